"""Every operation of the bridge on small inputs: odd sizes, ragged and empty requests, NaN where nothing may be read.

    python3 -m tests.gpu.small_grid [--op NAME] [--only TEXT] [--device cuda]

What comes out is compared with the same call on the CPU, which the reference answers. test_small_grid.py makes these
calls too. As a program of its own, without jax, compute-sanitizer can watch them, one operation and one sanitizer at
a time (run it once without, so that the kernels are compiled):

    compute-sanitizer --tool racecheck python3 -m tests.gpu.small_grid --op mla_prefill --only float8
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

import tsmla_bridge
from tests.oracles import sparse_inputs
from tests.oracles.inputs import poisoned_cache
from tsmla_bridge import prefill_sinks
from tsmla_kernels.contract.selection import selection_words

LATENT, ROPE, PAGE = 512, 64, 64
FP8 = torch.float8_e4m3fn
SCALE = 192**-0.5
SIZES = (1.0, 2.0**17, 1.0, 1.0, 2.0**-12)
"""Factors of tokens' bf16 queries: f16 has the range for some, and others must be scaled."""
MANY = 800
"""Tokens or requests: enough for several on every CTA of a GPU."""


class Call(NamedTuple):
    """One call: a function of the bridge, its tensors on the CPU and its other arguments."""

    name: str
    function: Callable[..., Any]
    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]

    def on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The results of the call on copies of its tensors there."""
        results = self.function(**{k: x.to(device, copy=True) for k, x in self.tensors.items()}, **self.options)
        return results if isinstance(results, tuple) else (results,)


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def numbers(array: np.ndarray) -> torch.Tensor:
    """A tensor of a numpy array, of ml_dtypes too."""
    return torch.from_numpy(array.view(f"i{array.itemsize}").copy()).view(getattr(torch, array.dtype.name))


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return int32([0, *itertools.accumulate(lengths)])


@functools.cache
def poisoned(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    cache, table = map(torch.from_numpy, poisoned_cache(np.random.default_rng(0), lengths, PAGE, LATENT + ROPE))
    return cache * 0.5, table


def paged(lengths: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned cache and its block table."""
    cache, table = poisoned(*lengths)
    return cache.to(dtype), table


def decode_calls(generator: torch.Generator) -> Iterator[Call]:
    """mla_decode: few rows and many, split and whole, ragged, in all pairs of dtypes; over an fp8 cache bf16 queries
    that f16 has not the range for."""
    kinds = [(torch.bfloat16,) * 2, (torch.float16,) * 2, (FP8, FP8), (torch.bfloat16, FP8)]
    cases = [(16, 1, [300, 0, 65]), (16, 4, [130, 2]), (128, 1, [200, 1]), (9, 2, [700])]
    for (dtype, kv_dtype), (heads, q_len, lengths) in itertools.product(kinds, cases):
        cache, table = paged(lengths, kv_dtype)
        q = normal(generator, len(lengths), q_len, heads, LATENT + ROPE, dtype=dtype)
        if dtype == torch.bfloat16 and kv_dtype == FP8:
            chosen = (1, 4, 0) if len(lengths) == 3 else (0, 1)[: len(lengths)]
            q *= torch.tensor([SIZES[i] for i in chosen], dtype=dtype)[:, None, None, None]
        tensors = {"q": q, "kv_cache": cache, "block_tables": table, "seq_lens": int32(lengths)}
        for invariant in (False, True):
            name = f"{dtype} {kv_dtype} H {heads} S {q_len} {lengths}{' invariant' * invariant}"
            options = {"softmax_scale": SCALE, "return_lse": True, "batch_invariant": invariant}
            yield Call(name, tsmla_bridge.mla_decode, tensors, options)
    lengths = [256, 0, 64]  # cut evenly: an lse as far below says nothing of a part's keys
    for dtype, kv_dtype in kinds:
        cache, table = paged(lengths, kv_dtype)
        q, keys = normal(generator, 3, 1, 16, LATENT + ROPE, dtype=dtype), cache.clone()
        tensors = {"q": far_below(q, keys), "kv_cache": keys, "block_tables": table, "seq_lens": int32(lengths)}
        options = {"softmax_scale": FAR, "return_lse": True}
        yield Call(f"{dtype} {kv_dtype} far below", tsmla_bridge.mla_decode, tensors, options)
    for heads, q_len, lengths in ((128, 1, [300, 1]), (48, 1, [700]), (40, 2, [0, 130])):
        cache, table = paged(lengths, FP8)
        q = normal(generator, len(lengths), q_len, heads, LATENT + ROPE, dtype=FP8)
        tensors = {"q": q, "kv_cache": cache, "block_tables": table, "seq_lens": int32(lengths)}
        options = {"softmax_scale": SCALE, "return_lse": True, "fp8_probabilities": True}
        yield Call(f"fp8 probabilities H {heads} S {q_len} {lengths}", tsmla_bridge.mla_decode, tensors, options)
    yield from decode_kinds(generator)


FAR = 1e30
"""A softmax_scale that makes scores which no finite number far above the least float32 is below."""


