"""merge_attention_states on torch tensors: one attention result from partial results over disjoint keys.

On a Hopper GPU by the catalog's kernel, one launch. In torch operations on CPUs, where a derivative is asked for, and
where the kernel can't serve the call: a dtype or width that merge.config refuses, rows of uneven strides or not at
multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tsmla_bridge import devices, kernels, ops, tensors
from tsmla_bridge.tensors import DTYPES, accumulation_dtype
from tsmla_kernels import contract
from tsmla_kernels.catalog import MERGE_ATTENTION_STATES
from tsmla_kernels.merge import config as merge_rules


def merge_attention_states(
    outs: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    *,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact merge of attention over disjoint sets of keys: weights exp(lse_i - logsumexp(lse)).

    As merge_attn_states in vLLM and FlashInfer's cascade; used for chunked context, split keys and context parallelism.

    Args:
      outs: N partial results [..., H, L], a sequence or one tensor with N in front; float16 to float64.
      lses: their logsumexps [..., H], natural logarithm; float32 or float64. A part with lse -inf saw no key: its out
        is ignored whatever it holds, NaN included.
      implementation: "cute" (the kernel), "reference" (torch operations), or None: the kernel where it can run.

    Returns:
      out [..., H, L] in outs' dtype and lse [..., H]; a row that no part saw is 0 with lse -inf. Computed in float32
      (float64 for float64). Differentiable in outs and lses, in torch operations.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason.
    """
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    derived = _derivative_asked_for(outs, lses)
    if torch.compiler.is_compiling() or (not derived and ops.is_traced(*outs, *lses)):
        return torch.ops.tsmla.merge_attention_states(outs, lses, implementation)
    return run(outs, lses, implementation)


def run(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], implementation: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """An eager call of merge_attention_states."""
    spec = contract.merge_spec(
        outs=[tensors.describe(f"outs[{i}]", out) for i, out in enumerate(outs)],
        lses=[tensors.describe(f"lses[{i}]", lse) for i, lse in enumerate(lses)],
    )
    for name, parts in (("outs", outs), ("lses", lses)):
        tensors.same_device("outs[0]", outs[0], {f"{name}[{i}]": part for i, part in enumerate(parts)})
    rows = _kernel_rows(spec, outs, lses, implementation)
    if rows is not None:
        return _launch(spec, rows, outs, lses)
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
    # Dense, as what the kernel returns, whatever the parts' strides.
    return merged.to(DTYPES[spec.out_dtype]).contiguous(), merged_lse.to(DTYPES[spec.lse_dtype]).contiguous()


def _derivative_asked_for(*parts: Sequence[torch.Tensor]) -> bool:
    given = (part for some in parts for part in some if isinstance(part, torch.Tensor))
    return torch.is_grad_enabled() and any(part.requires_grad for part in given)


def _kernel_rows(
    spec: contract.MergeSpec, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], implementation: str | None
) -> list[torch.Tensor] | None:
    """The outs as the kernel reads them; None if torch operations run the call. NotImplementedError, with every reason,
    if the kernel was named and can't."""
    kernels.check_implementation(implementation)
    device = outs[0].device
    if implementation == "reference" or (implementation is None and devices.kind(device) != "cuda"):
        return None
    reasons = kernels.reasons(MERGE_ATTENTION_STATES, device) + merge_rules.merge_reasons(spec)
    if _derivative_asked_for(outs, lses):
        reasons.append("a derivative is asked for; the kernel has none")
    rows = []
    for i, out in enumerate(outs):
        if (seen := _rows(out)) is None:
            reasons.append(kernels.unreadable(f"outs[{i}]", out))
        else:
            rows.append(seen)
    if reasons:
        if implementation == "cute":
            raise contract.not_runnable("merge_attention_states", "cute", reasons)
        return None
    return rows if kernels.wanted(implementation, device) else None


def _launch(
    spec: contract.MergeSpec, rows: list[torch.Tensor], outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = (torch.empty_like(parts[0], memory_format=torch.contiguous_format) for parts in (outs, lses))
    if lse.numel() == 0:
        return out, lse
    # The kernel reads the first columns of rows that may be wider. What is left of lses is a 128th of the bytes.
    arrays = {f"out_{i}": kernels.view(part, (part.shape[0], part.stride(0))) for i, part in enumerate(rows)}
    dense = [part.contiguous() for part in lses]  # kept until the launch
    arrays |= {f"lse_{i}": kernels.view(part, (part.numel(),)) for i, part in enumerate(dense)}
    arrays |= {"out": kernels.view(out, (lse.numel(), out.shape[-1])), "lse": kernels.view(lse, (lse.numel(),))}
    index = devices.index_of(out.device)
    with devices.made_current(index):
        stream = devices.current_stream(index)
        config = merge_rules.merge_config(spec)
        kernels.run("merge_attention_states", MERGE_ATTENTION_STATES, config, index, stream, arrays)
    return out, lse


def _rows(part: torch.Tensor) -> torch.Tensor | None:
    """A part as [rows, L], the rows of one stride and at multiples of 16 bytes; None if it can't be seen so."""
    try:
        rows = part.view(-1, part.shape[-1])
    except RuntimeError:
        return None
    if len(rows) == 1:  # whose stride may be anything
        rows = rows.as_strided(rows.shape, (rows.shape[1], rows.stride(1)))
    aligned = (rows.stride(0) * rows.element_size() % kernels.ROW_ALIGN, rows.data_ptr() % kernels.ROW_ALIGN) == (0, 0)
    return rows if aligned and rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1] else None


def _parts(name: str, parts: Sequence[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    if isinstance(parts, list | tuple):
        return list(parts)
    stacked = tensors.describe(name, parts)
    if not stacked.shape:
        raise ValueError(f"{name}: got a tensor of shape []; its first axis must be the parts")
    return list(parts)
