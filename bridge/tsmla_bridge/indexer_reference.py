"""Training of an indexer in torch operations: the logits of selected keys, the loss, and their gradients.

The functions work on blocks of tokens, and within each on blocks of columns, as tsmla_jax's "xla" does. So no
intermediate array has an element for each pair of a token and a key, or the gathered keys of all tokens, unless one
block has all of these. No value is read on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from tsmla_bridge.reference import seen_keys
from tsmla_bridge.runtime.devices import in_own_precision
from tsmla_bridge.runtime.tensors import DTYPES
from tsmla_kernels.contract.indexer import IndexerLossSpec, SelectedLogitsSpec

BLOCK_COLUMNS = 1024
BLOCK_BYTES = 64 << 20
"""The bytes that the gathered keys of a block, or its scores by head, may take in float32; a block has at least one
token."""
FAR = 40.0
"""How far a sink may be above lse in all heads before a token's probabilities, which are divided by their sum, are made
larger: they must not become too small for exp."""


class Index(NamedTuple):
    """The indexer's tensors."""

    q: torch.Tensor
    weights: torch.Tensor
    cache: torch.Tensor


class Attention(NamedTuple):
    """The attention's tensors, and its scale, a number or a scalar tensor."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    lse: torch.Tensor
    sinks: torch.Tensor | None
    scale: torch.Tensor | float


class Where(NamedTuple):
    """Which keys each token has: indices and lengths, or block tables."""

    indices: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None


class Block(NamedTuple):
    """A block of tokens and columns: slots [t, C] in bounds, and which of them are keys."""

    tokens: slice
    columns: slice
    slots: torch.Tensor
    valid: torch.Tensor


class Blocks:
    """The blocks of a call."""

    def __init__(self, num_slots: int, page_size: int, num_columns: int, where: Where, num_tokens: int) -> None:
        self.num_slots, self.page_size, self.num_columns, self.where = num_slots, page_size, num_columns, where
        self.request: torch.Tensor | None = None
        self.seen = where.lengths if where.indices is not None else where.seq_lens
        if where.cu_seqlens_q is not None:
            assert where.seq_lens is not None
            self.request, self.seen = seen_keys(where.seq_lens, where.cu_seqlens_q, num_tokens)

    def of(self, tokens: slice) -> Iterator[Block]:
        """The blocks of these tokens, in the order of their columns."""
        for first in range(0, self.num_columns, BLOCK_COLUMNS):
            yield self.at(tokens, slice(first, min(first + BLOCK_COLUMNS, self.num_columns)))

    def at(self, tokens: slice, columns: slice) -> Block:
        """The block of these tokens and columns."""
        if self.where.indices is not None:
            slots = self.where.indices[tokens, columns]
            column = torch.arange(columns.start, columns.stop, device=slots.device)
        else:
            tables = self.where.block_tables
            assert tables is not None
            column = torch.arange(columns.start, columns.stop, device=tables.device)
            rows = tables[tokens] if self.request is None else tables[self.request[tokens]]
            pages = rows[:, column // self.page_size]
            slots = torch.where(pages < 0, -1, pages * self.page_size + column % self.page_size)
        valid = (slots >= 0) & (slots < self.num_slots)
        if self.seen is not None:
            valid &= column < self.seen[tokens, None]
        return Block(tokens, columns, torch.where(valid, slots, 0).long(), valid)


def token_blocks(num_tokens: int, num_columns: int, *widths: int) -> Iterator[slice]:
    """Blocks of tokens, as slices: as many tokens as fit BLOCK_BYTES if each has a float32 row of the greatest of these
    widths for every column of a block."""
    width = 4 * max(1, min(num_columns, BLOCK_COLUMNS)) * max(widths)
    count = max(1, BLOCK_BYTES // width)
    for first in range(0, num_tokens, count):
        yield slice(first, min(first + count, num_tokens))


def rows_in(cache: torch.Tensor, block: Block, dtype: torch.dtype) -> torch.Tensor:
    """The keys [t, C, D], 0 where a slot is no key: what lies there may be NaN."""
    rows = cache.reshape(-1, cache.shape[-1])[block.slots]
    return rows.masked_fill(~block.valid[..., None], 0).to(dtype)


def score(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The products of queries and keys [t, Hi, C], and the logits [t, C]."""
    dots = torch.matmul(q.to(keys.dtype), keys.mT)
    return dots, torch.matmul(weights[:, None], dots.relu())[:, 0]


