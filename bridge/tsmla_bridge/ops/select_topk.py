"""select_topk on torch tensors: the positions or slots of the largest logits of each row, exact.

On a Hopper GPU the catalog's kernel runs the call, one launch; on Blackwell only where implementation="cute" names it.
Torch operations run the call on CPUs, on other GPUs, and, unless "cute" is named, where the kernel can't serve it:
slots with order="value", logits of another dtype than float32 or not at a multiple of 16 bytes, sizes that topk.config
refuses, tensors with gaps. No call reads a value on the host, except under TSMLA_CHECK=1 outside of a capture, so CUDA
graphs can capture all of them.
"""

from __future__ import annotations

from typing import Any

import torch

from tsmla_bridge import operators, sparse_reference
from tsmla_bridge.runtime import data_checks, loaded_kernels, tensors
from tsmla_kernels.catalog import SELECT_TOPK
from tsmla_kernels.contract import values
from tsmla_kernels.contract.selection import selection_words
from tsmla_kernels.contract.sparse import TopKSpec, topk_spec
from tsmla_kernels.topk.config import topk_config

Results = tuple[torch.Tensor, torch.Tensor]
"""Positions, slots or words, and counts."""


def select_topk(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    k: int,
    *,
    order: str = "value",
    row_starts: torch.Tensor | None = None,
    block_tables: torch.Tensor | None = None,
    page_size: int | None = None,
    return_bits: bool = False,
    out: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor | Results:
    """The positions of the k largest of seq_lens[t] logits of each row, exact, as tsmla_jax.select_topk defines it; or
    their slots in a cache, or their bits.

    Args:
      logits: [T, N] float16, bfloat16, float32 or float64; columns that are not the row's change
        nothing, whatever they hold.
      seq_lens: [T] int32, how many logits each row has: at least 0, and at most the columns from its start on.
      k: at least 1.
      order: the order of a row's positions: "value" (largest logit first) or "position" (ascending), which is faster on
        Hopper. The kernel returns slots only in the order of "position".
      row_starts: [T] int32, the column where each row begins; positions count from there. None is column 0 for all.
      block_tables: [T, M] int32, the pages of each row's keys: slots are returned in the place of positions.
      page_size: the block tables' tokens a page: position p is slot
        block_tables[t, p // page_size] * page_size + p % page_size.
      return_bits: return the selection as bits, which mla_prefill takes, in the place of positions; not legal with
        block_tables. On Hopper the kernel writes the bits itself, for rows of up to 131,072 columns.
      out: int32 [T, k] for the positions or slots, [T, W] for the bits, or None.
      counts: int32 [T] for the counts, or None; only with block_tables.
      implementation: "cute" (the kernel), "reference" (torch operations), or None: on Hopper the kernel if it can run,
        else torch operations.

    Returns:
      int32 [T, k], `out` if it is given: -1 after the min(k, seq_lens[t]) positions of a row. Of equal logits the one
      at the lower position is the larger, and NaN is below every number. With block_tables: the slots in the order of
      the positions, -1 for a position past the table; and int32 [T], min(k, seq_lens[t]). With return_bits: int32 words
      [T, W], W = ceil(N / 128) * 4, the selection_bits of the positions; `order` has no meaning.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason.
      RuntimeError: CUDA refused a launch, or a kernel would have to be loaded during a capture.
    """
    if counts is not None and block_tables is None:
        raise ValueError("counts: got a tensor without block_tables; legal: None")
    arguments = (logits, seq_lens, k, order, row_starts, block_tables, page_size, return_bits, implementation)
    if torch.compiler.is_compiling() or operators.is_traced(logits, seq_lens, derivatives=False):
        if out is None and counts is None:
            results = torch.ops.tsmla.select_topk(*arguments)
        else:
            width = selection_words(logits.shape[1]) if return_bits else k
            results = _new(logits, seq_lens, width) if out is None or counts is None else (out, counts)
            results = (results[0] if out is None else out, results[1] if counts is None else counts)
            torch.ops.tsmla.select_topk_into(*arguments, *results)
    else:
        results = _select(*arguments, out, counts)
    return results[0] if block_tables is None else results


def _new(logits: torch.Tensor, seq_lens: torch.Tensor, width: int) -> Results:
    return logits.new_empty((logits.shape[0], width), dtype=torch.int32), torch.empty_like(seq_lens)


def _select(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    k: int,
    order: str,
    row_starts: torch.Tensor | None,
    block_tables: torch.Tensor | None,
    page_size: int | None,
    return_bits: bool,
    implementation: str | None,
    out: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> Results:
    """The indices, or the words, and the counts; without block tables the kernel writes no counts."""
    given: dict[str, Any] = {"logits": logits, "seq_lens": seq_lens}
    given |= {"row_starts": row_starts} if row_starts is not None else {}
    given |= {"block_tables": block_tables} if block_tables is not None else {}
    options: dict[str, Any] = {"k": k, "order": order, "page_size": page_size, "return_bits": return_bits}
    spec = tensors.describe_call(topk_spec, **given, **options)

    def why_not() -> list[str]:
        return SELECT_TOPK.reasons(spec) + loaded_kernels.layout_reasons(given)

    by_kernel = loaded_kernels.is_chosen(SELECT_TOPK, implementation, logits.device, why_not)
    if row_starts is None:
        data_checks.check(values.topk_lens, spec.num_columns, seq_lens)
    else:
        data_checks.check(values.topk_rows, spec.num_columns, seq_lens, row_starts)
    rows = spec.num_tokens
    for name, tensor, shape in (("out", out, (rows, spec.width)), ("counts", counts, (rows,))):
        if tensor is not None:
            tensors.check_output(name, tensor, shape, torch.int32, logits.device)
            tensors.check_apart(name, tensor, given if name == "out" else {"out": out, **given})
    if not by_kernel or 0 in (rows, spec.num_columns) or (block_tables is not None and not block_tables.shape[1]):
        found = sparse_reference.select_topk(spec, logits, seq_lens, row_starts, block_tables)
        wanted = (out, counts)
        return tuple(x if to is None else to.copy_(x) for x, to in zip(found, wanted, strict=True))  # type: ignore[return-value]
    new = _new(logits, seq_lens, spec.width) if out is None or counts is None else (out, counts)
    results = (new[0] if out is None else out, new[1] if counts is None else counts)
    if spec.bits and out is not None:
        loaded_kernels.check_aligned("out", out)
    tensors.mark_written(*(to for to in (out, counts) if to is not None))
    _launch(spec, given, results)
    return results


def _launch(spec: TopKSpec, given: dict[str, torch.Tensor], results: Results) -> None:
    arrays = {name: loaded_kernels.view(tensor) for name, tensor in given.items()}
    arrays["selection" if spec.bits else "indices"] = loaded_kernels.view(results[0])
    if spec.page_size:
        arrays["counts"] = loaded_kernels.view(results[1])
    loaded_kernels.run_on(SELECT_TOPK, topk_config(spec), results[0].device, arrays)


# ---- the operators

_SCHEMA = (
    "Tensor logits, Tensor seq_lens, int k, str order, Tensor? row_starts, Tensor? block_tables, int? page_size,"
    " bool return_bits, str? implementation"
)


def _select_into(*arguments: Any) -> None:
    _select(*arguments)


topk_operator = operators.register("select_topk", _select, f"({_SCHEMA}) -> (Tensor, Tensor)")
topk_into_operator = operators.register(
    "select_topk_into", _select_into, f"({_SCHEMA}, Tensor(a!) out, Tensor(b!) counts) -> ()", writes=("out", "counts")
)


def _fake(logits: Any, seq_lens: Any, k: Any, *others: Any) -> Any:
    return_bits = others[-2]
    return _new(logits, seq_lens, selection_words(logits.shape[1]) if return_bits else k)


operators.register_fake(topk_operator, _fake)
