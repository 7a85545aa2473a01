"""rope_write_kv_cache: the separate steps in one call, its layouts, and what it refuses."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import tsmla_jax
from tsmla_jax.nn import MLAConfig
from tsmla_jax.nn.mla.rope import apply_rope

IMPLEMENTATIONS = ("reference", "xla")
T, H, L, R, PAGE = 6, 3, 24, 8, 16
I32 = jnp.int32


def arrays(dtype: Any = np.float32, kv_dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    angles = rng.uniform(-50, 50, (T, R // 2))

    def drawn(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(dtype)

    return {
        "kv_cache": rng.normal(size=(4, PAGE, L + R)).astype(kv_dtype),
        "q_nope": drawn(T, H, L),
        "q_rope": drawn(T, H, R),
        "latent": drawn(T, L),
        "k_rope": drawn(T, R),
        "slot_mapping": np.asarray([3, -1, 63, 16, 70, 15], np.int32),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
    }


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(("interleave", "layout"), [(True, "interleaved"), (True, "halves"), (False, "halves")])
def test_rotation_is_that_of_complex_numbers(name: str, interleave: bool, layout: str) -> None:
    given = arrays()
    run = functools.partial(
        tsmla_jax.rope_write_kv_cache, rope_interleave=interleave, rope_layout=layout, implementation=name
    )
    q, cache = jax.jit(run)(**given, q_scale=jnp.float32(0.5), kv_scale=4.0, q_dtype=None)
    turn = given["cos"].astype(np.float64) + 1j * given["sin"]

    def rotated(x: np.ndarray, turn: np.ndarray) -> np.ndarray:
        z = (x[..., 0::2] + 1j * x[..., 1::2] if interleave else x[..., : R // 2] + 1j * x[..., R // 2 :]) * turn
        if layout == "halves":
            return np.concatenate([z.real, z.imag], axis=-1)
        return np.stack([z.real, z.imag], axis=-1).reshape(x.shape)

    want_q = np.concatenate([given["q_nope"], rotated(given["q_rope"], turn[:, None])], axis=-1) * 2
    assert q.dtype == jnp.float8_e4m3fn  # because there is a q_scale
    np.testing.assert_allclose(np.asarray(q, np.float32), want_q, rtol=2.0**-4, atol=2.0**-10)
    want = given["kv_cache"].reshape(-1, L + R).copy()
    rows = np.concatenate([given["latent"], rotated(given["k_rope"], turn)], axis=-1) / 4
    for row, slot in zip(rows, given["slot_mapping"], strict=True):
        if 0 <= slot < len(want):
            want[slot] = row
    np.testing.assert_allclose(np.asarray(cache).reshape(want.shape), want, atol=1e-6)


@pytest.mark.usefixtures("optimised_compilation")
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.sampled(2)
def test_it_is_the_separate_steps_bit_for_bit(name: str, kv_dtype: Any) -> None:
    given = arrays(ml_dtypes.bfloat16, kv_dtype)
    config = MLAConfig(8, 1, kv_lora_rank=L, qk_rope_head_dim=R)
    cos, sin = given["cos"], given["sin"]
    scale = jnp.float32(0.3)

    @jax.jit
    def separately() -> tuple[jax.Array, jax.Array]:
        q_rope = apply_rope(config, given["q_rope"], cos[:, None], sin[:, None])
        k_rope = apply_rope(config, given["k_rope"], cos, sin)
        written = tsmla_jax.write_kv_cache(
            given["kv_cache"], given["latent"], k_rope, given["slot_mapping"], kv_scale=scale, implementation=name
        )
        return jnp.concatenate([given["q_nope"], q_rope], axis=-1), written

    got = jax.jit(functools.partial(tsmla_jax.rope_write_kv_cache, implementation=name))(**given, kv_scale=scale)
    for a, b in zip(got, separately(), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.usefixtures("optimised_compilation")
def test_implementations_agree_and_xla_writes_in_place() -> None:
    given = arrays(ml_dtypes.bfloat16, ml_dtypes.bfloat16)
    want = jax.jit(functools.partial(tsmla_jax.rope_write_kv_cache, implementation="reference"))(**given)
    cache = jnp.asarray(given.pop("kv_cache"))
    address = cache.unsafe_buffer_pointer()
    run = jax.jit(functools.partial(tsmla_jax.rope_write_kv_cache, implementation="xla"), donate_argnums=0)
    q, written = run(cache, *given.values())
    assert written.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(np.asarray(q), np.asarray(want[0]))
    np.testing.assert_array_equal(np.asarray(written), np.asarray(want[1]))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_no_tokens_and_no_pages(name: str) -> None:
    given = arrays()
    none = {key: value if key == "kv_cache" else value[:0] for key, value in given.items()}
    q, cache = tsmla_jax.rope_write_kv_cache(**none, implementation=name)
    assert q.shape == (0, H, L + R)
    np.testing.assert_array_equal(cache, given["kv_cache"])
    q, cache = tsmla_jax.rope_write_kv_cache(**{**given, "kv_cache": given["kv_cache"][:0]}, implementation=name)
    assert cache.shape[0] == 0 and np.isfinite(q).all()


BAD = [
    ("q_nope", np.zeros((T, L), np.float32), r"q_nope: got shape \[6, 24\] of rank 2; legal: \[T, H, L\]"),
    ("q_nope", np.zeros((T, 0, L), np.float32), r"q_nope: .* H must be at least 1"),
    ("q_nope", np.zeros((T, H, L + 1), np.float32), r"q_nope: .* legal: \[T, H, L\] = \[6, 3, 24\]"),
    ("q_nope", np.zeros((T, H, L), np.float16), r"q_nope: got dtype float16; it must be latent's, float32"),
    ("q_rope", np.zeros((T, H + 1, R), np.float32), r"q_rope: .* legal: \[T, H, R\] = \[6, 3, 8\]"),
    ("latent", np.zeros((T, L - 1), np.float32), r"k_rope: .* legal: \[T, R\] = \[6, 9\]"),
    ("k_rope", None, "k_rope: got NoneType; legal: an array"),
    ("slot_mapping", np.zeros(T, np.int64), "slot_mapping: got dtype int64; legal: int32"),
    ("cos", np.zeros((T, R), np.float32), r"cos: got shape \[6, 8\]; legal: \[T, R / 2\] = \[6, 4\]"),
    ("sin", np.zeros((T, R // 2), np.float16), "sin: got dtype float16; legal: float32"),
    ("q_scale", np.zeros(2, np.float32), r"q_scale: got an array of shape \[2\]"),
    ("kv_scale", "1", "kv_scale: got str"),
    ("q_dtype", jnp.int32, "q_dtype: got int32; legal: float16"),
    ("rope_layout", "pairs", "rope_layout: got 'pairs'; legal: 'interleaved', 'halves'"),
    ("rope_interleave", 1, "rope_interleave: got int; legal: True or False"),
    ("implementation", "flash", "implementation: got 'flash'"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_arguments_are_named(name: str, value: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        tsmla_jax.rope_write_kv_cache(**{**arrays(), name: value})


def test_a_cache_without_rope_columns_is_refused() -> None:
    given = arrays()
    given |= {"kv_cache": given["kv_cache"][..., :L], "k_rope": np.zeros((T, 0), np.float32)}
    with pytest.raises(ValueError, match=r"k_rope: got shape \[6, 0\]; R must be even and at least 2"):
        tsmla_jax.rope_write_kv_cache(**given)


def test_swapped_parts_are_named() -> None:
    given = arrays()
    keys = given | {"latent": given["k_rope"], "k_rope": given["latent"]}
    with pytest.raises(ValueError, match=r"^latent: got shape \[6, 8\]; legal: \[T, L\] with L from 16 to 32"):
        tsmla_jax.rope_write_kv_cache(**keys)
    with pytest.raises(ValueError, match=r"^latent: got shape \[6, 8\]"):
        tsmla_jax.rope_write_kv_cache(**keys | {"q_nope": given["q_rope"], "q_rope": given["q_nope"]})
    with pytest.raises(ValueError, match=r"^q_nope: got shape \[6, 3, 8\]; legal: \[T, H, L\] = \[6, 3, 24\]"):
        tsmla_jax.rope_write_kv_cache(**given | {"q_nope": given["q_rope"], "q_rope": given["q_nope"]})


def test_slots_are_checked_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSMLA_CHECK", "1")
    with pytest.raises(ValueError, match="slot_mapping: token 4 goes to slot 70; legal: -1, or 0 to 63"):
        tsmla_jax.rope_write_kv_cache(**arrays())
