"""Keys of expanded attention from their two parts, and values, converted to fp8."""

from __future__ import annotations

import torch

from tsmla_kernels.contract.rules import show


def mla_kv_pack_quantize_fp8(
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    k_scale_inv: float = 1.0,
    v_scale_inv: float = 1.0,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[k_nope | k_pe for every head] * k_scale_inv and v * v_scale_inv as fp8.

    Args:
      k_nope: [T, H, N], bfloat16 or float16, of any strides.
      k_pe: [T, R] or [T, 1, R], R at most N.
      v: [T, H, V].
      k_scale_inv, v_scale_inv: factors before the conversion, which is from float32.
      k_out, v_out: where the results go; new tensors otherwise.
      fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
      enable_pdl: ignored; these are plain torch operations.

    Returns:
      k [T, H, N + R] and v [T, H, V], rounded to nearest even; values out of range become the dtype's
        greatest or least finite value.

    Raises:
      ValueError: a shape, fp8_dtype or an output's dtype is not legal.
    """
    if fp8_dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"fp8_dtype: got {fp8_dtype}; legal: torch.float8_e4m3fn, torch.float8_e5m2")
    if k_nope.dim() != 3:
        raise ValueError(f"k_nope: got shape {show(tuple(k_nope.shape))}; legal: [T, H, N]")
    tokens, heads, width = k_nope.shape
    if v.dim() != 3 or v.shape[:2] != k_nope.shape[:2]:
        raise ValueError(f"v: got shape {show(tuple(v.shape))}; legal: [T, H, V] = [{tokens}, {heads}, V]")
    given = tuple(k_pe.shape)
    if k_pe.dim() == 2:
        k_pe = k_pe[:, None]
    if k_pe.dim() != 3 or k_pe.shape[:2] != (tokens, 1):
        raise ValueError(f"k_pe: got shape {show(given)}; legal: [T, R] or [T, 1, R] with T = {tokens}")
    if k_pe.shape[-1] > width:
        raise ValueError(
            f"k_pe: got shape {show(given)}; legal: R at most N = {width}, k_nope's width, as no model has"
            " more rope columns than others"
        )
    k_shape, v_shape = (tokens, heads, width + k_pe.shape[-1]), tuple(v.shape)
    for name, out, shape in (("k_out", k_out, k_shape), ("v_out", v_out, v_shape)):
        if out is not None and (tuple(out.shape) != shape or out.dtype != fp8_dtype):
            raise ValueError(f"{name}: got {out.dtype}{show(tuple(out.shape))}; legal: {fp8_dtype}{show(shape)}")
    k_out = torch.empty(k_shape, dtype=fp8_dtype, device=k_nope.device) if k_out is None else k_out
    v_out = torch.empty(v_shape, dtype=fp8_dtype, device=v.device) if v_out is None else v_out
    k_out[..., :width].copy_(_scaled(k_nope, k_scale_inv, fp8_dtype))
    k_out[..., width:].copy_(_scaled(k_pe, k_scale_inv, fp8_dtype).expand(-1, heads, -1))
    v_out.copy_(_scaled(v, v_scale_inv, fp8_dtype))
    return k_out, v_out


def _scaled(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """x * scale in float32, clamped to the range of `dtype`: the conversion alone can turn values outside into NaN or
    infinities, by dtype and release of torch."""
    greatest = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-greatest, greatest).to(dtype)
