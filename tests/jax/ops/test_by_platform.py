"""implementation=None on a machine without a GPU whose CUTE_DSL_ARCH names one: programs that are lowered for GPUs have
the kernels, all others run XLA."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tsmla_jax
from tests.jax.ops.programs import calls, lower, primitives
from tsmla_jax import sparse
from tsmla_jax.ops import device, kernel_call
from tsmla_jax.ops.explain import OPERATIONS

pytestmark = [
    pytest.mark.usefixtures("for_hopper"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="is about machines without a GPU"),
]

BF16, F32, I32, U8, FP8 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.uint8, jnp.float8_e4m3fn
Arrays = dict[str, Any]


def zeros(*shape: int, dtype: Any = BF16) -> np.ndarray:
    return np.zeros(shape, dtype)


def ints(x: Any) -> np.ndarray:
    return np.asarray(x, np.int32)


CACHE, TABLES, LENS, STARTS = zeros(4, 64, 576), ints([[0, 1], [2, 3]]), ints([70, 3]), ints([0, 1, 2])
ROWS = {"latent": zeros(2, 512), "k_rope": zeros(2, 64), "slot_mapping": ints([5, -1])}
ANGLES = {"cos": zeros(2, 32, dtype=F32), "sin": zeros(2, 32, dtype=F32)}
KEYS = {"k_cache": zeros(4, 64, 132, dtype=U8), "block_tables": TABLES, "seq_lens": LENS}
QUERY = {"q": zeros(2, 64, 128, dtype=FP8), "weights": zeros(2, 64, dtype=F32)}
OFFSETS = {"cu_seqlens_q": STARTS, "cu_seqlens_kv": STARTS}
PRODUCT = {
    "x": zeros(2, 128, dtype=FP8), "x_scales": zeros(2, 1, dtype=F32),
    "weight": zeros(256, 128, dtype=FP8), "weight_scales": zeros(2, 1, dtype=F32),
}  # fmt: skip
LENGTHS = {"max_q_len": 1, "max_kv_len": 1, "softmax_scale": 0.1}
TOKENS = 8
CALLS: dict[str, tuple[Arrays, dict[str, Any]]] = {
    "mla_decode": (
        {"q": zeros(2, 1, 16, 576), "kv_cache": CACHE, "block_tables": TABLES, "seq_lens": LENS},
        {"softmax_scale": 0.1},
    ),
    "mla_prefill": ({"q": zeros(2, 4, 192), "k": zeros(2, 4, 192), "v": zeros(2, 4, 128)} | OFFSETS, LENGTHS),
    "mla_prefill_kv": ({"q": zeros(2, 4, 192), "kv": zeros(2, 4, 256), "k_rope": zeros(2, 64)} | OFFSETS, LENGTHS),
    "write_kv_cache": ({"kv_cache": CACHE} | ROWS, {}),
    "rope_write_kv_cache": (
        {"kv_cache": CACHE, "q_nope": zeros(2, 16, 512), "q_rope": zeros(2, 16, 64)} | ROWS | ANGLES, {},
    ),
    "gather_kv_cache": (
        {"kv_cache": CACHE, "block_tables": TABLES, "starts": ints([0, 1]), "lens": ints([70, 2])}, {"total_len": 80},
    ),
    "merge_attention_states": ({"outs": zeros(2, 3, 4, 128), "lses": zeros(2, 3, 4, dtype=F32)}, {}),
    "sparse_mla": (
        {"q": zeros(2, 16, 576), "kv_cache": CACHE, "indices": ints([[0, 5, 9, -1]] * 2)}, {"softmax_scale": 0.1},
    ),
    "compress_write_kv_cache": (
        {
            "cache": zeros(2, 64, 512), "kv_score": zeros(TOKENS, 2, 1024, dtype=F32),
            "ape": zeros(4, 1024, dtype=F32), "norm_weight": zeros(512, dtype=F32),
            "cos_sin": zeros(9, 64, dtype=F32), "block_tables": TABLES[:1, :1], "state_slots": ints([0]),
            "seq_lens": ints([TOKENS]), "cu_seqlens_q": ints([0, TOKENS]),
        },
        {"ratio": 4, "overlap": True, "eps": 1e-6},
    ),
    "indexer_logits": (QUERY | KEYS, {}),
    "select_topk": ({"logits": zeros(2, 300, dtype=F32), "seq_lens": ints([300, 7])}, {"k": 16}),
    "selection_bits": ({"positions": ints([[3, 9], [0, -1]])}, {"num_keys": 30}),
    "indexer_topk": (QUERY | KEYS, {"k": 16}),
    "indexer_quantize": ({"q": zeros(2, 64, 128), "weights": zeros(2, 64)} | ANGLES, {}),
    "write_indexer_cache": (
        {"k_cache": KEYS["k_cache"], "k": zeros(2, 128), "slot_mapping": ROWS["slot_mapping"]} | ANGLES, {},
    ),
    "write_packed_kv_cache": ({"kv_cache": zeros(4, 64, 656, dtype=U8)} | ROWS | ANGLES, {}),
    "block_scaled_matmul": (PRODUCT, {}),
    "grouped_block_scaled_matmul": (
        PRODUCT | {
            "weight": zeros(2, 256, 128, dtype=FP8), "weight_scales": zeros(2, 2, 1, dtype=F32), "cu_rows": STARTS,
        }, {},
    ),
    "quantize_blocks": ({"x": zeros(2, 128)}, {}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object's bytes are not needed to lower the call of it."""
    monkeypatch.setattr(kernel_call, "_module", lambda *_: (b"object", b"key"))