class Gradient:
    """The gradient of an indexer's tensors, added up block by block."""

    def __init__(self, index: Index) -> None:
        self.index, dtype = index, index.weights.dtype
        self.q = torch.zeros(index.q.shape, dtype=dtype, device=index.q.device)
        self.weights = torch.zeros_like(index.weights)
        self.keys = index.weights.new_zeros((index.cache.shape[0] * index.cache.shape[1], index.cache.shape[2]))

    def add(self, block: Block, keys: torch.Tensor, dots: torch.Tensor, d_logits: torch.Tensor) -> None:
        """Add the block's part of the gradients. d_logits [t, C]: the cotangent of its logits, 0 where there is no
        key."""
        tokens = block.tokens
        self.weights[tokens] += torch.matmul(dots.relu(), d_logits[..., None])[..., 0]
        d_dots = (self.index.weights[tokens][..., None] * d_logits[:, None]).masked_fill(dots <= 0, 0)
        self.q[tokens] += torch.matmul(d_dots, keys)
        d_keys = torch.matmul(d_dots.mT, self.index.q[tokens].to(keys.dtype))
        self.keys.index_add_(0, block.slots.reshape(-1), d_keys.reshape(-1, d_keys.shape[-1]))

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of q, weights and cache in their dtypes."""
        index = self.index
        return self.q.to(index.q.dtype), self.weights, self.keys.reshape(index.cache.shape).to(index.cache.dtype)


def _blocks_of_logits(spec: SelectedLogitsSpec, where: Where) -> Blocks:
    cache = spec.cache
    return Blocks(cache.num_pages * cache.page_size, cache.page_size, spec.num_selected, where, spec.num_tokens)


@in_own_precision
def selected_logits(
    spec: SelectedLogitsSpec,
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
) -> torch.Tensor:
    """logits [T, K] of indexer_selected_logits."""
    found = [weights.new_zeros((0, spec.num_selected))]
    blocks = _blocks_of_logits(spec, Where(indices, lengths))
    for tokens in token_blocks(spec.num_tokens, spec.num_selected, spec.head_dim, spec.num_heads):
        parts = [weights.new_zeros((tokens.stop - tokens.start, 0))]
        for block in blocks.of(tokens):
            logits = score(q[tokens], weights[tokens], rows_in(k_cache, block, weights.dtype))[1]
            parts.append(logits.masked_fill(~block.valid, -torch.inf))
        found.append(torch.cat(parts, 1))
    return torch.cat(found)


@in_own_precision
def selected_logits_backward(
    spec: SelectedLogitsSpec,
    d_logits: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, weights and k_cache."""
    total = Gradient(Index(q, weights, k_cache))
    blocks = _blocks_of_logits(spec, Where(indices, lengths))
    for tokens in token_blocks(spec.num_tokens, spec.num_selected, spec.head_dim, spec.num_heads):
        for block in blocks.of(tokens):
            keys = rows_in(k_cache, block, weights.dtype)
            dots, _ = score(q[tokens], weights[tokens], keys)
            mine = d_logits[block.tokens, block.columns].masked_fill(~block.valid, 0)  # may be NaN without a key
            total.add(block, keys, dots, mine)
    return total.result()