def far_below(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Queries that score -2 on one key and -4 on the next, and so on; `keys`, which may be NaN, get the column for it.
    Powers of two, so that a product by the scale that is fused with the subtraction of a maximum leaves nothing."""
    column = keys[..., -1].float()
    numbers = 1.0 + torch.arange(column.numel()).view(column.shape) % 2
    keys[..., -1] = torch.where(column.isnan(), column, numbers).to(keys.dtype)
    q = torch.zeros_like(q)
    q[..., -1] = -2
    return q


def decode_kinds(generator: torch.Generator) -> Iterator[Call]:
    """mla_decode with visible_lens, with a query in two tensors, and of many short requests, ragged and not."""
    options: dict[str, Any] = {"softmax_scale": SCALE, "return_lse": True}

    def made(lengths: list[int], tokens: tuple[int, ...], heads: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        cache, table = paged(lengths, dtype)
        q = normal(generator, *tokens, heads, LATENT + ROPE, dtype=dtype)
        return {"q": q, "kv_cache": cache, "block_tables": table, "seq_lens": int32(lengths)}

    for dtype, heads in ((torch.bfloat16, 16), (FP8, 8)):
        lengths = [300, 0, 65]
        tensors = made(lengths, (3, 4), heads, dtype)
        visible = torch.randint(-3, 310, (3, 4), generator=generator, dtype=torch.int32)
        given = {**tensors, "visible_lens": visible}
        yield Call(f"{dtype} visible_lens", tsmla_bridge.mla_decode, given, options)
        parts = {"q": tensors["q"][..., :LATENT].contiguous(), "q_rope": tensors["q"][..., LATENT:]}
        yield Call(f"{dtype} in two tensors", decode_of_pair, {**tensors, **parts}, options)
        first = options | {"heads_first": True}
        yield Call(f"{dtype} in two tensors heads first", decode_of_pair, {**tensors, **parts}, first)
    lengths = [n * 7 % 65 for n in range(300)]
    yield Call("short requests", tsmla_bridge.mla_decode, made(lengths, (300, 1), 4, torch.bfloat16), options)
    tensors = made(lengths, (450,), 4, torch.bfloat16)
    tensors["cu_seqlens_q"] = offsets_of([1 + n % 2 for n in range(300)])
    yield Call("short requests ragged", tsmla_bridge.mla_decode, tensors, options | {"max_q_len": 2})
    tensors = made([70, 3, 0, 300], (47,), 16, torch.bfloat16)
    tensors["cu_seqlens_q"] = offsets_of([40, 2, 0, 5])
    bound = options | {"max_q_len": 1 << 18}
    yield Call("prompts under the bound of a context", tsmla_bridge.mla_decode, tensors, bound)


def decode_of_pair(q: torch.Tensor, q_rope: torch.Tensor, *, heads_first: bool = False, **given: Any) -> Any:
    """mla_decode of a query in two tensors. heads_first: the latent one lies in memory heads first."""
    if heads_first:
        q = q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    return tsmla_bridge.mla_decode((q, q_rope), **given)


def prefill_calls(generator: torch.Generator) -> Iterator[Call]:
    """mla_prefill: ragged, empty queries and empty keys, behind a context, causal and not."""
    lengths = [([70, 0, 5], [70, 30, 200]), ([3, 1], [0, 2]), ([130, 1], [131, 64])]
    for dtype, (q_lens, kv_lens) in itertools.product((torch.bfloat16, torch.float16, FP8), lengths):
        q = normal(generator, sum(q_lens), 3, 192, dtype=dtype)
        k, v = (normal(generator, sum(kv_lens) + 2, 3, width, dtype=torch.float32) for width in (192, 128))
        k[sum(kv_lens) :], v[sum(kv_lens) :] = float("nan"), float("nan")
        offsets = {f"cu_seqlens_{name}": offsets_of(lens) for name, lens in (("q", q_lens), ("kv", kv_lens))}
        bounds = {"max_q_len": max(q_lens), "max_kv_len": max(kv_lens)}
        for causal in (False, True):
            options = {**bounds, "softmax_scale": SCALE, "return_lse": True, "causal": causal}
            name = f"{dtype} {q_lens} over {kv_lens}{' causal' * causal}"
            tensors = {"q": q, "k": k.to(dtype), "v": v.to(dtype), **offsets}
            yield Call(name, tsmla_bridge.mla_prefill, tensors, options)
        if q_lens[0] == 130:
            keys = k.to(dtype)
            far = {**tensors, "q": far_below(q, keys), "k": keys}
            yield Call(f"{name} far below", tsmla_bridge.mla_prefill, far, options | {"softmax_scale": FAR})
    yield from wide_prefill_calls(generator)


def wide_prefill_calls(generator: torch.Generator) -> Iterator[Call]:
    """Prefill with 256 columns of keys and of values: k and v, kv and k_rope, and selected keys."""
    lengths = [([3, 1], [0, 2]), ([70, 0, 5], [70, 30, 200]), ([130, 1], [300, 64])]
    for dtype, (q_lens, kv_lens) in itertools.product((torch.bfloat16, torch.float16, FP8), lengths):
        if dtype == torch.float16 and q_lens[0] != 3:
            continue
        tokens, keys = sum(q_lens) + 2, sum(kv_lens) + 2
        q = normal(generator, tokens, 3, 256, dtype=dtype)
        k, v = (normal(generator, keys, 3, 256, dtype=torch.float32) for _ in range(2))
        k[-2:], v[-2:] = float("nan"), float("nan")
        offsets = {f"cu_seqlens_{name}": offsets_of(lens) for name, lens in (("q", q_lens), ("kv", kv_lens))}
        bounds = {"max_q_len": max(q_lens), "max_kv_len": max(kv_lens)}
        whole = {"q": q, "k": k.to(dtype), "v": v.to(dtype), **offsets}
        joint = {"kv": torch.cat((k[..., :-ROPE], v), -1).to(dtype), "k_rope": k[:, 0, -ROPE:].to(dtype)}
        for causal in (False, True):
            options = {**bounds, "softmax_scale": SCALE, "return_lse": True, "causal": causal}
            name = f"256 and 256 {dtype} {q_lens} over {kv_lens}{' causal' * causal}"
            yield Call(name, tsmla_bridge.mla_prefill, whole, options)
            if dtype != FP8:
                given = {"q": q, **joint, **offsets}
                yield Call(f"{name} kv and k_rope", tsmla_bridge.mla_prefill_kv, given, options)
            selected = random_selection(generator, tokens, max(kv_lens), rows=causal)
            yield Call(f"{name} selected", tsmla_bridge.mla_prefill, {**whole, **selected}, options)


def sink_calls(generator: torch.Generator) -> Iterator[Call]:
    """mla_prefill and mla_prefill_kv with sinks and, in 16 bits, the rows' greatest logits; also of selected keys. One
    query is NaN for one head."""
    lengths = [([70, 0, 5], [70, 30, 200]), ([3, 1], [0, 2])]
    for i, (dtype, (q_lens, kv_lens)) in enumerate(itertools.product((torch.bfloat16, torch.float16, FP8), lengths)):
        tokens, keys = sum(q_lens) + 2, sum(kv_lens) + 2
        q = normal(generator, tokens, 3, 192, dtype=dtype)
        k, v = (normal(generator, keys, 3, width, dtype=torch.float32) for width in (192, 128))
        k[-2:], v[-2:] = float("nan"), float("nan")
        q[1, 2] = float("nan")  # this row of results is NaN, and no other row
        offsets = {f"cu_seqlens_{name}": offsets_of(lens) for name, lens in (("q", q_lens), ("kv", kv_lens))}
        given = {"q": q, **offsets, "sinks": torch.tensor([-9.0, 0.5, 40.0])}
        whole = {**given, "k": k.to(dtype), "v": v.to(dtype)}
        joint = {**given, "kv": torch.cat((k[..., :-ROPE], v), -1).to(dtype), "k_rope": k[:, 0, -ROPE:].to(dtype)}
        options = {"max_q_len": max(q_lens), "max_kv_len": max(kv_lens), "softmax_scale": SCALE, "causal": i % 2 == 0}
        options |= {"return_lse": True, "return_max_logits": dtype != FP8}
        name = f"{dtype} {q_lens} over {kv_lens}"
        yield Call(name, tsmla_bridge.mla_prefill, whole, options)
        if dtype != FP8:
            yield Call(f"{name} kv and k_rope", tsmla_bridge.mla_prefill_kv, joint, options)
            selected = random_selection(generator, tokens, max(kv_lens), rows=True)
            yield Call(f"{name} selected", tsmla_bridge.mla_prefill, {**whole, **selected}, options)


def random_selection(
    generator: torch.Generator, tokens: int, max_kv_len: int, *, rows: bool
) -> dict[str, torch.Tensor]:
    """A selection of half of the keys of most tokens, of none of some tokens' keys, and with `rows` of all keys of
    others, whose words lie in another order than the tokens."""
    words = torch.randint(-(2**31), 2**31, (tokens + 1, selection_words(max_kv_len)), generator=generator)
    words = words.to(torch.int32)
    words[::7] = 0
    if not rows:
        return {"selection": words[:tokens].contiguous()}
    order = torch.randperm(tokens + 1, generator=generator)[:tokens].to(torch.int32)
    order[3::5] = -1
    return {"selection": words, "selection_rows": order}


def selection_calls(generator: torch.Generator) -> Iterator[Call]:
    """mla_prefill and mla_prefill_kv of selected keys: ragged, behind a context, causal and not, all dtypes."""
    lengths = [([70, 0, 5], [70, 30, 200]), ([130, 1], [300, 64]), ([3, 1], [0, 2])]
    for i, (dtype, (q_lens, kv_lens)) in enumerate(itertools.product((torch.bfloat16, torch.float16, FP8), lengths)):
        tokens, keys = sum(q_lens) + 2, sum(kv_lens) + 2
        q = normal(generator, tokens, 3, 192, dtype=dtype)
        k, v = (normal(generator, keys, 3, width, dtype=torch.float32) for width in (192, 128))
        k[-2:], v[-2:] = float("nan"), float("nan")
        offsets = {f"cu_seqlens_{name}": offsets_of(lens) for name, lens in (("q", q_lens), ("kv", kv_lens))}
        bounds = {"max_q_len": max(q_lens), "max_kv_len": max(kv_lens)}
        for causal in (False, True):
            options = {**bounds, "softmax_scale": SCALE, "return_lse": True, "causal": causal}
            selected = random_selection(generator, tokens, max(kv_lens), rows=(i + causal) % 2 == 0)
            name = f"{dtype} {q_lens} over {kv_lens}{' causal' * causal}"
            tensors = {"q": q, "k": k.to(dtype), "v": v.to(dtype), **offsets, **selected}
            yield Call(name, tsmla_bridge.mla_prefill, tensors, options)
            if dtype != FP8:
                joint = {"kv": torch.cat((k[..., :-ROPE], v), -1).to(dtype), "k_rope": k[:, 0, -ROPE:].to(dtype)}
                given = {"q": q, **joint, **offsets, **selected}
                yield Call(f"{name} kv and k_rope", tsmla_bridge.mla_prefill_kv, given, options)


def bits_calls(generator: torch.Generator) -> Iterator[Call]:
    """selection_bits: duplicates, positions outside of the keys, few keys and more than a span of words, with lengths
    and with starts."""
    for num_keys, k in ((77, 64), (3001, 512), (150_000, 300)):
        positions = torch.randint(-5, num_keys + 5, (5, k), generator=generator, dtype=torch.int32)
        positions[1], positions[2] = -1, 3
        each = {"lengths": int32([k, 0, 7, k + 9, -1]), "starts": int32([0, 9, num_keys, 64, -7])}
        for names in ((), ("lengths",), ("starts",), ("lengths", "starts")):
            tensors = {"positions": positions, **{name: each[name] for name in names}}
            yield Call(f"{num_keys} {' '.join(names)}", tsmla_bridge.selection_bits, tensors, {"num_keys": num_keys})


def gradients(
    function: Callable[..., Any], inputs: dict[str, torch.Tensor], dout: torch.Tensor, dlse: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """The gradients of the inputs of a function, for these cotangents of its results; dlse may be None."""
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    cotangents = (dout,) if dlse is None else (dout, dlse)
    results = function(**leaves, return_lse=True)[: len(cotangents)]
    return torch.autograd.grad(results, list(leaves.values()), cotangents)


def prefill_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k and v by mla_prefill."""
    call = functools.partial(tsmla_bridge.mla_prefill, **options)
    return gradients(call, {"q": q, "k": k, "v": v}, dout, dlse)


def prefill_kv_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, ...]:
    """The gradients of q, kv and k_rope by mla_prefill_kv. All heads share the rope columns of the first."""
    call = functools.partial(tsmla_bridge.mla_prefill_kv, **options)
    kv, k_rope = torch.cat((k[..., :-ROPE], v), -1), k[:, 0, -ROPE:].contiguous()
    return gradients(call, {"q": q, "kv": kv, "k_rope": k_rope}, dout, dlse)


