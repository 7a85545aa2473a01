"""The packed cache layouts, byte for byte, and the functions that write and read them.

V3.2, 656 bytes a row: 512 e4m3 | 4 f32 scales, one per 128 channels, powers of two | 64 bf16 rope.
V4, 584 bytes a row: a page is Z rows of 448 e4m3 | 64 bf16, then Z rows of 8 UE8M0 scale bytes (7 used, one per 64
channels, and a zero), then padding up to a multiple of 576 bytes. Both follow the caches of vLLM and FlashMLA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from tsmla_jax.ops.inputs import describe, describe_ints, describe_scale
from tsmla_jax.ops.selected import checks, numerics
from tsmla_jax.ops.selected.blocks import fetch, put_rows
from tsmla_kernels import contract
from tsmla_kernels.contract import FLOATS, packed, rules
from tsmla_kernels.contract.layouts import V4_PACKED, V32_PACKED, CacheSpec, cache_spec, valid_slots

if TYPE_CHECKING:
    from tsmla_jax.array_types import Array, Float, Int32, UInt8


def pack_v32_rows(latent: Float[Array, "*N 512"], k_rope: Float[Array, "*N 64"]) -> UInt8[Array, "*N 656"]:
    """V3.2 packed rows of latents and rope parts.

    Each group of 128 latent channels has the scale 2^ceil(log2(max(amax, 1e-4) / 448)); rope is rounded to bf16.

    Args:
      latent: [..., 512] floats.
      k_rope: [..., 64] floats, rotated.

    Raises:
      TypeError, ValueError: arrays of other widths or dtypes, or whose other axes differ.
    """
    packed.check_packed_rows(describe("latent", latent), describe("k_rope", k_rope))
    latent, k_rope = jnp.asarray(latent), jnp.asarray(k_rope)
    groups = latent.reshape(*latent.shape[:-1], V32_PACKED.num_scales, V32_PACKED.group)
    values, scales, _ = numerics.quantize_pow2(groups, V32_PACKED.floor)
    parts = (values.reshape(latent.shape), scales, k_rope.astype(jnp.bfloat16))
    return jnp.concatenate([numerics.to_bytes(part) for part in parts], axis=-1)


def unpack_v32_rows(rows: UInt8[Array, "*N 656"]) -> tuple[Float[Array, "*N 512"], Float[Array, "*N 64"]]:
    """(latent f32, k_rope bf16) of V3.2 packed rows.

    Args:
      rows: uint8 [..., 656].

    Raises:
      TypeError, ValueError: rows of another width or dtype.
    """
    _describe_bytes("rows", rows, V32_PACKED.row_bytes)
    rows = jnp.asarray(rows)
    scales_at = V32_PACKED.latent_dim
    rope_at = scales_at + 4 * V32_PACKED.num_scales
    values = numerics.from_bytes(rows[..., :scales_at], numerics.E4M3).astype(jnp.float32)
    scales = numerics.from_bytes(rows[..., scales_at:rope_at], jnp.float32)
    groups = values.reshape(*values.shape[:-1], V32_PACKED.num_scales, V32_PACKED.group)
    latent = (groups * scales[..., None]).reshape(values.shape)
    return latent, numerics.from_bytes(rows[..., rope_at:], jnp.bfloat16)


def pack_v4_rows(kv: Float[Array, "*N 512"]) -> tuple[UInt8[Array, "*N 576"], UInt8[Array, "*N 8"]]:
    """(data bytes, scale bytes) of V4 packed rows; a page keeps them in two regions.

    Each group of 64 of the first 448 channels has the scale 2^ceil(log2(max(amax, 1e-4) / 448)), stored as the byte
    exponent + 127; the last 64 channels (rope) are rounded to bf16.

    Args:
      kv: [..., 512] floats, normed and rotated.

    Raises:
      TypeError, ValueError: another width or dtype.
    """
    _describe_wide("kv", kv, V4_PACKED.head_dim)
    kv = jnp.asarray(kv)
    nope, rope = kv[..., : V4_PACKED.nope_dim], kv[..., V4_PACKED.nope_dim :]
    groups = nope.reshape(*kv.shape[:-1], V4_PACKED.num_scales, V4_PACKED.group)
    values, _, exponents = numerics.quantize_pow2(groups, V4_PACKED.floor)
    data = [numerics.to_bytes(values.reshape(nope.shape)), numerics.to_bytes(rope.astype(jnp.bfloat16))]
    unused = V4_PACKED.scale_row_bytes - V4_PACKED.num_scales
    scales = jnp.pad(numerics.exponent_to_ue8m0(exponents), [(0, 0)] * (kv.ndim - 1) + [(0, unused)])
    return jnp.concatenate(data, axis=-1), scales


def unpack_v4_rows(data: UInt8[Array, "*N 576"], scales: UInt8[Array, "*N 8"]) -> Float[Array, "*N 512"]:
    """f32 rows of V4 packed data and scale bytes.

    Args:
      data: uint8 [..., 576].
      scales: uint8 [..., 8].

    Raises:
      TypeError, ValueError: other widths or dtypes, or other axes that differ.
    """
    rows = _describe_bytes("data", data, V4_PACKED.data_row_bytes).shape[:-1]
    scale_rows = _describe_bytes("scales", scales, V4_PACKED.scale_row_bytes).shape[:-1]
    if scale_rows != rows:
        raise ValueError(f"scales: got rows {list(scale_rows)}; data has {list(rows)}")
    data, scales = jnp.asarray(data), jnp.asarray(scales)
    values = numerics.from_bytes(data[..., : V4_PACKED.nope_dim], numerics.E4M3).astype(jnp.float32)
    factors = numerics.ue8m0_to_f32(scales[..., : V4_PACKED.num_scales])
    groups = values.reshape(*values.shape[:-1], V4_PACKED.num_scales, V4_PACKED.group)
    nope = (groups * factors[..., None]).reshape(values.shape)
    rope = numerics.from_bytes(data[..., V4_PACKED.nope_dim :], jnp.bfloat16).astype(jnp.float32)
    return jnp.concatenate([nope, rope], axis=-1)


def write_v4_cache(
    kv_cache: Array,
    kv: Float[Array, "T D"],
    slot_mapping: Int32[Array, " T"],
    *,
    kv_scale: float | Float[Array, ""] | None = None,
    page_size: int | None = None,
    page_span: int | None = None,
) -> Array:
    """Write rows of a shared latent (K = V) into a plain cache or one of V4's packed pages; in place under donation.

    Args:
      kv_cache: [P, Z, D] of bf16, f16, f32, f64 or float8_e4m3fn, or uint8 [P, page_bytes] (the packed 584-byte
        layout).
      kv: [T, D] floats, norm and rope already applied. An fp8 cache rounds it to bf16, divides by kv_scale and clamps
        to [-448, 448].
      slot_mapping: [T] int32, page * page_span + offset; -1 is skipped. Slots must differ, as in write_kv_cache.
      kv_scale: the per-tensor scale of an fp8 cache; None is 1. Not legal for other caches.
      page_size: how many rows a packed page has (64), or a plain page whose stride is larger than its rows.
      page_span: the slots between two packed pages, page_size unless slots were remapped (see remap_slots); between
        two plain pages it is Z.

    Raises:
      TypeError, ValueError: a layout, width, dtype, page size or scale is not legal; under TSMLA_CHECK=1 also a slot
        that is outside the cache or comes twice.
    """
    spec = cache_spec("kv_cache", describe("kv_cache", kv_cache), page_size=page_size, page_span=page_span)
    described = _describe_wide("kv", kv, spec.head_dim)
    rules.check_rank("kv", described, "T D")
    if spec.layout == "v32":
        raise ValueError("kv_cache: got V3.2 rows of 656 bytes; write them with write_packed_kv_cache")
    if kv_scale is not None and spec.dtype != "float8_e4m3fn":
        raise ValueError(f"kv_scale: got a scale with a cache of {spec.dtype}; legal with float8_e4m3fn only")
    rules.check_scale("kv_scale", describe_scale("kv_scale", kv_scale))
    slots = masked_slots(slot_mapping, described, spec)
    kv_cache, kv = jnp.asarray(kv_cache), jnp.asarray(kv)
    if spec.layout == "plain":
        if spec.dtype == "float8_e4m3fn":
            rows = numerics.quantize_per_tensor(kv, 1.0 if kv_scale is None else kv_scale)
        else:
            rows = kv.astype(kv_cache.dtype)
        return put_rows(kv_cache, rows, slots)
    data, scales = pack_v4_rows(kv)
    page, offset = slots // spec.span, slots % spec.span  # a dropped slot's page is past the last one
    scales_at = spec.page_size * V4_PACKED.data_row_bytes
    kv_cache = numerics.scatter_bytes(kv_cache, page, offset * V4_PACKED.data_row_bytes, data)
    return numerics.scatter_bytes(kv_cache, page, scales_at + offset * V4_PACKED.scale_row_bytes, scales)


def gather_rows(cache: jax.Array, slots: jax.Array, spec: CacheSpec, dtype: jnp.dtype) -> jax.Array:
    """[..., D] rows of a cache in `dtype`. A float8_e4m3fn cache's one scale is not applied. Slots must lie inside the
    cache."""
    if spec.layout == "plain":
        rows = cache.reshape(spec.num_slots, spec.head_dim)
        return fetch(rows, slots, lambda rows, at: rows[at]).astype(dtype)
    if spec.layout == "v32":
        latent, rope = unpack_v32_rows(cache.reshape(spec.num_slots, V32_PACKED.row_bytes)[slots])
        return jnp.concatenate([latent.astype(dtype), rope.astype(dtype)], axis=-1)
    page, offset = slots // spec.span, slots % spec.span
    scales_at = spec.page_size * V4_PACKED.data_row_bytes
    data = numerics.gather_bytes(cache, page, offset * V4_PACKED.data_row_bytes, V4_PACKED.data_row_bytes)
    scales = numerics.gather_bytes(
        cache, page, scales_at + offset * V4_PACKED.scale_row_bytes, V4_PACKED.scale_row_bytes
    )
    return unpack_v4_rows(data, scales).astype(dtype)


def masked_slots(slot_mapping: Array, rows: contract.Array, spec: CacheSpec) -> jax.Array:
    """Slots, with the skipped ones moved past the end, where a scatter with mode "drop" ignores them (-1 would wrap
    round).
    """
    describe_ints("slot_mapping", slot_mapping, "T", (rows.shape[0], "T, kv's rows"))
    slots = checks.slot_mapping(jnp.asarray(slot_mapping), spec)
    return kept_slots(slots, spec)


def kept_slots(slots: jax.Array, spec: CacheSpec) -> jax.Array:
    """Slots, with those that name no row moved past the end."""
    return jnp.where(valid_slots(slots, spec), slots, spec.num_slots)


def _describe_wide(name: str, value: Array, width: int, dtypes: tuple[str, ...] = FLOATS) -> contract.Array:
    """The description of an array of one of the dtypes whose last axis is `width` wide; ValueError for others."""
    array = describe(name, value)
    rules.check_dtype(name, array, dtypes)
    packed.check_width(name, array, width, " bytes" if dtypes == ("uint8",) else "")
    return array


def _describe_bytes(name: str, value: Array, width: int) -> contract.Array:
    return _describe_wide(name, value, width, ("uint8",))
