"""indexer_logits, indexer_topk and sparse_mla on Blackwell: lowered with their kernels, without such a GPU; and the
code around the kernels against the reference, with the kernels' behaviour emulated on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tests.emulator import blackwell_selected
from tests.jax.ops.programs import kernels
from tests.kernels.object_checks import check_object
from tsmla_jax import sparse
from tsmla_jax.nn import Step, v4, v32
from tsmla_jax.ops import device
from tsmla_jax.ops.indexer_logits import blackwell as logits_operands
from tsmla_jax.ops.sparse_mla import blackwell as sparse_operands
from tsmla_kernels import object_cache
from tsmla_kernels.catalog import COMPRESS_WRITE_KV_CACHE, INDEXER_LOGITS_SM100, SELECT_TOPK, SPARSE_MLA_SM100
from tsmla_kernels.contract.layouts import V4_PACKED
from tsmla_kernels.kernel import Kernel
from tsmla_kernels.sm100 import logits_config, packages, sparse_config

FP8 = jnp.float8_e4m3fn
Struct = jax.ShapeDtypeStruct
needs_packages = pytest.mark.skipif(
    not all(device.importlib.util.find_spec(package.module) for package in (packages.FLASHINFER, packages.CUDNN)),
    reason="needs flashinfer-python and nvidia-cudnn-frontend",
)


def lower(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    # A new function each time, because jax caches the lowering of a function.
    jitted = jax.jit(lambda *args, **kwargs: function(*args, implementation="cute", **kwargs))
    return jitted.trace(*args, **kwargs).lower(lowering_platforms=("cuda",)).as_text()


# ---- objects and lowering


@needs_packages
@pytest.mark.parametrize(
    ("kernel", "config"),
    [
        (INDEXER_LOGITS_SM100, logits_config.LogitsConfig(64)),
        pytest.param(INDEXER_LOGITS_SM100, logits_config.LogitsConfig(32, 128), marks=pytest.mark.slow),
        pytest.param(INDEXER_LOGITS_SM100, logits_config.LogitsConfig(8, 32), marks=pytest.mark.slow),
        (SPARSE_MLA_SM100, sparse_config.SparseConfig("bfloat16", 576)),
        pytest.param(SPARSE_MLA_SM100, sparse_config.SparseConfig("float16", 512), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("arch", ["sm_100a", pytest.param("sm_103a", marks=pytest.mark.slow)])
def test_objects_have_no_spills(kernel: Kernel, config: Any, arch: str) -> None:
    check_object(object_cache.load_or_compile(kernel, config, arch), kernels=1)


@needs_packages
@pytest.mark.parametrize("arch", ["sm_100a", pytest.param("sm_103a", marks=pytest.mark.slow)])
def test_each_operation_of_a_sparse_layer_lowers_with_its_kernel(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", arch)
    q8, weights = Struct((300, 64, 128), FP8), Struct((300, 64), jnp.float32)
    keys, tables, lens = Struct((99, 64, 132), jnp.uint8), Struct((3, 41), jnp.int32), Struct((3,), jnp.int32)
    ragged = {"cu_seqlens_q": Struct((4,), jnp.int32)}
    target = f"@{device.TARGET}("
    assert lower(tsmla_jax.indexer_logits, q8, weights, keys, tables, lens, **ragged).count(target) == 1
    topk = functools.partial(tsmla_jax.indexer_topk, k=2048, return_slots=True)
    assert lower(topk, q8, weights, keys, tables, lens, **ragged).count(target) == 2
    logits = Struct((8, 8192), jnp.float32)
    assert lower(functools.partial(tsmla_jax.select_topk, k=2048), logits, lens_of(8)).count(target) == 1
    attend = functools.partial(tsmla_jax.sparse_mla, softmax_scale=0.1, return_lse=True)
    packed = Struct((99, 64, 656), jnp.uint8)
    for heads, cache in ((128, packed), (16, Struct((99, 64, 576), jnp.bfloat16))):
        q, indices = Struct((8, heads, 576), jnp.bfloat16), Struct((8, 2048), jnp.int32)
        assert lower(attend, q, cache, indices, lengths=lens_of(8)).count(target) == 1
    bf16 = functools.partial(Struct, dtype=jnp.bfloat16)
    rope = Struct((8, 32), jnp.float32), Struct((8, 32), jnp.float32)
    assert (
        lower(sparse.write_packed_kv_cache, packed, bf16((8, 512)), bf16((8, 64)), lens_of(8), *rope).count(target) == 1
    )
    assert lower(sparse.write_indexer_cache, keys, bf16((8, 128)), lens_of(8)).count(target) == 1
    assert lower(sparse.indexer_quantize, bf16((8, 64, 128)), bf16((8, 64))).count(target) == 1


@needs_packages
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_attention_over_two_caches_of_v4_lowers_with_its_kernel(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", arch)
    pages = Struct((99, V4_PACKED.page_bytes(64)), jnp.uint8)
    attend = functools.partial(tsmla_jax.sparse_mla, softmax_scale=0.1, window=128)
    q, indices = Struct((8, 128, 512), jnp.bfloat16), Struct((8, 640), jnp.int32)
    lowered = lower(attend, q, pages, indices, compressed_kv_cache=pages, sinks=Struct((128,), jnp.float32))
    assert lowered.count(f"@{device.TARGET}(") == 1


V32 = v32.V32Config.from_hf(
    {
        "model_type": "deepseek_v32", "hidden_size": 64, "num_attention_heads": 16, "kv_lora_rank": 512,
        "q_lora_rank": 32, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_n_heads": 64,
        "index_head_dim": 128, "index_topk": 2048, "max_position_embeddings": 4096, "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
    }
)  # fmt: skip


@needs_packages
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_a_layer_of_v32_calls_the_kernels_that_are_named(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", arch)
    cache = v32.init_cache(V32, 100, 64, kv_dtype=jnp.uint8, indexer_dtype=jnp.uint8)
    tables = jnp.arange(100, dtype=jnp.int32).reshape(2, -1)
    lens = jnp.asarray([2500, 900], jnp.int32)
    step = Step.ragged(tables, lens, jnp.asarray([0, 1, 2]), total_tokens=2, page_size=64)
    params = {name: jnp.zeros(shape, jnp.bfloat16) for name, shape in v32.param_shapes(V32).items()}

    def attend(x: jax.Array) -> Any:
        return v32.attend(params, V32, x, cache, step, form="direct", implementation="cute")

    x = jnp.zeros((2, 64), jnp.bfloat16)
    called = [kernel for kernel, _ in kernels(jax.make_jaxpr(attend)(x))]
    assert called == [INDEXER_LOGITS_SM100, SELECT_TOPK, SPARSE_MLA_SM100]


@needs_packages
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("sliding", [SPARSE_MLA_SM100]),
        ("heavily_compressed", [COMPRESS_WRITE_KV_CACHE, SPARSE_MLA_SM100]),
        ("compressed_sparse", [
            COMPRESS_WRITE_KV_CACHE, COMPRESS_WRITE_KV_CACHE, INDEXER_LOGITS_SM100, SELECT_TOPK, SPARSE_MLA_SM100
        ]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [jnp.uint8, FP8, jnp.bfloat16])
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_a_layer_of_v4_calls_the_kernels_that_are_named(
    arch: str, dtype: Any, kind: str, named: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", arch)
    config = v4.V4Config.from_hf({
        "model_type": "deepseek_v4", "hidden_size": 64, "num_attention_heads": 64, "head_dim": 512,
        "qk_rope_head_dim": 64, "q_lora_rank": 32, "sliding_window": 128, "o_groups": 8, "o_lora_rank": 8,
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "num_hidden_layers": 1,
        "layer_types": [f"{kind}_attention"], "max_position_embeddings": 4096, "rope_theta": 1e4,
        "compress_rope_theta": 4e4, "rms_norm_eps": 1e-6,
    }, 0)  # fmt: skip
    cache = v4.init_cache(config, window_pages=80, compressed_pages=80, num_states=2, page_size=64, dtype=dtype)
    tables, lens = jnp.arange(80, dtype=jnp.int32).reshape(2, -1), jnp.asarray([2500, 900], jnp.int32)
    made = v4.make_step(
        config,
        Step.ragged(tables, lens, jnp.asarray([0, 1, 2]), total_tokens=2, page_size=64),
        state_slots=jnp.arange(2, dtype=jnp.int32),
        compressed_tables=tables,
        cos_sin=v4.rope_table(config, 4096),
        page_size=64,
    )
    params = {name: jnp.zeros(shape, jnp.bfloat16) for name, shape in v4.param_shapes(config).items()}

    def attend(x: jax.Array) -> Any:
        return v4.attend(params, config, x, cache, made, implementation="cute")

    called = [kernel for kernel, _ in kernels(jax.make_jaxpr(attend)(jnp.zeros((2, 64), jnp.bfloat16)))]
    assert called == named


def lens_of(count: int) -> Struct:
    return Struct((count,), jnp.int32)


def test_nothing_unproven_is_taken_without_its_name() -> None:
    q, indices = Struct((8, 64, 576), jnp.bfloat16), Struct((8, 2048), jnp.int32)
    explained = tsmla_jax.explain("sparse_mla", q, Struct((9, 64, 656), jnp.uint8), indices, softmax_scale=0.1)
    assert explained.chosen == "xla"
    assert explained.notes["cute"] == (sparse_config.NOTICE, sparse_config.WIDENS)
    assert "not run by us" in sparse_config.NOTICE and "not run by us" in logits_config.NOTICE
    assert any("untested on sm_100a" in reason for reason in explained.reasons["cute"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 320, "latent": 256}, "head_dim and latent_dim are 320 and 256; cuDNN's kernel takes 512 or 576"),
        ({"dtype": jnp.float32}, "q.dtype is float32; cuDNN's kernel takes bfloat16 or float16"),
        ({"batch_invariant": True}, "batch_invariant is True; nobody has checked that of cuDNN's kernel"),
        ({"scale": Struct((), jnp.float32)}, "softmax_scale, q_scale or a cache's scale is an array"),
    ],
)
def test_limits_are_errors(change: dict[str, Any], reason: str) -> None:
    dtype, width = change.get("dtype", jnp.bfloat16), change.get("head_dim", 576)
    q, cache = Struct((8, 64, width), dtype), Struct((9, 64, width), dtype)
    options = {"latent_dim": change.get("latent", 512), "batch_invariant": change.get("batch_invariant", False)}
    call = functools.partial(tsmla_jax.sparse_mla, implementation="cute", **options)
    with pytest.raises(NotImplementedError, match=f"^sparse_mla: implementation='cute' can't run.*{reason}"):
        jax.eval_shape(call, q, cache, Struct((8, 64), jnp.int32), softmax_scale=change.get("scale", 0.1))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"need flashinfer-python: .*; pip install "):
        packages.module_of(packages.FLASHINFER, "attn_scores.kernels.fp8_paged_mqa_logits")


# ---- the code around the kernels


def kernel_call(
    kernel: Kernel, config: Any, inputs: Sequence[jax.Array], shapes: Sequence[tuple[int, ...]], *, arch: str
) -> list[jax.Array]:
    """In the place of tsmla_jax.ops.kernel_call.kernel_call: what the packages' kernels compute."""
    operands = kernel.operands(config)
    for operand, array in zip((o for o in operands if not o.output), inputs, strict=True):
        operand.check(array.shape, jnp.dtype(array.dtype).name)
    results = []
    for operand, shape in zip((o for o in operands if o.output), shapes, strict=True):
        operand.check(shape, operand.dtype)
        results.append(Struct(shape, operand.dtype))
    names = [operand.name for operand in operands if not operand.output]

    def compute(*arrays: Any) -> list[Any]:
        given = {name: np.asarray(array) for name, array in zip(names, arrays, strict=True)}
        if kernel is INDEXER_LOGITS_SM100:
            return [blackwell_selected.logits(given, tuple(shapes[0]))]
        out, greatest, lse = blackwell_selected.attention(given, (shapes[3][0], shapes[4][0]))
        rest = (np.zeros(shape, np.int8) for shape in shapes[3:])
        return [out.astype(given["q"].dtype), greatest, lse.astype(np.float32), *rest]

    return list(jax.pure_callback(compute, results, *inputs))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "why_not_made", lambda kernel, config: [])
    for module in (logits_operands, sparse_operands):
        monkeypatch.setattr(module, "kernel_call", kernel_call)


