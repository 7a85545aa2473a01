"""The packed caches' operations without a GPU: what they mean, and what is lowered around their kernels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsmla_jax
from tests.jax.ops.programs import ints, lower
from tsmla_jax import sparse
from tsmla_jax.ops import device
from tsmla_jax.ops.indexer_quantize.api import OPERATION as QUANTIZE
from tsmla_jax.ops.write_indexer_cache.api import OPERATION as KEYS
from tsmla_jax.ops.write_packed_kv_cache.api import OPERATION as PACKED
from tsmla_jax.sparse import CompressorState

TOKENS, PAGES, PAGE, HEADS = 6, 4, 16, 4
OPERATIONS = {operation.name: operation for operation in (PACKED, KEYS, QUANTIZE)}
WRITES = (PACKED.name, KEYS.name)
OPTIONS: dict[str, dict[str, Any]] = {
    PACKED.name: {"rope_interleave": False},
    KEYS.name: {"rope_offset": 64, "rope_layout": "interleaved"},
    QUANTIZE.name: {"rope_offset": 0, "rope_layout": "halves"},
}


def arrays(op: str, seed: int = 0, tokens: int = TOKENS) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)

    def drawn(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    slots = ints(rng.permutation(PAGES * PAGE)[:tokens]).at[1].set(-1)
    turn = tuple(drawn(tokens, 32, dtype=jnp.float32) for _ in range(2))
    width = 656 if op == PACKED.name else 132
    cache = jnp.asarray(rng.integers(0, 256, (PAGES, PAGE, width), np.uint8))
    return {
        PACKED.name: (cache, drawn(tokens, 512), drawn(tokens, 64), slots, *turn),
        KEYS.name: (cache, drawn(tokens, 128), slots, *turn),
        QUANTIZE.name: (drawn(tokens, HEADS, 128), drawn(tokens, HEADS), *turn),
    }[op]


def run(op: str, name: str) -> Any:
    return functools.partial(getattr(sparse, op), implementation=name, **OPTIONS[op])


def assert_same(got: Any, want: Any) -> None:
    """XLA may contract a rotation's products in one program and not in the other: here and there a byte is another."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(a), np.asarray(b)
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.mean(x != y) < 0.002