def sink_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k, v and the sinks by mla_prefill, from out alone unless they are deterministic; and out."""
    dout, dlse = given.pop("dout"), given.pop("dlse")
    dlse = dlse if given["deterministic"] else None
    call, inputs = functools.partial(tsmla_bridge.mla_prefill, **given), {"q": q, "k": k, "v": v, "sinks": sinks}
    out = call(**inputs)
    return (*gradients(call, inputs, dout, dlse), out)


def with_rounded_out(call: Call, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The right results of sink_gradient, given `out` as it is in `got`.

    The gradients of q and k use each row's sum of out * dout, of the rounded out. With few keys, and no other head with
    weight, nearly all of them may cancel except what the rounding adds, so no bound holds for two different roundings.
    A difference of these sums acts as lse's cotangent does, times the keys' share of the weight.
    """
    given = {**call.tensors, **call.options, "implementation": "reference"}
    sinks, dout, _ = given.pop("sinks"), given.pop("dout"), given.pop("dlse")
    inputs = {name: given.pop(name) for name in ("q", "k", "v")}
    function = functools.partial(tsmla_bridge.mla_prefill, sinks=sinks, **given)
    _, lse = function(**inputs, return_lse=True)
    sums = ((want[-1].float() - got[-1].cpu().float()) * dout.float()).sum(-1).nan_to_num(0.0)
    copies = {name: x.clone() for name, x in inputs.items()}
    added = gradients(function, copies, torch.zeros_like(dout), sums * prefill_sinks.share(lse, sinks))
    moved = [(a.float() + b.float()).to(a.dtype) for a, b in zip(want[:2], added[:2], strict=True)]
    return (*moved, *want[2:])


def sink_gradient_calls(generator: torch.Generator) -> Iterator[Call]:
    """The gradient of prefill with sinks, in both modes; some sinks have nearly all weight, or all, or none."""
    for call in gradient_calls(generator):
        if call.tensors["q"].dtype == torch.bfloat16 and call.options["causal"]:
            for name, sinks in SINKS.items():
                given = {**call.tensors, "sinks": torch.tensor(sinks)}
                yield call._replace(name=f"{call.name}{name}", function=sink_gradient, tensors=given)


SINKS = {"": (-9.0, 0.5, 9.0), " far sinks": (30.0, 95.0, 1e4), " sinks at the ends": (-torch.inf, torch.inf, 3e38)}


def selection_gradient_calls(generator: torch.Generator) -> Iterator[Call]:
    """The gradients of mla_prefill and mla_prefill_kv of selected keys, causal and not, in both modes."""
    functions = (prefill_gradient, prefill_kv_gradient)
    for i, function in enumerate(functions):
        for j, call in enumerate(gradient_calls(generator, function)):
            if (i + j) % 2 == 0:
                rows, longest = len(call.tensors["q"]), call.options["max_kv_len"]
                selected = random_selection(generator, rows, longest, rows=j % 4 < 2)
                yield call._replace(name=f"{call.name}{' shared rope' * i}", tensors={**call.tensors, **selected})


def wide_gradient_calls(generator: torch.Generator) -> Iterator[Call]:
    """The gradients of mla_prefill and mla_prefill_kv with 256 columns of keys and of values, some of selected keys."""
    for i, function in enumerate((prefill_gradient, prefill_kv_gradient)):
        for j, call in enumerate(gradient_calls(generator, function, (256, 256))):
            if j % 3 == 2 or j == 0:
                rows, longest = len(call.tensors["q"]), call.options["max_kv_len"]
                selected = random_selection(generator, rows, longest, rows=j % 2 == 0) if j % 4 == 2 else {}
                name = f"{call.name}{' shared rope' * i}{' selected' * bool(selected)}"
                yield call._replace(name=name, tensors={**call.tensors, **selected})


def gradient_calls(
    generator: torch.Generator, function: Callable[..., Any] = prefill_gradient, dims: tuple[int, int] = (192, 128)
) -> Iterator[Call]:
    """The gradient of prefill: ragged, empty queries and keys, behind a context, causal and not, in both modes."""
    lengths = [([70, 0, 5], [70, 30, 200]), ([3, 1], [0, 2]), ([130, 1], [131, 64])]
    modes = itertools.product((True, False), (True, False))
    for dtype, (causal, deterministic) in itertools.product((torch.bfloat16, torch.float16), modes):
        for q_lens, kv_lens in lengths:
            rows, widths = (sum(q_lens), sum(kv_lens), sum(kv_lens), sum(q_lens)), [n for n in dims for _ in range(2)]
            given = [normal(generator, n + 2, 3, w, dtype=torch.float32) for n, w in zip(rows, widths, strict=True)]
            for x, n in zip(given, rows, strict=True):
                x[n:] = float("nan")
            tensors = dict(zip(("q", "k", "v", "dout"), (x.to(dtype) for x in given), strict=True))
            tensors["dlse"] = normal(generator, sum(q_lens) + 2, 3, dtype=torch.float32)
            offsets = {f"cu_seqlens_{name}": offsets_of(lens) for name, lens in (("q", q_lens), ("kv", kv_lens))}
            bounds = {"max_q_len": max(q_lens), "max_kv_len": max(kv_lens)}
            options = {**bounds, "softmax_scale": SCALE, "causal": causal, "deterministic": deterministic}
            name = f"{dtype} {q_lens} over {kv_lens}{' causal' * causal}{' deterministic' * deterministic}"
            yield Call(name, function, {**tensors, **offsets}, options)