def indexer_arrays(seed: int, lens: list[int], tokens: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    pages, size, width = 40, 64, 9
    keys = rng.standard_normal((pages * size, 128)).astype(np.float32)
    cache = sparse.write_indexer_cache(
        jnp.zeros((pages, size, 132), jnp.uint8),
        jnp.asarray(keys, jnp.bfloat16),
        jnp.arange(pages * size, dtype=jnp.int32),
    )
    tables = rng.permutation(pages)[: len(lens) * width].reshape(len(lens), width).astype(np.int32)
    used = np.arange(width) * size < np.asarray(lens)[:, None]
    return {
        "q": jnp.asarray(rng.standard_normal((tokens, 64, 128)), FP8),
        "weights": jnp.asarray(rng.standard_normal((tokens, 64)), jnp.float32),
        "k_cache": cache,
        "block_tables": jnp.asarray(np.where(used, tables, 12345)),
        "seq_lens": jnp.asarray(lens, jnp.int32),
    }


@pytest.mark.parametrize("offsets", [None, [0, 3, 3, 70]], ids=["a token each", "ragged"])
@pytest.mark.usefixtures("blackwell", "emulated")
def test_logits_around_the_kernel(offsets: list[int] | None) -> None:
    lens = [576, 0, 257] if offsets else [300, 0, 1, 576]
    arrays = indexer_arrays(0, lens, 72 if offsets else 4)
    if offsets:
        arrays["cu_seqlens_q"] = jnp.asarray(offsets, jnp.int32)
    runs = [jax.jit(functools.partial(tsmla_jax.indexer_logits, implementation=name)) for name in ("cute", "reference")]
    got, want = (np.asarray(run(**arrays)) for run in runs)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


def random_rows(rng: np.random.Generator, width: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal((7, 16, width)), jnp.bfloat16)


def v4_pages(rng: np.random.Generator) -> jax.Array:
    slots = jnp.arange(7 * 16, dtype=jnp.int32)
    empty = jnp.zeros((7, V4_PACKED.page_bytes(16)), jnp.uint8)
    return sparse.write_v4_cache(empty, random_rows(rng, 512).reshape(-1, 512), slots, page_size=16)


V4_SIZES = {"window": 16, "page_size": 16, "compressed_page_size": 16}
CACHES: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "plain": lambda rng: {"kv_cache": random_rows(rng, 576), "kv_scale": 0.5},
    "plain fp8": lambda rng: {"kv_cache": random_rows(rng, 576).astype(FP8), "kv_scale": 0.5},
    "v32": lambda rng: {"kv_cache": sparse.pack_v32_rows(random_rows(rng, 512), random_rows(rng, 64))},
    "v4": lambda rng: {"kv_cache": v4_pages(rng), "compressed_kv_cache": v4_pages(rng), **V4_SIZES},
    "two plain caches": lambda rng: {
        "kv_cache": random_rows(rng, 512), "compressed_kv_cache": random_rows(rng, 512), **V4_SIZES
    },
}  # fmt: skip


