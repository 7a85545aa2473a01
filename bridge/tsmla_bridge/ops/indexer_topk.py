"""indexer_topk on torch tensors: the keys that the V3.2 indexer selects, without the logits of all query tokens.

On a Hopper GPU, and on Blackwell if "cute" is named, the kernels of indexer_logits and select_topk run the call, in
turn on chunks of query tokens; torch operations compute logits that no kernel takes (topk.logits_kernel says which).
Torch operations also run all other calls: on CPUs, on other GPUs, and, unless "cute" is named, where the kernel of
select_topk can't serve the call or the scores' derivative is asked for. No call reads a value on the host, except under
TSMLA_CHECK=1 outside of a capture, so CUDA graphs can capture all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tsmla_bridge import operators, reference, sparse_reference
from tsmla_bridge.ops import blackwell
from tsmla_bridge.runtime import data_checks, devices, loaded_kernels, tensors
from tsmla_bridge.runtime.workspace import Workspace, check_workspace
from tsmla_kernels.catalog import INDEXER_LOGITS, SELECT_TOPK
from tsmla_kernels.contract import values
from tsmla_kernels.contract.selection import selection_words
from tsmla_kernels.contract.sparse import IndexerTopkSpec, indexer_topk_spec
from tsmla_kernels.sm90.logits.config import LogitsConfig
from tsmla_kernels.topk.chunks import LOGIT_BYTES, ROW_BYTES, Chunks, chunks_of, logits_of_rows, selection_reasons
from tsmla_kernels.topk.logits_kernel import no_logits_kernel

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Positions or slots [T, k] or words [T, W], counts [T] and scores [T, k]. Counts that a call does not return mean
nothing; scores that it does not return are empty."""


Operands = dict[str, torch.Tensor]


class Call(NamedTuple):
    """The arguments of a call, without the caller's memory."""

    q: torch.Tensor
    weights: torch.Tensor
    k_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    k: int
    return_slots: bool
    return_scores: bool
    return_bits: bool
    implementation: str | None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The call's tensors by name; without cu_seqlens_q if it is None."""
        named: dict[str, Any] = dict(zip(self._fields[:6], self[:6], strict=True))
        if self.cu_seqlens_q is None:
            del named["cu_seqlens_q"]
        return named

    @property
    def width(self) -> int:
        """Integers of a row of the first result."""
        columns = self.block_tables.shape[1] * self.k_cache.shape[1]
        return selection_words(columns) if self.return_bits else self.k


class Memory(NamedTuple):
    """The caller's memory for a call's results and chunks; None where the call makes its own."""

    out: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    workspace: Workspace | None = None


