"""The kernels of the paged cache. They write rows into its slots, with or without a rotation first, or gather rows.
DESIGN.md in this folder gives the reasons.

Each kernel moves every row once, in one launch. A thread owns one chunk of columns (at most 16 bytes of results) of one
to four rows. The writes load a row's slot together with the row, not before it. Addresses are computed in 64 bits, in
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import AddressSpace, Float32, Int32, Int64, const_expr

from tsmla_kernels.cache_ops.config import GatherConfig, RopeWriteConfig, WriteConfig

DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
}
NOWHERE = -1  # the slot of a row that has no place in the cache, and the request of a row that belongs to none


def values_at(dtype, address, count):
    """The `count` values at an address of global memory, as a tensor that is read or written by instructions of up to
    16 bytes."""
    align = min(16, count * dtype.width // 8)
    pointer = cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


def load(dtype, address, count):
    """Load the `count` values at an address into registers."""
    values = cute.make_rmem_tensor((count,), dtype)
    cute.autovec_copy(values_at(dtype, address, count), values)
    return values


def store(dtype, address, values):
    """Write float32 registers, rounded to nearest even in `dtype` (fp8 saturates)."""
    count = cute.size(values)
    rounded = cute.make_rmem_tensor((count,), dtype)
    rounded.store(values.load().to(dtype))
    cute.autovec_copy(rounded, values_at(dtype, address, count))


def widened(values, factor):
    """The values times a factor, in float32 registers."""
    wide = cute.make_rmem_tensor((cute.size(values),), Float32)
    wide.store(values.load().to(Float32) * factor)
    return wide


def row_address(array, row, column_bytes):
    """The address of a row of an array [rows, pitch], plus `column_bytes`. The pitch is read from the array, because a
    launch may pass wider rows; only their first columns are read."""
    pitch = Int64(array.shape[1]) * (array.element_type.width // 8)
    return array.iterator.toint() + Int64(row) * pitch + Int64(column_bytes)


def slot_address(cache, slot, column_bytes):
    """The address of a slot's row in a cache [P, Z, D], plus `column_bytes`."""
    row_bytes = cache.shape[2] * cache.element_type.width // 8
    return cache.iterator.toint() + Int64(slot) * row_bytes + Int64(column_bytes)


def is_written(is_row, cache, slot):
    """Whether a row is written: `is_row` holds, and the slot lies in the cache [P, Z, D]."""
    return is_row & (slot >= 0) & (Int64(slot) < Int64(cache.shape[0]) * Int64(cache.shape[1]))


