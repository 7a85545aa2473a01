"""The paged cache's own kernels: writing rows into its slots, with and without the rotation before it, and gathering
them back. DESIGN.md beside this says why they look as they do.

Each moves rows once, each in one launch. A thread keeps one chunk of columns (16 bytes of results) and walks down rows
with it, a few of them in flight at once; whatever decides where a row goes is read beside the row, not before it.
Addresses are computed in 64 bits, in bytes.
"""

from __future__ import annotations

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
NOWHERE = -1  # the slot of a row that comes from, or goes to, no place in the cache


def values_at(dtype, address, count):
    """The `count` values at an address, as a tensor over global memory that is read and written at its full width."""
    align = min(16, count * dtype.width // 8)
    pointer = cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


def load(dtype, address, count):
    """These values in registers."""
    values = cute.make_rmem_tensor((count,), dtype)
    cute.autovec_copy(values_at(dtype, address, count), values)
    return values


def store(dtype, address, values):
    """`values`, float32 in registers, rounded to nearest even into `dtype` (fp8 saturates) and written."""
    count = cute.size(values)
    rounded = cute.make_rmem_tensor((count,), dtype)
    rounded.store(values.load().to(dtype))
    cute.autovec_copy(rounded, values_at(dtype, address, count))


def widened(values, factor):
    """Float32 registers: the values times a factor."""
    wide = cute.make_rmem_tensor((cute.size(values),), Float32)
    wide.store(values.load().to(Float32) * factor)
    return wide


def row_address(array, row, column_bytes):
    """Where a row of an array [rows, pitch] begins, plus some bytes. The pitch is read from the array: whoever launches
    may pass a slice of wider rows as an array of those (their first columns are what is read)."""
    pitch = Int64(array.shape[1]) * (array.element_type.width // 8)
    return array.iterator.toint() + Int64(row) * pitch + Int64(column_bytes)


def slot_address(cache, slot, column_bytes):
    """Where the row of a slot begins in a cache [P, Z, D], plus some bytes."""
    row_bytes = cache.shape[2] * cache.element_type.width // 8
    return cache.iterator.toint() + Int64(slot) * row_bytes + Int64(column_bytes)


def num_slots(cache):
    """P * Z, in 64 bits."""
    return Int64(cache.shape[0]) * Int64(cache.shape[1])


class WriteKvCache:
    """write_kv_cache: `config` is static, all shapes but D, L and R are dynamic.

    Operands of the launcher: kv_cache [P, Z, D], latent [T, L] and k_rope [T, R] (or rows of which these are the first
    columns; every row at a multiple of 16 bytes; k_rope is not read where R = 0), slot_mapping [T] i32, kv_scale [1]
    f32, new_kv_cache: the same memory as kv_cache, which is not read.
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
        chunk, local = tidx % tiling.chunks, tidx // tiling.chunks
        first = block * (tiling.rows * unroll) + local
        num_tokens = slot_mapping.shape[0]
        in_bytes = self.in_dtype.width // 8

        slots, rows = [], []
        for u in cutlass.range_constexpr(unroll):
            token = cutlass.min(first + u * tiling.rows, num_tokens - 1)
            at = row_address(latent, token, chunk * (tiling.vector * in_bytes))
            if chunk >= self.latent_chunks:
                at = row_address(k_rope, token, (chunk - self.latent_chunks) * (tiling.vector * in_bytes))
            slots.append(slot_mapping[token])
            rows.append(load(self.in_dtype, at, tiling.vector))
        inverse = Float32(1.0) / kv_scale[0]
        for u in cutlass.range_constexpr(unroll):
            inside = (first + u * tiling.rows < num_tokens) & (slots[u] >= 0) & (Int64(slots[u]) < num_slots(cache))
            if inside:
                at = slot_address(cache, slots[u], chunk * (tiling.vector * self.kv_dtype.width // 8))
                store(self.kv_dtype, at, widened(rows[u], inverse))


class RopeWriteKvCache:
    """rope_write_kv_cache: `config` is static, all shapes but D, L and R are dynamic.

    Operands of the launcher, N = T * H query rows: kv_cache [P, Z, D]; q_nope [N, L], q_rope [N, R], latent [T, L],
    k_rope [T, R], cos and sin [T, R / 2] f32 (each of them also as rows of which these are the first columns, every row
    at a multiple of 16 bytes); slot_mapping [T] i32, q_scale [1] and kv_scale [1] f32; q [N, D]; new_kv_cache: the same
    memory as kv_cache, which is not read.

    The rows of the grid are the N of q, and then the T of the cache.
    """

    def __init__(self, config: RopeWriteConfig) -> None:
        self.config = config
        self.tiling = config.tiling
        self.in_dtype = DTYPES[config.in_dtype]
        self.q_dtype, self.kv_dtype = DTYPES[config.q_dtype], DTYPES[config.kv_dtype]
        self.latent_chunks = config.latent_dim // self.tiling.vector
        self.half = config.rope_dim // 2
        self.pairs = self.tiling.vector // 2  # that a thread rotates

    @cute.jit
    def __call__(
        self,
        stream: cuda.CUstream,
        kv_cache: cute.Tensor,
        q_nope: cute.Tensor,
        q_rope: cute.Tensor,
        latent: cute.Tensor,
        k_rope: cute.Tensor,
        slot_mapping: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        q_scale: cute.Tensor,
        kv_scale: cute.Tensor,
        q: cute.Tensor,
        new_kv_cache: cute.Tensor,
    ):
        tokens, q_rows = slot_mapping.shape[0], q.shape[0]
        step = self.tiling.rows * self.config.unroll
        self.rotate_and_write(
            q_nope, q_rope, latent, k_rope, slot_mapping, cos, sin, q_scale, kv_scale, q, new_kv_cache,
            Int32(q_rows // tokens),
        ).launch(
            grid=[cute.ceil_div(q_rows + tokens, step), 1, 1],
            block=[self.tiling.threads, 1, 1],
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def rotate_and_write(
        self,
        q_nope: cute.Tensor,
        q_rope: cute.Tensor,
        latent: cute.Tensor,
        k_rope: cute.Tensor,
        slot_mapping: cute.Tensor,
        cos: cute.Tensor,
        sin: cute.Tensor,
        q_scale: cute.Tensor,
        kv_scale: cute.Tensor,
        q: cute.Tensor,
        cache: cute.Tensor,
        num_heads: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        tiling, unroll = self.tiling, self.config.unroll
        chunk, local = tidx % tiling.chunks, tidx // tiling.chunks
        first = block * (tiling.rows * unroll) + local
        q_rows, num_tokens = q.shape[0], slot_mapping.shape[0]
        in_bytes, vector = self.in_dtype.width // 8, self.tiling.vector

        if chunk < self.latent_chunks:
            slots, rows = [], []
            for u in cutlass.range_constexpr(unroll):
                row = cutlass.min(first + u * tiling.rows, q_rows + num_tokens - 1)
                at = row_address(q_nope, cutlass.min(row, q_rows - 1), chunk * (vector * in_bytes))
                slot = Int32(0)
                if row >= q_rows:
                    at = row_address(latent, row - q_rows, chunk * (vector * in_bytes))
                    slot = slot_mapping[row - q_rows]
                slots.append(slot)
                rows.append(load(self.in_dtype, at, vector))
            factors = Float32(1.0) / q_scale[0], Float32(1.0) / kv_scale[0]
            for u in cutlass.range_constexpr(unroll):
                row = first + u * tiling.rows
                self.put(q, cache, row, slots[u], num_tokens, chunk * vector, (rows[u],), 0, factors)
        else:
            slots, firsts, seconds, angles = [], [], [], []
            pair = (chunk - self.latent_chunks) * self.pairs
            for u in cutlass.range_constexpr(unroll):
                row = cutlass.min(first + u * tiling.rows, q_rows + num_tokens - 1)
                at = row_address(q_rope, cutlass.min(row, q_rows - 1), 0)
                token, slot = row // num_heads, Int32(0)
                if row >= q_rows:
                    token = row - q_rows
                    at = row_address(k_rope, token, 0)
                    slot = slot_mapping[token]
                slots.append(slot)
                halves = self.load_pairs(at, pair)
                firsts.append(halves[0])
                seconds.append(halves[1])
                angles.append(
                    tuple(load(Float32, row_address(table, token, pair * 4), self.pairs) for table in (cos, sin))
                )
            factors = Float32(1.0) / q_scale[0], Float32(1.0) / kv_scale[0]
            for u in cutlass.range_constexpr(unroll):
                x, y, (c, s) = firsts[u], seconds[u], angles[u]
                turned = [
                    [x[i] * c[i] - y[i] * s[i] for i in range(self.pairs)],
                    [y[i] * c[i] + x[i] * s[i] for i in range(self.pairs)],
                ]
                row, latent_dim = first + u * tiling.rows, self.config.latent_dim
                if const_expr(self.config.rope_layout == "interleaved"):
                    # In pairs, and rounded as the input is: quantising starts from what an unfused rotation gives.
                    values = cute.make_rmem_tensor((vector,), self.in_dtype)
                    for i in cutlass.range_constexpr(self.pairs):
                        for side in cutlass.range_constexpr(2):
                            values[2 * i + side] = turned[side][i].to(self.in_dtype)
                    self.put(q, cache, row, slots[u], num_tokens, latent_dim + 2 * pair, (values,), 0, factors)
                else:
                    sides = []
                    for side in cutlass.range_constexpr(2):
                        values = cute.make_rmem_tensor((self.pairs,), self.in_dtype)
                        for i in cutlass.range_constexpr(self.pairs):
                            values[i] = turned[side][i].to(self.in_dtype)
                        sides.append(values)
                    self.put(q, cache, row, slots[u], num_tokens, latent_dim + pair, sides, self.half, factors)

    def load_pairs(self, at, pair):
        """The first and the second members, in float32, of a thread's pairs from number `pair` on of the rope vector at
        an address."""
        count, size = self.pairs, self.in_dtype.width // 8
        if self.config.rope_interleave:
            both = load(self.in_dtype, at + Int64(pair * (2 * size)), 2 * count)
            sides = [[both[2 * i + side] for i in range(count)] for side in range(2)]
        else:
            halves = [load(self.in_dtype, at + Int64((pair + side * self.half) * size), count) for side in range(2)]
            sides = [[half[i] for i in range(count)] for half in halves]
        return [[value.to(Float32) for value in side] for side in sides]

    @cute.jit
    def put(
        self,
        q: cute.Tensor,
        cache: cute.Tensor,
        row: Int32,
        slot: Int32,
        num_tokens: Int32,
        column: Int32,
        parts: cutlass.Constexpr,
        apart: cutlass.Constexpr,
        factors: cutlass.Constexpr,
    ):
        """Values of the grid's row `row` from `column` on: into q, or into the cache's slot; more parts follow `apart`
        columns on."""
        if row < q.shape[0]:
            for i in cutlass.range_constexpr(len(parts)):
                at = row_address(q, row, (column + i * apart) * (self.q_dtype.width // 8))
                store(self.q_dtype, at, widened(parts[i], factors[0]))
        elif (row < q.shape[0] + num_tokens) & (slot >= 0) & (Int64(slot) < num_slots(cache)):
            for i in cutlass.range_constexpr(len(parts)):
                at = slot_address(cache, slot, (column + i * apart) * (self.kv_dtype.width // 8))
                store(self.kv_dtype, at, widened(parts[i], factors[1]))


class GatherKvCache:
    """gather_kv_cache: `config` is static, all shapes but D are dynamic.

    Operands of the launcher: kv_cache [P, Z, D], block_tables [B, M] i32, starts [B] i32, lens [B] i32, kv_scale [1]
    f32, out [N, D].

    A CTA finds the requests of its own rows: it adds up lens with all its threads, a segment at a time, and one thread
    for each row searches the sums. Nothing is prepared by a launch before.
    """

    def __init__(self, config: GatherConfig) -> None:
        self.config = config
        self.tiling = config.tiling
        self.kv_dtype, self.out_dtype = DTYPES[config.kv_dtype], DTYPES[config.out_dtype]
        # Requests that are added up at once, a power of two for the search.
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

        chunk, local = tidx % tiling.chunks, tidx // tiling.chunks
        in_column = chunk * (tiling.vector * self.kv_dtype.width // 8)
        out_column = chunk * (tiling.vector * self.out_dtype.width // 8)
        factor = kv_scale[0]
        for turn in cutlass.range(self.config.rounds // unroll, unroll=1):
            sources, rows = [], []
            begin = turn * (unroll * tiling.rows) + local
            for u in cutlass.range_constexpr(unroll):
                sources.append(slots[begin + u * tiling.rows])
                at = slot_address(cache, cutlass.max(sources[u], Int64(0)), in_column)
                rows.append(load(self.kv_dtype, at, tiling.vector))
            for u in cutlass.range_constexpr(unroll):
                row = block * cta_rows + begin + u * tiling.rows
                if row < out.shape[0]:
                    values = widened(rows[u], factor)
                    if sources[u] < 0:
                        values.fill(0.0)
                    store(self.out_dtype, row_address(out, row, out_column), values)

    @cute.jit
    def owner(self, row: Int32, lens: cute.Tensor, ends: cute.Tensor, totals: cute.Tensor, tidx: Int32):
        """(request, position in it) of a packed row; request -1 if it is no request's."""
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
                # As many requests as end at or before the row: this steps over those of length 0.
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
        """Where a request's token lies in the cache, NOWHERE if it is not inside the table. A page outside of the cache
        is taken for the nearest inside."""
        found = Int64(NOWHERE)
        if request >= 0:
            page_size = cache.shape[1]
            token = starts[request] + position
            if (token >= 0) & (Int64(token) < Int64(block_tables.shape[1]) * Int64(page_size)):
                entry = token // page_size
                at = Int64(request) * Int64(block_tables.shape[1]) + Int64(entry)
                page = cute.make_tensor(block_tables.iterator + at, cute.make_layout(1))[0]
                page = cutlass.min(cutlass.max(page, 0), cache.shape[0] - 1)
                found = Int64(page) * Int64(page_size) + Int64(token - entry * page_size)
        return found
