"""The math warpgroups of indexer_logits: the products of 64 keys with the heads of some tokens, and their logits.

A product is S^T = K Q^T, keys by heads, in fp8. Its epilogue takes relu, weighs the heads, sums over them and
multiplies by the key's scale. While one warpgroup does so, the tensor cores compute the products of other warpgroups.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field

from tsmla_kernels.sm90.logits.config import BLOCK, HEAD_DIM, Q_STAGES, LogitsConfig
from tsmla_kernels.sm90.logits.copies import layout_atom
from tsmla_kernels.sm90.logits.memory import Mma, Piece, Shared
from tsmla_kernels.sm90.warp import advance, kept, quotient, release, remainder, uniform

STEPS = HEAD_DIM // 32  # WGMMAs of a product


class Lane(NamedTuple):
    """A thread of a math warpgroup.

    Attributes:
      q_group: the group of tokens that the thread's warpgroup multiplies. thread: the thread's index in the
        warpgroup. lane: the thread's index in the warp.
      key: the index in a block of the key whose logits the thread writes. token: the index in the tile of the first
        token whose logits it writes. writes: 1 if the thread writes logits, else 0.
    """

    q_group: Int32
    thread: Int32
    lane: Int32
    key: Int32
    token: Int32
    writes: Int32


class Block(NamedTuple):
    """A block of keys: its index in the request, its stage, and the parity of the stage's barrier."""

    number: Int32
    stage: Int32
    phase: Int32


class Held(NamedTuple):
    """A warpgroup's registers for a piece.

    Attributes:
      q: Q of the warpgroup's tokens. weights: the weights of the lane's columns.
      target: the address of the logit of the lane's first token and the lane's key in block 0. row_bytes: bytes
        from one token's logits to the next token's.
      limit: how many keys the lane's first token sees, minus the index of the lane's key in a block. tokens: how many
        of the piece's tokens remain from the lane's first token on; 0 if the lane writes no logits.
    """

    q: cute.Tensor
    weights: cute.Tensor
    target: Int64
    row_bytes: Int64
    limit: Int32
    tokens: Int32


