"""What a prefill configuration fixes at compile time, in the terms of the device code."""

from __future__ import annotations

import cutlass
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from tsmla_kernels.sm90.decode.config import FP8
from tsmla_kernels.sm90.prefill.config import GROUP_ROWS, PrefillConfig
from tsmla_kernels.sm90.warp import DTYPES


class KernelTraits:
    """Static sizes, dtypes and layouts that all parts of the kernel share.

    Rows, keys and columns are counted in elements. A column tile has 64 columns: TMA's box and the swizzled layout of
    16-bit and of 8-bit operands then have one shape, and differ only in bytes.
    """

    def __init__(self, config: PrefillConfig) -> None:
        self.config = config
        self.fp8 = config.dtype == FP8
        self.dtype = DTYPES[config.dtype]
        self.out_dtype = cutlass.BFloat16 if self.fp8 else self.dtype
        self.element_bytes = self.dtype.width // 8
        self.mma_k = 32 // self.element_bytes  # elements of the k axis that one WGMMA takes
        self.swizzle_kind = SmemLayoutAtomKind.K_SW64 if self.fp8 else SmemLayoutAtomKind.K_SW128
        self.qk_head_dim, self.v_head_dim = config.qk_head_dim, config.v_head_dim
        self.causal, self.groups = config.causal, config.groups
        self.block, self.stages, self.tile_rows = config.block, config.stages, config.tile_rows
        self.k_tiles, self.v_tiles = self.qk_head_dim // 64, self.v_head_dim // 64
        self.rope_tiles = config.rope_dim // 64
        self.nope_tiles = self.k_tiles - self.rope_tiles
        self.q_elements = GROUP_ROWS * self.qk_head_dim
        self.k_elements, self.v_elements = self.block * self.qk_head_dim, self.block * self.v_head_dim
        # fp8: the transposed V and P have their keys in whole tiles of 128.
        self.transposed_keys = (self.block + 127) // 128 * 128
        self.transposed_elements = self.transposed_keys * self.v_head_dim
        self.p_elements = GROUP_ROWS * self.transposed_keys
        self.threads = 128 * (self.groups + 1)
        self.producer_warp = 4 * self.groups
        self.compute_registers, self.producer_registers = {2: (232, 40), 3: (160, 32)}[self.groups]
        if not self.fp8 and self.groups != 2:
            raise ValueError(f"groups: got {self.groups} with dtype {config.dtype}; legal: 2")

    def layout_atom(self):
        """The swizzled layout of Q, K and V in shared memory, as TMA writes it and WGMMA reads it."""
        return warpgroup.make_smem_layout_atom(self.swizzle_kind, self.dtype)
