"""Which indexer_logits kernel serves a call: static configurations. Imports no cutlass.

Sequences, rows, pages and the width of the block table are dynamic; `logits_config` picks how the query tokens of a
request are grouped.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tsmla_kernels.sm90.constants import FP8, MOST_KEYS, SMEM_BYTES

if TYPE_CHECKING:
    from tsmla_kernels.contract.sparse import IndexerLogitsSpec

HEAD_DIM = 128
BLOCK = 64  # keys of a product: M of one WGMMA
Q_STAGES = 2
MAX_COLUMNS = 128  # most columns of an accumulator: the accumulator and its weights then take 96 registers
MAX_TOKENS = 4  # most query tokens of an accumulator: each takes two sums per lane
MAX_HEADS = 128
MAX_PAGE_SIZE = 128
FIXED_BYTES = 2048  # shared memory for barriers, descriptions of pieces, and alignment


@dataclasses.dataclass(frozen=True)
class LogitsConfig:
    """The static choices of a compiled indexer_logits. Everything else is dynamic.

    Attributes:
      num_heads: Hi. page_size: Z.
      packed: whether a page is Z keys and then Z scales; otherwise it has only keys.
      ragged: whether a request's query tokens are found through cu_seqlens_q; otherwise each request has one token.
      writes_rows: whether the launch may have only a chunk of a ragged call's rows (query tokens). The kernel then also
        writes each row's request and how many keys the row sees, for the top-k that follows.
      tokens: how many query tokens an accumulator has, a power of two.
      q_groups: how many groups of `tokens` tokens a CTA holds and multiplies with each key block, a power of two.
      groups: how many math warpgroups a CTA has, a multiple of q_groups. Each multiplies one group of tokens;
        warpgroups of the same group take blocks in turn.
      num_ctas: CTAs that share the work: the number of multiprocessors.
    """

    num_heads: int
    page_size: int = 64
    packed: bool = True
    ragged: bool = False
    writes_rows: bool = False
    tokens: int = 1
    q_groups: int = 1
    groups: int = 2
    num_ctas: int = 132

    @property
    def columns(self) -> int:
        """Columns of an accumulator: the heads of its tokens."""
        return self.tokens * self.num_heads

    @property
    def tile_tokens(self) -> int:
        """Query tokens that read a block of keys together."""
        return self.tokens * self.q_groups

    @property
    def registers(self) -> tuple[int, int, int]:
        """The registers of a thread: at launch, in a math warpgroup, and in the other warps."""
        return {2: (168, 224, 56), 3: (128, 152, 56), 4: (96, 112, 32)}[self.groups]

    @property
    def page_bytes(self) -> int:
        return self.page_size * (HEAD_DIM + 4 * self.packed)

    @property
    def q_bytes(self) -> int:
        """Bytes of a tile's queries in shared memory."""
        return self.q_groups * self.columns * HEAD_DIM

    @property
    def weight_words(self) -> int:
        return self.tile_tokens * self.num_heads

    @property
    def stages(self) -> int:
        """How many blocks of keys the ring in shared memory has: a multiple of the number of warpgroups that take
        blocks in turn."""
        turns = self.groups // self.q_groups
        left = SMEM_BYTES - FIXED_BYTES - Q_STAGES * (self.q_bytes + 4 * self.weight_words)
        return min(left // (BLOCK * (HEAD_DIM + 4)), 16) // turns * turns


def logits_reasons(spec: IndexerLogitsSpec) -> list[str]:
    """Why the kernel cannot run this call; empty if it can."""
    kernel, cache, reasons = "the sm_90 indexer kernel", spec.cache, []
    if spec.q_dtype != FP8:
        reasons.append(f"q's dtype is {spec.q_dtype}; {kernel} takes {FP8}")
    if not cache.packed and spec.cache_dtype != FP8:
        reasons.append(f"k_cache's dtype is {spec.cache_dtype}; {kernel} takes packed keys or {FP8}")
    if spec.weights_dtype != "float32":
        reasons.append(f"weights' dtype is {spec.weights_dtype}; {kernel} takes float32")
    if spec.head_dim != HEAD_DIM:
        reasons.append(f"head_dim (Di) is {spec.head_dim}; {kernel} takes {HEAD_DIM}")
    if spec.num_heads % 8 or not 8 <= spec.num_heads <= MAX_HEADS:
        reasons.append(f"num_heads (Hi) is {spec.num_heads}; {kernel} takes a multiple of 8 up to {MAX_HEADS}")
    if cache.page_size not in (16, 32, 64, 128):
        reasons.append(f"page_size (Z) is {cache.page_size}; {kernel} takes 16, 32, 64 or {MAX_PAGE_SIZE}")
    if not reasons and isinstance(spec.max_pages, int):
        keys = spec.max_pages * cache.page_size
        if keys > MOST_KEYS:
            reasons.append(f"block_tables hold {keys} keys a request (M * Z); {kernel} takes at most {MOST_KEYS}")
    return reasons


def logits_config(spec: IndexerLogitsSpec, num_sms: int = 132) -> LogitsConfig:
    """The configuration that serves `spec` on a GPU with `num_sms` multiprocessors.

    A ragged configuration serves requests with any number of tokens. The mean number of tokens of a request picks the
    configuration, because it decides which is fastest.
    """
    requests, heads = spec.num_requests, spec.num_heads
    most = min(1 << (MAX_COLUMNS // heads).bit_length() - 1, MAX_TOKENS)
    if not spec.ragged:
        mean = 1
    elif isinstance(spec.num_tokens, int) and isinstance(requests, int):
        mean = -(-spec.num_tokens // max(requests, 1))
    else:
        mean = most * 4
    tokens = min(most, 1 << (mean - 1).bit_length())
    if mean > tokens == MAX_TOKENS and tokens * heads > MAX_COLUMNS - MAX_TOKENS * 8:
        tokens //= 2  # with four warpgroups, eight sums do not fit next to the accumulator and its weights
    q_groups = 1 if mean <= tokens else 2 if mean <= 2 * tokens else 4
    return LogitsConfig(
        num_heads=heads,
        page_size=spec.cache.page_size,
        packed=spec.cache.packed,
        ragged=spec.ragged,
        tokens=tokens,
        q_groups=q_groups,
        groups=3 if q_groups == 1 else 4,
        num_ctas=num_sms,
    )