def cache_calls(generator: torch.Generator) -> Iterator[Call]:
    """write_kv_cache, with slots that are left out, and gather_kv_cache of what was there before."""
    for dtype in (torch.bfloat16, FP8):
        cache, table = paged([100, 7, 64], dtype)
        latent, rope = (normal(generator, 33, width, dtype=torch.bfloat16) for width in (LATENT, ROPE))
        slots = torch.randperm(cache.shape[0] * PAGE, generator=generator)[:33].to(torch.int32)
        slots[::5] = -1
        rows = {"latent": latent, "k_rope": rope, "slot_mapping": slots}
        for kind in (torch.int32, torch.int64):
            given = {"kv_cache": cache, **rows, "slot_mapping": slots.to(kind)}
            name = f"write {dtype}{' int64 slots' * (kind == torch.int64)}"
            options = {"kv_scale": 0.5}
            yield Call(name, tsmla_bridge.write_kv_cache, given, options)
        tables = {"block_tables": table, "starts": int32([3, 0, 10]), "lens": int32([90, 7, 0])}
        yield Call(
            f"gather {dtype}",
            tsmla_bridge.gather_kv_cache,
            {"kv_cache": cache, **tables},
            {"total_len": 97, "kv_scale": 0.5},
        )


def merge_calls(generator: torch.Generator) -> Iterator[Call]:
    """merge_attention_states of two and three parts, some of whose rows saw no key (lse -inf or +inf), and some have an
    lse of NaN."""
    for dtype, parts in ((torch.bfloat16, 2), (torch.float16, 3), (torch.float32, 2)):
        outs = normal(generator, parts, 19, 3, 128, dtype=dtype)
        lses = normal(generator, parts, 19, 3, dtype=torch.float32)
        for part in range(parts):
            lses[part, part :: parts + 1], outs[part, part :: parts + 1] = -torch.inf, 0
            lses[part, part :: 2 * parts + 2] = torch.inf
        lses[:, -2:], lses[0, -4], lses[:, -3] = -torch.inf, torch.inf, torch.inf
        lses[0, -2], lses[-1, -1] = torch.nan, torch.nan
        lses[:, 3] = -2 * FAR
        yield Call(f"{dtype} {parts} parts", tsmla_bridge.merge_attention_states, {"outs": outs, "lses": lses}, {})