def call_of(op: str, implementation: str | None = None) -> tuple[Callable[..., Any], Arrays]:
    arrays, options = CALLS[op]
    arrays = dict(arrays)
    if op == "compress_write_kv_cache":
        arrays["state"] = sparse.init_compressor_state(1, ratio=4, channels=512, overlap=True)
    function = getattr(tsmla_jax, op, None) or getattr(sparse, op)
    return lambda given: function(**given, **options, implementation=implementation), arrays


def exported(function: Callable[..., Any], arrays: Arrays, *platforms: str) -> str:
    make = export.export(jax.jit(function), platforms=platforms, disabled_checks=tsmla_jax.export_disabled_checks())
    return str(make(arrays).mlir_module())


def test_every_operation_with_a_kernel_has_a_call() -> None:
    assert CALLS.keys() == {name for name, op in OPERATIONS.items() if "cute" in op.table}


@pytest.mark.parametrize("op", CALLS)
def test_the_platform_of_the_program_decides(op: str) -> None:
    function, arrays = call_of(op)
    named, _ = call_of(op, "cute")
    kernels = lower(named, arrays).count(device.TARGET)
    assert kernels and lower(function, arrays).count(device.TARGET) == kernels
    assert device.TARGET in exported(function, arrays, "cuda")
    assert device.TARGET not in exported(function, arrays, "cpu")
    with pytest.raises(NotImplementedError, match=r"lowered for another platform; .* exported as one for each"):
        exported(function, arrays, "cpu", "cuda")
    assert device.TARGET not in exported(call_of(op, "xla")[0], arrays, "cpu", "cuda")


@pytest.mark.parametrize("op", CALLS)
def test_on_the_cpu_xla_runs(op: str) -> None:
    function, arrays = call_of(op)
    want = jax.jit(call_of(op, "xla")[0])(arrays)
    for got in (function(arrays), jax.jit(function)(arrays)):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("op", CALLS)
