"""The kernel that makes a group's union: the slots that its tokens select, each once, and a bit for each token.

A CTA has a group. It enters the slots into a hash table in shared memory, with the bits of the tokens that select them.
The union has the first token's slots in its order, then those of the second token that the first does not have, and so
on: an order that does not depend on the order in which threads run. First the CTA enters one of eight classes of slots.
If these show that the tokens share little, the group's tokens gather for themselves, and this costs little. The same
holds if a token has a slot twice, because a bit does not say how often.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Int32, Int64, const_expr

from tsmla_kernels.sm90.sparse.union_config import PARTS, TABLE, WORTH, UnionConfig
from tsmla_kernels.sm90.storage import checked_storage
from tsmla_kernels.sm90.warp import element, quotient, remainder, sum_before

THREADS = 1024
WARPS = THREADS // 32
EMPTY = -1  # a place of the table without a slot
NO_SLOT = (1 << 31) - 1  # a cache has fewer slots; with the second cache's bit it would be EMPTY
SECOND_CACHE = -(1 << 31)  # the bit of the second cache's slots
GOLDEN = 0x9E3779B1 - (1 << 32)  # 2^32 divided by the golden ratio, odd: multiplied by it, slots spread over the table
CLASSES = 8  # classes of slots, of which one is a sample
DOUBT = 8  # PARTS by which a sample may exceed what is worth it
ENOUGH = 64  # slots of a sample that says anything


class Total(IntEnum):
    """Words of shared memory that count a group's entries."""

    ENTERED = 0  # slots that were entered, each as often as tokens have it
    DIFFERENT = 1  # different ones among them
    TWICE = 2  # slots that a token has twice


class UnionArrays(NamedTuple):
    """The operands of the kernel.

    Attributes:
      indices: [T, K]. lengths: [T], or None.
      slots: [G, U], the unions; a slot of the second cache has SECOND_CACHE. bits: [G, U], bit i of a byte is the
        group's i-th token's.
      union_lengths: [G], how many slots a union has; -1: the tokens gather for themselves.
      token_lengths: [T], how many columns a token has; -1 minus that, if its group shares.
    """

    indices: cute.Tensor
    lengths: cute.Tensor | None
    slots: cute.Tensor
    bits: cute.Tensor
    union_lengths: cute.Tensor
    token_lengths: cute.Tensor


class Table(NamedTuple):
    """The hash table in shared memory: slots, and a byte of bits for each, four in a word; the words of Total; and the
    warps' counts of the slots that they write, for two rounds."""

    slots: cute.Tensor
    bits: cute.Tensor
    totals: cute.Tensor
    counts: cute.Tensor


class Tally(NamedTuple):
    """What a thread has entered: see Total."""

    entered: Int32
    different: Int32
    twice: Int32


