"""sparse_mla by the kernel, on CPUs: its choice and its operands. An emulation takes the kernel's place; the reference
is the oracle."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.emulator import decode as cute_emulation
from tests.emulator import sparse as emulation
from tests.jax.ops.programs import assert_same, calls, collectives, ints, kernels
from tests.oracles import sparse as oracle
from tsmla_jax.ops.sparse_mla import api, cute
from tsmla_kernels.catalog import SPARSE_MLA, SPARSE_MLA_UNION
from tsmla_kernels.sm90.latent import shape as latent_shape

pytestmark = [
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="emulates the kernel on CPUs"),
    pytest.mark.usefixtures("for_hopper"),
]

TOKENS, HEADS, SELECTED, WINDOW, PAGE = 8, 4, 12, 4, 8
Results = tuple[jax.Array, jax.Array]
Struct = jax.ShapeDtypeStruct


@pytest.fixture(autouse=True, scope="module")
def emulated() -> Iterator[None]:
    with cute_emulation.emulated(cute._transformable, by=emulation.emulate):
        yield


def caches_of(layout: str) -> dict[str, jax.Array]:
    """kv_cache of 5 pages, and for V4 a second one of 3."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((5, PAGE, 576))
    if layout == "v32":
        packed = b"".join(oracle.v32_row(row[:512], row[512:]) for row in rows.reshape(-1, 576))
        return {"kv_cache": jnp.asarray(np.frombuffer(packed, np.uint8).reshape(5, PAGE, 656))}
    if layout == "plain":
        return {"kv_cache": jnp.asarray(oracle.e4m3(rows * 9))}
    pages = np.stack([np.frombuffer(oracle.v4_page(page[:, :512], PAGE), np.uint8) for page in rows])
    return {"kv_cache": jnp.asarray(pages), "compressed_kv_cache": jnp.asarray(pages[2:])}


def arrays(layout: str) -> dict[str, jax.Array]:
    """The arrays of a call: -1, duplicates, no key at all, and POISON behind the lengths."""
    rng = np.random.default_rng(1)
    indices = rng.integers(-1, 5 * PAGE, (TOKENS, SELECTED))
    indices[:, WINDOW:] = rng.integers(-1, 3 * PAGE, (TOKENS, SELECTED - WINDOW))
    lengths = np.asarray([12, 0, 3, 12, 7, 12, 1, 12])
    indices[3], indices[4, 7:] = -1, 2**31 - 1
    found = {
        "q": jnp.asarray(rng.standard_normal((TOKENS, HEADS, 512 if layout == "v4" else 576)), jnp.bfloat16),
        **caches_of(layout),
        "indices": ints(indices),
        "lengths": ints(lengths),
    }
    return found | ({"sinks": jnp.asarray(rng.standard_normal(HEADS), jnp.bfloat16)} if layout == "v4" else {})


def attend(implementation: str | None, layout: str, **options: Any) -> Callable[..., Results]:
    """sparse_mla of arrays by name."""
    fixed: dict[str, Any] = {"softmax_scale": 0.135, "return_lse": True}
    if layout == "v4":
        fixed |= {"window": WINDOW, "page_size": PAGE, "compressed_page_size": PAGE}
    elif layout == "plain":
        fixed |= {"kv_scale": jnp.float32(1 / 9)}
    run = partial(tsmla_jax.sparse_mla, implementation=implementation, **(fixed | options))
    return lambda given: run(**given)


LAYOUTS = ("v32", "v4", "plain")


@pytest.mark.parametrize(
    ("layout", "without"), [("v32", ""), ("v4", ""), ("v4", "lengths"), ("v4", "sinks"), ("plain", "lengths")]
)
def test_operands(layout: str, without: str) -> None:
    given = {name: array for name, array in arrays(layout).items() if name != without}
    if without == "lengths":
        given["indices"] = jnp.where(given["indices"] > 99, -1, given["indices"])
    for softmax_scale in (0.1, jnp.float32(0.2)):
        options = {"softmax_scale": softmax_scale, "q_scale": 0.5}
        got = jax.jit(attend("cute", layout, **options))(given)
        assert_same(got, attend("reference", layout, **options)(given))
        assert got[0].dtype == jnp.bfloat16 and got[0].shape == (TOKENS, HEADS, 512)