def test_explain_says_so(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, options = CALLS[op]
    if op == "compress_write_kv_cache":
        arrays = call_of(op)[1]
    explained = tsmla_jax.explain(op, **arrays, **options)
    assert explained.chosen == "xla" and explained.reasons["cute"] == ("jax's default device is a cpu",)
    assert "runs in programs that are lowered for an NVIDIA GPU, as by jax.export" in explained.notes["cute"]
    monkeypatch.delenv("CUTE_DSL_ARCH")
    explained = tsmla_jax.explain(op, **arrays, **options)
    assert not any("lowered for an NVIDIA GPU" in note for note in explained.notes.get("cute", ()))
    assert re.search("set CUTE_DSL_ARCH, e.g. to sm_90a; without it .* has no kernels", explained.reasons["cute"][0])


def test_nothing_is_traced_twice_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    function, arrays = call_of("mla_decode")
    both = jax.make_jaxpr(function)(arrays)
    assert calls(both) and "platform_index" in primitives(both)
    monkeypatch.delenv("CUTE_DSL_ARCH")
    one = jax.make_jaxpr(lambda given: function(given))(arrays)
    assert not calls(one) and "platform_index" not in primitives(one)


def test_vmap_and_derivatives_of_such_a_call() -> None:
    function, arrays = call_of("merge_attention_states")
    arrays = {name: jnp.asarray(np.random.default_rng(0).normal(size=x.shape), x.dtype) for name, x in arrays.items()}

    def loss(function: Callable[..., Any], given: Arrays) -> jax.Array:
        out, lse = jax.vmap(function, in_axes=({"outs": 1, "lses": 1},))(given)
        return out.astype(F32).sum() + lse.sum()

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, call_of("merge_attention_states", name)[0])))(arrays)
        for name in (None, "xla")
    )
    for name, gradient in got.items():
        np.testing.assert_array_equal(np.asarray(gradient), np.asarray(want[name]))
    assert device.TARGET in lower(jax.grad(functools.partial(loss, function)), arrays)


@pytest.mark.parametrize("op", ["mla_prefill", "mla_prefill_kv", "write_kv_cache", "gather_kv_cache"])
def test_gradients_of_such_a_call(op: str) -> None:
    function, arrays = call_of(op)
    rng = np.random.default_rng(0)
    given = {name: rng.normal(size=x.shape).astype(x.dtype) if x.dtype == BF16 else x for name, x in arrays.items()}
    floats = {name: x for name, x in given.items() if x.dtype == BF16}

    def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(lambda floats: jax.tree.leaves(function(given | floats))[0].astype(F32).sum())

    assert device.TARGET in lower(gradient(function), floats)
    got, want = (jax.jit(gradient(each))(floats) for each in (function, call_of(op, "xla")[0]))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a, F32), np.asarray(b, F32))


def test_a_derivative_that_there_is_not_is_refused() -> None:
    function, arrays = call_of("mla_decode")
    with pytest.raises(NotImplementedError, match="mla_decode has no derivative"):
        jax.jit(jax.grad(lambda q: function(arrays | {"q": q}).astype(F32).sum()))(jnp.asarray(arrays["q"]))


def test_an_architecture_without_a_kernel_leaves_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    function, arrays = call_of("select_topk")
    assert device.TARGET not in lower(function, arrays)
    assert "the architecture is sm_80" in tsmla_jax.explain("select_topk", **arrays, k=16).reasons["cute"][0]


@pytest.mark.parametrize("varying", [0, -1])
@pytest.mark.parametrize("op", CALLS)
def test_under_shard_map_with_one_operand_that_varies(op: str, varying: int) -> None:
    """Where both implementations can be called so, None can."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    _, arrays = call_of(op)
    split = list(arrays)[varying]

    def shapes(implementation: str | None) -> Any:
        def inner(given: Arrays) -> Any:
            mixed = {**given, split: jax.tree.map(lambda x: jax.lax.pcast(x, "x", to="varying"), given[split])}
            return jax.tree.map(lambda x: x[None], call_of(op, implementation)[0](mixed))

        try:
            return jax.eval_shape(jax.shard_map(inner, mesh=mesh, in_specs=(P(),), out_specs=P("x")), arrays)
        except Exception as error:
            return str(error)

    of_kernel, of_xla = shapes("cute"), shapes("xla")
    assert isinstance(of_kernel, str) or isinstance(of_xla, str) or shapes(None) == of_kernel


@pytest.mark.parametrize("op", CALLS)
def test_on_explicit_mesh_axes(op: str) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    function, arrays = call_of(op)
    with jax.set_mesh(mesh):
        first = next(iter(arrays))
        placed = arrays | {first: jax.device_put(arrays[first], NamedSharding(mesh, P()))}
        assert calls(jax.make_jaxpr(function)(placed))