class UnionMaker:
    """Makes the unions of a call, one CTA for each group.

    Attributes: tokens: of a group. window: as in SparseConfig.
    """

    def __init__(self, config: UnionConfig) -> None:
        self.config, self.tokens, self.window = config, config.tokens, config.window

    @cute.jit
    def launch(self, stream: cuda.CUstream, arrays: UnionArrays):
        """Launch the kernel."""

        @cute.struct
        class Storage:
            slots: cute.struct.Align[cute.struct.MemRange[Int32, TABLE], 16]
            bits: cute.struct.Align[cute.struct.MemRange[Int32, TABLE // 4], 16]
            # Four words, because the compiler reads as many at once.
            totals: cute.struct.Align[cute.struct.MemRange[Int32, 4], 16]
            counts: cute.struct.MemRange[Int32, 2 * WARPS]

        self.storage = checked_storage(Storage, self.config)
        self.make(arrays).launch(
            grid=[arrays.union_lengths.shape[0], 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=2,
            preferred_smem_carveout=100,  # the next launch's, because a change would take time
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
            storage.counts.get_tensor(cute.make_layout((WARPS, 2))),
        )
        self.clear(table, thread)
        cute.arch.sync_threads()
        # The host calls this kernel only if the slots have room; a wrong shape must not make it search without end.
        if arrays.indices.shape[1] * self.tokens <= TABLE:
            self.enter(group, thread, True, table, arrays)
        cute.arch.sync_threads()
        entered, different = table.totals[Total.ENTERED], table.totals[Total.DIFFERENT]
        worth = Int32(WORTH[self.tokens])
        shares = Int32(arrays.indices.shape[1] * self.tokens <= TABLE)
        if entered >= ENOUGH and different * PARTS > entered * (worth + DOUBT):
            shares = Int32(0)
        cute.arch.sync_threads()  # before the totals change
        if shares == 1:
            self.enter(group, thread, False, table, arrays)
        cute.arch.sync_threads()
        entered, different = table.totals[Total.ENTERED], table.totals[Total.DIFFERENT]
        if different * PARTS > entered * worth or different > arrays.slots.shape[1]:
            shares = Int32(0)
        if table.totals[Total.TWICE] > 0:
            shares = Int32(0)
        if shares == 1:
            self.write(group, thread, table, arrays)
        if thread == 0:
            arrays.union_lengths[group] = different * shares + shares - 1
        token = group * self.tokens + thread
        if thread < self.tokens and token < arrays.indices.shape[0]:
            length = self.length(token, arrays)
            arrays.token_lengths[token] = length ^ -shares  # ~length is -1 - length

    @cute.jit
    def clear(self, table: Table, thread: Int32):
        """Empty the table."""
        four = cute.make_rmem_tensor((4,), Int32)
        for words, value in ((table.slots, EMPTY), (table.bits, 0)):
            four.fill(value)
            for i in cutlass.range(thread * 4, cute.size(words), THREADS * 4, unroll=1):
                cute.autovec_copy(four, cute.make_tensor((words.iterator + i).align(16), cute.make_layout(4)))
        if thread < len(Total):
            table.totals[thread] = Int32(0)

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
    def key(self, token: Int32, column: Int32, length: Int32, arrays: UnionArrays):
        """The slot in a column of a token's row, with the bit of the second cache; EMPTY if there is none."""
        key = Int32(EMPTY)
        if column < length:
            row = element(arrays.indices, Int64(token) * arrays.indices.shape[1], 4)
            slot = cute.make_tensor(row, cute.make_layout(1 << 30))[column]
            if slot >= 0 and slot != NO_SLOT:
                key = slot
                if const_expr(self.window is not None):
                    if column >= self.window:
                        key = slot | Int32(SECOND_CACHE)
        return key

    @cute.jit
    def enter(
        self, group: Int32, thread: Int32, sampled: cutlass.Constexpr[bool], table: Table, arrays: UnionArrays
    ):  # fmt: skip
        """Enter the slots of the sampled class, or those of the others."""
        entered, different, twice = Int32(0), Int32(0), Int32(0)
        for i in cutlass.range(self.tokens, unroll=1):
            token = group * self.tokens + i
            length = self.length(token, arrays)
            for column in cutlass.range(thread, length, THREADS, unroll=2):
                key = self.key(token, column, length, arrays)
                mixed = key * GOLDEN
                sample = Int32(remainder(mixed >> 9, CLASSES) == 0)
                if key != EMPTY and sample == Int32(sampled):
                    place, fresh = self.enter_key(key, mixed, table)
                    shift = remainder(place, 4) * 8 + i
                    before = cute.arch.atomic_or(
                        table.bits.iterator + quotient(place, 4), Int32(1) << shift, sem="relaxed", scope="cta"
                    )
                    entered += 1
                    different += fresh
                    twice += (before >> shift) & 1
        for which, count in ((Total.ENTERED, entered), (Total.DIFFERENT, different), (Total.TWICE, twice)):
            total = cute.arch.warp_redux_sync(count, "add")
            if cute.arch.lane_idx() == 0 and total > 0:
                cute.arch.atomic_add(table.totals.iterator + which, total, sem="relaxed", scope="cta")

    def first_place(self, mixed: Int32) -> Int32:
        """The place at which the search for a slot begins."""
        return remainder(mixed >> (32 - (TABLE.bit_length() - 1)), TABLE)

    @cute.jit
    def enter_key(self, key: Int32, mixed: Int32, table: Table):
        """The place of a slot, which is entered if the table does not have it; and 1 if it did not."""
        place, fresh, searching = self.first_place(mixed), Int32(0), Int32(1)
        while searching == 1:
            there = cute.arch.atomic_cas(
                table.slots.iterator + place, cmp=Int32(EMPTY), val=key, sem="relaxed", scope="cta"
            )
            fresh = Int32(there == EMPTY)
            searching = 1 - (fresh | Int32(there == key))
            place = remainder(place + searching, TABLE)
        return place, fresh

    @cute.jit
    def bits_of(self, key: Int32, table: Table):
        """The bits of the tokens that have a slot, which is in the table."""
        place = self.first_place(key * GOLDEN)
        while table.slots[place] != key:
            place = remainder(place + 1, TABLE)
        return (table.bits[quotient(place, 4)] >> (remainder(place, 4) * 8)) & 255

    @cute.jit
    def write(self, group: Int32, thread: Int32, table: Table, arrays: UnionArrays):
        """Write the union. A slot belongs to the first token that has it."""
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(quotient(thread, 32))
        begin, around = Int32(0), Int32(0)
        first = Int64(group) * arrays.slots.shape[1]
        slots = cute.make_tensor(element(arrays.slots, first, 4), cute.make_layout(1 << 30))
        bits = cute.make_tensor(element(arrays.bits, first, 1), cute.make_layout(1 << 30))
        for i in cutlass.range(self.tokens, unroll=1):
            token = group * self.tokens + i
            length = self.length(token, arrays)
            for base in cutlass.range(0, length, THREADS, unroll=1):
                key = self.key(token, base + thread, length, arrays)
                of_tokens = Int32(0)
                if key != EMPTY:
                    of_tokens = self.bits_of(key, table)
                own = of_tokens != 0 and (of_tokens & ((Int32(1) << i) - 1)) == 0
                owners = cute.arch.vote_ballot_sync(own)
                if lane == 0:
                    table.counts[warp, around] = cute.arch.popc(owners)
                cute.arch.sync_threads()
                of_warp = table.counts[lane, around]
                place = begin + sum_before(of_warp, warp, lane)
                begin += cute.arch.warp_redux_sync(of_warp, "add")
                around ^= 1
                if own:
                    place += cute.arch.popc(owners & ((Int32(1) << lane) - 1))
                    slots[place] = key
                    bits[place] = cutlass.Uint8(of_tokens)