def indexer_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k: int,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    return_slots: bool = False,
    return_scores: bool = False,
    return_bits: bool = False,
    out: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    implementation: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The cached keys with the k best scores of the indexer for every query token, as tsmla_jax.indexer_topk defines
    it: select_topk(order="position") of indexer_logits, which only "reference" holds for all tokens and keys at once.

    Args:
      q: [T, Hi, Di]; float8_e4m3fn with a packed cache, any float with a plain one.
      weights: [T, Hi] float32, scales and constants folded in; float64 is rounded to float32 by torch operations.
      k_cache: uint8 [P, Z, Di + 4], a page's bytes Z keys of e4m3 and then Z scales of float32; or plain floats
        [P, Z, Di].
      block_tables: [T, M] int32, one row a token, or with cu_seqlens_q [B, M], one row a request; entries past a row's
        last page are never used.
      seq_lens: [T] int32, keys token t sees; or with cu_seqlens_q [B], keys of request b; 0 is legal.
      k: at least 1.
      cu_seqlens_q: [B + 1] int32, where each request's tokens begin in q, or None. Token i of a request's S sees key j
        iff j < seq_len - (S - 1) + i; rows that belong to no request see none.
      return_slots: return slots and counts in the place of positions.
      return_scores: return the scores of the selected keys, too, as the last result.
      return_bits: return the selection as bits, which mla_prefill takes, in the place of positions; without
        return_slots and return_scores.
      out: int32 [T, k] for the positions or slots, [T, W] for the bits, or None.
      counts: int32 [T] for the counts, or None; only with return_slots.
      scores: float32 [T, k] for the scores, or None; only with return_scores.
      workspace: memory for a chunk's logits and, with cu_seqlens_q, 8 bytes a token, or None;
        indexer_topk_workspace_size says how much. With it and with memory for all its results a call of Hopper's
        kernels allocates nothing but 4 bytes a token for counts, if it does not return them.
      implementation: "cute" (the kernels; torch operations compute logits that no kernel takes), "reference" (torch
        operations), or None: on Hopper as "cute" if the kernel of the top-k can run, else torch operations.

    Returns:
      int32 [T, k], `out` if it is given: the positions of the selected keys, ascending, and -1 after the
      min(k, keys seen) of them. Of equal scores the one at the lower position is the larger, and NaN is below every
      number. With return_slots: their slots in k_cache in the same order, and int32 [T], min(k, keys seen). With
      return_scores also float32 [T, k], their scores in the same order, -inf where there is no key. With return_bits:
      int32 words [T, W], W = ceil(M * Z / 128) * 4, the selection_bits of the positions. The scores have a
      derivative in eager torch operations; where one is asked for, the kernels don't run.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason; or backward() asks for the
        derivative of a call that runs as an operator of torch (under torch.compile, say).
      RuntimeError: CUDA refused a launch, or a kernel would have to be loaded during a capture.
    """
    if counts is not None and not return_slots:
        raise ValueError("counts: got a tensor without return_slots; legal: None")
    if scores is not None and not return_scores:
        raise ValueError("scores: got a tensor without return_scores; legal: None")
    check_workspace(workspace)
    call = Call(
        q=q,
        weights=weights,
        k_cache=k_cache,
        block_tables=block_tables,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        k=k,
        return_slots=return_slots,
        return_scores=return_scores,
        return_bits=return_bits,
        implementation=implementation,
    )
    memory = Memory(out, counts, scores, workspace)
    if torch.compiler.is_compiling() or operators.is_traced(q, weights, k_cache, derivatives=False):
        if all(place is None for place in memory):
            results = torch.ops.tsmla.indexer_topk(*call)
        else:
            results = _results(call, memory)
            torch.ops.tsmla.indexer_topk_into(*call, *results, None if workspace is None else workspace.buffer)
    else:
        results = _select(call, memory)
    indices, new_counts, new_scores = results
    found = indices, *((new_counts,) if return_slots else ()), *((new_scores,) if return_scores else ())
    return found if len(found) > 1 else indices


def _results(call: Call, memory: Memory) -> Results:
    """The caller's memory for the results, or new memory."""
    rows, k = call.q.shape[0], call.k

    def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return call.q.new_empty(shape, dtype=dtype)

    return (
        new(torch.int32, rows, call.width) if memory.out is None else memory.out,
        new(torch.int32, rows) if memory.counts is None else memory.counts,
        new(torch.float32, rows, k if call.return_scores else 0) if memory.scores is None else memory.scores,
    )


