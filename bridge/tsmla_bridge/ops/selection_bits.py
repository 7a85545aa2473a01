"""selection_bits on torch tensors: the bits by which mla_prefill selects keys, from the positions that a top-k chose.

On a Hopper GPU the catalog's kernel runs the call, one launch; on Blackwell only where implementation="cute" names it.
Torch operations run the call on CPUs, on other GPUs, and, unless "cute" is named, for tensors with gaps. No call reads
a value on the host, so CUDA graphs can capture all of them.
"""

from __future__ import annotations

from typing import Any

import torch

from tsmla_bridge import operators, selection_reference
from tsmla_bridge.runtime import loaded_kernels, tensors
from tsmla_kernels.catalog import SELECTION_BITS
from tsmla_kernels.contract.selection import selection_bits_spec, selection_words
from tsmla_kernels.selection.config import selection_bits_config


def selection_bits(
    positions: torch.Tensor,
    num_keys: int,
    *,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """The selection of keys as mla_prefill and mla_prefill_kv take it, a bit for each key, as tsmla_jax.selection_bits
    defines it.

    Args:
      positions: [T, k] int32, the keys that each token selects, counted from the first key of its request; in any
        order, also several times. Positions outside of a row's keys, -1 among them, select nothing.
      num_keys: how many keys a row needs bits for, at least 1. W is 4 * ceil(num_keys / 128), and a row has bits for
        32 W keys.
      lengths: [T] int32, how many of a row's positions count, from the first on; None is all.
      starts: [T] int32, at least 0, the key that a row's first bit stands for, if the words are for a chunk of context.
        None is 0.
      out: int32 [T, W] for the words, or None.
      implementation: "cute" (the kernel), "reference" (torch operations), or None: on Hopper the kernel if it can run,
        else torch operations.

    Returns:
      int32 [T, W], `out` if it is given: bit j of word w of row t is 1 iff the row selects key starts[t] + 32 w + j.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason.
      RuntimeError: CUDA refused a launch, or a kernel would have to be loaded during a capture.
    """
    arguments = (positions, num_keys, lengths, starts, implementation)
    if torch.compiler.is_compiling() or operators.is_traced(positions, derivatives=False):
        if out is None:
            return torch.ops.tsmla.selection_bits(*arguments)
        torch.ops.tsmla.selection_bits_into(*arguments, out)
        return out
    return _mark(*arguments, out)


def _mark(
    positions: torch.Tensor,
    num_keys: int,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None,
    implementation: str | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    each = {name: tensor for name, tensor in (("lengths", lengths), ("starts", starts)) if tensor is not None}
    given = {"positions": positions, **each}
    spec = tensors.describe_call(selection_bits_spec, **given, num_keys=num_keys)

    def why_not() -> list[str]:
        return SELECTION_BITS.reasons(spec) + loaded_kernels.layout_reasons(given)

    by_kernel = loaded_kernels.is_chosen(SELECTION_BITS, implementation, positions.device, why_not)
    if out is not None:
        tensors.check_output("out", out, (positions.shape[0], spec.num_words), torch.int32, positions.device)
        tensors.check_apart("out", out, given)
    if not by_kernel or positions.numel() == 0:
        words = selection_reference.selection_bits(spec, positions, lengths, starts)
        return words if out is None else out.copy_(words)
    words = _new(positions, num_keys) if out is None else out
    if out is not None:
        loaded_kernels.check_aligned("out", out)
        tensors.mark_written(out)
    arrays = {name: loaded_kernels.view(tensor) for name, tensor in given.items()}
    arrays["selection"] = loaded_kernels.view(words)
    loaded_kernels.run_on(SELECTION_BITS, selection_bits_config(spec), words.device, arrays)
    return words


def _new(positions: torch.Tensor, num_keys: int, *_: Any) -> torch.Tensor:
    return positions.new_empty((positions.shape[0], selection_words(num_keys)), dtype=torch.int32)


# ---- the operators

_SCHEMA = "Tensor positions, int num_keys, Tensor? lengths, Tensor? starts, str? implementation"


def _mark_into(*arguments: Any) -> None:
    _mark(*arguments)


bits_operator = operators.register("selection_bits", _mark, f"({_SCHEMA}) -> Tensor")
bits_into_operator = operators.register(
    "selection_bits_into", _mark_into, f"({_SCHEMA}, Tensor(a!) out) -> ()", writes=("out",)
)
operators.register_fake(bits_operator, _new)