@pytest.mark.parametrize("layout", ["plain", "v32"])
def test_queries_of_e4m3(layout: str) -> None:
    given = arrays(layout)
    given["q"] = given["q"].astype(jnp.float8_e4m3fn)
    got = jax.jit(attend("cute", layout, q_scale=jnp.float32(0.5)))(given)
    assert_same(got, attend("reference", layout, q_scale=0.5)(given))
    assert got[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("layout", ["plain", "v32"])
def test_wide_pages_and_two_scales(layout: str) -> None:
    given, options = arrays(layout), {"page_size": 5, "batch_invariant": True}
    options |= {"compressed_kv_cache": given["kv_cache"][:4], "window": WINDOW, "compressed_page_size": 7}
    if layout == "plain":
        options |= {"kv_scale": 0.1, "compressed_kv_scale": jnp.float32(0.3)}
    got, want = (attend(name, layout, **options)(given) for name in ("cute", "reference"))
    assert_same(got, want)


@pytest.mark.parametrize("tokens", [(0, SELECTED), (TOKENS, 0)])
def test_nothing_to_attend_to(tokens: tuple[int, int]) -> None:
    given = {name: array for name, array in arrays("v32").items() if name != "lengths"}
    given |= {"q": given["q"][: tokens[0]], "indices": given["indices"][: tokens[0], : tokens[1]]}
    out, lse = jax.jit(attend("cute", "v32"))(given)
    assert out.shape == (tokens[0], HEADS, 512) and not np.float32(out).any() and np.isneginf(lse).all()


@pytest.mark.parametrize(("layout", "each"), [("v4", 3), ("v32", 8), ("plain", 1)])
def test_many_invariant_tokens_take_several_launches(layout: str, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arrays(layout)
    monkeypatch.setattr(latent_shape, "INVARIANT_WORKSPACE", each * 64 * (512 * 4 + 12))
    cute._transformable.cache_clear()
    run = jax.jit(attend("cute", layout, batch_invariant=True))
    assert calls(jax.make_jaxpr(run)(given)) == -(-TOKENS // each)
    assert_same(run(given), attend("reference", layout)(given))
    cute._transformable.cache_clear()


# ---- tokens that share gathers


def of_16_heads(layout: str) -> dict[str, jax.Array]:
    given = arrays(layout)
    return given | {
        name: jnp.repeat(given[name], 4, -2 if name == "q" else 0) for name in ("q", "sinks") if name in given
    }


@pytest.mark.parametrize("layout", ["v32", "v4", "plain"])
def test_tokens_share_gathers(layout: str) -> None:
    given = of_16_heads(layout)
    run = jax.jit(attend("cute", layout, form="union"))
    ((kernel, config),) = kernels(jax.make_jaxpr(run)(given))
    assert kernel is SPARSE_MLA_UNION and config.tokens == 4
    assert_same(run(given), attend("reference", layout, form="union")(given))
    ((kernel, _),) = kernels(jax.make_jaxpr(attend("cute", layout, form="direct"))(given))
    assert kernel is SPARSE_MLA


def test_a_folded_call_and_each_devices_part_share_gathers(mesh: Mesh) -> None:
    given = of_16_heads("v4")
    stacked = given | {"q": jnp.stack([given["q"], given["q"][::-1]])}
    run = jax.vmap(attend("cute", "v4", form="union"), ({name: 0 if name == "q" else None for name in given},))
    ((kernel, _),) = kernels(jax.make_jaxpr(run)(stacked))
    assert kernel is SPARSE_MLA_UNION
    want = [attend("reference", "v4")(given | {"q": q}) for q in stacked["q"]]
    assert_same(run(stacked), jax.tree.map(lambda *x: jnp.stack(x), *want))
    specs = {"q": P("data", "model"), "indices": P("data"), "lengths": P("data"), "sinks": P("model")}
    split = {n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in given.items()}
    compiled = jax.jit(attend("cute", "v4", form="union")).lower(split).compile()  # with 8 heads on a device
    assert collectives(compiled) == []
    assert_same(compiled(split), attend("reference", "v4")(given))


def test_sizes_choose_the_form_and_explain_says_it() -> None:
    q, indices = Struct((2048, 16, 576), jnp.bfloat16), Struct((2048, 2048), jnp.int32)
    given = {"q": q, "indices": indices, "lengths": Struct((2048,), jnp.int32)}
    (note,) = (said for said in explain("v32", **given).notes["cute"] if "form" in said)
    assert note == "form union: q has 2048 tokens, and 4 that select the same slots gather them once"
    (note,) = (said for said in explain("v32", **given, tokens_per_request=1).notes["cute"] if "form" in said)
    assert note.startswith("form direct: each token is of another request")
    found = explain("v32", form="union", batch_invariant=True, implementation="cute", **given)
    assert found.chosen is None and "batch_invariant is set" in found.reasons["cute"][0]
    with pytest.raises(ValueError, match=r"form: got 'wide'; legal: 'auto', 'direct', 'union'"):
        explain("v32", form="wide")
    with pytest.raises(ValueError, match="tokens_per_request: got 0"):
        explain("v32", tokens_per_request=0)


# ---- vmap, derivatives


# ---- several devices


# ---- which implementation runs


def explain(layout: str, **changed: Any) -> Any:
    given = {name: Struct(x.shape, x.dtype) for name, x in arrays(layout).items()}
    pages = {"window": WINDOW, "page_size": PAGE, "compressed_page_size": PAGE} if layout == "v4" else {}
    return tsmla_jax.explain("sparse_mla", **(given | {"softmax_scale": 1.0} | pages | changed))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_named_and_by_default(layout: str) -> None:
    named = explain(layout, implementation="cute")
    assert named.chosen == "cute" and named.reasons["cute"] == ()
    by_default = explain(layout)
    assert by_default.chosen == "xla" and "jax's default device is a cpu" in by_default.reasons["cute"]


def test_the_kernel_is_chosen_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    table = api.OPERATION.table
    on_hopper = dataclasses.replace(table["cute"], why_not_by_default=list)
    monkeypatch.setitem(api.OPERATION.__dict__, "table", {**table, "cute": on_hopper})
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
        assert explain("v32", q=Struct((TOKENS, HEADS, 576), dtype)).chosen == "cute"
    for heads in (32, 33):
        wide = {"q": Struct((TOKENS, heads, 576), jnp.bfloat16), "kv_cache": Struct((5, PAGE, 576), jnp.bfloat16)}
        assert explain("v32", **wide).chosen == "cute"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"q": Struct((TOKENS, HEADS, 576), jnp.float32)}, "q.dtype is float32"),
        (
            {"q": Struct((TOKENS, HEADS, 576), jnp.float8_e4m3fn), "kv_cache": Struct((5, PAGE, 576), jnp.bfloat16)},
            "q.dtype is float8_e4m3fn and kv_cache has plain rows of bfloat16",
        ),
        ({"kv_cache": Struct((5, PAGE, 576), jnp.float32)}, "kv_cache.dtype is float32"),
        ({"latent_dim": 256}, "latent_dim is 256"),
        (
            {"compressed_kv_cache": Struct((5, PAGE, 656), jnp.uint8), "window": WINDOW},
            "compressed_kv_cache has v32 rows of uint8 and kv_cache plain rows of float8_e4m3fn",
        ),
    ],
)
def test_reasons_are_all_said(changed: dict[str, Any], reason: str) -> None:
    explained = explain("plain", implementation="cute", **changed)
    assert explained.chosen is None and any(reason in said for said in explained.reasons["cute"])


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_120a")
    text = re.escape("the architecture is sm_120a; sparse_mla is written for sm_90a")
    with pytest.raises(NotImplementedError, match=text):
        attend("cute", "v32")(arrays("v32"))
