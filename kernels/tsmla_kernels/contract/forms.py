"""In which form a step computes attention over selected keys: one rule, from sizes that the host knows.

All forms compute the attention over the selected keys, and differ by rounding alone. No form attends to other keys.
Imports neither jax nor torch.

  direct   sparse_mla: the absorbed form on the selected rows of the cache
  mask     mla_prefill on keys and values that are expanded from the cache, with the selection as bits
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FORMS = ("direct", "mask")

LEAST_TOKENS = 256
"""Tokens of a step below which a mask is not tried: decoding, and short ends of prompts."""

PAIRS = ((16, 9.0), (64, 4.5))
"""(query heads up to which this counts, pairs of token and key that the mask's kernel computes in the time of one pair
of sparse_mla); the last counts for more heads too. With few heads sparse_mla's tiles have rows without a head. Measured
on an H200 with 2,048 selected keys of prompts of 8,192 and 16,384 tokens (16 heads: 9.5 and 11.8; 64 and 128 heads: 4.4
to 4.7): benchmarks/results/h200/sparse_mla_prefill.json, forms direct and mask."""

WIDE_PAIRS = ((16, 5.0), (64, 2.5))
"""The same if keys and values have 256 columns each: the mask's kernel takes 1.8 times as long for them
(kernels/tsmla_kernels/sm90/prefill/LOG.md), and sparse_mla as long as for 192 and 128."""

EXPANSION_PAIRS = 410
"""Pairs whose products are as many as those of expanding a key: 2 x 512 x 256 of 2 x 320."""


class Form(NamedTuple):
    """How a step computes its attention over selected keys, or how the kernel of sparse_mla gathers them.

    name: one of FORMS, or of contract.sparse.SPARSE_FORMS. why: the reason, in words.
    """

    name: str
    why: str


class StepSizes(NamedTuple):
    """Sizes of a step that the host knows: new tokens, requests, a bound on a request's tokens (the new ones included),
    query heads, keys that a token selects, and columns that a head's key and value have together."""

    tokens: int
    requests: int
    longest: int
    heads: int
    selected: int
    columns: int = 320


def selected_form(sizes: StepSizes, *, forced: str | None = None, reasons: Sequence[str] = ()) -> Form:
    """The form for a step of these sizes.

    forced: the caller's choice, or None. reasons: why the mask can't serve the call, or not well; empty if it can.

    Raises:
      ValueError: `forced` is no form.
    """
    if forced is not None:
        if forced not in FORMS:
            raise ValueError(f"form: got {forced!r}; legal: None, {', '.join(map(repr, FORMS))}")
        return Form(forced, "the caller asks for it")
    if reasons:
        return Form("direct", "; ".join(reasons))
    if sizes.tokens < LEAST_TOKENS:
        return Form("direct", f"the step has {sizes.tokens} tokens, fewer than {LEAST_TOKENS}")
    seen, most = pairs_of_mask(sizes), pairs_that_pay(sizes)
    compared = f"the mask computes {seen:.0f} pairs of keys a token, and up to {most:.0f} take less time than direct"
    return Form("mask" if seen < most else "direct", compared)


def pairs_of_mask(sizes: StepSizes) -> float:
    """Pairs (a token and a key) that the mask form computes per token: the keys that a token sees on average, if its
    request has `longest` tokens, plus the cost of expanding the cached keys, in pairs. The direct form has no
    expansion."""
    new = min(sizes.tokens / max(sizes.requests, 1), sizes.longest)
    expanded = EXPANSION_PAIRS * sizes.requests * (sizes.longest - new) / sizes.tokens
    return sizes.longest - new / 2 + expanded


def pairs_that_pay(sizes: StepSizes) -> float:
    """How many pairs per token the mask's kernel computes in the time in which sparse_mla computes the selected
    ones."""
    of_heads = PAIRS if sizes.columns <= 320 else WIDE_PAIRS
    each = next((pairs for heads, pairs in of_heads if sizes.heads <= heads), of_heads[-1][1])
    return each * min(sizes.selected, sizes.longest)
