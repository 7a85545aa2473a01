"""tokenspeed_mla_prefill: ragged attention with keys wider than values, with package tokenspeed_mla's parameters."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tsmla_bridge import blackwell
from tsmla_bridge.engines import naming
from tsmla_bridge.ops import mla_prefill
from tsmla_bridge.runtime import devices
from tsmla_bridge.runtime.tensors import dtype_name
from tsmla_kernels import contract

_logger = logging.getLogger(__name__)


def tokenspeed_mla_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seq_lens: torch.Tensor,
    cum_seq_lens: torch.Tensor,
    max_seq_len: int,
    batch_size: int,
    softmax_scale: float,
    is_causal: bool = True,
    return_lse: bool = False,
    cum_seq_lens_q: torch.Tensor | None = None,
    max_seq_len_q: int | None = None,
    enable_pdl: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed requests with their own packed keys.

    Args:
      query: [Tq, H, K], bfloat16, float16 or float8_e4m3fn. A query that isn't contiguous (a half of a wider tensor) is
        copied first.
      key, value: [Tk, H, K] and [Tk, H, V] in query's dtype; copied if not contiguous, too.
      seq_lens, batch_size: ignored; cum_seq_lens says both.
      cum_seq_lens: [B + 1], row where each request's keys start, and the end.
      max_seq_len: bound on one request's keys.
      softmax_scale: factor of the logits.
      is_causal: bottom-right aligned, else a query sees all keys of its request.
      return_lse: also return the logsumexp of the scaled logits.
      cum_seq_lens_q, max_seq_len_q: the offsets and the bound of the queries; by default those of the keys.
      enable_pdl: ignored; results do not depend on it.
      out: where the result goes, contiguous bfloat16 [Tq, H, V].

    Returns:
      out [Tq, H, V] bfloat16; with return_lse also lse [Tq, H] float32, natural logarithm. Rows that see no key give 0
      and -inf.

    Raises:
      ValueError, TypeError: an argument is not legal.
      NotImplementedError: no kernel runs the call, with the reasons.
      RuntimeError: as mla_decode says.
    """
    if blackwell.runs("tokenspeed_mla_prefill", query):
        real: Any = blackwell.package()
        return real.tokenspeed_mla_prefill(
            query, key, value, seq_lens, cum_seq_lens, max_seq_len, batch_size, softmax_scale, is_causal, return_lse,
            cum_seq_lens_q, max_seq_len_q, enable_pdl, out,
        )  # fmt: skip
    if out is not None:
        shape = (*query.shape[:2], value.shape[2])
        if tuple(out.shape) != shape:
            raise ValueError(f"out: got shape {tuple(out.shape)}; legal: {shape}")
        if out.dtype != torch.bfloat16:
            raise TypeError(f"out: got {out.dtype}; legal: torch.bfloat16")
        if out.device != query.device:
            raise ValueError(f"out: got a tensor on {out.device}; it must be on query's device, {query.device}")
        if not out.is_contiguous():
            raise ValueError("out: got a tensor with gaps; legal: a contiguous one")
    starts_kv = cum_seq_lens.to(query.device, torch.int32)
    starts_q = starts_kv if cum_seq_lens_q is None else cum_seq_lens_q.to(query.device, torch.int32)
    direct = query.dtype != torch.float16
    names = naming.TOKENSPEED_PREFILL
    names = names | ({"cu_seqlens_q": "cum_seq_lens"} if cum_seq_lens_q is None else {})
    names = names | ({"max_q_len": "max_seq_len"} if max_seq_len_q is None else {})
    found: Any = naming.call(
        mla_prefill.mla_prefill,
        names,
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        cu_seqlens_q=starts_q,
        cu_seqlens_kv=starts_kv,
        max_q_len=max_seq_len if max_seq_len_q is None else max_seq_len_q,
        max_kv_len=max_seq_len,
        softmax_scale=softmax_scale,
        causal=is_causal,
        return_lse=return_lse,
        out=out if direct else None,
    )
    if direct:
        return found
    result, *lse = found if return_lse else (found,)
    result = result.to(torch.bfloat16) if out is None else out.copy_(result)
    return (result, *lse) if return_lse else result


def warmup_compile_prefill(
    q_dtype: torch.dtype = torch.float8_e4m3fn,
    d_qk: int = 192,
    d_v: int = 128,
    enable_pdl: bool = False,
) -> None:
    """Load, and compile if the cache on disk lacks them, the kernels for causal and other calls, ahead of the first
    call.

    If no kernel serves such calls nothing is loaded; the calls themselves say why. Safe to call again.

    Args:
      q_dtype: the dtype of query, key and value.
      d_qk, d_v: K and V.
      enable_pdl: ignored.
    """
    for is_causal in (True, False):
        config = (q_dtype, d_qk, d_v, is_causal, True, enable_pdl, _enable_ex2_emulation())
        if config not in _compiled_kernels:
            _compiled_kernels[config] = _compile_prefill_kernel(*config[:5], use_pdl=enable_pdl)


# SGLang, up to 0.5.22, reaches for these three to compile ahead of time.

_compiled_kernels: dict[tuple[Any, ...], Any] = {}


def _enable_ex2_emulation() -> bool:
    """Part of tokenspeed_mla's key of a compiled kernel. The kernels here have no such variant, so False."""
    return False


def _compile_prefill_kernel(
    q_dtype: torch.dtype,
    head_dim_qk: int,
    head_dim_v: int,
    is_causal: bool,
    return_lse: bool,
    use_pdl: bool = False,
    enable_ex2_emulation: bool = True,
) -> bool:
    """Load the kernel for such calls on the current device. Returns whether there is one."""
    if not torch.cuda.is_available():
        return False
    index = devices.current_device()
    dtype = dtype_name(q_dtype)
    spec = contract.PrefillSpec(
        batch=1,
        total_q_len=1,
        total_kv_len=1,
        max_q_len=1,
        max_kv_len=1,
        num_heads=1,
        qk_head_dim=head_dim_qk,
        v_head_dim=head_dim_v,
        q_dtype=dtype,
        kv_dtype=dtype,
        causal=is_causal,
    )
    device = devices.torch_device(index)
    itself = ["on Blackwell the package itself runs the calls"] if blackwell.is_device(device) else []
    if reasons := itself or mla_prefill.why_not(spec, device):
        _logger.info("no prefill kernel to compile ahead for %s: %s", dtype, "; ".join(reasons))
        return False
    mla_prefill.warm(spec, index)
    return True