def topk_calls(generator: torch.Generator) -> Iterator[Call]:
    """select_topk: rows of every kind, by value and by position, of columns of their own, slots and bits; rows of a CTA
    and of clusters of 4 and 8."""
    for columns, k in ((77, 64), (3001, 512), (8256, 64), (40000, 256)):
        logits = normal(generator, 5, columns, dtype=torch.float32)
        logits[1] = 1.5
        logits[2, ::2], logits[2, 1::3] = float("nan"), -torch.inf
        logits[4] *= 1e30  # beyond the f16s by which the kernel counts
        tensors = {"logits": logits, "seq_lens": int32([columns, columns, columns - 3, 0, columns // 2])}
        starts = {**tensors, "row_starts": int32([0, 0, 3, 5, 13])}
        tables = torch.randint(0, 900, (5, columns // 64), generator=generator, dtype=torch.int32)
        slots: dict[str, Any] = {"k": k, "order": "position", "page_size": 64}
        for order in ("value", "position"):
            for name, given in (("whole", tensors), ("from their starts", starts)):
                yield Call(f"{columns} {order} {name}", tsmla_bridge.select_topk, given, {"k": k, "order": order})
        yield Call(f"{columns} slots", tsmla_bridge.select_topk, {**tensors, "block_tables": tables}, slots)
        bits = {"k": k, "return_bits": True}
        for name, given in (("whole", tensors), ("from their starts", starts)):
            yield Call(f"{columns} bits {name}", tsmla_bridge.select_topk, given, bits)


def indexer_calls(generator: torch.Generator) -> Iterator[Call]:
    """indexer_topk over packed keys: a row of the block table a token and one a request, positions and slots. Scores
    are sums of small integers times powers of two, so that every device selects the same."""
    q_lens, lens, heads, pages = [3, 0, 70, 1], [500, 9, 1200, 1], 16, 40

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    tokens = sum(q_lens)
    tables = torch.randint(0, pages, (len(lens), 20), generator=generator, dtype=torch.int32)
    scales = 2.0 ** torch.randint(-1, 2, (pages, PAGE), generator=generator)
    parts = whole(pages, PAGE * 128).to(FP8).view(torch.uint8), scales.view(torch.uint8)
    arrays = {
        "q": whole(tokens, heads, 128).to(FP8),
        "weights": whole(tokens, heads),
        "k_cache": torch.cat(parts, 1).view(pages, PAGE, 132),
    }
    owner = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(q_lens))
    flat = {"block_tables": tables[owner], "seq_lens": torch.arange(1, tokens + 1, dtype=torch.int32) * 17}
    ragged = {"block_tables": tables, "seq_lens": int32(lens), "cu_seqlens_q": offsets_of(q_lens)}
    places = (("flat", flat), ("ragged", ragged))
    for (name, where), slots, scores in itertools.product(places, (False, True), (False, True)):
        options = {"k": 64, "return_slots": slots, "return_scores": scores}
        what = f"{name}{' slots' * slots}{' scores' * scores}"
        yield Call(what, tsmla_bridge.indexer_topk, {**arrays, **where}, options)
    for name, where in places:
        bits = {"k": 64, "return_bits": True}
        yield Call(f"{name} bits", tsmla_bridge.indexer_topk, {**arrays, **where}, bits)


def packed_calls(generator: torch.Generator) -> Iterator[Call]:
    """write_packed_kv_cache, write_indexer_cache and indexer_quantize, rotated and not; some slots are left out."""
    for tokens, dtype in itertools.product((1, 33), (torch.bfloat16, torch.float32)):
        slots = torch.randperm(3 * PAGE, generator=generator)[:tokens].to(torch.int32)
        slots[1::5] = -1
        turn = {name: normal(generator, tokens, 32, dtype=torch.float32) for name in ("cos", "sin")}
        latent, rope, k = (normal(generator, tokens, width, dtype=dtype) for width in (LATENT, ROPE, 128))
        queries = {"q": normal(generator, tokens, 6, 128, dtype=dtype), "weights": rope[:, :6].contiguous()}
        caches = [torch.full((3, PAGE, width), 7, dtype=torch.uint8) for width in (656, 132)]
        packed = {"kv_cache": caches[0], "latent": latent, "k_rope": rope, "slot_mapping": slots}
        keys = {"k_cache": caches[1], "k": k, "slot_mapping": slots}
        for angles in ({}, turn):
            name = f"{tokens} {dtype}{' rotated' * bool(angles)}"
            yield Call(f"rows {name}", tsmla_bridge.write_packed_kv_cache, {**packed, **angles}, {})
            yield Call(f"keys {name}", tsmla_bridge.write_indexer_cache, {**keys, **angles}, {})
            yield Call(f"queries {name}", tsmla_bridge.indexer_quantize, {**queries, **angles}, {})


def compress_calls(generator: torch.Generator) -> Iterator[Call]:
    """compress_write_kv_cache: requests that begin, go on and complete nothing, over every kind of cache, of short
    windows and of long ones, which a cluster pools."""

    def run(**tensors: Any) -> tuple[torch.Tensor, ...]:
        cache = tsmla_bridge.compress_write_kv_cache(**tensors)
        return cache, tensors["state"], tensors["state_positions"]

    caches = {
        "v4": torch.zeros(4, 65 * 576, dtype=torch.uint8),
        "indexer": torch.zeros(4, 64, 132, dtype=torch.uint8),
        "plain": torch.zeros(4, 64, 512, dtype=torch.bfloat16),
    }
    for (name, cache), (ratio, overlap) in itertools.product(caches.items(), ((4, True), (128, False), (128, True))):
        channels = 128 if name == "indexer" else 512
        width, window = channels * (1 + overlap), ratio * (1 + overlap)
        new = [1, 130, 3, 1]
        arrays = {
            "cache": cache,
            "kv_score": normal(generator, sum(new) + 2, 2, width, dtype=torch.float32),
            "ape": normal(generator, ratio, width, dtype=torch.float32),
            "state": normal(generator, 5, window, 2, width, dtype=torch.float32),
            "state_positions": torch.zeros(5, window, dtype=torch.int32),
            "norm_weight": normal(generator, channels, dtype=torch.bfloat16),
            "cos_sin": normal(generator, 300, 64, dtype=torch.float32),
            "block_tables": int32([2, 0, 3, 1])[:, None],
            "state_slots": int32([4, 0, 2, 1]),
            "seq_lens": int32([256, 190, 3, 255]),
            "cu_seqlens_q": offsets_of(new),
        }
        options = {"ratio": ratio, "overlap": overlap, "eps": 1e-6}
        yield Call(f"{name} {ratio}{' overlapping' * overlap}", run, arrays, options)


def sparse_calls(generator: torch.Generator) -> Iterator[Call]:
    """sparse_mla: every format of rows, one cache and two, few heads and many, odd sizes, rows of no slot, queries that
    f16 has not the range for, and many tokens of few keys: short pieces, one after another."""
    cases: list[dict[str, Any]] = [
        {"layout": "v32", "heads": 16, "selected": 300, "tokens": 5},
        {"layout": "v32", "heads": 128, "selected": 70, "tokens": 3, "gap": 2, "sinks": True},
        {"layout": "v32", "heads": 5, "selected": 33, "lengths": False, "dtype": "float16"},
        {"layout": "v4", "heads": 16, "selected": 12, "gap": 1},
        {"layout": "v4", "heads": 64, "selected": 192, "window": 128, "sinks": True, "sizes": SIZES},
        {"layout": "v4", "heads": 128, "selected": 320, "window": 128, "tokens": 3, "sinks": True},
        {"layout": "plain", "heads": 3, "selected": 129, "sizes": SIZES},
        {"layout": "plain", "heads": 40, "selected": 260, "width": 512},
        {"layout": "plain", "heads": 16, "selected": 68, "window": 4, "width": 512, "sinks": True},
        {"layout": "plain", "heads": 64, "selected": 68, "window": 4, "width": 512, "kv_dtype": "bfloat16"}
        | {"sizes": SIZES},
        {"layout": "plain", "heads": 16, "selected": 40, "dtype": "float16", "kv_dtype": "float16"},
        {"layout": "plain", "heads": 128, "selected": 70, "tokens": 3, "kv_dtype": "bfloat16", "sinks": True}
        | {"sizes": SIZES},
        {"layout": "plain", "heads": 64, "selected": 68, "window": 4, "dtype": "float16", "kv_dtype": "float16"},
        {"layout": "plain", "heads": 33, "selected": 130, "width": 512, "dtype": "float16", "kv_dtype": "float16"},
        {"layout": "plain", "heads": 33, "selected": 12, "tokens": MANY // 2, "kv_dtype": "bfloat16", "sinks": True},
        {"layout": "plain", "heads": 70, "selected": 450, "tokens": 5, "kv_dtype": "bfloat16"},
        {"layout": "plain", "heads": 64, "selected": 332, "tokens": 5, "window": 100, "kv_dtype": "bfloat16"}
        | {"dtype": "float16"},
        {"layout": "v32", "heads": 33, "selected": 12, "tokens": 200, "sinks": True},  # CTAs have two pieces
        {"layout": "v32", "heads": 72, "selected": 130, "dtype": "float8_e4m3fn", "sinks": True},
        {"layout": "plain", "heads": 5, "selected": 67, "dtype": "float8_e4m3fn"},
        {"layout": "v4", "heads": 16, "selected": 12, "gap": 1, "tokens": MANY, "sizes": SIZES},
    ]
    for case in cases:
        call = sparse_inputs.call(**case)
        tensors = {name: numbers(array) for name, array in call.arrays.items()}
        if "sinks" in tensors:  # as heavy as the keys together
            tensors["sinks"] = 4 + 2 * tensors["sinks"]
        for invariant in (False, True):
            greatest = "sinks" in tensors and tensors["q"].dtype != FP8
            options = call.options | {"return_lse": True, "batch_invariant": invariant, "return_max_logits": greatest}
            yield Call(f"{case}{' invariant' * invariant}", tsmla_bridge.sparse_mla, tensors, options)
            if case["layout"] == "plain" and case["heads"] >= 64 and tensors["kv_cache"].shape[-1] > LATENT:
                latent, rope = tensors["q"].split([LATENT, ROPE], -1)
                parts = {"q": latent.contiguous(), "q_rope": rope.contiguous()}
                for first in (False, True)[: 1 + (case["heads"] in (64, 128))]:
                    name = f"{case} in two tensors{' heads first' * first}{' invariant' * invariant}"
                    yield Call(name, sparse_mla_of_pair, tensors | parts, options | {"heads_first": first})
        if case["layout"] == "plain" and case["heads"] in (5, 16, 70) and "window" not in case:
            keys = tensors["kv_cache"].clone()
            far = {**tensors, "q": far_below(tensors["q"], keys), "kv_cache": keys}
            far["indices"] = tensors["indices"][..., :64].contiguous()  # one part: see decode_calls
            far["lengths"] = tensors["lengths"].clamp(max=64)
            options = call.options | {"return_lse": True, "softmax_scale": FAR}
            yield Call(f"{case} far below", tsmla_bridge.sparse_mla, far, options)
    yield from (rising_logits(generator, tokens, heads) for tokens, heads in ((2, 16), (6, 40)))
    yield from union_calls()


def sparse_mla_of_pair(q: torch.Tensor, q_rope: torch.Tensor, *, heads_first: bool = False, **given: Any) -> Any:
    """sparse_mla of a query in two tensors. The first may be [H, T, L] in memory. The second gets its gaps here,
    because a copy to the device closes them."""
    latent = q.movedim(-2, 0).contiguous().movedim(0, -2) if heads_first else q
    rope = torch.nn.functional.pad(q_rope, (128, 0), value=torch.nan)[..., 128:]
    return tsmla_bridge.sparse_mla((latent, rope), **given)


def rising_logits(generator: torch.Generator, tokens: int, heads: int) -> Call:
    """sparse_mla whose blocks of keys have greater logits one after another for even heads, and smaller ones for odd
    heads. The running maximum stays where it is in the second block, and rises in the third for even heads; the second
    token does not select the third."""
    keys = normal(generator, 4, 75, LATENT + ROPE, dtype=torch.float16)
    logits = torch.tensor([0.0] * 64 + [3.0] * 64 + [20.0] * 172)
    keys[..., 0] = (logits / SCALE / 16).view(4, 75)
    q = normal(generator, tokens, heads, LATENT + ROPE, dtype=torch.float16) / 8
    q[:, ::2, 0], q[:, 1::2, 0] = 16, -16
    indices = torch.arange(300, dtype=torch.int32).repeat(tokens, 1)
    indices[1, 128:] = -1
    options = {"softmax_scale": SCALE, "latent_dim": LATENT, "return_lse": True, "return_max_logits": True}
    return Call(
        f"rising logits H {heads}", tsmla_bridge.sparse_mla, {"q": q, "kv_cache": keys, "indices": indices}, options
    )


def union_calls() -> Iterator[Call]:
    """sparse_mla whose tokens share gathers: every format, groups of two, four and eight, of which some share and some,
    across the border of two requests or with a slot twice, do not; a last group of fewer tokens; many groups; and a row
    of NaN that one token of a group selects."""
    cases: list[dict[str, Any]] = [
        {"layout": "v32", "heads": 16, "selected": 100, "tokens": 14, "together": 6},
        {"layout": "v32", "heads": 8, "selected": 70, "tokens": 17, "together": 9, "sinks": True, "gap": 1}
        | {"lengths": True},
        {"layout": "v32", "heads": 32, "selected": 130, "tokens": 7, "together": 4, "dtype": "float16"},
        {"layout": "v4", "heads": 16, "selected": 160, "window": 128, "tokens": 9, "together": 4, "sinks": True}
        | {"gap": 1},
        {"layout": "plain", "heads": 16, "selected": 70, "tokens": 6, "together": 4, "kv_dtype": "bfloat16"},
        {"layout": "plain", "heads": 16, "selected": 70, "tokens": 6, "together": 4, "kv_dtype": "float16"}
        | {"dtype": "float16", "width": 512},
        {"layout": "plain", "heads": 16, "selected": 70, "tokens": 6, "together": 4},
        {"layout": "v32", "heads": 16, "selected": 12, "tokens": MANY, "together": 9, "sizes": SIZES},
    ]
    for case in cases:
        call = sparse_inputs.call(**({"pages": 24, "lengths": False} | case))
        tensors = {name: numbers(array) for name, array in call.arrays.items()}
        options = call.options | {"return_lse": True, "form": "union", "return_max_logits": "sinks" in tensors}
        yield Call(f"union {case}", tsmla_bridge.sparse_mla, tensors, options)
    call = sparse_inputs.call(**(cases[0] | {"tokens": 8, "together": 8, "pages": 24, "lengths": False}))
    tensors = {name: numbers(array) for name, array in call.arrays.items()}
    slot = int(tensors["indices"][2, 0])
    others = torch.arange(8) != 2
    tensors["indices"][others] = torch.where(tensors["indices"][others] == slot, -1, tensors["indices"][others])
    tensors["kv_cache"].view(-1, tensors["kv_cache"].shape[-1])[slot] = 0xFF
    options = call.options | {"return_lse": True, "form": "union"}
    yield Call("union of a row of NaN", tsmla_bridge.sparse_mla, tensors, options)


def sparse_gradient(dout: torch.Tensor, dlse: torch.Tensor, **given: Any) -> tuple[torch.Tensor, ...]:
    """The gradients of q, the caches and the sinks by sparse_mla."""
    names = ("q", "kv_cache", "compressed_kv_cache", "sinks")
    inputs = {name: given.pop(name) for name in names if name in given}
    return gradients(functools.partial(tsmla_bridge.sparse_mla, **given), inputs, dout, dlse)


def sparse_gradient_calls(generator: torch.Generator) -> Iterator[Call]:
    """The gradient of sparse_mla over plain caches: one and two, heads that fill no tile and several, gaps between
    pages, sinks, rows of no slot, slots given twice, NaN in all others, many tokens of few keys, and tokens with few
    heads that share slots."""
    cases: list[dict[str, Any]] = [
        {"heads": 16, "selected": 70, "tokens": 5},
        {"heads": 80, "selected": 200, "tokens": 5, "sinks": True},
        {"heads": 5, "selected": 33, "gap": 2, "lengths": False},
        {"heads": 64, "selected": 68, "window": 4, "width": 512, "sinks": True},
        {"heads": 130, "selected": 68, "window": 4, "gap": 1},
        {"heads": 33, "selected": 12, "width": 512, "tokens": 150, "sinks": True},
        {"heads": 16, "selected": 150, "tokens": 14, "together": 6, "pages": 24, "lengths": False},
        {"heads": 8, "selected": 70, "width": 512, "tokens": 17, "together": 9, "pages": 24, "gap": 1},
        {"heads": 32, "selected": 92, "window": 40, "tokens": 5, "together": 4, "pages": 24, "sinks": True},
    ]
    for dtype, case in itertools.product(("bfloat16", "float16"), cases):
        call = sparse_inputs.call("plain", dtype=dtype, kv_dtype=dtype, **case)
        tensors = {name: numbers(array) for name, array in call.arrays.items()}
        options = {name: option for name, option in call.options.items() if not name.endswith("kv_scale")}
        for name in ("kv_cache", "compressed_kv_cache"):
            if name in tensors:
                tensors[name] = tensors[name] * call.options["kv_scale"]
        if "sinks" in tensors:  # as heavy as the keys together
            tensors["sinks"] = (2 + tensors["sinks"]).to(tensors["q"].dtype)
        rows = tensors["q"].shape[:2]
        tensors["dout"] = normal(generator, *rows, LATENT, dtype=tensors["q"].dtype)
        tensors["dlse"] = normal(generator, *rows, dtype=torch.float32)
        yield Call(f"{dtype} {case}", sparse_gradient, tensors, options)
        if case["heads"] in (5, 16, 80) or "window" in case:
            yield Call(f"deterministic {dtype} {case}", sparse_gradient, tensors, options | {"deterministic": True})


def quantized_and_back(x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_blocks: the numbers that its values stand for, of which a rounding may differ, and the scales."""
    values, scales = tsmla_bridge.quantize_blocks(x, **options)
    return values.float() * scales.repeat_interleave(128, -1)[..., : x.shape[-1]], scales


def gated_and_back(*, function: Callable[..., Any], **given: Any) -> Any:
    """A gated product: its result, or the numbers that its e4m3 values stand for, in bf16, whose bound allows for some
    that are rounded the other way, and the scales."""
    results = function(gated=True, **given)
    if not isinstance(results, tuple):
        return results
    values, scales = results
    return (values.float() * scales.repeat_interleave(128, -1)[..., : values.shape[-1]]).bfloat16(), scales


def gated_calls(generator: torch.Generator) -> Iterator[Call]:
    """Gated products, dense and grouped, with picked rows, of every kind of tile and result; NaN in rows of x that are
    not picked, and indices that don't exist behind the last group."""

    def blocks(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tsmla_bridge.quantize_blocks(normal(generator, *shape, dtype=torch.float32))

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) * 1e-3 + 5e-4

    forms = itertools.cycle(((FP8, None), (torch.bfloat16, 4.0), (FP8, 0.5), (torch.float32, None)))
    for rows, columns, terms in ((1, 256, 272), (7, 512, 1296), (33, 256, 400), (130, 768, 272), (300, 256, 400)):
        (x, x_scales), (weight, _) = blocks(rows, terms), blocks(columns, terms)
        tensors = {
            "x": x,
            "weight": weight,
            "x_scales": x_scales,
            "weight_scales": scales(columns // 128, -(-terms // 128)),
        }
        kept = {key: tensor for key, tensor in tensors.items() if key != "x_scales"}
        wide = kept | {"x": normal(generator, rows, terms, dtype=torch.bfloat16 if rows % 2 else torch.float16)}
        function = functools.partial(gated_and_back, function=tsmla_bridge.block_scaled_matmul)
        for given, options in ((tensors, {}), (wide, {"x_scales": None})):
            out_dtype, limit = next(forms)
            name = f"gated {rows} rows, {columns} x {terms}{' wide' if options else ''} {out_dtype} {limit}"
            yield Call(name, function, given, {"out_dtype": out_dtype, "limit": limit, **options})
    for counts in ([0, 1, 0, 3], [20, 0, 45, 2], [0, 0, 150], [250, 0, 130], [n % 3 for n in range(70)]):
        used, (weight, _) = sum(counts), blocks(len(counts) + 1, 256, 336)
        (x, x_scales), picked = blocks(40, 336), torch.randint(0, 37, (used,), generator=generator)
        x.view(torch.uint8)[-3:], x_scales[-3:] = 0x7F, torch.nan
        rows = torch.cat((picked, torch.tensor([1 << 30, -5, 39]))).int()
        tensors = {"x": x, "weight": weight, "x_scales": x_scales, "weight_scales": scales(len(counts), 2, 3)}
        given = {**tensors, "cu_rows": offsets_of(counts), "rows": rows}
        kept = {key: tensor for key, tensor in given.items() if key != "x_scales"}
        wide = kept | {"x": normal(generator, 40, 336, dtype=torch.bfloat16)}
        wide["x"][-3:] = torch.nan
        function = functools.partial(gated_and_back, function=tsmla_bridge.grouped_block_scaled_matmul)
        for call, options in ((given, {}), (wide, {"x_scales": None})):
            out_dtype, limit = next(forms)
            of_16_bits = " wide" if options else ""
            name = f"groups of {counts}{of_16_bits}"
            yield Call(f"picked {name}", tsmla_bridge.grouped_block_scaled_matmul, call, options)
            options = {**options, "out_dtype": out_dtype, "limit": limit}
            yield Call(f"gated picked {name} {out_dtype} {limit}", function, call, options)
            apart = {key: tensor for key, tensor in call.items() if key != "rows"}
            apart["cu_rows"] = apart["cu_rows"].clamp(max=37)
            yield Call(f"gated {name} {out_dtype} {limit}", function, apart, options)


def packed_product_calls(generator: torch.Generator) -> Iterator[Call]:
    """Products with weights of e2m1: dense and grouped, gated with picked rows, of every kind of tile."""

    def weights(*shape: int) -> dict[str, torch.Tensor]:
        *stack, terms = shape
        exponents = torch.randint(118, 124, (*stack, terms // 32), generator=generator)
        codes = torch.randint(0, 256, (*stack, terms // 2), generator=generator)
        return {"weight": codes.byte(), "weight_scales": exponents.byte()}

    for rows, columns, terms in ((1, 264, 384), (7, 136, 1280), (50, 136, 640), (300, 392, 384)):
        given = {"x": normal(generator, rows, terms, dtype=torch.bfloat16), **weights(columns, terms)}
        name = f"packed {rows} rows, {columns} x {terms}"
        yield Call(name, tsmla_bridge.block_scaled_matmul, given, {"x_scales": None, "out_dtype": torch.float32})
    function = functools.partial(gated_and_back, function=tsmla_bridge.grouped_block_scaled_matmul)
    for counts in ([0, 3, 0, 0, 9, 1], [20, 0, 45, 2], [250, 0, 130]):
        x = normal(generator, sum(counts) + 5, 384, dtype=torch.bfloat16)
        x[-5:] = torch.nan
        given = {"x": x, **weights(len(counts), 256, 384), "cu_rows": offsets_of(counts)}
        yield Call(f"packed groups of {counts}", tsmla_bridge.grouped_block_scaled_matmul, given, {"x_scales": None})
        picked = given | {"rows": torch.randint(0, sum(counts), (sum(counts),), generator=generator).int()}
        for out_dtype in (torch.bfloat16, FP8):
            options = {"x_scales": None, "out_dtype": out_dtype, "limit": 4.0}
            yield Call(f"packed gated groups of {counts} {out_dtype}", function, picked, options)


def plain_product_calls(generator: torch.Generator) -> Iterator[Call]:
    """Groups' products with weights of 16 bits, gated with picked rows, too."""
    function = functools.partial(gated_and_back, function=tsmla_bridge.grouped_block_scaled_matmul)
    scales = {"x_scales": None, "weight_scales": None}
    for dtype, counts in ((torch.bfloat16, [0, 3, 0, 65, 1]), (torch.float16, [250, 0, 130]), (torch.bfloat16, [1])):
        x = normal(generator, sum(counts) + 5, 400, dtype=dtype)
        x[-5:] = torch.nan
        weight = normal(generator, len(counts) + 1, 264, 400, dtype=dtype)
        given = {"x": x, "weight": weight, "cu_rows": offsets_of(counts)}
        yield Call(f"groups of {counts}", tsmla_bridge.grouped_block_scaled_matmul, given, scales)
        picked = {**given, "weight": normal(generator, len(counts), 512, 400, dtype=dtype)}
        picked["rows"] = torch.randint(0, sum(counts), (sum(counts) + 2,), generator=generator).int()
        for out_dtype in (torch.float32, FP8):
            options = {**scales, "out_dtype": out_dtype, "limit": 4.0}
            yield Call(f"gated groups of {counts} {out_dtype}", function, picked, options)


def product_calls(generator: torch.Generator) -> Iterator[Call]:
    """block_scaled_matmul and the grouped one: every kind of tile, rows and terms that fill no tile or block, groups
    without rows and one with all, NaN behind the last group."""

    def blocks(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tsmla_bridge.quantize_blocks(normal(generator, *shape, dtype=torch.float32))

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator) * 0.1 + 0.01

    dtypes = itertools.cycle((torch.bfloat16, torch.float16, torch.float32))
    for rows, columns, terms in ((1, 264, 272), (7, 136, 1296), (16, 520, 2064), (50, 136, 640), (100, 264, 400),
                                 (300, 392, 400)):  # fmt: skip
        (x, x_scales), (weight, _) = blocks(rows, terms), blocks(columns, terms)
        weight_scales = scales(-(-columns // 128), -(-terms // 128))
        tensors = {"x": x, "weight": weight, "x_scales": x_scales, "weight_scales": weight_scales}
        name = f"{rows} rows, {columns} x {terms}"
        yield Call(name, tsmla_bridge.block_scaled_matmul, tensors, {"out_dtype": next(dtypes)})
        kept = {key: tensor for key, tensor in tensors.items() if key != "x_scales"}
        wide = kept | {"x": normal(generator, rows, terms, dtype=torch.bfloat16 if rows % 2 else torch.float16)}
        yield Call(f"wide {name}", tsmla_bridge.block_scaled_matmul, wide, {"x_scales": None})
    for dtype, (rows, terms) in zip(dtypes, ((3, 1000), (40, 256), (1, 16), (7, 7168)), strict=False):
        x = normal(generator, 2, rows, terms, dtype=dtype)
        x[0, 0] = 0
        options = {"power_of_two": rows == 40}
        yield Call(f"blocks of {rows} x {terms}", quantized_and_back, {"x": x}, options)
    for counts in ([0, 3, 0, 0, 9, 1], [20, 0, 45, 2], [0, 0, 150], [250, 0, 130], [n % 3 for n in range(70)]):
        (x, x_scales), (weight, _) = blocks(sum(counts) + 5, 336), blocks(len(counts), 264, 336)
        x.view(torch.uint8)[-5:], x_scales[-5:] = 0x7F, torch.nan
        tensors = {"x": x, "weight": weight, "x_scales": x_scales, "weight_scales": scales(len(counts), 3, 3)}
        given = {**tensors, "cu_rows": offsets_of(counts)}
        yield Call(f"groups of {counts}", tsmla_bridge.grouped_block_scaled_matmul, given, {"out_dtype": next(dtypes)})
        kept = {key: tensor for key, tensor in given.items() if key != "x_scales"}
        wide = kept | {"x": normal(generator, sum(counts) + 5, 336, dtype=torch.bfloat16)}
        wide["x"][-5:] = torch.nan
        yield Call(f"wide groups of {counts}", tsmla_bridge.grouped_block_scaled_matmul, wide, {"x_scales": None})


CALLS: dict[str, Callable[[torch.Generator], Iterator[Call]]] = {
    "mla_decode": decode_calls,
    "mla_prefill": prefill_calls,
    "mla_prefill_selection": selection_calls,
    "mla_prefill_sinks": sink_calls,
    "mla_prefill_sinks_gradient": sink_gradient_calls,
    "mla_prefill_gradient": gradient_calls,
    "mla_prefill_selection_gradient": selection_gradient_calls,
    "mla_prefill_wide_gradient": wide_gradient_calls,
    "mla_prefill_kv_gradient": functools.partial(gradient_calls, function=prefill_kv_gradient),
    "kv_cache": cache_calls,
    "merge_attention_states": merge_calls,
    "select_topk": topk_calls,
    "selection_bits": bits_calls,
    "indexer_topk": indexer_calls,
    "packed_caches": packed_calls,
    "compress_write_kv_cache": compress_calls,
    "sparse_mla": sparse_calls,
    "sparse_mla_gradient": sparse_gradient_calls,
    "block_scaled_matmul": product_calls,
    "gated_block_scaled_matmul": gated_calls,
    "packed_block_scaled_matmul": packed_product_calls,
    "plain_grouped_matmul": plain_product_calls,
}


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """How far a result is from the right one; inf if shapes differ, or what is not finite.

    float32: the greatest difference of two numbers over the size of the right one, or of a row of the right ones (the
    log-sum-exp of a row of large scores may be small, its error isn't), or over 1. Narrower floats, which round by each
    number's own size: the norm of the difference over that of `want`. Integers: the part that differs.
    """
    if got.shape != want.shape:
        return float("inf")
    if not want.dtype.is_floating_point:
        return float((got.cpu() != want).double().mean())
    a, b = got.cpu().double(), want.double()
    finite = torch.isfinite(b)
    sizes = b.abs()
    if b.ndim and want.dtype in (torch.float32, torch.float64):
        of_rows = sizes.where(finite, torch.nan).nanmean(-1, keepdim=True)
        sizes = torch.maximum(sizes, of_rows.expand_as(b))
    if not finite.all():  # picking elements takes longer than all else
        if not torch.equal(a[~finite].nan_to_num(7.0), b[~finite].nan_to_num(7.0)):
            return float("inf")
        a, b, sizes = a[finite], b[finite], sizes[finite]
    if want.dtype in (torch.float32, torch.float64):
        return float(((a - b).abs() / sizes.clamp(min=1.0)).max()) if b.numel() else 0.0
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def stretched(got: torch.Tensor, want: torch.Tensor) -> float:
    """By how much `got` is longer than `want` in the direction of `want`: what a wrong scale does, and what rounding,
    which has no direction, hardly does."""
    a, b = got.cpu().double(), want.double()
    finite = torch.isfinite(a) & torch.isfinite(b)
    a, b = a[finite], b[finite]
    return abs(float((a * b).sum() / (b * b).sum().clamp(min=1e-30)) - 1) if b.any() else 0.0


NARROW_BOUNDS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, FP8: 1e-3}
FP8_P_BOUND = 0.066
"""Three times what a right kernel shows, whose P has 4 bits."""
STRETCH_BOUND = 4e-3
LOGIT_BOUND = 2**-11
"""sparse_mla finds a row's greatest logit as the logarithm of a P of f16."""
GATED_BOUND = 6e-5
"""The factors of a gated product are sums of hundreds of terms: on a GPU 3.6e-6 on average and 2.5e-5 at most."""
GATED_FP8_BOUND = 0.015
"""Sums of 14 bits round one e4m3 result in some 200 the other way, by a sixteenth to an eighth."""
SINK_BOUND = 0.06
"""A sink's gradient sums products of out, which is rounded, over the tokens, and they cancel."""


def bound(call: Call, index: int, result: torch.Tensor, on_gpu: bool) -> float:
    """The greatest legal `apart` of result `index` of a call: two to three times that of the right kernel.

    A GPU's tensor cores add products of e4m3 in 14 bits, and its compiler fuses products and sums, so that a few bytes
    of a quantised cache are rounded otherwise.
    """
    of_fp8 = any(call.tensors[name].dtype == FP8 for name in ("q", "x") if name in call.tensors)
    if result.dtype == torch.uint8:
        return 2e-3 if on_gpu else 1e-4
    if not result.dtype.is_floating_point:
        return 0.0
    if call.function is sink_gradient and result.ndim == 1:
        return SINK_BOUND
    if on_gpu and index == 0 and getattr(call.function, "func", None) is gated_and_back:
        if of_fp8 and call.options["out_dtype"] == FP8 and result.dtype == torch.bfloat16:
            return GATED_FP8_BOUND
        if not of_fp8 and result.dtype == torch.float32:
            return GATED_BOUND
    if result.dtype in (torch.float32, torch.float64):
        if call.function in (tsmla_bridge.sparse_mla, sparse_mla_of_pair) and index == 2:
            return LOGIT_BOUND
        return 5e-3 if on_gpu and of_fp8 else 1e-5
    if of_fp8 and (call.function is tsmla_bridge.mla_prefill or call.options.get("fp8_probabilities")):
        return FP8_P_BOUND
    narrow = NARROW_BOUNDS[result.dtype]
    # dS is rounded too, and where a query sees two keys their dS cancel.
    of_gradient = "dout" in call.tensors and not (call.function is sink_gradient and index == 4)
    return 2 * narrow if of_gradient else narrow


def wrong(call: Call, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], on_gpu: bool = False) -> list[str]:
    """The results of a call that differ from the reference's, in words."""
    found = []
    if call.function is sink_gradient:
        want = with_rounded_out(call, got, want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        error, limit = apart(a, b), bound(call, i, b, on_gpu)
        if not error <= limit:
            found.append(f"result {i}: apart by {error:.2g}, legal: {limit:.2g}")
        elif error > 0 and b.dtype in NARROW_BOUNDS and not stretched(a, b) <= STRETCH_BOUND:
            found.append(f"result {i}: too long by {stretched(a, b):.2g}, legal: {STRETCH_BOUND:.2g}")
    return found


def failures(op: str, device: torch.device, only: str = "") -> list[str]:
    """The calls of `op` on `device`, of those whose names hold `only`, that differ from those on the CPU by more than
    rounding explains."""
    found = []
    for call in (call for call in CALLS[op](torch.Generator().manual_seed(0)) if only in call.name):
        differences = wrong(call, call.on(device), call.on(torch.device("cpu")), device.type == "cuda")
        if differences:
            found.append(f"{op} {call.name}: {'; '.join(differences)}")
    return found


def main(argv: list[str] | None = None) -> int:
    parser: Any = argparse.ArgumentParser(description="every operation of the bridge on small inputs")
    parser.add_argument("--op", choices=list(CALLS), action="append", help="all by default")
    parser.add_argument("--only", default="", help="calls whose names hold this text, a dtype say")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    found = [line for op in args.op or CALLS for line in failures(op, torch.device(args.device), args.only)]
    print("\n".join(found) or "all as on the CPU")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
