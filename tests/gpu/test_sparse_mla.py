"""sparse_mla's kernel on a GPU through jax and through torch: against float64 on what the rows hold, captured,
threaded, transformed, exported, past 2^32 bytes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import export

import tsmla_bridge
import tsmla_jax
from tests.gpu import stress
from tests.gpu.front_ends import tensor
from tests.gpu.stress import assert_same_bits
from tests.jax.ops.sparse_calls import check_v32_layout
from tests.oracles import sparse, sparse_inputs
from tests.oracles.sparse_inputs import Call
from tsmla_bridge import Workspace, sparse_workspace_size
from tsmla_bridge.ops import sparse_mla

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_in_torch")]

FP8 = "float8_e4m3fn"
STRESS_CALLS = int(os.environ.get("TSMLA_STRESS_CALLS", "200"))  # of each thread
Arrays = tuple[np.ndarray, ...]
Tensors = dict[str, torch.Tensor]


def on_gpu(case: Call) -> Tensors:
    return {name: tensor(array) for name, array in case.arrays.items()}


def attend(case: Call, given: Tensors, **changed: Any) -> Any:
    """The case through torch, with lse."""
    return tsmla_bridge.sparse_mla(**(given | case.options | {"return_lse": True} | changed))


def through_torch(case: Call, **options: Any) -> Arrays:
    out, lse = (tsmla_bridge.to_jax(x) for x in attend(case, on_gpu(case), **options))
    return np.asarray(out), np.asarray(lse)


def in_jax(case: Call, **options: Any) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The case's call inside jax, a function of its arrays by name."""
    run = functools.partial(tsmla_jax.sparse_mla, return_lse=True, implementation="cute", **(case.options | options))
    return lambda given: run(**given)


def through_jax(case: Call, **options: Any) -> Arrays:
    out, lse = jax.jit(in_jax(case, **options))({name: jnp.asarray(x) for name, x in case.arrays.items()})
    return np.asarray(out), np.asarray(lse)


FRONT_ENDS: dict[str, Callable[..., Arrays]] = {"jax": through_jax, "torch": through_torch}


def assert_right(got: Any, case: Call, lse_error: Any = None) -> None:
    """Against float64: out in norm to the step of bf16, lse to `lse_error` and as much of its own size. Scores of e4m3
    queries are sums of fp8 tensor cores, which keep some 13 bits."""
    want, want_lse = case.want()
    if lse_error is None:
        lse_error = 2**-9 if case.arrays["q"].dtype.itemsize == 1 else 2**-12
    out, lse = (x.double().cpu().numpy() if isinstance(x, torch.Tensor) else np.float64(x) for x in got)
    unseen = np.isneginf(want_lse)
    assert np.isfinite(out).all() and not out[unseen].any()
    np.testing.assert_array_equal(np.isneginf(lse), unseen)
    assert np.linalg.norm(out - want) <= 2**-8 * np.linalg.norm(want)
    assert (np.abs(lse - want_lse)[~unseen] <= (lse_error * (1 + np.abs(want_lse)))[~unseen]).all()


