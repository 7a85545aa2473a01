"""Blocks of shared memory that WGMMA reads as operands, for kernels that multiply a block both as it is and
transposed, and the TMA loads that fill them."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

from tsmla_kernels.sm90.warp import uniform


class TmaCopy(NamedTuple):
    """A TMA load: its copy atom and the global tensor that the atom reads."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Block(NamedTuple):
    """Rows and columns of an operand in shared memory: column tiles of `width` columns, each with `pitch` rows."""

    rows: int
    columns: int
    width: int
    pitch: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def layout_atom(self, dtype: type[cutlass.Numeric]) -> cute.ComposedLayout:
        """The swizzled layout of the block in shared memory, as TMA writes it and WGMMA reads it."""
        kind = {64: SmemLayoutAtomKind.K_SW128, 32: SmemLayoutAtomKind.K_SW64}[self.width]
        return warpgroup.make_smem_layout_atom(kind, dtype)


@cute.jit
def operand(
    dtype: cutlass.Constexpr[type[cutlass.Numeric]],
    memory: cute.Pointer,
    offset: Int32,
    block: cutlass.Constexpr[Block],
):
    """A block as an operand of WGMMA, `offset` bytes into `memory`. `uniform` puts the address into a uniform register,
    because WGMMA takes its descriptors from those."""
    address = uniform(memory.toint() + offset)
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=512)
    swizzle = block.layout_atom(dtype).inner
    layout = cute.make_layout(
        ((8, block.rows // 8), (block.width, block.columns // block.width)),
        stride=((block.width, 8 * block.width), (1, block.pitch * block.width)),
    )
    return cute.make_tensor(cute.recast_ptr(pointer, swizzle, dtype=dtype), layout)


def transposed(x: cute.Tensor) -> cute.Tensor:
    """A block's operand with rows and columns exchanged."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 0]))
