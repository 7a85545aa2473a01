"""The MLA prefill backend for vLLM: expanded attention of new tokens, and of chunks of cached context.

vLLM defines the class and its hooks (vllm/v1/attention/backends/mla/prefill/base.py). This module is imported when the
backend is chosen, not when it is registered.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from tsmla_bridge.engines import versions
from tsmla_bridge.ops import mla_prefill as op
from tsmla_bridge.runtime import devices
from tsmla_bridge.runtime.tensors import dtype_name
from tsmla_kernels.catalog import MLA_PREFILL
from tsmla_kernels.contract import PrefillSpec

Results = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""out [T, H, V], or out and lse [H, T], which is dense, if lse is asked for."""

versions.warn_if_untested(versions.VLLM, vllm.__version__)


def describe(dtype: torch.dtype, dimensions: Any, *, causal: bool = True) -> PrefillSpec:
    """The spec of a prefill call of a model with these MLADimensions."""
    name = dtype_name(dtype)
    return PrefillSpec(
        batch=1, total_q_len=1, total_kv_len=1, max_q_len=1, max_kv_len=1, num_heads=1,
        qk_head_dim=dimensions.qk_nope_head_dim + dimensions.qk_rope_head_dim, v_head_dim=dimensions.v_head_dim,
        q_dtype=name, kv_dtype=name, causal=causal,
    )  # fmt: skip


class TsmlaMLAPrefillBackend(MLAPrefillBackend):
    """Prefill attention of one layer."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is not None and device_capability.major == 9

    @classmethod
    def validate_configuration(cls, device_capability: Any, selector_config: Any) -> list[str]:
        """The reasons against this backend: those that vLLM gives, and those that the kernel gives."""
        reasons: list[str] = super().validate_configuration(device_capability, selector_config)
        spec = describe(selector_config.dtype, selector_config.mla_dimensions)
        return reasons + MLA_PREFILL.reasons(spec)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        config = self.vllm_config
        if config is not None and config.device_config.device_type == "cuda":
            # So that no request waits for the compiler.
            for causal in (True, False):
                spec = describe(config.model_config.dtype, self, causal=causal)
                op.warm(spec, devices.current_device(), wide_v=True)
        versions.say_active(versions.VLLM, "MLA prefill runs on this backend")

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> Results:
        """Causal attention of each request's new tokens to each other."""
        metadata = self._prefill_metadata
        starts, most = metadata.query_start_loc, metadata.max_query_len
        return self._attend(q, k, v, (starts, starts), (most, most), True, return_softmax_lse, out)

    def run_prefill_context_chunk(
        self,
        chunk: Any = None,
        q: Any = None,
        k: Any = None,
        v: Any = None,
        out: torch.Tensor | None = None,
        *,
        chunk_idx: int | None = None,
    ) -> Results:
        """Attention of new tokens to a chunk of cached context, without a mask. Up to vLLM 0.27 the chunk is an index
        into the metadata, and all requests are part of it; later it is an object that says which are."""
        if chunk_idx is None and not isinstance(chunk, int):
            starts, most = (chunk.query_start_loc, chunk.cu_seq_lens), (chunk.max_query_len, chunk.max_seq_len)
            return self._attend(q, k, v, starts, most, False, True, out)
        index, metadata = chunk if chunk_idx is None else chunk_idx, self._prefill_metadata
        context = metadata.chunked_context
        starts = metadata.query_start_loc, context.cu_seq_lens[index]
        return self._attend(q, k, v, starts, (metadata.max_query_len, context.max_seq_lens[index]), False, True, out)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        starts: tuple[torch.Tensor, torch.Tensor],
        most: tuple[int, int],
        causal: bool,
        return_lse: bool,
        out: torch.Tensor | None,
    ) -> Results:
        """mla_prefill with (query, key) pairs of offsets and bounds."""
        dense_out = out if out is not None and out.is_contiguous() else None
        results: Any = op.mla_prefill(  # type: ignore[call-overload]  # mypy expands no bool
            q.contiguous(),
            k.contiguous(),
            v,  # part of a tensor that has k's columns, too; read where it lies
            cu_seqlens_q=starts[0],
            cu_seqlens_kv=starts[1],
            max_q_len=most[0],
            max_kv_len=most[1],
            softmax_scale=self.scale,
            causal=causal,
            return_lse=return_lse,
            out=dense_out,
        )
        result, lse = results if return_lse else (results, None)
        if out is not None and dense_out is None:
            result = out.copy_(result)
        # Before vLLM 0.30 the kernel that merges the parts reads lse as dense [H, T], whatever its strides.
        return result if lse is None else (result, lse.transpose(0, 1).contiguous())