class _Loss:
    """A call of indexer_loss by blocks."""

    def __init__(self, spec: IndexerLossSpec, index: Index, attention: Attention, where: Where) -> None:
        self.spec, self.index, self.attention = spec, index, attention
        cache, self.dtype = spec.index.cache, DTYPES[spec.index.weights_dtype]
        slots = cache.num_pages * cache.page_size
        columns = 0 if spec.paged and spec.num_requests == 0 else spec.num_columns
        self.blocks = Blocks(slots, cache.page_size, columns, where, spec.num_tokens)
        lse = attention.lse.to(self.dtype)
        lse = lse.masked_fill(lse == -torch.inf, 0)
        self.total = lse
        if attention.sinks is not None:
            total = torch.logaddexp(lse, attention.sinks.to(self.dtype))
            common = (total - lse).amin(-1, keepdim=True)
            self.total = total - (common.masked_fill(common == torch.inf, 0) - FAR).clamp(min=0)

    def tokens(self) -> Iterator[slice]:
        """Blocks of tokens."""
        spec = self.spec
        widths = spec.head_dim, spec.num_heads, spec.index.head_dim, spec.index.num_heads
        return token_blocks(spec.num_tokens, spec.num_columns, *widths)

    def scored(self, block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The indexer's keys, their products and logits, and the head-summed probabilities of a block."""
        tokens = block.tokens
        keys = rows_in(self.index.cache, block, self.dtype)
        dots, logits = score(self.index.q[tokens], self.index.weights[tokens], keys)
        kv = rows_in(self.attention.kv_cache, block, self.dtype)
        scores = torch.matmul(self.attention.q[tokens].to(self.dtype), kv.mT) * self.attention.scale
        target = (scores - self.total[tokens, :, None]).exp().sum(1).masked_fill(~block.valid, 0)
        return keys, dots, logits, target


@in_own_precision
def _loss_by_blocks(tensor: torch.Tensor, call: _Loss) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    zeros = [tensor.new_zeros(call.spec.num_tokens) for _ in range(3)]
    loss, all_mass, all_lse = zeros
    for tokens in call.tokens():
        count = tokens.stop - tokens.start
        maximum = tensor.new_full((count,), -torch.inf)
        choice, mass, entropy, cross = (tensor.new_zeros(count) for _ in range(4))
        for block in call.blocks.of(tokens):
            _, _, logits, target = call.scored(block)
            greatest = torch.maximum(maximum, logits.masked_fill(~block.valid, -torch.inf).amax(-1))
            # A row without a key so far has no maximum; 0 stands in for it, so that no inf - inf arises.
            finite = greatest.masked_fill(greatest == -torch.inf, 0)
            choice = choice * (maximum - finite).exp()
            choice = choice + (logits - finite[:, None]).exp().masked_fill(~block.valid, 0).sum(-1)
            maximum = greatest
            mass = mass + target.sum(-1)
            entropy = entropy + torch.special.xlogy(target, target).sum(-1)
            cross = cross + (target * logits).sum(-1)
        seen, chosen = mass != 0, choice != 0  # true for NaN, too, which must not look like a row without keys
        whole = torch.where(seen, mass, 1)
        lse = torch.where(chosen, maximum + torch.where(chosen, choice, 1).log(), 0)
        each = ((entropy - cross) / whole - whole.log() + lse).clamp(min=0)  # rounding may leave it a little below 0
        loss[tokens] = torch.where(seen, each, 0)
        all_mass[tokens], all_lse[tokens] = mass, lse
    return loss, all_mass, all_lse


def loss(
    spec: IndexerLossSpec, index: Index, attention: Attention, where: Where
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of each token, the sum of its head-summed probabilities and the logsumexp of its logits, each [T]."""
    return _loss_by_blocks(index.weights, _Loss(spec, index, attention, where))


@in_own_precision
def _gradient_by_blocks(d_loss: torch.Tensor, mass: torch.Tensor, choice_lse: torch.Tensor, call: _Loss) -> Gradient:
    total = Gradient(call.index)
    seen = mass != 0
    whole, d_loss = torch.where(seen, mass, 1), torch.where(seen, d_loss, 0)
    for tokens in call.tokens():
        for block in call.blocks.of(tokens):
            keys, dots, logits, target = call.scored(block)
            difference = (logits - choice_lse[tokens, None]).exp() - target / whole[tokens, None]
            total.add(block, keys, dots, (d_loss[tokens, None] * difference).masked_fill(~block.valid, 0))
    return total


def loss_backward(
    spec: IndexerLossSpec,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    index: Index,
    attention: Attention,
    where: Where,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of the indexer's q, weights and cache.

    saved: the cotangent of the loss, and the two other results of `loss`.
    """
    d_loss, mass, choice_lse = saved
    return _gradient_by_blocks(d_loss, mass, choice_lse, _Loss(spec, index, attention, where)).result()
