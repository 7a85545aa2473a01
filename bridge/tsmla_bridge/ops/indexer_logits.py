"""indexer_logits on torch tensors: the V3.2 indexer's score of every cached key for every query token.

On a Hopper GPU the catalog's kernel runs the call, one launch; on Blackwell FlashInfer's, if "cute" is named. Torch
operations run all other calls: on CPUs, on other GPUs, and, unless "cute" is named, where a derivative is asked for or
the kernel can't serve the call (`logits_reasons`, tensors that have gaps or, other than those of int32, are not aligned
to 16 bytes). Without TSMLA_CHECK=1 no call reads a value on the host, so all can be captured into CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import torch

from tsmla_bridge import operators, reference
from tsmla_bridge.ops import blackwell
from tsmla_bridge.runtime import data_checks, devices, loaded_kernels, tensors
from tsmla_kernels.catalog import INDEXER_LOGITS, INDEXER_LOGITS_SM100
from tsmla_kernels.contract import values
from tsmla_kernels.contract.sparse import IndexerLogitsSpec, indexer_logits_spec
from tsmla_kernels.sm90.logits.config import logits_config
from tsmla_kernels.sm100 import logits_config as sm100


def indexer_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """The indexer's score of every cached key for every query token, as tsmla_jax.indexer_logits defines it:
    logits[t, s] = kscale[s] * sum over h of weights[t, h] * relu(q[t, h] . k[s]), float32.

    Args:
      q: [T, Hi, Di]; float8_e4m3fn with a packed cache, any float with a plain one.
      weights: [T, Hi] float32, scales and constants folded in; float64 is rounded to float32 by torch operations.
      k_cache: uint8 [P, Z, Di + 4], a page's bytes Z keys of e4m3 and then Z scales of float32; or plain floats
        [P, Z, Di].
      block_tables: [T, M] int32, one row a token, or with cu_seqlens_q [B, M], one row a request; entries past a row's
        last page are never used.
      seq_lens: [T] int32, keys token t sees; or with cu_seqlens_q [B], keys of request b; 0 is legal.
      cu_seqlens_q: [B + 1] int32, where each request's tokens begin in q, or None. Token i of a request's S sees key j
        iff j < seq_len - (S - 1) + i; rows that belong to no request see none.
      out: float32 [T, M * Z] for the result, or None.
      implementation: "cute" (the kernel), "reference" (torch operations), or None: on Hopper the kernel if it can run,
        else torch operations.

    Returns:
      [T, M * Z] float32; column s scores the key at position s of the token's sequence, and is -inf if token t does not
      see that key. `out` itself if it is given.

    Raises:
      TypeError, ValueError: an argument is not legal; the message names it, what it got and what is legal.
      NotImplementedError: the named implementation can't run this call, with every reason; or backward() asks for the
        derivative of a call that runs as an operator of torch (under torch.compile, say).
      RuntimeError: CUDA refused a launch, or a kernel would have to be loaded during a capture.
    """
    arguments = (q, weights, k_cache, block_tables, seq_lens, cu_seqlens_q)
    if torch.compiler.is_compiling() or operators.is_traced(q, weights, k_cache, derivatives=False):
        if out is None:
            return torch.ops.tsmla.indexer_logits(*arguments, implementation)
        torch.ops.tsmla.indexer_logits_into(*arguments, implementation, out)
        return out
    return _score(*arguments, implementation, out)


def _score(
    q: torch.Tensor,
    weights: torch.Tensor,
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    implementation: str | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    given: dict[str, Any] = {
        "q": q,
        "weights": weights,
        "k_cache": k_cache,
        "block_tables": block_tables,
        "seq_lens": seq_lens,
    }
    if cu_seqlens_q is not None:
        given["cu_seqlens_q"] = cu_seqlens_q
    spec = tensors.describe_call(indexer_logits_spec, **given)
    shape = spec.num_tokens, spec.max_pages * spec.cache.page_size

    kernel = loaded_kernels.kernel_for(q.device, INDEXER_LOGITS, INDEXER_LOGITS_SM100)

    def why_not() -> list[str]:
        reasons = kernel.reasons(spec) + loaded_kernels.layout_reasons(given)
        if kernel is INDEXER_LOGITS_SM100 and not reasons:
            reasons = loaded_kernels.why_not_made(kernel, sm100.logits_config(spec), q.device)
        return reasons + operators.derivative_reasons(*given.values())

    by_kernel = loaded_kernels.is_chosen(kernel, implementation, q.device, why_not, op="indexer_logits")
    data_checks.check(values.indexer_logits, spec, seq_lens, block_tables, cu_seqlens_q)
    if out is not None:
        tensors.check_output("out", out, shape, torch.float32, q.device)
        tensors.check_apart("out", out, given)
    if not by_kernel or 0 in (*shape, spec.num_requests, spec.cache.num_pages):
        logits = reference.indexer_logits(spec, q, weights, k_cache, block_tables, seq_lens, cu_seqlens_q)
        return logits if out is None else out.copy_(logits)
    if kernel is INDEXER_LOGITS_SM100:
        logits = blackwell.indexer_logits(spec, given)
        return logits if out is None else out.copy_(logits)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=q.device)
    else:
        loaded_kernels.check_aligned("out", out)
        tensors.mark_written(out)
    _launch(spec, given, out)
    return out


def _launch(spec: IndexerLogitsSpec, given: dict[str, torch.Tensor], out: torch.Tensor) -> None:
    config = logits_config(spec, devices.num_sms(devices.index_of(out.device)))
    arrays = {name: loaded_kernels.view(tensor) for name, tensor in given.items()}
    arrays["logits"] = loaded_kernels.view(out)
    loaded_kernels.run_on(INDEXER_LOGITS, config, out.device, arrays)


# ---- the operators

_SCHEMA = (
    "Tensor q, Tensor weights, Tensor k_cache, Tensor block_tables, Tensor seq_lens, Tensor? cu_seqlens_q,"
    " str? implementation"
)


def _write_into(*arguments: Any) -> None:
    _score(*arguments)


logits_operator = operators.register("indexer_logits", _score, f"({_SCHEMA}) -> Tensor")
logits_into_operator = operators.register(
    "indexer_logits_into", _write_into, f"({_SCHEMA}, Tensor(a!) out) -> ()", writes=("out",)
)
operators.refuse_backward(logits_operator, "indexer_logits", "an eager call has one")


def _fake(q: Any, weights: Any, k_cache: Any, block_tables: Any, *_: Any) -> Any:
    return q.new_empty((q.shape[0], block_tables.shape[1] * k_cache.shape[1]), dtype=torch.float32)


operators.register_fake(logits_operator, _fake)
