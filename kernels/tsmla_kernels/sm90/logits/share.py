"""How CTAs share the work of indexer_logits: each finds its own range of a line of key blocks.

A request's query tokens are cut into tiles from its last token on. So all tiles but one are full, and a tile that is
`i` tiles before the last one sees exactly `i * tile_tokens` keys fewer. The line has the blocks of all tiles of all
requests one after another. Each CTA takes a range of neighbouring blocks; the ranges' lengths differ by at most one.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from tsmla_kernels.sm90.logits.config import BLOCK, LogitsConfig
from tsmla_kernels.sm90.logits.memory import Arrays, Position, Request, Share
from tsmla_kernels.sm90.warp import quotient, running_sum


def rows_before(arrays: Arrays) -> Int32:
    """How many rows of the call come before the launch's rows; 0 if the launch has all rows."""
    if arrays.row_lens is None:
        return Int32(0)
    return Int32(arrays.row_lens.shape[0]) - Int32(arrays.logits.shape[0])


class Line:
    """Device functions of a warp that finds its CTA's share."""

    def __init__(self, config: LogitsConfig) -> None:
        self.config = config
        self.tile_tokens = config.tile_tokens
        self.tiles_of_block = BLOCK // config.tile_tokens  # a tile this many tiles before another has one block less

    @cute.jit
    def request(self, arrays: Arrays, r: Int32):
        """Request `r` of this launch, or an empty request if `r` is past the last one."""
        rows, width = arrays.logits.shape[0], arrays.logits.shape[1]
        keys, tokens, row = Int32(0), Int32(0), r
        if r < arrays.seq_lens.shape[0]:
            keys, tokens = arrays.seq_lens[r], Int32(1)
            if const_expr(self.config.ragged):
                row, end = arrays.cu_seqlens_q[r], arrays.cu_seqlens_q[r + 1]
                if const_expr(self.config.writes_rows):
                    row, end = row - rows_before(arrays), end - rows_before(arrays)
                    # The request's tokens after this launch's rows have its last keys, which no row here sees.
                    keys -= cutlass.max(end - rows, 0)
                row, end = cutlass.max(cutlass.min(row, rows), 0), cutlass.max(cutlass.min(end, rows), 0)
                tokens = end - row
            keys = cutlass.max(cutlass.min(keys, width), 0)
        return Request(keys, tokens, row)

    def tiles(self, request: Request) -> Int32:
        """How many tiles of a request see keys."""
        n = self.tile_tokens
        return cutlass.min(quotient(request.tokens + (n - 1), n), quotient(request.keys + (n - 1), n))

    def blocks(self, request: Request, tile: Int32) -> Int32:
        """How many key blocks a tile has."""
        return quotient(request.keys - tile * self.tile_tokens + (BLOCK - 1), BLOCK)

    def rising(self, count: Int32) -> Int32:
        """How many blocks `count` tiles have together, modulo 2^32, if the first tile sees `tile_tokens` keys and each
        next one `tile_tokens` more.

        The sum can exceed 2^32 (few tokens, millions of keys), but the difference that `blocks_before` takes is right.
        `whole * (whole + 1)` can wrap too. Then the top bit of its half is wrong, but multiplying by `per`, which is
        even, shifts that bit out.
        """
        per = self.tiles_of_block
        whole = quotient(count, per)
        return per * quotient(whole * (whole + 1), 2) + (count - whole * per) * (whole + 1)

    def blocks_before(self, request: Request, tile: Int32) -> Int32:
        """How many blocks the request's tiles before `tile` have; `tile` is at most `tiles(request)`."""
        if not self.config.ragged:
            return tile * quotient(request.keys + (BLOCK - 1), BLOCK)
        whole = quotient(request.keys + (self.tile_tokens - 1), self.tile_tokens)
        return self.rising(whole) - self.rising(whole - tile)

    def cost(self, request: Request) -> Int32:
        """How many blocks all tiles of a request have."""
        return self.blocks_before(request, self.tiles(request))

    @cute.jit
    def share(self, arrays: Arrays, cta: Int32, ctas: Int32):
        """Find the CTA's Share. Each lane reads one of the first 32 requests and keeps it for the search."""
        lane = cute.arch.lane_idx()
        requests = arrays.seq_lens.shape[0]
        chunks = quotient(requests + 31, 32)
        own = self.request(arrays, lane)
        through = self.cost(own)
        total = through
        for chunk in cutlass.range(1, chunks, unroll=4):
            total += self.cost(self.request(arrays, chunk * 32 + lane))
        total = cute.arch.warp_redux_sync(total, "add")
        every = total // ctas
        more = total - every * ctas
        begin = cta * every + cutlass.min(cta, more)
        count = every
        if cta < more:
            count += 1
        # Find the request that has block `begin` of the line.
        r, before = Int32(0), Int32(0)
        searching = Int32(1)
        if count == 0:
            searching = Int32(0)
        base = Int32(0)
        while searching == 1:
            if base > 0:
                through = self.cost(self.request(arrays, base + lane))
            through = running_sum(through, lane)
            passed = cute.arch.popc(cute.arch.vote_ballot_sync(before + through <= begin))
            last = cute.arch.shuffle_sync(through, cutlass.max(passed - 1, 0))
            if passed > 0:
                before += last
            r = base + passed
            base += 32
            if passed < 32 or base >= requests:
                searching = Int32(0)
        keys, tokens, row = (cute.arch.shuffle_sync(word, cutlass.min(r, 31)) for word in own)
        if r >= 32:
            later = self.request(arrays, r)
            keys, tokens, row = later.keys, later.tokens, later.row
        request = Request(keys, tokens, row)
        # Find the request's tile: the last one that begins at block `begin` or before it.
        low, high = Int32(0), self.tiles(request)
        while high - low > 1:
            middle = quotient(low + high, 2)
            if before + self.blocks_before(request, middle) <= begin:
                low = middle
            else:
                high = middle
        block = begin - before - self.blocks_before(request, low)
        return Share(Position(r, low, block), request, count)

    @cute.jit
    def next_tile(self, arrays: Arrays, position: Position, request: Request):
        """Find (position, request) of the first block of the next tile after `position`. The line must have one
        more tile."""
        r, tile = position.request, position.tile + 1
        keys, tokens, row = request.keys, request.tokens, request.row
        if tile >= self.tiles(request):
            tile = Int32(0)
            empty = Int32(1)
            while empty == 1:
                r += 1
                following = self.request(arrays, r)
                keys, tokens, row = following.keys, following.tokens, following.row
                if self.tiles(following) > 0 or r >= arrays.seq_lens.shape[0]:
                    empty = Int32(0)
        return Position(r, tile, Int32(0)), Request(keys, tokens, row)
