"""A row of float32 in shared memory, walked by the warps that share it, and the order of float32 as integers.

A row is cut into units of 128 columns from a multiple of 16 bytes on, and every warp of the cluster has as many
neighbouring ones as the others. A warp copies its own units into its own part of shared memory, so that no warp waits
for another. Units that fit are copied once; otherwise each walk copies them again, through a ring of stages.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from tsmla_kernels.sm90.indexer.config import UNIT, TopkConfig
from tsmla_kernels.sm90.warp import quotient, remainder

VECTORS = UNIT // 4  # of 16 bytes, in a unit
NAN = float("nan")
LOWEST_NUMBER = 0x007FFFFF
"""The ordered number of -inf."""


class Row(NamedTuple):
    """One row, and what a warp has of it.

    Attributes:
      address: of the first 16 bytes that hold a column of the row.
      lead: columns there that are not the row's. length: the row's columns.
      units: units of the row. begin, end: those of the warp.
      full: vectors of 16 bytes, from the first, that are copied: they lie in the array as a whole.
      chunks: copies that bring the warp's units.
      ring: the warp's stages. barriers: one for each of them.
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


class RowWalker:
    """Device functions that bring and walk a row. `config` is the kernel's."""

    config: TopkConfig

    @cute.jit
    def plan(self, logits: cute.Tensor, first: Int64, length: Int32, ring: cute.Pointer, barriers: cute.Pointer):
        """The Row of `length` columns from element `first` of the array on, for the calling warp."""
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
        """The warp's barriers, which only the warp itself uses."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(self.config.stages):
                cute.arch.mbarrier_init(barriers + warp * self.config.stages + i, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

    @cute.jit
    def begin_copies(self, row: cutlass.Constexpr):
        """Ask for as many chunks as there are stages."""
        for chunk in cutlass.range(cutlass.min(row.chunks, self.config.stages), unroll=1):
            self.copy_chunk(row, chunk, chunk)

    @cute.jit
    def copy_chunk(self, row: cutlass.Constexpr, chunk: Int32, stage: Int32):
        """Ask for a chunk of the warp's units."""
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
        row: cutlass.Constexpr,
        visit: cutlass.Constexpr,
        context: cutlass.Constexpr,
        copied: Int32,
        first: Int32,
        second: Int32,
    ):
        """Call visit(row, context, unit, values, first, second) for each of the warp's units, in order. It returns
        (first, second) for the next. `values` are the lane's four columns; those outside of the row are NaN. `copied`
        is how many chunks the warp's earlier walks have brought."""
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
    def mend(self, row: cutlass.Constexpr, begin: Int32, end: Int32, place: cute.Pointer):
        """Make what is no column of the row NaN, and bring the columns behind the array's last whole 16 bytes."""
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
    def position(self, row: cutlass.Constexpr, unit: Int32, column: cutlass.Constexpr):
        """Where in the row a lane's column of a unit is; outside of 0 to length where it is none of the row's."""
        return unit * UNIT + cute.arch.lane_idx() * 4 + column - row.lead


def global_column(address: Int64, element: Int32) -> Float32:
    """One column in global memory."""
    source = cute.make_ptr(Float32, address + Int64(element) * 4, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(source, cute.make_layout(1))[0]


def ordered(value: Float32) -> Uint32:
    """A number that is greater for a greater float; the same for 0.0 and -0.0; 0 for NaN alone."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 t; .reg .b32 m; .reg .pred p;"
        " add.rn.f32 t, {$r0}, 0f00000000; mov.b32 {$w0}, t; shr.s32 m, {$w0}, 31; or.b32 m, m, 0x80000000;"
        " xor.b32 {$w0}, {$w0}, m; setp.nan.f32 p, t, t; selp.b32 {$w0}, 0, {$w0}, p; }",
        write_only_types=[Uint32],
        read_only_args=[value],
    )


@cute.jit
def least_float(key: Uint32) -> Float32:
    """The least float whose ordered number is at least `key`; NaN for 0, and for what is above inf's."""
    # No float but NaN has a number below that of -inf.
    if key > 0:
        key = cutlass.max(key, Uint32(LOWEST_NUMBER))
    return cute.arch.inline_ptx(
        "{ .reg .b32 m; shr.s32 m, {$r0}, 31; not.b32 m, m; or.b32 m, m, 0x80000000; xor.b32 m, m, {$r0};"
        " mov.b32 {$w0}, m; }",
        write_only_types=[Float32],
        read_only_args=[key],
    )


def pair_bins(low: Float32, high: Float32):
    """Bytes from a histogram's beginning to the bins of two floats: the upper 12 bits of their f16s, rounded towards
    zero, made to ascend. NaN has -inf's bin, and -0.0, with all that rounds to it, that of 0.0."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 p, m; cvt.rz.f16x2.f32 p, {$r1}, {$r0}; mov.b32 m, 0; add.rn.f16x2 p, p, m;"
        " mov.b32 m, 0xFC00FC00; max.f16x2 p, p, m; prmt.b32 m, p, 0, 0xBB99; or.b32 m, m, 0x80008000;"
        " xor.b32 p, p, m; shr.u32 m, p, 2; and.b32 {$w0}, m, 0x3FFC; shr.u32 m, p, 18; and.b32 {$w1}, m, 0x3FFC; }",
        write_only_types=[Int32, Int32],
        read_only_args=[low, high],
    )


NAN_BIN = 0x03FF >> 4
"""The bin of -inf and NaN: that of the f16 0xFC00."""


@cute.jit
def bin_floor(index: Int32) -> Uint32:
    """The least ordered number of all whose bin, as of pair_bins, is `index` or a greater one."""
    found = Uint32(0)
    number = index * 16
    if number > 0x8000:
        found = ordered(f16_value(number - 0x8000))
    else:
        # What rounds to a magnitude of at most m towards zero is what is above -(m + 1).
        magnitude = cutlass.max(Int32(0x7FFF) - number, 0) + 1
        if magnitude <= 0x7C00:
            found = ordered(-f16_value(magnitude)) + 1
    return found


def f16_value(bits: Int32) -> Float32:
    """The float of an f16's bits."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 h; cvt.u16.u32 h, {$r0}; cvt.f32.f16 {$w0}, h; }",
        write_only_types=[Float32],
        read_only_args=[bits],
    )
