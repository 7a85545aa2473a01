"""The kernel that makes a group's union: the slots that its tokens select, each once, and a bit for each token.

A CTA has a group, and each thread some columns of every token. First the CTA marks a quarter of the slots in a bitmap,
those whose hashes are low: the number of marks shows about what part of the slots are different. If the tokens share
little, they gather for themselves, and no more is done. Otherwise the slots go to a hash table in shared memory, with
the bits of the tokens that select them. The union has the first token's slots, then those of the second token that the
first does not have, and so on. Their order does not depend on the order in which threads run. If a token has a slot
twice, the group's tokens also gather for themselves, because a bit does not say how often a token has the slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Float32, Int32, Int64, const_expr

from tsmla_kernels.sm90.sparse.union_config import MOST_COLUMNS, PARTS, TABLE, WORTH, UnionConfig
from tsmla_kernels.sm90.sparse_backward.config import SparseBackwardConfig
from tsmla_kernels.sm90.storage import checked_storage
from tsmla_kernels.sm90.warp import element, quotient, remainder, running_sum

THREADS = 1024
WARPS = THREADS // 32
COLUMNS = MOST_COLUMNS // THREADS  # columns of each token that a thread has
EMPTY = -1  # a place of the table without a slot
NO_SLOT = (1 << 31) - 1  # a cache has fewer slots; with the second cache's bit it would be EMPTY
SECOND_CACHE = -(1 << 31)  # the bit of the second cache's slots
GOLDEN = 0x9E3779B1 - (1 << 32)  # 2^32 divided by the golden ratio, odd: multiplied by it, slots spread over the table
MARKS = THREADS * 32  # bits of the bitmap: a word for each thread. It lies where the table's bits lie later
HASHES = MARKS * 4  # how many hashes there are: slots with a hash below MARKS are marked
FEWEST_MARKED = 512  # fewer marked slots say too little of the others
DOUBT = 3  # an error, in PARTS-ths of the selected slots, that the number of slots found from the marks may have


class Total(IntEnum):
    """Words of shared memory that count a group's slots."""

    SELECTED = 0  # slots, each as often as tokens have it
    LOOKED_AT = 1  # those of the selected slots that are marked in the bitmap
    MARKED = 2  # marks in the bitmap
    DIFFERENT = 3  # different slots
    TWICE = 4  # slots that a token has twice


class UnionArrays(NamedTuple):
    """The operands of the kernel.

    Attributes:
      indices: [T, K]. lengths: [T], or None.
      slots: [G, U], the unions; in a slot of the second cache the bit SECOND_CACHE is set. bits: [G, U], a byte for
        each slot; bit i says whether token i of the group selects the slot.
      union_lengths: [G], how many slots a union has; -1 if the group's tokens gather for themselves.
      token_lengths: [T], n if a token has n active columns; -1 - n instead if the token's group shares.
    """

    indices: cute.Tensor
    lengths: cute.Tensor | None
    slots: cute.Tensor
    bits: cute.Tensor
    union_lengths: cute.Tensor
    token_lengths: cute.Tensor


class Table(NamedTuple):
    """The hash table in shared memory: `slots`; `bits`, a byte for each slot, four in a word; the words of Total; and
    counts[w, n], how many slots of the union the warps before warp w have in the n-th columns of their threads."""

    slots: cute.Tensor
    bits: cute.Tensor
    totals: cute.Tensor
    counts: cute.Tensor


