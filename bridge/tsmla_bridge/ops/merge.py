"""merge_attention_states on torch tensors: one attention result from partial results over disjoint keys.

On a Hopper GPU, and on later ones (cache_ops.config.ARCHS) if "cute" is named, the catalog's kernel runs the call, one
launch. Torch operations run all other calls: on CPUs, on other GPUs, and, unless "cute" is named, where a derivative is
asked for or the kernel can't serve the call: a dtype, width or number of parts that merge.config refuses, rows of
uneven strides or not at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tsmla_bridge import operators, reference
from tsmla_bridge.runtime import devices, loaded_kernels, tensors
from tsmla_bridge.runtime.results import Computed
from tsmla_kernels import contract
from tsmla_kernels.catalog import MERGE_ATTENTION_STATES
from tsmla_kernels.contract import MergeSpec
from tsmla_kernels.merge import config as merge_config

Parts = Sequence[torch.Tensor]


def merge_attention_states(
    outs: Sequence[torch.Tensor] | torch.Tensor,
    lses: Sequence[torch.Tensor] | torch.Tensor,
    *,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact merge of attention over disjoint sets of keys: weights exp(lse_i - logsumexp(lse)).

    The counterpart of merge_attn_states in vLLM and FlashInfer's cascade, for chunked context, split keys and context
    parallelism.

    Args:
      outs: N partial results [..., H, L], a sequence or one tensor with N in front; float16, bfloat16,
        float32 or float64.
      lses: their logsumexps [..., H], natural logarithm; float32 or float64. A part with lse -inf, or +inf as
        FlashAttention and FlashMLA write it, saw no key: its out is ignored whatever it holds, NaN included.
      implementation: "cute" (the kernel), "reference" (torch operations), or None: on Hopper the kernel if it can run,
        else torch operations.

    Returns:
      out [..., H, L] in outs' dtype and lse [..., H] in lses' dtype; a row that no part saw is 0 with lse -inf.
      Computed in float32, or in float64 if outs or lses are. An eager call is differentiable in outs and lses by torch
      operations, which run if a derivative is asked for; under torch.compile the derivative raises NotImplementedError.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason.
      RuntimeError: CUDA refused a launch, or a kernel would have to be loaded during a capture.
    """
    outs, lses = _parts("outs", outs), _parts("lses", lses)
    derived = operators.asks_for_derivative(*outs, *lses)
    if torch.compiler.is_compiling() or (not derived and operators.is_traced(*outs, *lses)):
        return torch.ops.tsmla.merge_attention_states(outs, lses, implementation)
    return _merge(outs, lses, implementation)


def _merge(outs: Parts, lses: Parts, implementation: str | None) -> Computed:
    spec = contract.merge_spec(
        outs=[tensors.describe(f"outs[{i}]", out) for i, out in enumerate(outs)],
        lses=[tensors.describe(f"lses[{i}]", lse) for i, lse in enumerate(lses)],
    )
    for name, parts in (("outs", outs), ("lses", lses)):
        tensors.same_device("outs[0]", outs[0], {f"{name}[{i}]": part for i, part in enumerate(parts)})
    device = outs[0].device
    rows = [_rows(out) for out in outs] if implementation == "cute" or devices.kind(device) == "cuda" else []

    def why_not() -> list[str]:
        reasons = MERGE_ATTENTION_STATES.reasons(spec) + operators.derivative_reasons(*outs, *lses)
        unreadable = [i for i, seen in enumerate(rows) if seen is None]
        return reasons + [loaded_kernels.unreadable(f"outs[{i}]", outs[i]) for i in unreadable]

    if loaded_kernels.is_chosen(MERGE_ATTENTION_STATES, implementation, device, why_not):
        return _launch(spec, [seen for seen in rows if seen is not None], outs, lses)
    return reference.merge_attention_states(spec, outs, lses)


def _launch(spec: MergeSpec, rows: Parts, outs: Parts, lses: Parts) -> Computed:
    out, lse = (torch.empty_like(parts[0], memory_format=torch.contiguous_format) for parts in (outs, lses))
    if lse.numel() == 0:
        return out, lse
    arrays = {f"out_{i}": loaded_kernels.wide_view(part) for i, part in enumerate(rows)}
    dense = [part.contiguous() for part in lses]  # lses are a small part of the bytes; the copies live until the launch
    arrays |= {f"lse_{i}": loaded_kernels.view(part, (part.numel(),)) for i, part in enumerate(dense)}
    arrays["out"] = loaded_kernels.view(out, (lse.numel(), out.shape[-1]))
    arrays["lse"] = loaded_kernels.view(lse, (lse.numel(),))
    loaded_kernels.run_on(MERGE_ATTENTION_STATES, merge_config.merge_config(spec), out.device, arrays)
    return out, lse


def _rows(part: torch.Tensor) -> torch.Tensor | None:
    """A part as [rows, L], the rows of one stride and at multiples of 16 bytes; None if no such view exists."""
    try:
        rows = part.view(-1, part.shape[-1])
    except RuntimeError:
        return None
    if len(rows) == 1:  # the stride of a single row may be anything
        rows = rows.as_strided(rows.shape, (rows.shape[1], rows.stride(1)))
    step = rows.stride(0) * rows.element_size()
    aligned = step % loaded_kernels.ROW_ALIGN == 0 == rows.data_ptr() % loaded_kernels.ROW_ALIGN
    return rows if aligned and rows.stride(1) == 1 and rows.stride(0) >= rows.shape[1] else None


def _parts(name: str, parts: Parts | torch.Tensor) -> list[torch.Tensor]:
    if isinstance(parts, list | tuple):
        return list(parts)
    stacked = tensors.describe(name, parts)
    if not stacked.shape:
        raise ValueError(f"{name}: got a tensor of shape []; its first axis must be the parts")
    return list(parts)


# ---- the operator

merge_operator = operators.register(
    "merge_attention_states", _merge, "(Tensor[] outs, Tensor[] lses, str? implementation) -> (Tensor, Tensor)"
)
operators.refuse_backward(merge_operator, "merge_attention_states", "an eager call has one")


@merge_operator.register_fake
def _(outs: Parts, lses: Parts, implementation: str | None) -> Computed:
    for name, parts in (("outs", outs), ("lses", lses)):
        tensors.same_device("outs[0]", outs[0], {f"{name}[{i}]": part for i, part in enumerate(parts)})
    dense = torch.contiguous_format
    return torch.empty_like(outs[0], memory_format=dense), torch.empty_like(lses[0], memory_format=dense)