@pytest.mark.usefixtures("cache_directory")
@pytest.mark.parametrize("op", OPERATIONS)
def test_the_call_is_one_kernel(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    text = lower(run(op, "cute"), *arrays(op), donate=(0,) if op in WRITES else ())
    assert text.count(f"@{device.TARGET}(") == 1
    assert ("output_tuple_indices = [], operand_index = 0" in text) == (op in WRITES)


@pytest.mark.parametrize("op", WRITES)
def test_a_rotation_is_that_of_the_rows(op: str) -> None:
    """Rotated first, or by the operation."""

    write = getattr(sparse, op)
    options = OPTIONS[op] if op == KEYS.name else {}

    def rotated_first(cache: jax.Array, *given: jax.Array) -> jax.Array:
        *rows, turning, slots, cos, sin = given
        turning = turning.astype(jnp.float32) if op == KEYS.name else turning
        cos_sin = jnp.concatenate([cos, sin], axis=1)
        turned = sparse.apply_rope(turning, jnp.arange(TOKENS, dtype=jnp.int32), cos_sin)
        return write(cache, *rows, turned, slots)

    assert_same(jax.jit(functools.partial(write, **options))(*arrays(op)), jax.jit(rotated_first)(*arrays(op)))


@pytest.mark.parametrize(
    ("op", "at", "value", "message"),
    [
        (PACKED.name, 1, jnp.zeros((TOKENS, 500)), "latent: got shape .*; its last axis must be 512"),
        (PACKED.name, 2, jnp.zeros((3, 64)), r"k_rope: got rows \[3\]; latent has \[6\]"),
        (PACKED.name, 4, None, "cos: got None; legal: cos and sin, or neither"),
        (PACKED.name, 5, jnp.zeros((TOKENS, 16)), r"sin: got shape \[6, 16\]; legal: \[T, R / 2\] = \[6, 32\]"),
        (KEYS.name, 1, jnp.zeros((TOKENS, 64)), "k: got shape .*Di, k_cache's key width"),
        (KEYS.name, 3, jnp.zeros((TOKENS, 64)), r"sin: got shape \[6, 32\]; legal: \[T, R / 2\] = \[6, 64\]"),
        (PACKED.name, 3, jnp.zeros(5, jnp.int32), "slot_mapping: got .*T, latent's tokens"),
        (PACKED.name, 4, jnp.zeros((5, 32)), "cos: got .*T, latent's tokens"),
        (KEYS.name, 2, jnp.zeros(5, jnp.int32), "slot_mapping: got .*T, k's tokens"),
        (QUANTIZE.name, 1, jnp.zeros((TOKENS, 3)), "weights: got shape .*Hi, q's heads"),
    ],
)
def test_refuses(op: str, at: int, value: Any, message: str) -> None:
    given = list(arrays(op))
    given[at] = value
    with pytest.raises(ValueError, match=message):
        run(op, "xla")(*given)


def test_a_rotation_stays_inside_the_row() -> None:
    with pytest.raises(ValueError, match="cos: got width R / 2 = 32 with rope_offset = 65; legal: columns"):
        sparse.indexer_quantize(*arrays(QUANTIZE.name), rope_offset=65)
    with pytest.raises(ValueError, match="rope_layout: got 'pairs'; legal: 'interleaved', 'halves'"):
        sparse.indexer_quantize(*arrays(QUANTIZE.name), rope_layout="pairs")


def test_checks_see_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    cache, k, slots, *turn = arrays(KEYS.name)
    with pytest.raises(ValueError, match="slot_mapping: tokens 0 and 2 both go to slot"):
        sparse.write_indexer_cache(cache, k, slots.at[2].set(slots[0]), *turn)


def compress_arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    state = sparse.init_compressor_state(3, ratio=4, channels=128, overlap=True)
    return {
        "cache": jnp.zeros((5, 16, 132), jnp.uint8),
        "kv_score": jnp.asarray(rng.standard_normal((30, 2, 256)), jnp.float32),
        "ape": jnp.asarray(rng.standard_normal((4, 256)), jnp.float32),
        "state": state,
        "norm_weight": jnp.ones(128),
        "cos_sin": jnp.asarray(rng.standard_normal((64, 64)), jnp.float32),
        "block_tables": ints([[4], [2]]),
        "state_slots": ints([2, 0]),
        "seq_lens": ints([17, 12]),
        "cu_seqlens_q": ints([0, 17, 29]),
    }


COMPRESS = functools.partial(tsmla_jax.compress_write_kv_cache, ratio=4, overlap=True, eps=1e-6)


def test_compress_write_is_the_separate_steps() -> None:
    given = compress_arrays()

    @jax.jit
    def separate_steps(given: dict[str, Any]) -> Any:
        entries, state = tsmla_jax.compress_kv(
            given["kv_score"],
            given["ape"],
            given["state"],
            **{name: given[name] for name in ("state_slots", "seq_lens", "cu_seqlens_q")},
            ratio=4,
            overlap=True,
        )
        rows = sparse.norm_rope(entries.kv, given["norm_weight"], entries.positions * 4, given["cos_sin"], eps=1e-6)
        tables = given["block_tables"][jnp.maximum(entries.requests, 0)]
        slots = sparse.positions_to_slots(entries.positions[:, None], tables, 16)[:, 0]
        return sparse.write_indexer_cache(given["cache"], rows, slots), state

    want, state = separate_steps(given)
    for name in ("xla", "reference"):
        cache, new_state = jax.jit(functools.partial(COMPRESS, implementation=name))(**given)
        assert_same(cache, want)
        for a, b in zip(new_state, state, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("cache_directory")
def test_compress_write_is_one_kernel_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    given = compress_arrays()
    cache, state = given.pop("cache"), given.pop("state")

    def step(cache: jax.Array, state: CompressorState) -> Any:
        return COMPRESS(cache=cache, state=state, **given, implementation="cute")

    text = lower(step, cache, state, donate=(0, 1))
    assert text.count(f"@{device.TARGET}(") == 1
    assert all(f"output_tuple_indices = [{i}], operand_index = {i}" in text for i in range(3))


@pytest.mark.usefixtures("cache_directory")
@pytest.mark.parametrize("cache", [jnp.zeros((5, 16, 128), jnp.bfloat16), jnp.zeros((5, 16, 132), jnp.uint8)])
def test_compress_write_has_no_derivative_in_the_kernel(cache: jax.Array, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of 0 would say that the entries and the state don't depend on the tokens."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    given = compress_arrays() | {"cache": cache}

    def loss(kv_score: jax.Array) -> jax.Array:
        written, state = COMPRESS(**given | {"kv_score": kv_score}, implementation="cute")
        return written.astype(jnp.float32).sum() + state.kv_score.sum()

    with pytest.raises(NotImplementedError, match=r"compress_write_kv_cache has no derivative .*compress_kv"):
        jax.make_jaxpr(jax.grad(loss))(given["kv_score"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache": jnp.zeros((5, 16, 68), jnp.uint8)}, "cache: got rows of width 64; kv_score's C is 128"),
        (
            {"cache": jnp.zeros((5, 16, 4), jnp.uint8)},
            r"^cache: got shape \[5, 16, 4\] of uint8; legal: \[P, Z, Di \+ 4\]",
        ),
        ({"kv_scale": 0.5}, "kv_scale: got a scale with a cache of uint8"),
        ({"norm_weight": jnp.ones(64)}, "norm_weight: got shape"),
        ({"cos_sin": jnp.ones((8, 130))}, "cos_sin: got shape"),
        ({"block_tables": ints([[1]])}, "block_tables: got shape"),
        ({"state_slots": ints([1])}, "state_slots: got shape"),
    ],
)
def test_compress_write_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        COMPRESS(**{**compress_arrays(), **change})
    with pytest.raises(ValueError, match="page_size: got 7; legal for a cache of three axes: None or Z, 16"):
        COMPRESS(**{**compress_arrays(), "cache": jnp.zeros((5, 16, 132), jnp.uint8)}, page_size=7)
    with pytest.raises(TypeError, match="eps: got str; legal: a static float"):
        COMPRESS(**compress_arrays(), **{"eps": "small"})