class Math:
    """Device functions of the math warpgroups. written: how many tokens of an accumulator a lane writes logits for."""

    def __init__(self, config: LogitsConfig) -> None:
        self.config = config
        self.tokens, self.turns = config.tokens, config.groups // config.q_groups
        self.written = max(1, config.tokens // 2)

    def mma(self) -> Mma:
        """The tiled MMAs of a product."""
        k_major, shape = OperandMajorMode.K, (BLOCK, self.config.columns)
        return Mma(*(
            sm90.make_trivial_tiled_mma(Float8E4M3FN, Float8E4M3FN, k_major, k_major, Float32, (1, 1, 1), shape)
            for _ in range(2)
        ))  # fmt: skip

    @cute.jit
    def operand(self, address: Int32, rows: cutlass.Constexpr[int]) -> cute.Tensor:
        """`rows` rows of shared memory from `address` on, as a WGMMA operand."""
        layout = cute.tile_to_shape(layout_atom(), (rows, HEAD_DIM), (0, 1))
        pointer = cute.make_ptr(Float8E4M3FN, address, cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=Float8E4M3FN), layout.outer)

    @cute.jit
    def run(self, logits: cute.Tensor, shared: Shared, mma: Mma, group: Int32) -> None:
        """Do the warpgroup's part of all pieces of this CTA: the products of one group of tokens with every
        `turns`-th block."""
        t = cute.arch.thread_idx()[0] % 128
        lane = kept(t % 32)
        writes = Int32(1)
        if const_expr(self.tokens == 1):
            writes = 1 - (lane // 2) % 2
        key, token = (t // 32) * 16 + lane // 4 + 8 * (lane % 2), (lane // 2) % 2 * (self.tokens // 2)
        q_group, turn = remainder(group, self.config.q_groups), quotient(group, self.config.q_groups)
        place = Lane(q_group, t, lane, key, token + q_group * self.tokens, writes)
        mma.first.set(Field.ACCUMULATE, False)
        mma.more.set(Field.ACCUMULATE, True)
        shape = mma.first.get_slice(t).partition_shape_C((BLOCK, self.config.columns))
        acc = cute.make_rmem_tensor(shape, Float32)
        q_index, q_phase = Int32(0), Int32(0)
        index, phase = turn, Int32(0)
        ahead = turn  # blocks of other warpgroups that come before this one's next block
        running = Int32(1)
        while running == 1:
            cute.arch.mbarrier_wait(shared.q.full + q_index, q_phase)
            begin = uniform(shared.pieces[Piece.BLOCK_BEGIN, q_index])
            end = uniform(shared.pieces[Piece.BLOCK_END, q_index])
            if begin == end:
                running = Int32(0)
            else:
                held = self.hold(logits, shared, mma, q_index, place)
                b = begin + ahead
                while b < end:
                    self.score(shared, mma, held, acc, place, Block(b, index, phase))
                    index, phase = self.next_stage(index, phase)
                    b += self.turns
                ahead = b - end
                self.release(shared.q.empty + q_index)
                q_index, q_phase = advance(q_index, q_phase, Q_STAGES)

    @cute.jit
    def release(self, barrier: cute.Pointer) -> None:
        """Arrive on `barrier`, once for the calling warp: the warp has finished reading the buffer."""
        cute.arch.sync_warp()
        release(barrier)

    def next_stage(self, index: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """The stage of the warpgroup's next block after the one in stage `index`, and the parity to wait for."""
        index += self.turns
        wrapped = index >= self.config.stages
        return cutlass.select_(wrapped, index - self.config.stages, index), phase ^ Int32(wrapped)

    @cute.jit
    def hold(
        self, logits: cute.Tensor, shared: Shared, mma: Mma, q_index: Int32,
        place: Lane,
    ) -> Held:  # fmt: skip
        """Set up the warpgroup's registers for the piece in Q's stage `q_index`."""
        config, pieces = self.config, shared.pieces
        row, width = pieces[Piece.ROW, q_index] + place.token, logits.shape[1]
        tokens = pieces[Piece.TOKENS, q_index] - place.token
        if place.writes == 0:
            tokens = Int32(0)
        limit = pieces[Piece.FIRST_KEYS, q_index] + place.token - place.key
        target = logits.iterator.toint() + (Int64(row) * Int64(width) + Int64(place.key)) * 4
        first = q_index * config.q_groups + place.q_group
        rows = self.operand(uniform(shared.q.memory.toint() + first * (config.columns * HEAD_DIM)), config.columns)
        q = mma.first.make_fragment_B(mma.first.get_slice(place.thread).partition_B(rows))
        weights = self.load_weights(shared.q.scales + (first * config.columns + place.lane % 4 * 2))
        return Held(q, weights, target, Int64(width) * 4, limit, tokens)

    @cute.jit
    def load_weights(self, first: cute.Pointer) -> cute.Tensor:
        """Load the lane's weights: two columns of every eight."""
        words = cute.make_rmem_tensor((2, self.config.columns // 8), Float32)
        for i in cutlass.range_constexpr(self.config.columns // 8):
            pair = cute.make_tensor((first + 8 * i).align(8), cute.make_layout(2))
            cute.autovec_copy(pair, words[None, i])
        return words

    @cute.jit
    def issue(
        self, shared: Shared, mma: Mma, q: cute.Tensor, acc: cute.Tensor, address: Int32,
        thread: Int32,
    ) -> None:  # fmt: skip
        """Issue the product of the keys at `address` and Q."""
        k = mma.first.make_fragment_A(mma.first.get_slice(thread).partition_A(self.operand(address, BLOCK)))
        warpgroup.fence()
        cute.gemm(mma.first, acc, k[None, None, 0], q[None, None, 0], acc)
        for step in cutlass.range_constexpr(1, STEPS):
            cute.gemm(mma.more, acc, k[None, None, step], q[None, None, step], acc)
        warpgroup.commit_group()

    def key_scale(self, shared: Shared, index: Int32, place: Lane) -> Float32:
        """The scale of the lane's key in stage `index`; 1 if keys have no scales."""
        if not self.config.packed:
            return Float32(1.0)
        return cute.make_tensor(shared.keys.scales + (index * BLOCK + place.key), cute.make_layout(1))[0]

    @cute.jit
    def score(
        self, shared: Shared, mma: Mma, held: Held, acc: cute.Tensor,
        place: Lane, block: Block,
    ) -> None:  # fmt: skip
        """Write the logits of a block."""
        b, index, phase = block.number, block.stage, block.phase
        cute.arch.mbarrier_wait(shared.keys.full + index, phase)
        address = uniform(shared.keys.memory.toint() + index * (BLOCK * HEAD_DIM))
        self.issue(shared, mma, held.q, acc, address, place.thread)
        scale = self.key_scale(shared, index, place)
        warpgroup.wait_group(0)
        self.release(shared.keys.empty + index)
        sums = self.sum_of_quad(self.head_sums(acc, held.weights), place.lane)
        target = held.target + Int64(b) * (BLOCK * 4)
        for i in cutlass.range_constexpr(self.written):
            if i < held.tokens and b * BLOCK < held.limit + i:
                pointer = cute.make_ptr(
                    Float32, target + Int64(i) * held.row_bytes, cute.AddressSpace.gmem, assumed_align=4
                )
                cute.make_tensor(pointer, cute.make_layout(1))[0] = sums[i] * scale

    def head_sums(self, acc: cute.Tensor, weights: cute.Tensor) -> list[Float32]:
        """The lane's partial sums of weight * relu over heads, one for each of its two keys and each token."""
        pairs = self.config.num_heads // 8
        values = cute.make_tensor(
            acc.iterator, cute.make_layout((2, 2, self.config.columns // 8), stride=(2, 1, 4))
        )  # [row, column of a pair, pair]
        sums = [Float32(0.0) for _ in range(2 * self.tokens)]
        # Neighbours in this order add to different sums: an addition waits for the previous one to the same sum.
        for pair, token, column, row in itertools.product(range(pairs), range(self.tokens), range(2), range(2)):
            x, weight = values[row, column, token * pairs + pair], weights[column, token * pairs + pair]
            sums[row * self.tokens + token] += cute.arch.fmax(x, 0.0, nan=True) * weight
        return sums

    def sum_of_quad(self, sums: list[Float32], lane: Int32) -> list[Float32]:
        """Add up the sums of the four lanes that have the same keys. Each lane keeps one key's sums of
        half of the tokens, or of the only token."""
        for bit in range(2):
            offset, upper, half = 1 << bit, ((lane >> bit) & 1) == 1, len(sums) // 2
            if half > 0:
                low, high = sums[:half], sums[half:]
                kept_sums = [cutlass.select_(upper, b, a) for a, b in zip(low, high, strict=True)]
                sent = [cutlass.select_(upper, a, b) for a, b in zip(low, high, strict=True)]
            else:
                kept_sums = sent = sums
            sums = [a + cute.arch.shuffle_sync_bfly(b, offset=offset) for a, b in zip(kept_sums, sent, strict=True)]
        return sums
