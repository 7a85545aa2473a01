"""What rope_write_kv_cache accepts and returns: its frozen spec and the error texts, as in `contract`.

Imports neither jax nor torch. Axes: T tokens, H query heads, L latent width, R rope width, D = L + R, P pages, Z page
size.
"""

from __future__ import annotations

from dataclasses import dataclass

from tsmla_kernels.contract import FP8, VALUES, Array, CacheWriteSpec, Dim, cache_write_spec, static_bool
from tsmla_kernels.contract.rules import check_at_least_one, check_dtype, check_rank, check_scale, listed, show

ROPE_LAYOUTS = ("interleaved", "halves")


@dataclass(frozen=True)
class RopeWriteSpec:
    """One call of rope_write_kv_cache: what it writes, and the query it makes. All four inputs have write.in_dtype."""

    write: CacheWriteSpec
    num_heads: Dim
    q_dtype: str
    rope_interleave: bool
    rope_layout: str


def rope_write_spec(
    *,
    kv_cache: Array,
    q_nope: Array,
    q_rope: Array,
    latent: Array,
    k_rope: Array,
    slot_mapping: Array,
    cos: Array,
    sin: Array,
    q_scale: Array | float | None = None,
    kv_scale: Array | float | None = None,
    q_dtype: str | None = None,
    rope_interleave: bool = True,
    rope_layout: str = "interleaved",
) -> RopeWriteSpec:
    """The spec of rope_write_kv_cache, or ValueError / TypeError naming the argument that is not legal.

    q_dtype None means float8_e4m3fn where there is a q_scale, and q_nope's dtype where there is none."""
    write = cache_write_spec(
        kv_cache=kv_cache, latent=latent, k_rope=k_rope, slot_mapping=slot_mapping, kv_scale=kv_scale
    )
    tokens, rope_dim = write.num_tokens, write.rope_dim
    if rope_dim % 2 or not rope_dim:
        raise ValueError(
            f"k_rope: got shape {show(k_rope.shape)}; R must be even and at least 2 (without rope columns"
            " write_kv_cache is all there is to do)"
        )
    check_rank("q_nope", q_nope, 3, "[T, H, L]")
    check_at_least_one("q_nope", q_nope.shape, 1, "H")
    num_heads = q_nope.shape[1]
    for name, array, letters, shape in (
        ("q_nope", q_nope, "[T, H, L]", (tokens, num_heads, write.latent_dim)),
        ("q_rope", q_rope, "[T, H, R]", (tokens, num_heads, rope_dim)),
    ):
        check_rank(name, array, 3, letters)
        if array.shape != shape:
            raise ValueError(
                f"{name}: got shape {show(array.shape)}; legal: {letters} = {show(shape)}, T and L from latent, R from"
                " k_rope, H from q_nope"
            )
        if array.dtype != latent.dtype:
            raise ValueError(f"{name}: got dtype {array.dtype}; it must be latent's, {latent.dtype}")
    for name, array in (("cos", cos), ("sin", sin)):
        check_rank(name, array, 2, "[T, R / 2]")
        if array.shape != (tokens, rope_dim // 2):
            raise ValueError(
                f"{name}: got shape {show(array.shape)}; legal: [T, R / 2] = {show((tokens, rope_dim // 2))}, T from"
                " latent, R from k_rope"
            )
        check_dtype(name, array, ("float32",))
    check_scale("q_scale", q_scale)
    if q_dtype is None:
        q_dtype = latent.dtype if q_scale is None else FP8
    elif q_dtype not in VALUES:
        raise ValueError(f"q_dtype: got {q_dtype}; legal: {listed(VALUES)}")
    rope_interleave = static_bool("rope_interleave", rope_interleave)
    if rope_layout not in ROPE_LAYOUTS:
        raise ValueError(f"rope_layout: got {rope_layout!r}; legal: {listed([repr(name) for name in ROPE_LAYOUTS])}")
    return RopeWriteSpec(write, num_heads, q_dtype, rope_interleave, rope_layout)