class WriteKvCache:
    """write_kv_cache: `config` is static, all shapes but D, L and R are dynamic.

    Operands of the launcher: kv_cache [P, Z, D], which is not read; latent [T, L] and k_rope [T, R], or wider rows that
    begin with these columns, every row at a multiple of 16 bytes (k_rope is not read if R = 0); slot_mapping [T] of
    config.slot_dtype; kv_scale [1] f32; new_kv_cache, the same memory as kv_cache.
    """

    def __init__(self, config: WriteConfig) -> None:
        self.config = config
        self.tiling = config.tiling
        self.in_dtype, self.kv_dtype = DTYPES[config.in_dtype], DTYPES[config.kv_dtype]
        self.latent_chunks = config.latent_dim // self.tiling.vector

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        kv_cache: cute.Tensor,
        latent: cute.Tensor,
        k_rope: cute.Tensor,
        slot_mapping: cute.Tensor,
        kv_scale: cute.Tensor,
        new_kv_cache: cute.Tensor,
    ):
        step = self.tiling.rows * self.config.unroll
        self.write(latent, k_rope, slot_mapping, kv_scale, new_kv_cache).launch(
            grid=[cute.ceil_div(slot_mapping.shape[0], step), 1, 1],
            block=[self.tiling.threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def write(
        self,
        latent: cute.Tensor,
        k_rope: cute.Tensor,
        slot_mapping: cute.Tensor,
        kv_scale: cute.Tensor,
        cache: cute.Tensor,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        tiling, unroll = self.tiling, self.config.unroll
        chunk, local_row = tidx % tiling.chunks, tidx // tiling.chunks
        first_row = block * (tiling.rows * unroll) + local_row
        num_tokens = slot_mapping.shape[0]
        in_bytes = self.in_dtype.width // 8

        slots, rows = [], []
        for u in cutlass.range_constexpr(unroll):
            token = cutlass.min(first_row + u * tiling.rows, num_tokens - 1)
            address = row_address(latent, token, chunk * (tiling.vector * in_bytes))
            if chunk >= self.latent_chunks:
                address = row_address(k_rope, token, (chunk - self.latent_chunks) * (tiling.vector * in_bytes))
            slots.append(slot_mapping[token])
            rows.append(load(self.in_dtype, address, tiling.vector))
        inverse = Float32(1.0) / kv_scale[0]
        for u in cutlass.range_constexpr(unroll):
            if is_written(first_row + u * tiling.rows < num_tokens, cache, slots[u]):
                address = slot_address(cache, slots[u], chunk * (tiling.vector * self.kv_dtype.width // 8))
                store(self.kv_dtype, address, widened(rows[u], inverse))


class RopeWriteArrays(NamedTuple):
    """The arrays that rope_write_kv_cache reads and writes, with N = T * H query rows. An input may have wider rows
    that begin with the columns given here; every row lies at a multiple of 16 bytes.

    Attributes:
      q_nope: [N, L]. q_rope: [N, R]. latent: [T, L]. k_rope: [T, R]. slot_mapping: [T] i32.
      cos, sin: [T, R / 2] f32. q_scale, kv_scale: [1] f32.
      q: [N, D]. new_kv_cache: [P, Z, D].
    """

    q_nope: cute.Tensor
    q_rope: cute.Tensor
    latent: cute.Tensor
    k_rope: cute.Tensor
    slot_mapping: cute.Tensor
    cos: cute.Tensor
    sin: cute.Tensor
    q_scale: cute.Tensor
    kv_scale: cute.Tensor
    q: cute.Tensor
    new_kv_cache: cute.Tensor


class RopeWriteKvCache:
    """rope_write_kv_cache: `config` is static, all shapes but D, L and R are dynamic.

    Operands of the launcher: kv_cache [P, Z, D], which is not read, and RopeWriteArrays, whose new_kv_cache is the same
    memory. The rows of the grid are first the N rows of q, then the T rows of the cache.
    """

    arrays = RopeWriteArrays

    def __init__(self, config: RopeWriteConfig) -> None:
        self.config = config
        self.tiling = config.tiling
        self.in_dtype = DTYPES[config.in_dtype]
        self.q_dtype, self.kv_dtype = DTYPES[config.q_dtype], DTYPES[config.kv_dtype]
        self.latent_chunks = config.latent_dim // self.tiling.vector
        self.half = config.rope_dim // 2
        self.pairs = self.tiling.vector // 2  # how many pairs a thread rotates

    @cute.jit
    def __call__(self, stream: cuda.CUstream, kv_cache: cute.Tensor, *operands: cute.Tensor):
        arrays = self.arrays(*operands)
        num_tokens, q_rows = arrays.slot_mapping.shape[0], arrays.q.shape[0]
        step = self.tiling.rows * self.config.unroll
        self.rotate_and_write(arrays, Int32(q_rows // num_tokens)).launch(
            grid=[cute.ceil_div(q_rows + num_tokens, step), 1, 1],
            block=[self.tiling.threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def rotate_and_write(self, arrays: RopeWriteArrays, num_heads: Int32):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        tiling, unroll = self.tiling, self.config.unroll
        chunk, local_row = tidx % tiling.chunks, tidx // tiling.chunks
        first_row = block * (tiling.rows * unroll) + local_row
        vector, in_bytes = tiling.vector, self.in_dtype.width // 8
        latent_dim = self.config.latent_dim

        if chunk < self.latent_chunks:
            slots, rows = [], []
            for u in cutlass.range_constexpr(unroll):
                row = first_row + u * tiling.rows
                address, _, slot = self.source(
                    arrays, arrays.q_nope, arrays.latent, row, num_heads, chunk * (vector * in_bytes)
                )
                slots.append(slot)
                rows.append(load(self.in_dtype, address, vector))
            factors = Float32(1.0) / arrays.q_scale[0], Float32(1.0) / arrays.kv_scale[0]
            for u in cutlass.range_constexpr(unroll):
                self.write(arrays, first_row + u * tiling.rows, slots[u], chunk * vector, (rows[u],), factors)
        else:
            slots, pairs, angles = [], [], []
            pair = (chunk - self.latent_chunks) * self.pairs
            for u in cutlass.range_constexpr(unroll):
                row = first_row + u * tiling.rows
                address, token, slot = self.source(arrays, arrays.q_rope, arrays.k_rope, row, num_heads, 0)
                slots.append(slot)
                pairs.append(self.load_pairs(address, pair))
                tables = arrays.cos, arrays.sin
                angles.append([load(Float32, row_address(table, token, pair * 4), self.pairs) for table in tables])
            factors = Float32(1.0) / arrays.q_scale[0], Float32(1.0) / arrays.kv_scale[0]
            for u in cutlass.range_constexpr(unroll):
                (x, y), (cos, sin) = pairs[u], angles[u]
                rotated = [
                    [x[i] * cos[i] - y[i] * sin[i] for i in range(self.pairs)],
                    [y[i] * cos[i] + x[i] * sin[i] for i in range(self.pairs)],
                ]
                if const_expr(self.config.rope_layout == "interleaved"):
                    rotated = [[rotated[i % 2][i // 2] for i in range(vector)]]
                # Round to the inputs' dtype, as a separate rotation would do before the quantisation.
                stores = [self.rounded(values) for values in rotated]
                column = latent_dim + pair * (3 - len(stores))
                self.write(arrays, first_row + u * tiling.rows, slots[u], column, stores, factors)

    @cute.jit
    def source(
        self,
        arrays: RopeWriteArrays,
        q_part: cute.Tensor,
        kv_part: cute.Tensor,
        row: Int32,
        num_heads: Int32,
        column_bytes: Int32,
    ):
        """(address, token, slot) of a row of the grid: the address from which the row is read, its token, and its slot
        in the cache (0 for a row of q). A row past the last one is read as the last one. `q_part` and `kv_part` are the
        inputs that hold rows of q and of the cache."""
        q_rows = arrays.q.shape[0]
        row = cutlass.min(row, q_rows + arrays.slot_mapping.shape[0] - 1)
        address = row_address(q_part, cutlass.min(row, q_rows - 1), column_bytes)
        token, slot = row // num_heads, Int32(0)
        if row >= q_rows:
            token = row - q_rows
            address = row_address(kv_part, token, column_bytes)
            slot = arrays.slot_mapping[token]
        return address, token, slot

    def load_pairs(self, address, pair):
        """The first and the second members, in float32, of a thread's pairs. The rope vector is at `address`, and
        `pair` is the index of the thread's first pair."""
        count, size = self.pairs, self.in_dtype.width // 8
        if self.config.rope_interleave:
            both = load(self.in_dtype, address + Int64(pair * (2 * size)), 2 * count)
            sides = [[both[2 * i + side] for i in range(count)] for side in range(2)]
        else:
            starts = [address + Int64((pair + side * self.half) * size) for side in range(2)]
            halves = [load(self.in_dtype, start, count) for start in starts]
            sides = [[half[i] for i in range(count)] for half in halves]
        return [[value.to(Float32) for value in side] for side in sides]

    def rounded(self, values):
        """Round `values` to the inputs' dtype, into registers."""
        registers = cute.make_rmem_tensor((len(values),), self.in_dtype)
        for i, value in enumerate(values):
            registers[i] = value.to(self.in_dtype)
        return registers

    @cute.jit
    def write(
        self,
        arrays: RopeWriteArrays,
        row: Int32,
        slot: Int32,
        column: Int32,
        stores: Sequence[cute.Tensor],
        factors: tuple[Float32, Float32],
    ):
        """Multiply values of a row of the grid by the factor of q or of the cache, and write them into q or into the
        row's slot in the cache. The first group of `stores` is written at `column`, the second, if any, half a rope
        vector further on."""
        q_rows = arrays.q.shape[0]
        if row < q_rows:
            for i in cutlass.range_constexpr(len(stores)):
                address = row_address(arrays.q, row, (column + i * self.half) * (self.q_dtype.width // 8))
                store(self.q_dtype, address, widened(stores[i], factors[0]))
        elif is_written(row < q_rows + arrays.slot_mapping.shape[0], arrays.new_kv_cache, slot):
            for i in cutlass.range_constexpr(len(stores)):
                address = slot_address(arrays.new_kv_cache, slot, (column + i * self.half) * (self.kv_dtype.width // 8))
                store(self.kv_dtype, address, widened(stores[i], factors[1]))


class GatherKvCache:
    """gather_kv_cache: `config` is static, all shapes but D are dynamic.

    Operands of the launcher: kv_cache [P, Z, D], block_tables [B, M] i32, starts [B] i32, lens [B] i32, kv_scale [1]
    f32, out [N, D].

    A CTA finds the requests of its own rows, so that no earlier launch is needed: all threads add up lens, one segment
    of requests at a time, and one thread for each row searches the sums.
    """

    def __init__(self, config: GatherConfig) -> None:
        self.config = config
        self.tiling = config.tiling
        self.kv_dtype, self.out_dtype = DTYPES[config.kv_dtype], DTYPES[config.out_dtype]
        # How many requests' lengths are added up at once: a power of two, for the search.
        self.segment = 1 << (min(self.tiling.threads, 256).bit_length() - 1)

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        kv_cache: cute.Tensor,
        block_tables: cute.Tensor,
        starts: cute.Tensor,
        lens: cute.Tensor,
        kv_scale: cute.Tensor,
        out: cute.Tensor,
    ):
        @cute.struct
        class Storage:
            ends: cute.struct.MemRange[Int32, self.segment]
            totals: cute.struct.MemRange[Int32, self.segment // 32]
            slots: cute.struct.MemRange[Int64, self.config.cta_rows]

        self.storage = Storage
        self.gather(kv_cache, block_tables, starts, lens, kv_scale, out).launch(
            grid=[cute.ceil_div(out.shape[0], self.config.cta_rows), 1, 1],
            block=[self.tiling.threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def gather(
        self,
        cache: cute.Tensor,
        block_tables: cute.Tensor,
        starts: cute.Tensor,
        lens: cute.Tensor,
        kv_scale: cute.Tensor,
        out: cute.Tensor,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        storage = utils.SmemAllocator().allocate(self.storage)
        ends = storage.ends.get_tensor(cute.make_layout(self.segment))
        totals = storage.totals.get_tensor(cute.make_layout(self.segment // 32))
        slots = storage.slots.get_tensor(cute.make_layout(self.config.cta_rows))
        tiling, unroll, cta_rows = self.tiling, self.config.unroll, self.config.cta_rows

        request, position = self.owner(block * cta_rows + tidx, lens, ends, totals, tidx)
        if tidx < cta_rows:
            slots[tidx] = self.slot(request, position, cache, block_tables, starts)
        cute.arch.sync_threads()

        chunk, local_row = tidx % tiling.chunks, tidx // tiling.chunks
        in_column = chunk * (tiling.vector * self.kv_dtype.width // 8)
        out_column = chunk * (tiling.vector * self.out_dtype.width // 8)
        factor = kv_scale[0]
        for batch_of_rows in cutlass.range(self.config.rounds // unroll, unroll=1):
            sources, rows = [], []
            first_row = batch_of_rows * (unroll * tiling.rows) + local_row
            for u in cutlass.range_constexpr(unroll):
                sources.append(slots[first_row + u * tiling.rows])
                address = slot_address(cache, cutlass.max(sources[u], Int64(0)), in_column)
                rows.append(load(self.kv_dtype, address, tiling.vector))
            for u in cutlass.range_constexpr(unroll):
                row = block * cta_rows + first_row + u * tiling.rows
                if row < out.shape[0]:
                    values = widened(rows[u], factor)
                    if sources[u] < 0:
                        values.fill(0.0)
                    store(self.out_dtype, row_address(out, row, out_column), values)

    @cute.jit
    def owner(self, row: Int32, lens: cute.Tensor, ends: cute.Tensor, totals: cute.Tensor, tidx: Int32):
        """Find (request, position) of a row of `out`; the position counts from starts[request]. The request is -1
        if the row belongs to no request."""
        batch, warp, lane = lens.shape[0], tidx // 32, tidx % 32
        request, position, before = Int32(NOWHERE), Int32(0), Int32(0)
        for segment in cutlass.range(cute.ceil_div(batch, self.segment), unroll=1):
            first = segment * self.segment
            total = Int32(0)
            if tidx < self.segment:
                if first + tidx < batch:
                    total = cutlass.max(lens[first + tidx], 0)
                for step in cutlass.range_constexpr(5):
                    other = cute.arch.shuffle_sync_up(total, offset=1 << step, mask_and_clamp=0)
                    if lane >= 1 << step:
                        total += other
                if lane == 31:
                    totals[warp] = total
            cute.arch.sync_threads()
            if tidx < self.segment:
                for w in cutlass.range_constexpr(self.segment // 32):
                    if w < warp:
                        total += totals[w]
                ends[tidx] = total
            cute.arch.sync_threads()
            inside = row - before
            if (inside >= 0) & (inside < ends[self.segment - 1]):
                # Count the requests that end at or before the row, which skips requests of length 0.
                count = Int32(0)
                for step in cutlass.range_constexpr(self.segment.bit_length() - 1):
                    half = self.segment >> (step + 1)
                    if ends[count + half - 1] <= inside:
                        count += half
                position = inside
                if count > 0:
                    position = inside - ends[count - 1]
                request = first + count
            before += ends[self.segment - 1]
            cute.arch.sync_threads()
        return request, position

    @cute.jit
    def slot(
        self, request: Int32, position: Int32, cache: cute.Tensor, block_tables: cute.Tensor, starts: cute.Tensor
    ) -> Int64:
        """The slot of a request's token, or NOWHERE if the block table has no entry for the token. A page outside the
        cache is replaced by the nearest page inside."""
        slot = Int64(NOWHERE)
        if request >= 0:
            page_size = cache.shape[1]
            token = starts[request] + position
            if (token >= 0) & (Int64(token) < Int64(block_tables.shape[1]) * Int64(page_size)):
                entry = token // page_size
                offset = Int64(request) * Int64(block_tables.shape[1]) + Int64(entry)
                page = cute.make_tensor(block_tables.iterator + offset, cute.make_layout(1))[0]
                page = cutlass.min(cutlass.max(page, 0), cache.shape[0] - 1)
                slot = Int64(page) * Int64(page_size) + Int64(token - entry * page_size)
        return slot