@pytest.mark.parametrize("layout", CACHES)
@pytest.mark.parametrize(("tokens", "heads", "selected"), [(5, 16, 72), (1, 64, 32), (2, 130, 64)])
@pytest.mark.usefixtures("blackwell", "emulated")
@pytest.mark.sampled(2)
def test_attention_around_the_kernel(layout: str, tokens: int, heads: int, selected: int) -> None:
    rng = np.random.default_rng(tokens)
    given = CACHES[layout](rng)
    width = 512 if "compressed_kv_cache" in given else 576
    indices = rng.integers(-1, 7 * 16, (tokens, selected)).astype(np.int32)
    indices[0, 3:9] = (-1, -7, 7 * 16, 10**6, indices[0, 0], indices[0, 0])
    lengths = rng.integers(1, selected + 1, tokens).astype(np.int32)
    lengths[-1] = 0 if tokens > 1 else selected
    arrays: dict[str, Any] = {
        "q": jnp.asarray(rng.standard_normal((tokens, heads, width)), jnp.bfloat16),
        "indices": jnp.asarray(indices),
        "lengths": jnp.asarray(lengths),
        "sinks": jnp.asarray(rng.standard_normal(heads), jnp.float32),
    }
    options: dict[str, Any] = given | {"softmax_scale": 0.07, "return_lse": True}
    (got, lse), (want, want_lse) = (
        jax.jit(functools.partial(tsmla_jax.sparse_mla, **options, implementation=name))(**arrays)
        for name in ("cute", "reference")
    )
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=2.0**-6, atol=4e-3)