CASES: dict[str, dict[str, Any]] = {
    "v32 H 1": {"layout": "v32", "heads": 1, "selected": 77, "tokens": 5},
    "v32 H 5, f16": {"layout": "v32", "heads": 5, "selected": 1021, "tokens": 67, "dtype": "float16"},
    "v32 H 16": {"layout": "v32", "heads": 16, "selected": 2048, "tokens": 9, "pages": 64},
    "v32 H 64": {"layout": "v32", "heads": 64, "selected": 2048, "tokens": 33, "pages": 64},
    "v32 H 72": {"layout": "v32", "heads": 72, "selected": 300, "tokens": 20},
    "v32 H 128": {"layout": "v32", "heads": 128, "selected": 640, "tokens": 150, "pages": 64},
    "v32 one column": {"layout": "v32", "heads": 16, "selected": 1, "tokens": 7},
    "v32 all columns": {"layout": "v32", "heads": 16, "selected": 2048, "tokens": 200, "lengths": False},
    "v32 wide pages, sinks": {"layout": "v32", "heads": 9, "selected": 130, "gap": 3, "page_size": 5, "sinks": True},
    "v4 one cache": {"layout": "v4", "heads": 9, "selected": 260, "tokens": 12, "sinks": True},
    "v4 H 16": {"layout": "v4", "heads": 16, "selected": 640, "window": 128, "sinks": True, "tokens": 40},
    "v4 H 64": {"layout": "v4", "heads": 64, "selected": 640, "window": 128, "sinks": True, "tokens": 130},
    "v4 few columns": {"layout": "v4", "heads": 128, "selected": 256, "window": 128, "sinks": True, "tokens": 110},
    "v4 H 128": {"layout": "v4", "heads": 128, "selected": 1152, "window": 128, "sinks": True, "tokens": 19},
    "v4 slots remapped": {"layout": "v4", "heads": 16, "selected": 64, "window": 20, "gap": 1},
    "plain": {"layout": "plain", "heads": 16, "selected": 515, "tokens": 30, "sinks": True},
    "plain H 128": {"layout": "plain", "heads": 128, "selected": 128, "dtype": "float16"},
    "plain, wide pages": {"layout": "plain", "heads": 24, "selected": 256, "width": 512, "gap": 2},
    "plain, two caches": {"layout": "plain", "heads": 24, "selected": 256, "window": 100, "width": 512, "sinks": True},
    "bf16": {"layout": "plain", "heads": 16, "selected": 300, "kv_dtype": "bfloat16", "tokens": 50},
    "bf16 of V4": {"layout": "plain", "heads": 64, "selected": 640, "window": 128, "width": 512}
    | {"kv_dtype": "bfloat16"},
    "e4m3 queries, H 64": {"layout": "v32", "heads": 64, "selected": 2048, "tokens": 33, "pages": 64, "dtype": FP8},
    "e4m3 queries, H 5": {"layout": "v32", "heads": 5, "selected": 300, "tokens": 67, "dtype": FP8},
    "e4m3 queries, H 24, sinks": {"layout": "v32", "heads": 24, "selected": 640, "sinks": True, "dtype": FP8},
    "e4m3 queries, H 72, wide pages": {"layout": "v32", "heads": 72, "selected": 130, "gap": 3, "page_size": 5}
    | {"dtype": FP8},
    "e4m3 queries, H 128, all columns": {"layout": "v32", "heads": 128, "selected": 640, "tokens": 150}
    | {"lengths": False, "dtype": FP8},
    "e4m3 queries, plain": {"layout": "plain", "heads": 16, "selected": 515, "tokens": 30, "dtype": FP8},
    "e4m3 queries, plain, H 100": {"layout": "plain", "heads": 100, "selected": 256, "width": 512, "dtype": FP8},
    "e4m3 queries, two plain caches": {"layout": "plain", "heads": 64, "selected": 256, "window": 100, "dtype": FP8},
    "bf16, H 33, sinks": {"layout": "plain", "heads": 33, "selected": 515, "kv_dtype": "bfloat16", "sinks": True},
    "bf16, H 128": {"layout": "plain", "heads": 128, "selected": 640, "kv_dtype": "bfloat16", "tokens": 150},
    "bf16, H 64, two caches, wide pages": {"layout": "plain", "heads": 64, "selected": 256, "window": 100, "gap": 2}
    | {"kv_dtype": "bfloat16"},
    "f16, H 64": {"layout": "plain", "heads": 64, "selected": 300, "dtype": "float16", "kv_dtype": "float16"},
    "f16 of V4, H 128": {"layout": "plain", "heads": 128, "selected": 640, "window": 128, "width": 512, "sinks": True}
    | {"dtype": "float16", "kv_dtype": "float16"},
    "f16": {"layout": "plain", "heads": 30, "selected": 129, "dtype": "float16", "kv_dtype": "float16", "tokens": 40},
}


