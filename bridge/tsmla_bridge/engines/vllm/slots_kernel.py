"""The Triton kernel of slots.py. It has its own module so that slots.py can be imported without Triton."""

import triton
import triton.language as tl


# No width of the block table, distance of pages or number of heads may compile a kernel of its own. Strides of
# positions and queries may: if Triton knows that they are multiples of 16, a thread loads 16 bytes at once.
@triton.jit(do_not_specialize=["request_stride", "pages", "step", "heads"])
def tsmla_slots(
    positions, requests, table, latent, rope, slots, counts, joined, token_stride, request_stride, latent_token_stride,
    latent_head_stride, rope_token_stride, rope_head_stride, columns, pages, step, heads, PAGE_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, JOINS: tl.constexpr,
    SIGNALS: tl.constexpr,
):  # fmt: skip
    """Write a token's slots and its count, in its first program; with JOINS each further program joins the queries of
    HEADS heads. SIGNALS: whether the next kernel may begin at once; that kernel waits for this one before it reads."""
    if SIGNALS:
        tl.extra.cuda.gdc_launch_dependents()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part == 0:
        column = tl.arange(0, COLUMNS)
        is_column = column < columns
        position = tl.load(positions + token * token_stride + column, mask=is_column, other=-1)
        page = position // PAGE_SIZE
        valid = (position >= 0) & (page < pages)
        row = table + tl.load(requests + token).to(tl.int64) * request_stride
        slot = tl.load(row + page, mask=valid, other=0) * step + position % PAGE_SIZE
        tl.store(slots + token * columns + column, tl.where(valid, slot, -1), mask=is_column)
        tl.store(counts + token, tl.max(tl.where(valid, column + 1, 0), 0))
    elif JOINS:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        is_head = head < heads
        a, b = tl.arange(0, LATENT)[None, :], tl.arange(0, ROPE)[None, :]
        head = head.to(tl.int64)
        left = tl.load(latent + token * latent_token_stride + head * latent_head_stride + a, mask=is_head)
        right = tl.load(rope + token * rope_token_stride + head * rope_head_stride + b, mask=is_head)
        to = joined + (token * heads + head) * (LATENT + ROPE)
        tl.store(to + a, left, mask=is_head)
        tl.store(to + LATENT + b, right, mask=is_head)
