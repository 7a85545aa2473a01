"""A row of float32 in shared memory, walked by the warps that share it.

A row is cut into units of 128 columns that begin at a multiple of 16 bytes. The warps of the cluster share the units
evenly, and the units of a warp are neighbours. A warp copies its own units into its own part of shared memory, so that
no warp waits for another. If a warp's units fit, they are copied once; otherwise each walk copies them again, through a
ring of stages.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from tsmla_kernels.sm90.warp import quotient, remainder
from tsmla_kernels.topk.config import UNIT, TopkConfig
from tsmla_kernels.topk.keys import NAN

VECTORS = UNIT // 4
"""Vectors of 16 bytes in a unit."""


class Row(NamedTuple):
    """A row, and a warp's part of it.

    Attributes:
      address: the address of the first 16 bytes that hold a column of the row.
      lead: columns in those bytes before the row's first. length: how many columns the row has.
      units: how many units the row has. begin, end: the warp's first unit, and the one behind its last.
      full: how many of the row's vectors of 16 bytes are copied: those that lie wholly in the array.
      chunks: how many copies the warp's units take.
      ring: the warp's stages. barriers: one for each stage.
    """

    address: Int64
    lead: Int32
    length: Int32
    units: Int32
    begin: Int32
    end: Int32
    full: Int32
    chunks: Int32
    ring: cute.Pointer
    barriers: cute.Pointer


Context = TypeVar("Context", bound=tuple, contravariant=True)  # a NamedTuple


class Visit(Protocol[Context]):
    """A callback of RowWalker.walk for one unit. `values` are the lane's four columns; columns outside of the row are
    NaN. The callback returns the pair (first, second) for the next unit."""

    def __call__(
        self, row: Row, context: Context, unit: Int32, values: cute.Tensor, first: Int32, second: Int32
    ) -> tuple[Int32, Int32]: ...


class RowWalker:
    """Device functions that copy and walk a row."""

    def __init__(self, config: TopkConfig) -> None:
        self.config = config

    @cute.jit
    def plan(self, logits: cute.Tensor, first: Int64, length: Int32, ring: cute.Pointer, barriers: cute.Pointer):
        """The Row of `length` columns from element `first` of the array on, with the calling warp's part."""
        config = self.config
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        member = remainder(block, config.cluster) * config.warps + warp
        members = config.cluster * config.warps
        lead = Int32(first & 3)
        begin = first - Int64(lead)
        units = (lead + length + (UNIT - 1)) // UNIT
        elements = Int64(logits.shape[0]) * Int64(logits.shape[1])
        whole = (elements - begin) >> 2
        full = (lead + length + 3) >> 2
        if Int64(full) > whole:
            full = Int32(whole)
        own = Int32((Int64(member) * Int64(units)) // members)
        after = Int32((Int64(member + 1) * Int64(units)) // members)
        return Row(
            address=logits.iterator.toint() + begin * 4,
            lead=lead,
            length=length,
            units=units,
            begin=own,
            end=after,
            full=full,
            chunks=(after - own + (config.stage_units - 1)) // config.stage_units,
            ring=ring + warp * (config.stages * config.stage_units * UNIT),
            barriers=barriers + warp * config.stages,
        )

    @cute.jit
    def init_stages(self, barriers: cute.Pointer):
        """Initialise the warp's barriers. No other warp uses them."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(self.config.stages):
                cute.arch.mbarrier_init(barriers + warp * self.config.stages + i, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

    @cute.jit
    def begin_copies(self, row: Row):
        """Start a copy into each stage."""
        for chunk in cutlass.range(cutlass.min(row.chunks, self.config.stages), unroll=1):
            self.copy_chunk(row, chunk, chunk)

    @cute.jit
    def copy_chunk(self, row: Row, chunk: Int32, stage: Int32):
        """Start the copy of a chunk of the warp's units into a stage."""
        units = self.config.stage_units
        begin = row.begin + chunk * units
        end = cutlass.min(cutlass.min(begin + units, row.end) * VECTORS, row.full)
        size = cutlass.max(end - begin * VECTORS, 0) * 16
        if cute.arch.lane_idx() == 0:
            barrier = row.barriers + stage
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
            if size > 0:
                cute.arch.inline_ptx(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                    " [{$r0}], [{$r1}], {$r2}, [{$r3}];",
                    read_only_args=[
                        Int32((row.ring + stage * (units * UNIT)).toint()),
                        row.address + Int64(begin) * (UNIT * 4),
                        size,
                        Int32(barrier.toint()),
                    ],
                )

    @cute.jit
    def walk(
        self,
        row: Row,
        visit: Visit[Context],
        context: Context,
        copied: Int32,
        first: Int32,
        second: Int32,
    ):
        """Visit each of the warp's units in order, and return the last visit's pair. `copied` must be 0 in the warp's
        first walk of the row, and row.chunks more in each later walk."""
        config = self.config
        streams = row.chunks > config.stages
        base = Int32(0)
        if streams:
            base = copied
            if copied > 0:
                for chunk in cutlass.range(config.stages, unroll=1):
                    self.copy_chunk(row, chunk, remainder(base + chunk, config.stages))
        for chunk in cutlass.range(row.chunks, unroll=1):
            stage = remainder(base + chunk, config.stages)
            begin = row.begin + chunk * config.stage_units
            end = cutlass.min(cutlass.min(begin + config.stage_units, row.end), row.units)
            place = row.ring + stage * (config.stage_units * UNIT)
            if streams or copied == 0:
                cute.arch.mbarrier_wait(row.barriers + stage, quotient(base + chunk, config.stages) & 1)
                self.mend(row, begin, end, place)
            for unit in cutlass.range(begin, end, unroll=1):
                values = self.unit_values(place, unit - begin)
                first, second = visit(row, context, unit, values, first, second)
            if streams:
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                if chunk + config.stages < row.chunks:
                    self.copy_chunk(row, chunk + config.stages, stage)
        return first, second

    def unit_values(self, place: cute.Pointer, index: Int32):
        """The lane's four columns of a unit in shared memory."""
        values = cute.make_rmem_tensor((4,), Float32)
        at = (place + (index * UNIT + cute.arch.lane_idx() * 4)).align(16)
        cute.autovec_copy(cute.make_tensor(at, cute.make_layout(4)), values)
        return values

    @cute.jit
    def mend(self, row: Row, begin: Int32, end: Int32, place: cute.Pointer):
        """Replace elements outside the row by NaN, and load the row's columns behind the array's last whole vector."""
        behind = row.lead + row.length
        if begin < end and (
            (begin == 0 and row.lead > 0) or (end == row.units and (behind < row.units * UNIT or behind > row.full * 4))
        ):
            lane = cute.arch.lane_idx()
            target = cute.make_tensor(place, cute.make_layout(self.config.stage_units * UNIT))
            for unit in cutlass.range(begin, end, unroll=1):
                for i in cutlass.range_constexpr(4):
                    element = unit * UNIT + lane * 4 + i
                    at = (unit - begin) * UNIT + lane * 4 + i
                    if element < row.lead or element >= behind:
                        target[at] = Float32(NAN)
                    elif element >= row.full * 4:
                        source = cute.make_ptr(
                            Float32, row.address + Int64(element) * 4, cute.AddressSpace.gmem, assumed_align=4
                        )
                        target[at] = cute.make_tensor(source, cute.make_layout(1))[0]
            cute.arch.sync_warp()

    @cute.jit
    def position(self, row: Row, unit: Int32, column: cutlass.Constexpr[int]):
        """The position in the row of a lane's column of a unit. Outside the row it is below 0 or at least
        row.length."""
        return unit * UNIT + cute.arch.lane_idx() * 4 + column - row.lead