def case_of(name: str, **changed: Any) -> Call:
    return sparse_inputs.call(**({"page_size": 64} | CASES[name] | changed))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, batch_invariant: bool) -> None:
    case = case_of(name)
    assert_right(through_torch(case, batch_invariant=batch_invariant), case)


@pytest.mark.parametrize("name", CASES)
def test_through_jax(name: str) -> None:
    case = case_of(name, seed=1)
    got = through_jax(case)
    assert_right(got, case)
    for a, b in zip(got, through_torch(case), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_few_tokens_of_many_sizes(front_end: str) -> None:
    """One object, other numbers of tokens and of columns: most with few keys, where pieces are few."""
    for tokens, selected in ((1, 1), (1, 63), (1, 64), (1, 65), (1, 2048), (2, 4097), (3, 500), (132, 64), (264, 130)):
        case = case_of("v32 H 16", tokens=tokens, selected=selected, seed=selected)
        assert_right(FRONT_ENDS[front_end](case), case)


@pytest.mark.parametrize("exponents", [(-23, -20), (-12, -2), (3, 6)])
@pytest.mark.parametrize("name", ["v32 H 16", "v32 H 128", "v4 H 16", "e4m3 queries, H 64"])
def test_scales_of_any_size(name: str, exponents: tuple[int, int]) -> None:
    """The scales of packed rows, from 1e-7 to 100."""
    case = case_of(name, exponents=exponents, seed=2)
    assert_right(through_torch(case), case)


@pytest.mark.parametrize("name", ["v32 H 5, f16", "v32 H 16", "v32 H 128"])
def test_scales_that_are_no_powers_of_two(name: str) -> None:
    """The kernel rounds them to f16 (FlashMLA to bf16), a group of 128 columns at once, and their products again. Each
    step is 2^-11, of the parts of a score that the groups and the rope columns add."""
    case = case_of(name, odd=True, seed=3)
    parts = np.zeros(case.arrays["q"].shape[:2])
    rows = sparse.selected(case.arrays["indices"], case.arrays["lengths"], case.caches)
    for token, keys in enumerate(rows):
        if len(keys):
            q = case.arrays["q"][token].astype(np.float64)
            columns = [slice(first, min(first + 128, 576)) for first in range(0, 576, 128)]
            parts[token] = sum(np.abs(q[:, at] @ keys[:, at].T) for at in columns).max(-1)
    assert_right(through_torch(case), case, 2**-12 + 2**-10 * case.options["softmax_scale"] * parts)


@pytest.mark.parametrize("layout", ["packed", "float8_e4m3fn"])
def test_the_cases_of_the_reference(layout: str) -> None:
    """The cases of the reference's own tests that the kernel takes."""
    check_v32_layout("cute", layout)


# ---- prefill


def of_tokens(case: Call, tokens: list[int]) -> Call:
    """The case of some of its tokens."""
    own = {name: case.arrays[name][tokens] for name in ("q", "indices", "lengths") if name in case.arrays}
    return Call(case.arrays | own, case.options, case.caches)


def prompt_of(name: str, tokens: int) -> tuple[Call, list[int]]:
    """A case as of a text's first tokens, whose lengths grow with their position, and a sample of tokens."""
    case = case_of(name, tokens=tokens, seed=4)
    selected = case.arrays["indices"].shape[1]
    lengths = np.minimum(np.arange(1, tokens + 1), selected).astype(np.int32)
    indices = np.where(case.arrays["indices"] == sparse_inputs.POISON, -1, case.arrays["indices"])
    case = Call(case.arrays | {"lengths": lengths, "indices": indices}, case.options, case.caches)
    return case, [0, 1, 63, 64, tokens // 2, tokens - 2, tokens - 1]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("tokens", [512, 2048, 4099])
@pytest.mark.parametrize(
    "name", ["v32 H 16", "v32 H 64", "v4 H 128", "e4m3 queries, H 128, all columns", "bf16, H 128", "f16, H 64"]
)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_prompts(front_end: str, name: str, tokens: int, batch_invariant: bool) -> None:
    """Thousands of tokens in one call; batch_invariant, in several launches of the same bits as of few tokens."""
    case, sample = prompt_of(name, tokens)
    got = [x[sample] for x in FRONT_ENDS[front_end](case, batch_invariant=batch_invariant)]
    few = of_tokens(case, sample)
    assert_right(got, few)
    if batch_invariant:
        for a, b in zip(got, FRONT_ENDS[front_end](few, batch_invariant=True), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["v32 H 16", "v4 H 16", "plain", "plain, wide pages", "e4m3 queries, plain"])
def test_many_tokens_of_few_keys(name: str) -> None:
    """A CTA has eight pieces of one block in a row, more than the ring has stages and descriptions ahead."""
    window = {"window": 20} if "window" in CASES[name] else {}
    case = case_of(name, tokens=1000, selected=60, **window)
    sample = list(range(0, 1000, 5))
    assert_right([x[sample] for x in through_torch(case)], of_tokens(case, sample))


def test_a_prompt_needs_no_memory_of_its_own() -> None:
    """Besides out and lse: partial results of two tiles a CTA."""
    case, _ = prompt_of("v32 H 64", 4096)
    given = on_gpu(case)
    attend(case, given)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = attend(case, given)
    used = torch.cuda.max_memory_allocated() - before
    assert used < out.numel() * 2 + lse.numel() * 4 + (64 << 20)


@pytest.mark.parametrize(
    ("name", "dtype"), [("v32 H 128", "bfloat16"), ("v32 H 128", FP8), ("bf16, H 128", "bfloat16")]
)
def test_results_past_2_to_the_31_elements(name: str, dtype: str) -> None:
    """33,000 tokens of 128 heads; the last ones have the same results in a call of their own."""
    tokens, case = 33_000, case_of(name, tokens=4, selected=64, lengths=False)
    given = on_gpu(case)
    held = given["indices"][given["indices"] >= 0]  # the others hold NaN
    given["q"] = torch.randn(tokens, 128, 576, device="cuda", dtype=torch.bfloat16).to(getattr(torch, dtype))
    given["indices"] = held[torch.randint(0, len(held), (tokens, 64), device="cuda")]
    whole = attend(case, given)
    assert whole[0].numel() > 2**31
    few = given | {name: given[name][-40:].contiguous() for name in ("q", "indices")}
    for a, b in zip(whole, attend(case, few), strict=True):
        torch.testing.assert_close(a[-40:].float(), b.float(), rtol=2**-7, atol=2**-7)


# ---- past 2^32 bytes


@pytest.mark.parametrize(
    ("layout", "heads", "kv_dtype"),
    [*((layout, 16, FP8) for layout in sparse_inputs.LAYOUTS), ("plain", 64, "bfloat16")],
)
def test_caches_past_2_to_the_32_bytes(layout: str, heads: int, kv_dtype: str) -> None:
    """Pages of a small cache, spread over a large one: the same bits."""
    sizes = {"selected": 512, "tokens": 40, "pages": 64, "page_size": 64}
    case = sparse_inputs.call(layout, heads=heads, kv_dtype=kv_dtype, sinks=layout == "v4", lengths=False, **sizes)
    given = on_gpu(case)
    small = given["kv_cache"].view(torch.uint8)
    count = (1 << 32) // small[0].numel() + 99
    large = torch.full((count, *small.shape[1:]), 0xFF, dtype=torch.uint8, device="cuda")
    places = torch.randperm(count, generator=torch.Generator().manual_seed(0))[: len(small)].sort().values
    places[0], places[-1] = 0, count - 1
    places = places.cuda()
    large[places] = small
    page, offset = given["indices"].long().div(64, rounding_mode="floor"), given["indices"] % 64
    slots = torch.where(given["indices"] >= 0, places[page.clamp(min=0)] * 64 + offset, -1).int()
    got = attend(case, given | {"kv_cache": large.view(given["kv_cache"].dtype), "indices": slots})
    assert_same_bits(got, attend(case, given))
    assert_right(got, case)


# ---- bits


@pytest.mark.parametrize("name", ["v32 H 16", "v32 H 128", "v4 H 64", "plain", "e4m3 queries, H 64", "bf16, H 128"])
def test_calls_repeat(name: str) -> None:
    case = case_of(name)
    given = on_gpu(case)
    first = attend(case, given)
    for _ in range(20):
        assert_same_bits(attend(case, given), first)


@pytest.mark.parametrize(
    "name", ["v32 H 16", "v4 H 64", "v32 H 128", "e4m3 queries, H 5", "e4m3 queries, plain", "bf16, H 128"]
)
def test_batch_invariant(name: str) -> None:
    case = case_of(name)
    given = on_gpu(case)
    whole = attend(case, given, batch_invariant=True)
    for tokens in ([0], [5, 2], [3, 0, 8, 1]):
        mine = {n: x[tokens].contiguous() if n in ("q", "indices", "lengths") else x for n, x in given.items()}
        assert_same_bits(attend(case, mine, batch_invariant=True), [x[tokens] for x in whole])


# ---- streams, graphs, threads


@pytest.mark.parametrize("with_memory", [False, True])
@pytest.mark.parametrize("name", ["v32 H 16", "v4 H 64"])
def test_a_graph_sees_new_lengths_indices_and_scales(name: str, with_memory: bool) -> None:
    cases = [case_of(name, seed=seed) for seed in range(3)]
    tokens, heads, _ = cases[0].arrays["q"].shape
    given, scale = on_gpu(cases[0]), torch.tensor(1.0, device="cuda")
    memory: dict[str, Any] = {}
    if with_memory:
        size = sparse_workspace_size(max_tokens=tokens, num_heads=heads)
        memory = {"out": torch.empty(tokens, heads, 512, dtype=torch.bfloat16, device="cuda"),
                  "lse": torch.empty(tokens, heads, device="cuda"), "workspace": Workspace(size)}  # fmt: skip
    attend(cases[0], given, q_scale=scale, **memory)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaled = attend(cases[0], given, q_scale=scale, **memory)
        plain = attend(cases[0], given)  # its scale is a number
    for case, factor in zip(cases, (1.0, 0.5, 2.0), strict=True):
        for x, new in zip(given.values(), on_gpu(case).values(), strict=True):
            x.view(torch.uint8).copy_(new.view(torch.uint8))
        given["q"].div_(factor)
        scale.fill_(factor)
        graph.replay()
        torch.cuda.synchronize()
        assert_right(scaled, case)
        assert_same_bits(plain, attend(case, given))


def test_the_current_stream_is_used() -> None:
    case = case_of("v32 H 16")
    given = on_gpu(case)
    want = attend(case, given)
    stream, late = torch.cuda.Stream(), torch.zeros_like(given["indices"])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(given["indices"])
        got = attend(case, given | {"indices": late})
    stream.synchronize()
    assert_same_bits(got, want)


def test_threads_on_streams() -> None:
    """8 threads on 8 streams make calls of random shapes, each compared with the same call made alone."""
    cases = [case_of(name) for name in ("v32 H 16", "v32 H 128", "v4 H 64", "plain", "v32 one column")]
    tensors = [on_gpu(case) for case in cases]

    def call(which: int, scale: float, workspace: Workspace | None) -> Any:
        return attend(cases[which], tensors[which], softmax_scale=scale, workspace=workspace)

    size = max(sparse_workspace_size(max_tokens=200, num_heads=heads) for heads in (16, 64, 128))
    found = stress.in_threads(call, len(cases), size, threads=8, calls=STRESS_CALLS)
    assert not found, found[0]


def test_allocations() -> None:
    case = case_of("v4 H 64")
    given = on_gpu(case)
    tokens, heads, _ = case.arrays["q"].shape
    size = sparse_workspace_size(max_tokens=tokens, num_heads=heads)
    memory = {"out": torch.empty(tokens, heads, 512, dtype=torch.bfloat16, device="cuda"),
              "lse": torch.empty(tokens, heads, device="cuda"), "workspace": Workspace(size)}  # fmt: skip
    for options, count in ((memory, 0), ({}, 3)):  # out, lse, and one for all partial results
        attend(case, given, **options)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        attend(case, given, **options)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == count


# ---- torch.compile


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled(mode: str | None) -> None:
    pytest.importorskip("triton", reason="torch.compile makes Triton kernels")
    case = case_of("v4 H 64")
    given = on_gpu(case)

    def step(q: torch.Tensor, rest: Tensors) -> torch.Tensor:
        return tsmla_bridge.sparse_mla(q + 1, **rest, **case.options) * 2

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    q = given.pop("q")
    for round_ in range(3):
        want = step(q + round_, given)
        assert torch.equal(compiled(q + round_, given).clone(), want)


def test_opcheck() -> None:
    case = case_of("v32 H 16", tokens=3)
    given = on_gpu(case)
    inputs = (given.get(name) for name in sparse_mla.SparseInputs._fields)
    options = (512, None, None, None, None, None, False, "auto", None, False, False, None)
    torch.library.opcheck(sparse_mla.sparse_operator, (*inputs, None, [0.1, 1.0, 1.0], *options))


def test_a_derivative_is_refused() -> None:
    case = case_of("v32 H 16")
    given = on_gpu(case)
    want = attend(case, given)
    given["q"].requires_grad_()
    with pytest.raises(NotImplementedError, match="sparse_mla has no derivative in this implementation"):
        attend(case, given)
    with torch.no_grad():
        assert_same_bits(attend(case, given), want)


# ---- jax


def arrays_of(case: Call) -> dict[str, jax.Array]:
    return {name: jnp.asarray(array) for name, array in case.arrays.items()}


def test_none_chooses_the_kernel() -> None:
    case = case_of("v32 H 16")
    explained = tsmla_jax.explain("sparse_mla", **arrays_of(case), **case.options)
    assert explained.chosen == "cute", explained
    out = tsmla_jax.sparse_mla(**arrays_of(case), **case.options)
    np.testing.assert_array_equal(out, through_jax(case)[0])


@pytest.mark.parametrize("name", ["v32 H 16", "v4 H 16", "plain, wide pages"])
def test_vmap(name: str) -> None:
    cases = [case_of(name, seed=seed) for seed in range(3)]
    stacked = {n: jnp.stack([jnp.asarray(case.arrays[n]) for case in cases]) for n in cases[0].arrays}
    shared = {n: 0 for n in stacked} | ({"sinks": None} if "sinks" in stacked else {})
    one = stacked | ({"sinks": stacked["sinks"][0]} if "sinks" in stacked else {})
    out, lse = jax.jit(jax.vmap(in_jax(cases[0]), (shared,)))(one)
    for i, case in enumerate(cases):
        sinks = {"sinks": cases[0].arrays["sinks"]} if "sinks" in stacked else {}
        assert_right((out[i], lse[i]), Call(case.arrays | sinks, case.options, case.caches))


def test_traced_scales_and_export() -> None:
    case = case_of("plain")

    def call(scale: jax.Array, given: dict[str, jax.Array]) -> Any:
        return in_jax(case, kv_scale=scale)(given)

    scale, given = jnp.float32(case.options["kv_scale"]), arrays_of(case)
    want = jax.jit(call)(scale, given)
    assert_right(want, case)
    checks = tsmla_jax.export_disabled_checks()
    exported = export.export(jax.jit(call), platforms=["cuda"], disabled_checks=checks)(scale, given)
    for a, b in zip(jax.jit(export.deserialize(exported.serialize()).call)(scale, given), want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_derivative_is_refused_in_jax() -> None:
    case = case_of("v32 H 16")
    given = arrays_of(case)

    def loss(q: jax.Array) -> jax.Array:
        return in_jax(case)(given | {"q": q})[0].astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match="sparse_mla has no derivative"):
        jax.grad(loss)(given["q"])
