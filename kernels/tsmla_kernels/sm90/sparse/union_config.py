"""Which calls of sparse_mla may share gathers, and the configuration that serves them. Imports no cutlass.

Neighbouring tokens, as many as have 32 or 64 heads together, are a group. A group whose tokens select much the same
slots gathers the union of their slots once. The other groups' tokens gather for themselves. The device chooses for each
group.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from tsmla_kernels.contract.forms import Form
from tsmla_kernels.sm90.constants import FP8
from tsmla_kernels.sm90.latent import shape as latent_shape
from tsmla_kernels.sm90.latent.shape import ROWS
from tsmla_kernels.sm90.sparse.config import (
    BLOCK,
    FEW_HEADS,
    LATENT_DIM,
    SparseConfig,
    sparse_config,
    sparse_reasons,
)

if TYPE_CHECKING:
    from tsmla_kernels.contract.sparse import SparseMLASpec

HEADS = (8, 16, 32)  # multiples of 8, so that eight rows of P are of one token; at most 8 tokens make 64 heads
MOST_COLUMNS = 2048  # columns of the indices; each thread of the kernel that makes unions has two of each token
TABLE = 1 << 14  # slots that the union's hash table has room for: as many as eight tokens select
FEWEST_TOKENS = 2048  # with fewer tokens, looking for unions costs too much if the tokens share little
FEWEST_NEIGHBOURS = 1024  # the same if it is known that neighbouring tokens are of one request, and so may share much
PARTS = 64
WORTH = {2: 40, 4: 34, 8: 36}
"""By a group's number of tokens: how many PARTS-ths of the slots that these tokens select a union may have. A larger
union would take longer than separate gathers (LOG.md has times)."""


@dataclasses.dataclass(frozen=True)
class UnionConfig:
    """The static choices of a compiled sparse_mla whose tokens may share gathers.

    Attributes:
      dtype, num_heads, layout, kv_dtype, head_dim, page_size, page_span, window, compressed_page_size,
        compressed_page_span, lengths, sinks, max_logits: as in SparseConfig.
    """

    dtype: str
    num_heads: int
    layout: str = "v32"
    kv_dtype: str = "uint8"
    head_dim: int = 576
    page_size: int = 0
    page_span: int = 0
    window: int | None = None
    compressed_page_size: int = 0
    compressed_page_span: int = 0
    lengths: bool = False
    sinks: bool = False
    max_logits: bool = False

    @property
    def two_caches(self) -> bool:
        return self.window is not None

    @property
    def tokens(self) -> int:
        """Tokens of a group."""
        return group_tokens(self.num_heads, self.head_dim, self.layout == "plain" and self.kv_dtype != FP8)

    @cached_property
    def shared(self) -> SparseConfig:
        """The configuration of the launch that computes the groups that share."""
        return dataclasses.replace(self.alone, tokens=self.tokens)

    @cached_property
    def alone(self) -> SparseConfig:
        """The configuration of the launch that computes the other tokens."""
        facts = dataclasses.asdict(self) | {"lengths": True}
        return SparseConfig(**facts, skips=True, dealt=True, early_q=True)


def group_tokens(num_heads: int, head_dim: int, rows_of_16_bits: bool) -> int:
    """How many tokens a group has: as many as have 64 query rows, or 32 if rows of 16 bits leave no room for more."""
    return (FEW_HEADS if rows_of_16_bits and head_dim > LATENT_DIM else ROWS) // num_heads


def union_columns(tokens: int, num_selected: int) -> int:
    """How many slots the union of a group of `tokens` tokens has at most, rounded up to whole blocks."""
    return -(-(tokens * num_selected * WORTH[tokens] // PARTS) // BLOCK) * BLOCK


def union_reasons(spec: SparseMLASpec) -> list[str]:
    """Why tokens of this call cannot share gathers; empty if they can."""
    if reasons := sparse_reasons(spec):
        return reasons
    reasons = []
    if spec.q_dtype == FP8:
        reasons.append(f"q.dtype is {FP8}; tokens share gathers with queries of bfloat16 or float16")
    if spec.num_heads not in HEADS:
        reasons.append(f"num_heads is {spec.num_heads}; tokens share gathers with {', '.join(map(str, HEADS))} heads")
    if spec.batch_invariant:
        reasons.append("batch_invariant is set; a token's bits depend on the tokens with which it shares gathers")
    if spec.compressed is not None and spec.cache.layout == "plain":
        reasons.append("there are two plain caches; tokens share gathers from one cache, or from V4's two")
    if not reasons:
        tokens = _tokens(spec)
        if tokens < 2:
            reasons.append(f"num_heads is {spec.num_heads}; over such rows tokens share gathers with 8 or 16 heads")
        elif isinstance(spec.num_selected, int) and spec.num_selected > MOST_COLUMNS:
            reasons.append(f"indices have {spec.num_selected} columns (K); tokens share gathers of {MOST_COLUMNS}")
    return reasons


def sparse_mla_reasons(spec: SparseMLASpec) -> list[str]:
    """Why no Hopper kernel of sparse_mla runs this call in the form that it names; empty if one does."""
    return union_reasons(spec) if spec.form == "union" else sparse_reasons(spec)


def sparse_form(spec: SparseMLASpec) -> Form:
    """The form of a call, "direct" or "union": the one that the call names, or else the one that follows from the
    call's options and from the sizes that the host knows. In "union" the device then chooses for each group whether its
    tokens share."""
    if spec.form != "auto":
        return Form(spec.form, "the call names it")
    tokens, per_request = spec.num_tokens, spec.tokens_per_request
    if reasons := union_reasons(spec):
        return Form("direct", reasons[0])
    if not isinstance(tokens, int):
        return Form("direct", f"q has {tokens} tokens, a number that is not known")
    if per_request == 1:
        return Form("direct", "each token is of another request, and they share little")
    least = FEWEST_NEIGHBOURS if per_request else FEWEST_TOKENS
    if tokens < least:
        return Form("direct", f"q has {tokens} tokens; they share gathers from {least} on")
    of_group = _tokens(spec)
    return Form("union", f"q has {tokens} tokens, and {of_group} that select the same slots gather them once")


def _tokens(spec: SparseMLASpec) -> int:
    rows_of_16_bits = spec.cache.layout == "plain" and spec.cache.dtype != FP8
    return group_tokens(spec.num_heads, spec.head_dim, rows_of_16_bits)


def union_config(spec: SparseMLASpec, *, lengths: bool = False, sinks: bool = False) -> UnionConfig:
    """The configuration that serves `spec`; `lengths` and `sinks` say whether the call has these operands."""
    alone = sparse_config(spec, lengths=lengths, sinks=sinks)
    return UnionConfig(**{field.name: getattr(alone, field.name) for field in dataclasses.fields(UnionConfig)})


def union_configs(dtype: str, num_heads: int) -> list[UnionConfig]:
    """The configurations for queries of this dtype and number of heads: one over packed rows, and one over plain rows
    of 1,152 bytes, whose groups have half as many tokens. A configuration is left out if its groups would have one
    token."""
    if dtype == FP8 or num_heads not in HEADS:
        return []
    packed = UnionConfig(dtype, num_heads)
    wide = UnionConfig(dtype, num_heads, layout="plain", kv_dtype="bfloat16")
    return [config for config in (packed, wide) if config.tokens > 1]


class UnionShapes(NamedTuple):
    """Sizes of a call's groups: how many there are, and the most slots of a union."""

    groups: int
    columns: int

    @classmethod
    def of(cls, config: UnionConfig, num_tokens: int, num_selected: int) -> UnionShapes:
        return cls(-(-num_tokens // config.tokens), union_columns(config.tokens, num_selected))


def union_workspaces(
    config: UnionConfig, num_sms: int, num_tokens: int, num_selected: int
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of the workspaces, in the order of the operands: the unions' slots, their bits and lengths, the
    tokens' lengths, and the partial results of both launches (see latent.shape.workspace_shapes)."""
    groups, columns = UnionShapes.of(config, num_tokens, num_selected)
    shared = latent_shape.workspace_shapes(config.shared.shape, num_sms, groups, columns)
    alone = latent_shape.workspace_shapes(config.alone.shape, num_sms, num_tokens, num_selected)
    return {
        "union_slots": ((groups, columns), "int32"),
        "union_bits": ((groups, columns), "uint8"),
        "union_lengths": ((groups,), "int32"),
        "token_lengths": ((num_tokens,), "int32"),
        **{f"union_{name}": of for name, of in shared.items()},
        **alone,
    }
