"""The definitions of products with block scales, and of quantising for them, on torch tensors. They mean what
tsmla_jax's mean, and read no value on the host."""

from __future__ import annotations

import torch

from tsmla_bridge.runtime.devices import in_own_precision
from tsmla_bridge.runtime.tensors import DTYPES
from tsmla_bridge.sparse_reference import quantize_pow2
from tsmla_kernels.contract.products import (
    BLOCK,
    INVERSE_MAX,
    LEAST_AMAX,
    PACKED_BLOCK,
    ProductSpec,
    QuantizeBlocksSpec,
)
from tsmla_kernels.contract.rules import FP8, FP8_MAX

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@in_own_precision
def block_scaled_matmul(
    spec: ProductSpec,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight_scales: torch.Tensor,
) -> Result:
    """The result of block_scaled_matmul."""
    return _finished(_product(x, weight, x_scales, weight_scales), spec)


def _product(
    x: torch.Tensor, weight: torch.Tensor, x_scales: torch.Tensor | None, weight_scales: torch.Tensor | None
) -> torch.Tensor:
    """The product itself, [T, N] float32.

    weight_scales: None if the weight has 16 bits.
    """
    if weight_scales is None:
        columns = weight.float()
    elif weight.dtype == torch.uint8:
        columns = _unpacked(weight, weight_scales)
    else:
        columns = _widened(weight, weight_scales.repeat_interleave(BLOCK, 0)[: weight.shape[0]])
    return _widened(x, x_scales) @ columns.T


def _unpacked(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Packed weights [N, K / 2] of e2m1 times their powers of two [N, ceil(K / 32)], in float32."""
    codes = torch.stack([weight & 15, weight >> 4], dim=-1).view(weight.shape[0], -1)
    # 0, 0.5, 1, 1.5, 2, 3, 4 and 6, made on the device: a graph's capture refuses a copy from the host's memory.
    code = torch.arange(8, dtype=torch.float32, device=weight.device)
    positive = torch.where(code < 4, code / 2, (2 + code % 2) * 2 ** (code // 2 - 2))
    values = torch.cat((positive, -positive))[codes.long()]
    bits = scales.int() << 23
    bits = torch.where(scales == 0, 1 << 22, torch.where(scales == 255, 0x7FC00000, bits)).int()
    return values * bits.view(torch.float32).repeat_interleave(PACKED_BLOCK, -1)[:, : values.shape[-1]]


def _finished(product: torch.Tensor, spec: ProductSpec) -> Result:
    """The result of a call from its product [T, N] float32: gated if the call is, and rounded or quantised."""
    if spec.gated:
        gate, up = product.chunk(2, dim=-1)
        if spec.limit is not None:
            gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
        product = torch.nn.functional.silu(gate) * up
    if spec.out_dtype == FP8:
        return quantize_blocks(QuantizeBlocksSpec(tuple(product.shape), "float32", power_of_two=False), product)
    return product.to(DTYPES[spec.out_dtype])


@in_own_precision
def grouped_block_scaled_matmul(
    spec: ProductSpec,
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor | None,
    weight_scales: torch.Tensor | None,
    cu_rows: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> Result:
    """The result of grouped_block_scaled_matmul."""
    if rows is not None:
        places = rows.long().clamp(0, max(x.shape[0] - 1, 0))
        x, x_scales = x[places], None if x_scales is None else x_scales[places]
    out = torch.zeros((x.shape[0], weight.shape[1]), device=x.device)
    row = torch.arange(x.shape[0], device=x.device)
    for group in range(cu_rows.shape[0] - 1):
        scales = None if weight_scales is None else weight_scales[group]
        product = _product(x, weight[group], x_scales, scales)
        own = (row >= cu_rows[group]) & (row < cu_rows[group + 1])
        out = torch.where(own[:, None], product, out)
    return _finished(out, spec)


def quantize_blocks(spec: QuantizeBlocksSpec, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """values and scales of quantize_blocks."""
    terms = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -terms % BLOCK))
    blocks = padded.view(*x.shape[:-1], padded.shape[-1] // BLOCK, BLOCK)
    amax = blocks.abs().amax(-1)
    scales = quantize_pow2(blocks, LEAST_AMAX)[1] if spec.power_of_two else amax.clamp(min=LEAST_AMAX) * INVERSE_MAX
    scales = torch.where(amax.isfinite(), scales, torch.nan)
    values = (blocks / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values.view(padded.shape)[..., :terms].contiguous(), scales


def _widened(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Values [..., K] times their scales [..., ceil(K / 128)], if they have any, in float32."""
    if scales is None:
        return values.float()
    return values.float() * scales.repeat_interleave(BLOCK, -1)[..., : values.shape[-1]]
