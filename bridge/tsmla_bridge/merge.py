"""merge_attention_states on torch tensors: one attention result from partial results over disjoint keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tsmla_bridge import ops, tensors
from tsmla_bridge.tensors import DTYPES, accumulation_dtype
from tsmla_kernels import contract


def merge_attention_states(
    outs: Sequence[torch.Tensor] | torch.Tensor, lses: Sequence[torch.Tensor] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact merge of attention over disjoint sets of keys: weights exp(lse_i - logsumexp(lse)).

    As merge_attn_states in vLLM and FlashInfer's cascade; used for chunked context, split keys and context parallelism.

    Args:
      outs: N partial results [..., H, L], a sequence or one tensor with N in front; float16 to float64.
      lses: their logsumexps [..., H], natural logarithm; float32 or float64. A part with lse -inf saw no key: its out
        is ignored whatever it holds, NaN included.

    Returns:
      out [..., H, L] in outs' dtype and lse [..., H]; a row that no part saw is 0 with lse -inf. Computed in float32
      (float64 for float64), in plain torch operations. Differentiable in outs and lses.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
    """
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    if torch.compiler.is_compiling() or ops.is_traced(*outs, *lses):
        return torch.ops.tsmla.merge_attention_states(outs, lses)
    return run(outs, lses)


def run(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """An eager call of merge_attention_states."""
    spec = contract.merge_spec(
        outs=[tensors.describe(f"outs[{i}]", out) for i, out in enumerate(outs)],
        lses=[tensors.describe(f"lses[{i}]", lse) for i, lse in enumerate(lses)],
    )
    for name, parts in (("outs", outs), ("lses", lses)):
        tensors.same_device("outs[0]", outs[0], {f"{name}[{i}]": part for i, part in enumerate(parts)})
    dtype = accumulation_dtype(spec.out_dtype)
    lse = torch.stack([part.to(dtype) for part in lses])
    maximum = lse.amax(0).detach()
    nothing = maximum == -torch.inf
    maximum = maximum.masked_fill(nothing, 0)  # a row that no part saw has no maximum; 0 avoids inf - inf
    # Shares of the sum, not exp(part - lse): rounding lse would cost 1e-4 of a weight at |lse| = 3000.
    terms = torch.exp(lse - maximum)
    total = terms.sum(0).masked_fill(nothing, 1)
    merged = sum(
        part.to(dtype).masked_fill((weight == 0)[..., None], 0) * weight[..., None]  # what has no weight may be NaN
        for part, weight in zip(outs, terms / total, strict=True)
    )
    assert isinstance(merged, torch.Tensor)
    merged_lse = (maximum + total.log()).masked_fill(nothing, -torch.inf)
    return merged.to(DTYPES[spec.out_dtype]), merged_lse.to(DTYPES[spec.lse_dtype])


def _parts(name: str, parts: Sequence[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    if isinstance(parts, list | tuple):
        return list(parts)
    stacked = tensors.describe(name, parts)
    if not stacked.shape:
        raise ValueError(f"{name}: got a tensor of shape []; its first axis must be the parts")
    return list(parts)
