"""compress_write_kv_cache: V4's compressor, the norm, rope and quantisation of its entries, their write into the cache
and the new state, in one launch. DESIGN.md beside this says why it looks as it does.

A CTA pools one entry, or a cluster does where the window is long. The first of a request pools those entries that
reach back into the state, one after the other, and writes the state behind them: no CTA reads what another one writes.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr

from tsmla_kernels.cache_ops.kernels import DTYPES, load, row_address, store, values_at, widened
from tsmla_kernels.contract.layouts import INDEXER, V4_PACKED
from tsmla_kernels.sparse_cache.compress_config import LANE_CHANNELS, CompressWriteConfig
from tsmla_kernels.sparse_cache.compress_memory import CompressArrays, Place, Request, Sums, Target, Window
from tsmla_kernels.sparse_cache.compress_requests import RequestSearch
from tsmla_kernels.sparse_cache.values import BIAS, greatest_bits, power_of_two, scale_exponent

LOG2_E = 1.4426950408889634
INFINITY = float("inf")


def exp2(value: Float32) -> Float32:
    """2^value, by one instruction."""
    return cute.math.exp2(value, fastmath=True)


class CompressWriteKvCache(RequestSearch):
    """compress_write_kv_cache. Operands of the launcher: cache, state, state_positions, and CompressArrays."""

    arrays = CompressArrays

    def __init__(self, config: CompressWriteConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        cache: cute.Tensor,
        state: cute.Tensor,
        state_positions: cute.Tensor,
        *operands: cute.Tensor,
    ):
        config = self.config

        @cute.struct
        class Storage:
            """arrived: the mbarrier at which the Sums of the cluster's CTAs arrive in the first one. held: each
            thread's vectors of window rows under way; then the Sums of the CTA's parts, each thread's where its own
            vectors were, and behind them, in the first CTA, those of the cluster's CTAs. squares: sums of the warps of
            a row."""

            arrived: cute.struct.MemRange[Int64, 1]
            held: cute.struct.Align[cute.struct.MemRange[Float32, config.held_values], 16]
            squares: cute.struct.MemRange[Float32, config.lanes // 32]

        self.storage = Storage
        arrays = self.arrays(*operands)
        num_tokens, num_requests = arrays.kv_score.shape[0], arrays.seq_lens.shape[0]
        self.compress(arrays).launch(
            grid=[(num_tokens // config.ratio + num_requests) * config.cluster, 1, 1],
            block=[config.threads, 1, 1],
            cluster=[config.cluster, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def compress(self, arrays: CompressArrays):
        config = self.config
        storage = utils.SmemAllocator().allocate(self.storage)
        arrived = storage.arrived.data_ptr()
        held = storage.held.get_tensor(cute.make_layout(config.held_values))
        squares = storage.squares.get_tensor(cute.make_layout(config.lanes // 32))
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if const_expr(config.cluster > 1):
            if thread == 0:
                cute.arch.mbarrier_init(arrived, 1)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
        rank, block = block % config.cluster, block // config.cluster
        lane = thread % config.lanes
        place = Place(rank, thread // config.lanes, lane, lane * LANE_CHANNELS)
        weights = self.norm_weights(arrays, place)
        request, number = self.owner(arrays, block, thread & 31)
        first_entry = request.start // config.ratio
        count = request.length // config.ratio - first_entry  # entries that the request's new tokens complete
        # The first `series` entries may reach back into the state: one CTA pools them in turn.
        turns = Int32(0)
        if number == 0:
            turns = cutlass.min(count, config.series)
        elif number >= config.series and number < count:
            turns = Int32(1)
        for turn in cutlass.range(turns, unroll=1):
            entry = first_entry + number + turn
            window = self.window(arrays, request, entry, place, held)
            for chunk in cutlass.range_constexpr(config.chunks_ahead):
                self.ask(window, Int32(chunk))
            target = self.target(arrays, request, entry, place)
            self.pool(window)
            cute.arch.sync_threads()
            sums, count = self.sums_in(held, 0, config.parts), config.parts
            if const_expr(config.cluster > 1):
                cute.arch.cluster_arrive_relaxed()
                merged = self.sums_in(held, config.parts, config.cluster)
                self.hand_over(sums, (merged, arrived), place)
                if place.rank == 0:
                    cute.arch.mbarrier_wait(arrived, turn & 1)
                sums, count = merged, config.cluster
            if place.rank == 0:
                values = self.normed(self.combined(sums, count, place), weights, place, squares)
                if place.part == 0:
                    self.write(arrays, target, place, values)
            # Before another entry takes the same shared memory.
            if const_expr(config.cluster > 1 and config.series > 1):
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()
            else:
                cute.arch.sync_threads()
        if number == 0 and request.state >= 0 and request.state < arrays.new_state.shape[0]:
            # The last CTAs of a cluster first: the first one may still have an entry to write.
            self.keep(arrays, request, (config.cluster - 1 - place.rank) * config.threads + thread)

    @cute.jit
    def pool(self, window: cutlass.Constexpr):
        """The Sums of a thread's channels over its part of an entry's window, whose first chunks were asked for, into
        shared memory."""
        config = self.config
        greatest, total, pooled = (cute.make_rmem_tensor((LANE_CHANNELS,), Float32) for _ in range(3))
        greatest.fill(-INFINITY)
        total.fill(0.0)
        pooled.fill(0.0)
        bias = cute.make_rmem_tensor((config.at_once * LANE_CHANNELS,), Float32)
        self.ask_bias(window, Int32(0), bias)
        for chunk in cutlass.range(config.chunks, unroll=1):
            cute.arch.cp_async_wait_group(config.chunks_ahead - 1)
            rows = self.rows_of(window, chunk, bias)
            if const_expr(config.chunks > 1):
                self.ask_bias(window, cutlass.min(chunk + 1, config.chunks - 1), bias)
            for i in cutlass.range_constexpr(LANE_CHANNELS):
                new = greatest[i]
                for _, score in rows:
                    new = cute.arch.fmax(new, score[i])
                # Where no token has been seen yet the weights are exp2(-inf) = 0.
                anchor = Float32(0.0)
                if new > -INFINITY:
                    anchor = new
                fade = exp2((greatest[i] - anchor) * LOG2_E)
                total[i] = total[i] * fade
                pooled[i] = pooled[i] * fade
                for kv, score in rows:
                    weight = exp2((score[i] - anchor) * LOG2_E)
                    total[i] += weight
                    pooled[i] += weight * kv[i]
                greatest[i] = new
            if const_expr(config.chunks > config.chunks_ahead):
                if chunk + config.chunks_ahead < config.chunks:
                    self.ask(window, chunk + config.chunks_ahead)
                else:
                    cute.arch.cp_async_commit_group()  # of nothing: the wait above counts groups
            elif const_expr(config.chunks > 1):
                cute.arch.cp_async_commit_group()
        for i, values in enumerate((greatest, total, pooled)):
            cute.autovec_copy(values, self.vector(window, i))

    def window(
        self,
        arrays: CompressArrays,
        request: Request,
        entry: Int32,
        place: Place,
        held: cute.Tensor,
    ) -> Window:
        """A thread's part of an entry's window."""
        config = self.config
        ring, column = arrays.new_state.shape[1], Int64(place.channel * 4)
        state = cutlass.min(cutlass.max(request.state, 0), arrays.new_state.shape[0] - 1)
        row_bytes = 8 * config.width
        row = place.rank * config.cta_rows + place.part * config.part_rows
        position = (entry + 1 - config.series) * config.ratio + row
        return Window(
            new=arrays.kv_score.iterator.toint() + column,
            old=arrays.new_state.iterator.toint() + Int64(state) * Int64(ring) * row_bytes + column,
            bias=arrays.ape.iterator.toint() + column,
            start=request.start,
            token=request.token - request.start,
            ring=ring,
            ring_row=(position + ring) % ring,  # a window may begin before the sequence
            row=row,
            position=position,
            held=held.iterator + (place.part * config.lanes + place.lane) * 4,
        )

    def series_bytes(self, row: Int32):
        """Where the channels of a window's row begin in a token's: the first window has those of the first series."""
        config = self.config
        return row // config.ratio * (config.channels * 4) if config.series > 1 else 0

    def vector(self, window: Window, index) -> cute.Tensor:
        """One of a thread's vectors in shared memory."""
        at = window.held + index * (self.config.threads * 4)
        return cute.make_tensor(at.align(16), cute.make_layout(LANE_CHANNELS))

    @cute.jit
    def ask(self, window: cutlass.Constexpr, chunk: Int32):
        """Copy kv and scores of a chunk of rows, of new tokens or from the state, into the thread's shared memory: what
        a thread copies it alone reads. A row from before the sequence began is copied too, from any row."""
        config = self.config
        row_bytes, offset = 8 * config.width, chunk * config.at_once
        position = window.position + offset
        slot = chunk % config.chunks_ahead * (2 * config.at_once)
        for u in cutlass.range_constexpr(config.at_once):
            base, row = window.old, window.ring_row + (offset + u)
            if row >= window.ring:
                row -= window.ring  # which is no shorter than the window
            if position + u >= window.start:
                base, row = window.new, window.token + position + u
            address = base + Int64(row) * row_bytes + Int64(self.series_bytes(window.row + offset + u))
            for i in cutlass.range_constexpr(2):
                cute.arch.inline_ptx(
                    "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
                    read_only_args=[
                        Int32(self.vector(window, slot + 2 * u + i).iterator.toint()),
                        address + Int64(i * 4 * config.width),
                    ],
                )
        cute.arch.cp_async_commit_group()

    @cute.jit
    def ask_bias(self, window: cutlass.Constexpr, chunk: Int32, bias: cute.Tensor):
        """Load what is added to the scores of a chunk of rows: 0 for those of the state, which have it."""
        config = self.config
        for u in cutlass.range_constexpr(config.at_once):
            row = window.row + chunk * config.at_once + u
            part = cute.make_tensor(bias.iterator + u * LANE_CHANNELS, cute.make_layout(LANE_CHANNELS))
            part.fill(0.0)
            if window.position + chunk * config.at_once + u >= window.start:
                at = window.bias + Int64(row % config.ratio * (4 * config.width) + self.series_bytes(row))
                cute.autovec_copy(values_at(Float32, at, LANE_CHANNELS), part)

    @cute.jit
    def rows_of(self, window: cutlass.Constexpr, chunk: Int32, bias: cute.Tensor):
        """kv and biased score of a thread's channels of each row of a chunk. Tokens before the sequence began have kv 0
        and score -inf."""
        config, rows = self.config, []
        slot = chunk % config.chunks_ahead * (2 * config.at_once)
        for u in cutlass.range_constexpr(config.at_once):
            kv, score = (cute.make_rmem_tensor((LANE_CHANNELS,), Float32) for _ in range(2))
            cute.autovec_copy(self.vector(window, slot + 2 * u), kv)
            cute.autovec_copy(self.vector(window, slot + 2 * u + 1), score)
            for i in cutlass.range_constexpr(LANE_CHANNELS):
                score[i] = score[i] + bias[u * LANE_CHANNELS + i]
            if window.position + chunk * config.at_once + u < 0:
                kv.fill(0.0)
                score.fill(-INFINITY)
            rows.append((kv, score))
        return rows

    def channels_of(self, target: cute.Tensor, slot, place):
        """A thread's channels of a slot in shared memory."""
        at = target.iterator + (slot * self.config.channels + place.channel)
        return cute.make_tensor(at.align(16), cute.make_layout(LANE_CHANNELS))

    def slot_of(self, target: cute.Tensor, slot, place):
        """A thread's channels of a slot, in registers."""
        registers = cute.make_rmem_tensor((LANE_CHANNELS,), Float32)
        cute.autovec_copy(self.channels_of(target, slot, place), registers)
        return registers

    def sums_in(self, memory: cute.Tensor, first: int, slots: int) -> Sums:
        """The Sums of `slots` parts or CTAs, behind those of `first` others, as pool or hand_over leaves them."""
        count, begin = slots * self.config.channels, memory.iterator + 3 * first * self.config.channels
        return Sums(*(cute.make_tensor(begin + i * count, cute.make_layout(count)) for i in range(3)))

    @cute.jit
    def combined(self, sums: cutlass.Constexpr, count: cutlass.Constexpr, place: cutlass.Constexpr):
        """The Sums of a thread's channels over `count` slots, in registers."""
        greatest, total, pooled = (cute.make_rmem_tensor((LANE_CHANNELS,), Float32) for _ in range(3))
        greatest.fill(-INFINITY)
        total.fill(0.0)
        pooled.fill(0.0)
        slots = [Sums(*(self.slot_of(target, slot, place) for target in sums)) for slot in range(count)]
        for i in cutlass.range_constexpr(LANE_CHANNELS):
            for slot in slots:
                greatest[i] = cute.arch.fmax(greatest[i], slot.greatest[i])
            for slot in slots:
                # A slot without a seen token has -inf, and so has all before it: a weight of 0.
                weight = Float32(0.0)
                if slot.greatest[i] > -INFINITY:
                    weight = exp2((slot.greatest[i] - greatest[i]) * LOG2_E)
                total[i] = total[i] + slot.total[i] * weight
                pooled[i] = pooled[i] + slot.pooled[i] * weight
        return Sums(greatest, total, pooled)

    @cute.jit
    def hand_over(self, parts: cutlass.Constexpr, target: cutlass.Constexpr, place: cutlass.Constexpr):
        """The CTA's Sums into the first CTA's shared memory: `target` is that and the mbarrier at which they arrive.
        All threads, behind their arrival at the cluster's barrier: no CTA reads rows any more, neither those in the
        first one's shared memory nor the state's. A second barrier in place of the mbarrier would wait for all stores
        to global memory as well."""
        config = self.config
        merged, arrived = target
        sums = self.combined(parts, config.parts, place)
        cute.arch.cluster_wait()
        if place.rank == 0 and place.part == 0 and place.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, 3 * config.cluster * config.channels * 4)
        if place.part == 0:
            for values, to in zip(sums, merged, strict=True):
                at = to.iterator + (place.rank * config.channels + place.channel)
                cute.arch.inline_ptx(
                    "{ .reg .b32 a, b; mapa.shared::cluster.u32 a, {$r0}, 0; mapa.shared::cluster.u32 b, {$r1}, 0;"
                    " st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
                    " [a], { {$r2}, {$r3}, {$r4}, {$r5} }, [b]; }",
                    read_only_args=[
                        Int32(at.toint()),
                        Int32(arrived.toint()),
                        *(values[j] for j in range(4)),
                    ],
                )

    @cute.jit
    def norm_weights(self, arrays: CompressArrays, place: cutlass.Constexpr):
        """A thread's weights of the norm."""
        dtype = DTYPES[self.config.weight_dtype]
        address = arrays.norm_weight.iterator.toint() + Int64(place.channel * (dtype.width // 8))
        return load(dtype, address, LANE_CHANNELS)

    @cute.jit
    def normed(
        self, sums: cutlass.Constexpr, weights: cute.Tensor, place: cutlass.Constexpr, squares: cute.Tensor
    ):
        """A thread's channels of the entry, pooled and normed. All threads of the CTA, each part's the same."""
        config = self.config
        values = cute.make_rmem_tensor((LANE_CHANNELS,), Float32)
        square = Float32(0.0)
        for i in cutlass.range_constexpr(LANE_CHANNELS):
            values[i] = sums.pooled[i] / sums.total[i]
            square += values[i] * values[i]
        for step in cutlass.range_constexpr(5):
            square += cute.arch.shuffle_sync_bfly(square, offset=1 << step)
        if const_expr(config.lanes > 32):
            if place.part == 0 and place.lane % 32 == 0:
                squares[place.lane // 32] = square
            cute.arch.sync_threads()
            square = squares[0]
            for warp in cutlass.range_constexpr(1, config.lanes // 32):
                square += squares[warp]
        factor = cute.math.rsqrt(square * Float32(1.0 / config.channels) + Float32(config.eps))
        for i in cutlass.range_constexpr(LANE_CHANNELS):
            values[i] = values[i] * factor * weights[i].to(Float32)
        return values

    @cute.jit
    def target(
        self, arrays: CompressArrays, request: cutlass.Constexpr, entry: Int32, place: cutlass.Constexpr
    ):
        """Where an entry goes."""
        config = self.config
        page_size = config.page_size if const_expr(config.cache == "v4") else arrays.new_cache.shape[1]
        width = arrays.block_tables.shape[1]
        table_entry = entry // page_size
        page = Int32(-1)
        if table_entry < width:
            at = Int64(request.index) * Int64(width) + Int64(table_entry)
            page = cute.make_tensor(arrays.block_tables.iterator + at, cute.make_layout(1))[0]
            if page >= arrays.new_cache.shape[0]:
                page = Int32(-1)
        half = config.rope_dim // 2
        pair = cutlass.max(place.channel - (config.channels - config.rope_dim), 0) // 2
        angle = cutlass.min(entry * config.ratio, arrays.cos_sin.shape[0] - 1)
        addresses = [row_address(arrays.cos_sin, angle, first * 4) for first in (pair, half + pair)]
        for address in addresses:
            # The compiler moves the loads to where they are used.
            cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])
        cos, sin = (load(Float32, address, 2) for address in addresses)
        return Target(page, entry - table_entry * page_size, cos, sin)

    @cute.jit
    def write(
        self, arrays: CompressArrays, target: cutlass.Constexpr, place: cutlass.Constexpr, values: cute.Tensor
    ):
        """Rotate an entry's channels, quantise them and write them into the entry's slot. Whole warps."""
        config = self.config
        if place.channel >= config.channels - config.rope_dim:
            for i in cutlass.range_constexpr(2):
                even, odd = values[2 * i], values[2 * i + 1]
                values[2 * i] = even * target.cos[i] - odd * target.sin[i]
                values[2 * i + 1] = odd * target.cos[i] + even * target.sin[i]
        exponent = Int32(0)
        if const_expr(config.scale_group > 0):
            bits = greatest_bits(values, LANE_CHANNELS)
            lanes = config.scale_group // LANE_CHANNELS
            for step in cutlass.range_constexpr(lanes.bit_length() - 1):
                bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, offset=1 << step))
            exponent = scale_exponent(bits, INDEXER.key_floor if config.cache == "indexer" else V4_PACKED.floor)
        if target.page >= 0:
            self.store_row(arrays, target.page, target.offset, place, (values, exponent))

    @cute.jit
    def store_row(
        self,
        arrays: CompressArrays,
        page: Int32,
        offset: Int32,
        place: cutlass.Constexpr,
        quantised: cutlass.Constexpr,
    ):
        """Write a thread's channels of a row of a page: `quantised` is the values and the exponent of their scale."""
        config, cache = self.config, arrays.new_cache
        values, exponent = quantised
        base = cache.iterator.toint()
        if const_expr(config.cache == "v4"):
            address = base + Int64(page) * Int64(cache.shape[1])
            row = address + Int64(offset * V4_PACKED.data_row_bytes)
            scales = address + Int64(config.page_size * V4_PACKED.data_row_bytes + offset * V4_PACKED.scale_row_bytes)
            group = place.channel // V4_PACKED.group
            if place.channel < V4_PACKED.nope_dim:
                store(Float8E4M3FN, row + Int64(place.channel), widened(values, power_of_two(-exponent)))
            else:
                rope = place.channel - V4_PACKED.nope_dim
                store(BFloat16, row + Int64(V4_PACKED.nope_dim + 2 * rope), values)
                exponent = Int32(-BIAS)  # the byte behind the scales is 0
            if place.channel % V4_PACKED.group == 0:
                values_at(Uint8, scales + Int64(group), 1)[0] = Uint8(exponent + BIAS)
        elif const_expr(config.cache == "indexer"):
            address = base + Int64(page) * Int64(cache.shape[1] * INDEXER.row_bytes)
            row = address + Int64(offset * INDEXER.head_dim + place.channel)
            store(Float8E4M3FN, row, widened(values, power_of_two(-exponent)))
            if place.lane == 0:
                scale = address + Int64(cache.shape[1] * INDEXER.head_dim + offset * INDEXER.scale_bytes)
                values_at(Float32, scale, 1)[0] = power_of_two(exponent)
        else:
            dtype = DTYPES[config.cache]
            slot = Int64(page) * Int64(cache.shape[1]) + Int64(offset)
            row = base + (slot * config.channels + Int64(place.channel)) * (dtype.width // 8)
            if const_expr(config.cache == "float8_e4m3fn"):
                divisor = arrays.kv_scale[0]
                for i in cutlass.range_constexpr(LANE_CHANNELS):
                    values[i] = values[i].to(BFloat16).to(Float32) / divisor
            store(dtype, row, values)

    @cute.jit
    def keep(self, arrays: CompressArrays, request: cutlass.Constexpr, thread: Int32):
        """Write the request's last new tokens into its ring, the scores with their bias. All threads of the cluster."""
        config = self.config
        ring = arrays.new_state.shape[1]
        vectors = 2 * config.width // LANE_CHANNELS  # of a row of the state
        first = cutlass.max(request.start, request.length - ring)
        rows = request.length - first
        base = Int64(request.state) * Int64(ring)
        threads = config.threads * config.cluster
        for i in cutlass.range(thread, rows * vectors, threads, unroll=2):
            row = i // vectors
            column = (i - row * vectors) * LANE_CHANNELS
            position = first + row
            token = request.token + position - request.start
            values = load(Float32, row_address(arrays.kv_score, token, column * 4), LANE_CHANNELS)
            biased = cutlass.max(column - config.width, 0)
            bias = load(Float32, row_address(arrays.ape, position % config.ratio, biased * 4), LANE_CHANNELS)
            if column >= config.width:
                for j in cutlass.range_constexpr(LANE_CHANNELS):
                    values[j] = values[j] + bias[j]
            held = base + Int64(position % ring)
            address = arrays.new_state.iterator.toint() + held * (8 * config.width) + Int64(column) * 4
            cute.autovec_copy(values, values_at(Float32, address, LANE_CHANNELS))
        for i in cutlass.range(thread, rows, threads, unroll=1):
            position = first + i
            at = arrays.new_positions.iterator + (base + Int64(position % ring))
            cute.make_tensor(at, cute.make_layout(1))[0] = position