def _select(call: Call, memory: Memory) -> Results:
    """The indices, the counts and the scores; without return_slots the kernels write no counts."""
    given = call.tensors
    flags = ("return_slots", "return_scores", "return_bits")
    options: dict[str, Any] = {"k": call.k, **{name: getattr(call, name) for name in flags}}
    spec = tensors.describe_call(indexer_topk_spec, **given, **options)
    device = call.q.device

    def why_not() -> list[str]:
        found = selection_reasons(spec) + loaded_kernels.layout_reasons(given)
        if call.return_scores and operators.asks_for_derivative(*given.values()):
            found.append("a derivative is asked for; the kernels have none")
        return found

    by_kernels = loaded_kernels.is_chosen(SELECT_TOPK, call.implementation, device, why_not, op="indexer_topk")
    data_checks.check(values.indexer_logits, spec.logits, call.seq_lens, call.block_tables, call.cu_seqlens_q)
    tokens = spec.logits.num_tokens
    shapes = ((tokens, spec.topk.width), torch.int32), ((tokens,), torch.int32), ((tokens, spec.k), torch.float32)
    places: dict[str, torch.Tensor] = {}
    for name, tensor, (shape, dtype) in zip(Memory._fields, memory[:3], shapes, strict=False):
        if tensor is not None and (name != "scores" or call.return_scores):
            tensors.check_output(name, tensor, shape, dtype, device)
            tensors.check_apart(name, tensor, given | places)
            places[name] = tensor
    if not by_kernels or 0 in (tokens, spec.logits.num_requests, spec.logits.cache.num_pages, spec.num_columns):
        found = sparse_reference.indexer_topk(spec, *call[:6])
        return tuple(x if to is None else to.copy_(x) for x, to in zip(found, memory[:3], strict=True))  # type: ignore[return-value]
    if call.return_bits and memory.out is not None:
        loaded_kernels.check_aligned("out", memory.out)
    results = _results(call, memory)
    tensors.mark_written(*places.values())
    index = devices.index_of(device)
    arch = devices.arch(index)
    plan = chunks_of(spec, devices.num_sms(index), arch=arch, logits_kernel=not no_logits_kernel(spec, arch))
    if isinstance(plan.logits, LogitsConfig):
        _launch(spec, plan, call, results, memory.workspace)
    else:
        _launch_topk(spec, plan, call, results)
    return results


@torch.no_grad()
def _launch_topk(spec: IndexerTopkSpec, plan: Chunks, call: Call, results: Results) -> None:
    """Compute each chunk's logits, in new memory, by FlashInfer's kernel or by torch operations, and their top-k."""
    device, num_tokens = call.q.device, spec.logits.num_tokens
    seen, request = call.seq_lens, None
    if call.cu_seqlens_q is not None:
        request, seen = reference.seen_keys(seen, call.cu_seqlens_q, num_tokens)
    for first in plan.starts(num_tokens):
        chunk = slice(first, first + plan.rows)
        tables = call.block_tables[chunk if request is None else request[chunk]]
        q, weights, of_rows = call.q[chunk], call.weights[chunk], logits_of_rows(spec, plan.rows)
        if plan.logits is None:
            logits = reference.indexer_logits(of_rows, q, weights, call.k_cache, tables, seen[chunk], None)
        else:
            arrays = {"q": q, "weights": weights, "k_cache": call.k_cache}
            logits = blackwell.indexer_logits(of_rows, arrays | {"block_tables": tables, "seq_lens": seen[chunk]})
        requests = {} if request is None else {"row_requests": request[chunk]}
        of_call = {"block_tables": tables if request is None else call.block_tables} | requests
        of_topk = {"logits": logits, "seq_lens": seen[chunk]} | (of_call if spec.return_slots else {})
        of_topk |= _of_results(spec, results, first, plan.rows)
        operands = {name: loaded_kernels.view(tensor) for name, tensor in of_topk.items()}
        loaded_kernels.run_on(SELECT_TOPK, plan.topk, device, operands)


def _of_results(spec: IndexerTopkSpec, results: Results, first: int, rows: int) -> Operands:
    """A chunk's rows of the results, by the top-k's operand."""
    indices, counts, scores = (result.narrow(0, first, rows) for result in results)
    found = {"selection" if spec.return_bits else "indices": indices}
    found |= {"counts": counts} if spec.return_slots else {}
    return found | ({"scores": scores} if spec.return_scores else {})


class Scratch(NamedTuple):
    """Results of a chunk's first launch that the second reads: the logits and, if the call has cu_seqlens_q, each row's
    count of keys that it sees and the index of its request."""

    logits: torch.Tensor
    row_lens: torch.Tensor | None = None
    row_requests: torch.Tensor | None = None


