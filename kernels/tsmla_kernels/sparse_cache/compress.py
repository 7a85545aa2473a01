"""compress_write_kv_cache in one launch: V4's compressor, the norm, rope and quantisation of its entries, their write
into the cache, and the new state. DESIGN.md in this folder gives the reasons.

A cluster pools one entry; it is one CTA unless the window is long. A request's first cluster pools, one after the
other, the entries that reach back into the state, and then writes the state. So no cluster reads state that another one
writes.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr

from tsmla_kernels.cache_ops.kernels import DTYPES, load, row_address, store, values_at, widened
from tsmla_kernels.contract.layouts import INDEXER, V4_PACKED
from tsmla_kernels.sparse_cache.compress_config import LANE_CHANNELS, ROWS_AT_ONCE, CompressWriteConfig
from tsmla_kernels.sparse_cache.compress_memory import CompressArrays, Place, Quantised, Request, Source, Sums, Target
from tsmla_kernels.sparse_cache.values import BIAS, greatest_bits, power_of_two, scale_exponent

LOG2_E = 1.4426950408889634
INFINITY = float("inf")


def exp2(value: Float32) -> Float32:
    """2^value, by one instruction."""
    return cute.math.exp2(value, fastmath=True)


class CompressWriteKvCache:
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
            """greatest, total, pooled: Sums of the CTA's parts. merged: Sums of the cluster's CTAs, in the first CTA.
            squares: for each warp of the first part, the sum of the squares of its channels of the pooled entry."""

            greatest: cute.struct.Align[cute.struct.MemRange[Float32, config.parts * config.channels], 16]
            total: cute.struct.Align[cute.struct.MemRange[Float32, config.parts * config.channels], 16]
            pooled: cute.struct.Align[cute.struct.MemRange[Float32, config.parts * config.channels], 16]
            merged: cute.struct.Align[cute.struct.MemRange[Float32, max(3 * config.merged * config.channels, 4)], 16]
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
        if const_expr(config.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
        storage = utils.SmemAllocator().allocate(self.storage)
        slots = cute.make_layout((config.parts, config.channels), stride=(config.channels, 1))
        parts = Sums(*(x.get_tensor(slots) for x in (storage.greatest, storage.total, storage.pooled)))
        merged = storage.merged.get_tensor(cute.make_layout(max(3 * config.merged * config.channels, 4)))
        squares = storage.squares.get_tensor(cute.make_layout(config.lanes // 32))
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank, block = block % config.cluster, block // config.cluster
        lane = thread % config.lanes
        place = Place(rank, thread // config.lanes, lane, lane * LANE_CHANNELS)
        weights = self.norm_weights(arrays, place)
        index, number = self.owner(arrays.cu_seqlens_q, arrays.seq_lens.shape[0], block, thread & 31)
        # Clamp invalid offsets and lengths, so that nothing outside the arrays is read or written.
        num_tokens = arrays.kv_score.shape[0]
        token = cutlass.min(cutlass.max(arrays.cu_seqlens_q[index], 0), num_tokens)
        tokens = cutlass.min(cutlass.max(arrays.cu_seqlens_q[index + 1], token), num_tokens) - token
        length = cutlass.max(arrays.seq_lens[index], tokens)
        start = length - tokens
        request = Request(index, token, start, length, arrays.state_slots[index])
        first_entry = start // config.ratio
        count = length // config.ratio - first_entry  # entries that the request's new tokens complete
        # The first `series` entries may reach back into the state, so the first cluster pools them in turn.
        turns = Int32(0)
        if number == 0:
            turns = cutlass.min(count, config.series)
        elif number >= config.series and number < count:
            turns = Int32(1)
        if const_expr(config.cluster > 1):
            cute.arch.cluster_wait()  # the first CTA has started, so hand_over may write into its memory
        for turn in cutlass.range(turns, unroll=1):
            entry = first_entry + number + turn
            target = self.target(arrays, request, entry, place)
            self.pool(arrays, request, entry, place, parts)
            cute.arch.sync_threads()
            sums, count = parts, config.parts
            if const_expr(config.cluster > 1):
                self.hand_over(parts, merged, place)
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()
                sums, count = self.merged_sums(merged), config.cluster
            if place.rank == 0:
                values = self.normed(self.combined(sums, count, place), weights, place, squares)
                if place.part == 0:
                    self.write(arrays, target, place, values)
            # Wait until all threads have read the shared memory that the next entry overwrites.
            if const_expr(config.cluster > 1 and config.series > 1):
                cute.arch.cluster_arrive()
                cute.arch.cluster_wait()
            else:
                cute.arch.sync_threads()
        if number == 0 and request.state >= 0 and request.state < arrays.new_state.shape[0]:
            self.keep(arrays, request, place.rank * config.threads + thread)

    @cute.jit
    def owner(self, cu_seqlens_q: cute.Tensor, num_requests: Int32, block: Int32, lane: Int32):
        """Find the request of a CTA (of a cluster if the window is long), and the CTA's index in it. A request has one
        CTA, and one more for every `ratio` tokens. All lanes of a warp call this function."""
        count = Int32(0)
        for i in cutlass.range(cute.ceil_div(num_requests, 32), unroll=1):
            request = i * 32 + lane
            at = cutlass.min(request, num_requests - 1)
            begins = cu_seqlens_q[at] // self.config.ratio + at <= block
            if begins and request < num_requests:
                count += 1
        index = cutlass.max(cute.arch.warp_redux_sync(count, "add") - 1, 0)
        return index, block - (cu_seqlens_q[index] // self.config.ratio + index)

    @cute.jit
    def pool(
        self,
        arrays: CompressArrays,
        request: Request,
        entry: Int32,
        place: Place,
        parts: Sums,
    ):
        """Compute the Sums of a thread's channels over its part of the entry's window, and store them to shared
        memory."""
        config = self.config
        rows = config.cta_rows // config.parts
        first = place.rank * config.cta_rows + place.part * rows
        begin = (entry + 1 - config.series) * config.ratio + first
        greatest, total, pooled = (cute.make_rmem_tensor((LANE_CHANNELS,), Float32) for _ in range(3))
        greatest.fill(-INFINITY)
        total.fill(0.0)
        pooled.fill(0.0)
        at_once = min(ROWS_AT_ONCE, rows)
        source = self.source(arrays, request, place)
        for chunk in cutlass.range(rows // at_once, unroll=1):
            held = []
            position = begin + chunk * at_once
            # The ring is at least as long as the window, so a position below 0 plus the ring's length is not negative.
            ring_row = cutlass.select_(position < 0, position + source.ring, position) % source.ring
            for u in cutlass.range_constexpr(at_once):
                row = first + chunk * at_once + u
                held.append(self.window_row(source, position + u, ring_row + u, row))
            for i in cutlass.range_constexpr(LANE_CHANNELS):
                scores = [score[i] for _, score in held]
                new = greatest[i]
                for score in scores:
                    new = cutlass.max(new, score)
                # Until a token has been seen, `new` is -inf; anchor 0 then gives weights of 0 instead of NaN.
                anchor = Float32(0.0)
                if new > -INFINITY:
                    anchor = new
                fade = exp2((greatest[i] - anchor) * LOG2_E)
                total[i] = total[i] * fade
                pooled[i] = pooled[i] * fade
                for kv, score in held:
                    weight = exp2((score[i] - anchor) * LOG2_E)
                    total[i] += weight
                    pooled[i] += weight * kv[i]
                greatest[i] = new
        for values, target in zip((greatest, total, pooled), parts, strict=True):
            cute.autovec_copy(values, self.channels_of(target, place.part, place))

    def source(self, arrays: CompressArrays, request: Request, place: Place) -> Source:
        """The addresses from which a thread reads the rows of a request's windows."""
        ring, column = arrays.new_state.shape[1], Int64(place.channel * 4)
        state = cutlass.min(cutlass.max(request.state, 0), arrays.new_state.shape[0] - 1)
        row_bytes = 8 * self.config.width
        return Source(
            new=arrays.kv_score.iterator.toint() + column,
            old=arrays.new_state.iterator.toint() + Int64(state) * Int64(ring) * row_bytes + column,
            bias=arrays.ape.iterator.toint() + column,
            start=request.start,
            token=request.token - request.start,
            ring=ring,
        )

    @cute.jit
    def window_row(self, source: Source, position: Int32, ring_row: Int32, row: Int32):
        """Load kv and the biased score of a thread's channels in a row of the window: from a new token, or from row
        `ring_row` of the ring, less the ring's length if it is past the end. Tokens before the beginning of the
        sequence have kv 0 and score -inf."""
        config = self.config
        series, row_bytes = 0, 8 * config.width
        if const_expr(config.series > 1):
            series = row // config.ratio * (config.channels * 4)
        is_new = position >= source.start
        if ring_row >= source.ring:
            ring_row -= source.ring
        address = source.old + Int64(ring_row) * row_bytes
        if is_new:
            address = source.new + Int64(source.token + position) * row_bytes
        kv = load(Float32, address + Int64(series), LANE_CHANNELS)
        score = load(Float32, address + Int64(series + 4 * config.width), LANE_CHANNELS)
        if is_new:
            at = source.bias + Int64(row % config.ratio * (4 * config.width) + series)
            bias = load(Float32, at, LANE_CHANNELS)
            for i in cutlass.range_constexpr(LANE_CHANNELS):
                score[i] = score[i] + bias[i]
        if position < 0:
            kv.fill(0.0)
            score.fill(-INFINITY)
        return kv, score

    def channels_of(self, target: cute.Tensor, slot, place):
        """A view of a thread's channels in slot `slot` of a tensor of Sums in shared memory."""
        at = target.iterator + (slot * self.config.channels + place.channel)
        return cute.make_tensor(at.align(16), cute.make_layout(LANE_CHANNELS))

    def slot_of(self, target: cute.Tensor, slot, place):
        """A thread's channels in slot `slot` of a tensor of Sums, loaded into registers."""
        registers = cute.make_rmem_tensor((LANE_CHANNELS,), Float32)
        cute.autovec_copy(self.channels_of(target, slot, place), registers)
        return registers

    def merged_sums(self, merged: cute.Tensor) -> Sums:
        """The Sums of the cluster's CTAs, which hand_over has written."""
        count = self.config.cluster * self.config.channels
        return Sums(*(cute.make_tensor(merged.iterator + i * count, cute.make_layout(count)) for i in range(3)))

    @cute.jit
    def combined(self, sums: Sums, count: cutlass.Constexpr[int], place: Place):
        """Compute the Sums of a thread's channels over `count` slots, in registers."""
        greatest, total, pooled = (cute.make_rmem_tensor((LANE_CHANNELS,), Float32) for _ in range(3))
        greatest.fill(-INFINITY)
        total.fill(0.0)
        pooled.fill(0.0)
        for slot in cutlass.range(count, unroll=1):
            of_slot = self.slot_of(sums.greatest, slot, place)
            for i in cutlass.range_constexpr(LANE_CHANNELS):
                greatest[i] = cutlass.max(greatest[i], of_slot[i])
        for slot in cutlass.range(count, unroll=1):
            tops, totals, sums_of = (self.slot_of(target, slot, place) for target in sums)
            for i in cutlass.range_constexpr(LANE_CHANNELS):
                # A slot without tokens has -inf. Its weight is 0, also if `greatest` is -inf.
                weight = Float32(0.0)
                if tops[i] > -INFINITY:
                    weight = exp2((tops[i] - greatest[i]) * LOG2_E)
                total[i] = total[i] + totals[i] * weight
                pooled[i] = pooled[i] + sums_of[i] * weight
        return Sums(greatest, total, pooled)

    @cute.jit
    def hand_over(self, parts: Sums, merged: cute.Tensor, place: Place):
        """Write the CTA's Sums into the first CTA's shared memory."""
        config = self.config
        if place.part == 0:
            sums = self.combined(parts, config.parts, place)
            for i, values in enumerate(sums):
                at = (i * config.cluster + place.rank) * config.channels + place.channel
                cute.arch.inline_ptx(
                    "{ .reg .b32 a; mapa.shared::cluster.u32 a, {$r0}, 0;"
                    " st.shared::cluster.v4.f32 [a], { {$r1}, {$r2}, {$r3}, {$r4} }; }",
                    read_only_args=[Int32(merged.iterator.toint()) + at * 4, *(values[j] for j in range(4))],
                )

    @cute.jit
    def norm_weights(self, arrays: CompressArrays, place: Place):
        """Load a thread's weights of the norm."""
        dtype = DTYPES[self.config.weight_dtype]
        address = arrays.norm_weight.iterator.toint() + Int64(place.channel * (dtype.width // 8))
        return load(dtype, address, LANE_CHANNELS)

    @cute.jit
    def normed(self, sums: Sums, weights: cute.Tensor, place: Place, squares: cute.Tensor):
        """Compute a thread's channels of the entry, pooled and normed. All threads of the CTA call this function; the
        threads of each part compute the same values."""
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
    def target(self, arrays: CompressArrays, request: Request, entry: Int32, place: Place):
        """Find the place to which an entry is written, and load the cos and sin of the thread's channels."""
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
        cos = load(Float32, row_address(arrays.cos_sin, angle, pair * 4), 2)
        sin = load(Float32, row_address(arrays.cos_sin, angle, (half + pair) * 4), 2)
        return Target(page, entry - table_entry * page_size, cos, sin)

    @cute.jit
    def write(self, arrays: CompressArrays, target: Target, place: Place, values: cute.Tensor):
        """Rotate an entry's channels, quantise them and write them into the entry's slot. Whole warps call this."""
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
            self.store_row(arrays, target.page, target.offset, place, Quantised(values, exponent))

    @cute.jit
    def store_row(
        self,
        arrays: CompressArrays,
        page: Int32,
        offset: Int32,
        place: Place,
        quantised: Quantised,
    ):
        """Write a thread's channels of a row of a page."""
        config, cache = self.config, arrays.new_cache
        values, exponent = quantised
        base = cache.iterator.toint()
        if const_expr(config.cache == "v4"):
            address = base + Int64(page) * Int64(cache.shape[1])
            row = address + Int64(offset) * V4_PACKED.data_row_bytes
            scales = address + config.page_size * V4_PACKED.data_row_bytes + Int64(offset) * V4_PACKED.scale_row_bytes
            group = place.channel // V4_PACKED.group
            if place.channel < V4_PACKED.nope_dim:
                store(Float8E4M3FN, row + Int64(place.channel), widened(values, power_of_two(-exponent)))
            else:
                rope = place.channel - V4_PACKED.nope_dim
                store(BFloat16, row + Int64(V4_PACKED.nope_dim + 2 * rope), values)
                exponent = Int32(-BIAS)  # so that the byte after the seven scales is 0
            if place.channel % V4_PACKED.group == 0:
                values_at(Uint8, scales + Int64(group), 1)[0] = Uint8(exponent + BIAS)
        elif const_expr(config.cache == "indexer"):
            address = base + Int64(page) * Int64(cache.shape[1]) * INDEXER.row_bytes
            row = address + Int64(offset) * INDEXER.head_dim + Int64(place.channel)
            store(Float8E4M3FN, row, widened(values, power_of_two(-exponent)))
            if place.lane == 0:
                scale = address + Int64(cache.shape[1]) * INDEXER.head_dim + Int64(offset) * INDEXER.scale_bytes
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
    def keep(self, arrays: CompressArrays, request: Request, thread: Int32):
        """Write the request's last new tokens into its ring, with biased scores. All threads of the cluster call this
        function."""
        config = self.config
        ring = arrays.new_state.shape[1]
        vectors = 2 * config.width // LANE_CHANNELS  # vectors of a row of the state
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
