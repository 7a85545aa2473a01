"""The definitions, on torch tensors, of how bits select keys. They read no value on the host."""

from __future__ import annotations

import torch

from tsmla_kernels.contract.selection import WORD_KEYS, SelectionBitsSpec


def selection_bits(
    spec: SelectionBitsSpec, positions: torch.Tensor, lengths: torch.Tensor | None, starts: torch.Tensor | None
) -> torch.Tensor:
    """The words of selection_bits."""
    tokens, num_keys = positions.shape[0], spec.num_words * WORD_KEYS
    first = torch.zeros_like(positions[:, :1]) if starts is None else starts.clamp(min=0)[:, None]
    keys = positions.long() - first
    counts = (keys >= 0) & (keys < num_keys)
    if lengths is not None:
        counts &= torch.arange(positions.shape[1], device=positions.device) < lengths[:, None]
    chosen = torch.zeros((tokens, num_keys + 1), dtype=torch.bool, device=positions.device)
    # Column num_keys takes the positions that select nothing.
    chosen.scatter_(1, torch.where(counts, keys, num_keys), True)
    bits = chosen[:, :num_keys].view(tokens, spec.num_words, WORD_KEYS).long()
    words = (bits << torch.arange(WORD_KEYS, device=positions.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def selected(words: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Whether each of T tokens selects each of the keys at `positions` [N], from 0, as bool [T, N].

    words: the words of a selection. They select no keys past the last word.
    rows: [T], the row of `words` that is the token's; a token with a negative row selects all keys.
    """
    inside = positions < words.shape[1] * WORD_KEYS
    word = torch.where(inside, positions // WORD_KEYS, 0)
    each = words[rows.long().clamp(0, max(len(words) - 1, 0))][:, word]
    return (rows[:, None] < 0) | (inside & ((each >> (positions % WORD_KEYS)) & 1).bool())