def _scratch(
    spec: IndexerTopkSpec, plan: Chunks, device: torch.device, stream: int, workspace: Workspace | None
) -> Scratch:
    """Scratch of a call, in the workspace or in new memory, which lives until the launches are queued."""
    size = plan.rows * spec.num_columns * LOGIT_BYTES
    of_rows = ROW_BYTES * spec.logits.num_tokens if spec.logits.ragged else 0
    if workspace is None:
        buffer = torch.empty(size + of_rows, dtype=torch.uint8, device=device)
    else:
        workspace.take("indexer_topk", size + of_rows, device, stream)
        buffer = workspace.buffer[: size + of_rows]
    logits = buffer[:size].view(torch.float32).view(plan.rows, spec.num_columns)
    return Scratch(logits, *(buffer[size:].view(torch.int32).chunk(2) if of_rows else ()))


def _launch(spec: IndexerTopkSpec, plan: Chunks, call: Call, results: Results, workspace: Workspace | None) -> None:
    index = devices.index_of(call.q.device)
    stream = devices.current_stream(index)
    scratch = _scratch(spec, plan, call.q.device, stream, workspace)
    with devices.made_current(index):
        for of_logits, of_topk in _chunks(spec, plan, call, scratch, results):
            operands = {name: loaded_kernels.view(tensor) for name, tensor in of_logits.items()}
            loaded_kernels.run(INDEXER_LOGITS, plan.logits, index, stream, operands)
            operands = {name: loaded_kernels.view(tensor) for name, tensor in of_topk.items()}
            loaded_kernels.run(SELECT_TOPK, plan.topk, index, stream, operands)


def _chunks(
    spec: IndexerTopkSpec, plan: Chunks, call: Call, scratch: Scratch, results: Results
) -> Iterator[tuple[Operands, Operands]]:
    """The operands of each chunk's two launches: only views of existing tensors, so that nothing else is launched.
    They live until the next chunk."""
    rows, given = plan.rows, call.tensors
    for first in plan.starts(spec.logits.num_tokens):
        cut = {name: given[name].narrow(0, first, rows) for name in ("q", "weights")}
        of_rows: Operands = {}
        requests: Operands = {}
        if scratch.row_lens is None or scratch.row_requests is None:
            cut |= {name: given[name].narrow(0, first, rows) for name in ("block_tables", "seq_lens")}
            tables, seen = cut["block_tables"], cut["seq_lens"]
        else:
            # The rows up to the chunk's last row: their number tells the kernel which of them belong to the chunk.
            through = first + rows
            of_rows = {"row_lens": scratch.row_lens[:through], "row_requests": scratch.row_requests[:through]}
            tables, seen = call.block_tables, scratch.row_lens.narrow(0, first, rows)
            requests = {"row_requests": scratch.row_requests.narrow(0, first, rows)}
        of_topk = {"logits": scratch.logits, "seq_lens": seen}
        of_topk |= {"block_tables": tables} | requests if spec.return_slots else {}
        of_topk |= _of_results(spec, results, first, rows)
        yield given | cut | {"logits": scratch.logits} | of_rows, of_topk


# ---- the operators

_SCHEMA = (
    "Tensor q, Tensor weights, Tensor k_cache, Tensor block_tables, Tensor seq_lens, Tensor? cu_seqlens_q, int k,"
    " bool return_slots, bool return_scores, bool return_bits, str? implementation"
)


def _run_operator(*arguments: Any) -> Results:
    return _select(Call(*arguments), Memory())


def _run_operator_into(*arguments: Any) -> None:
    *call, out, counts, scores, buffer = arguments
    workspace = None if buffer is None else Workspace.of(buffer)
    _select(Call(*call), Memory(out, counts, scores, workspace))


topk_operator = operators.register("indexer_topk", _run_operator, f"({_SCHEMA}) -> (Tensor, Tensor, Tensor)")
topk_into_operator = operators.register(
    "indexer_topk_into",
    _run_operator_into,
    f"({_SCHEMA}, Tensor(a!) out, Tensor(b!) counts, Tensor(c!) scores, Tensor(d!)? workspace) -> ()",
    writes=("out", "counts", "scores", "workspace"),
)
operators.refuse_backward(topk_operator, "indexer_topk (its scores)", "an eager call has one")


def _fake(*arguments: Any) -> Results:
    return _results(Call(*arguments), Memory())


operators.register_fake(topk_operator, _fake)