class UnionMaker:
    """Makes the unions of a call, one CTA for each group.

    Attributes:
      tokens: tokens of a group. each: columns of a thread, those of all tokens together. window: as in SparseConfig.
      worth: how many PARTS-ths of the slots that the tokens select a union may have.
    """

    def __init__(self, config: UnionConfig | SparseBackwardConfig, worth: Mapping[int, int] = WORTH) -> None:
        self.config, self.tokens, self.window, self.worth = config, config.tokens, config.window, worth[config.tokens]
        self.each = COLUMNS * self.tokens

    @cute.jit
    def launch(self, stream: cuda.CUstream, arrays: UnionArrays):
        """Launch the kernel."""

        @cute.struct
        class Storage:
            slots: cute.struct.Align[cute.struct.MemRange[Int32, TABLE], 16]
            bits: cute.struct.Align[cute.struct.MemRange[Int32, TABLE // 4], 16]
            totals: cute.struct.Align[cute.struct.MemRange[Int32, len(Total)], 16]
            counts: cute.struct.Align[cute.struct.MemRange[Int32, WARPS * (self.each + 1)], 16]

        self.storage = checked_storage(Storage, self.config)
        self.make(arrays).launch(
            grid=[arrays.union_lengths.shape[0], 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=2 if self.tokens <= 4 else 1,  # so that a thread's slots stay in registers
            preferred_smem_carveout=100,  # as in the next launch, because changing it takes time
        )

    @cute.kernel
    def make(self, arrays: UnionArrays):
        """Make the union of a group, or find that it is not worth it."""
        cute.arch.griddepcontrol_launch_dependents()
        group, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        storage = utils.SmemAllocator().allocate(self.storage)
        table = Table(
            storage.slots.get_tensor(cute.make_layout(TABLE)),
            storage.bits.get_tensor(cute.make_layout(TABLE // 4)),
            storage.totals.get_tensor(cute.make_layout(len(Total))),
            storage.counts.get_tensor(cute.make_layout((WARPS, self.each + 1))),
        )
        keys = self.load_keys(group, thread, arrays)
        table.bits[thread] = Int32(0)
        if thread < len(Total):
            table.totals[thread] = Int32(0)
        cute.arch.sync_threads()
        self.mark(keys, table)
        cute.arch.sync_threads()
        self.count_marks(thread, table)
        cute.arch.sync_threads()
        selected, worth = table.totals[Total.SELECTED], Int32(self.worth)
        # Different slots can have the same mark: if n marks are set, the next slot meets one with chance n / MARKS.
        marked = Float32(table.totals[Total.MARKED])
        different = marked + marked * marked * (0.5 / MARKS)
        # The host calls this kernel only if all columns have a thread.
        shares = Int32(arrays.indices.shape[1] <= MOST_COLUMNS)
        looked_at = table.totals[Total.LOOKED_AT]
        if looked_at >= FEWEST_MARKED and different * PARTS > Float32(looked_at * (worth + DOUBT)):
            shares = Int32(0)
        length = Int32(-1)
        if shares == 1:
            self.fill(table.slots, EMPTY, thread)
            self.fill(table.bits, 0, thread)
            cute.arch.sync_threads()
            self.enter(keys, table)
            cute.arch.sync_threads()
            length = table.totals[Total.DIFFERENT]
            if length * PARTS > selected * worth or length > arrays.slots.shape[1] or table.totals[Total.TWICE] > 0:
                shares, length = Int32(0), Int32(-1)
            else:
                self.write(group, thread, keys, table, arrays)
        if thread == 0:
            arrays.union_lengths[group] = length
        token = group * self.tokens + thread
        if thread < self.tokens and token < arrays.indices.shape[0]:
            arrays.token_lengths[token] = self.length(token, arrays) ^ -shares  # ~length is -1 - length

    @cute.jit
    def fill(self, words: cute.Tensor, value: cutlass.Constexpr[int], thread: Int32):
        """Set all words to `value`."""
        four = cute.make_rmem_tensor((4,), Int32)
        four.fill(value)
        for i in cutlass.range_constexpr(0, cute.size(words), THREADS * 4):
            pointer = (words.iterator + (i + thread * 4)).align(16)
            cute.autovec_copy(four, cute.make_tensor(pointer, cute.make_layout(4)))

    @cute.jit
    def length(self, token: Int32, arrays: UnionArrays):
        """How many columns of a token are active; 0 if there is no such token."""
        columns, tokens = Int32(arrays.indices.shape[1]), arrays.indices.shape[0]
        length = columns
        if const_expr(arrays.lengths is not None):
            length = cutlass.min(cutlass.max(arrays.lengths[cutlass.min(token, tokens - 1)], 0), columns)
        if token >= tokens:
            length = Int32(0)
        return length

    @cute.jit
    def load_keys(self, group: Int32, thread: Int32, arrays: UnionArrays):
        """Load the slots of a thread's columns, with SECOND_CACHE set in those of the second cache; EMPTY for a column
        without a slot. The loads are not in branches, so that all are in flight at once."""
        keys = cute.make_rmem_tensor((COLUMNS, self.tokens), Int32)
        columns, tokens = arrays.indices.shape[1], arrays.indices.shape[0]
        for i in cutlass.range_constexpr(self.tokens):
            token = cutlass.min(group * self.tokens + i, tokens - 1)
            row = element(arrays.indices, Int64(token) * columns, 4)
            selected = cute.make_tensor(row, cute.make_layout(1 << 30))
            for j in cutlass.range_constexpr(COLUMNS):
                keys[j, i] = selected[cutlass.min(thread + j * THREADS, columns - 1)]
        for i in cutlass.range_constexpr(self.tokens):
            length = self.length(group * self.tokens + i, arrays)
            for j in cutlass.range_constexpr(COLUMNS):
                column, key = thread + j * THREADS, keys[j, i]
                if column >= length or key < 0 or key == NO_SLOT:
                    key = Int32(EMPTY)
                elif const_expr(self.window is not None):
                    if column >= self.window:
                        key = key | Int32(SECOND_CACHE)
                keys[j, i] = key
        return keys

    @cute.jit
    def mark(self, keys: cute.Tensor, table: Table):
        """Count a thread's slots, and mark those with low hashes in the bitmap."""
        selected, looked_at = Int32(0), Int32(0)
        for n in cutlass.range_constexpr(self.each):
            mark = remainder((keys[n] * GOLDEN) >> (32 - (HASHES.bit_length() - 1)), HASHES)
            is_slot = Int32(keys[n] != EMPTY)
            selected += is_slot
            if is_slot == 1 and mark < MARKS:
                bit = Int32(1) << remainder(mark, 32)
                cute.arch.atomic_or(table.bits.iterator + quotient(mark, 32), bit, sem="relaxed", scope="cta")
                looked_at += 1
        self.add(Total.SELECTED, selected, table)
        self.add(Total.LOOKED_AT, looked_at, table)

    @cute.jit
    def count_marks(self, thread: Int32, table: Table):
        """Count the marks of the bitmap."""
        self.add(Total.MARKED, cute.arch.popc(table.bits[thread]), table)

    @cute.jit
    def add(self, which: cutlass.Constexpr[Total], count: Int32, table: Table):
        """Add the counts of a warp's threads to the total `which`."""
        total = cute.arch.warp_redux_sync(count, "add")
        if cute.arch.lane_idx() == 0 and total > 0:
            cute.arch.atomic_add(table.totals.iterator + which, total, sem="relaxed", scope="cta")

    @cute.jit
    def enter(self, keys: cute.Tensor, table: Table):
        """Enter a thread's slots in the table, and replace each slot in `keys` by its place there."""
        different, twice = Int32(0), Int32(0)
        for n in cutlass.range_constexpr(self.each):
            if keys[n] != EMPTY:
                place, fresh = self.enter_key(keys[n], table)
                shift = remainder(place, 4) * 8 + n // COLUMNS
                before = cute.arch.atomic_or(
                    table.bits.iterator + quotient(place, 4), Int32(1) << shift, sem="relaxed", scope="cta"
                )
                different += fresh
                twice += (before >> shift) & 1
                keys[n] = place
        self.add(Total.DIFFERENT, different, table)
        self.add(Total.TWICE, twice, table)

    @cute.jit
    def enter_key(self, key: Int32, table: Table):
        """Enter slot `key` if the table does not have it. Return its place, and 1 if it was entered, otherwise 0."""
        place = remainder((key * GOLDEN) >> (32 - (TABLE.bit_length() - 1)), TABLE)
        fresh, searching = Int32(0), Int32(1)
        while searching == 1:
            there = cute.arch.atomic_cas(
                table.slots.iterator + place, cmp=Int32(EMPTY), val=key, sem="relaxed", scope="cta"
            )
            fresh = Int32(there == EMPTY)
            searching = 1 - (fresh | Int32(there == key))
            place = remainder(place + searching, TABLE)
        return place, fresh

    @cute.jit
    def bits_of(self, place: Int32, table: Table):
        """The bits of the tokens that have the slot at a place of the table."""
        return (table.bits[quotient(place, 4)] >> (remainder(place, 4) * 8)) & 255

    @cute.jit
    def write(self, group: Int32, thread: Int32, places: cute.Tensor, table: Table, arrays: UnionArrays):
        """Write the union. A slot belongs to the first token that has it. `places`: the places of the thread's slots
        in the table, as `enter` gives them."""
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(quotient(thread, 32))
        own = Int32(0)  # a bit for each of the thread's columns
        for n in cutlass.range_constexpr(self.each):
            belongs = Int32(0)
            if places[n] != EMPTY:
                belongs = Int32((self.bits_of(places[n], table) & ((1 << n // COLUMNS) - 1)) == 0)
            own |= belongs << n
            owners = cute.arch.vote_ballot_sync(belongs == 1)
            if lane == 0:
                table.counts[warp, n] = cute.arch.popc(owners)
        cute.arch.sync_threads()
        if warp < self.each:
            count = table.counts[lane, warp]
            through = running_sum(count, lane)
            table.counts[lane, warp] = through - count
            if lane == 31:
                table.counts[warp, self.each] = through
        cute.arch.sync_threads()
        begin, first = Int32(0), Int64(group) * arrays.slots.shape[1]
        slots = cute.make_tensor(element(arrays.slots, first, 4), cute.make_layout(1 << 30))
        bits = cute.make_tensor(element(arrays.bits, first, 1), cute.make_layout(1 << 30))
        for n in cutlass.range_constexpr(self.each):
            belongs = (own >> n) & 1
            owners = cute.arch.vote_ballot_sync(belongs == 1)
            if belongs == 1:
                place = begin + table.counts[warp, n] + cute.arch.popc(owners & ((Int32(1) << lane) - 1))
                slots[place] = table.slots[places[n]]
                bits[place] = cutlass.Uint8(self.bits_of(places[n], table))
            begin += table.counts[n, self.each]
