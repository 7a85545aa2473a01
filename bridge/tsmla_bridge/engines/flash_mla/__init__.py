"""The public surface of DeepSeek's package flash_mla for serving, on this project's kernels.

The same functions with the same parameters, layouts and results, for engines that call that package (SGLang, LMDeploy,
TokenSpeed): dense decode, sparse decode over DeepSeek-V3.2's packed cache and V4's one or two, sparse prefill
(without max_logits). vLLM has its own build of FlashMLA's kernels and doesn't import the package.

`tsmla_bridge.install_as_flash_mla()` makes `import flash_mla` find this one. In SGLang `TSMLA_SGLANG=flash_mla` in the
environment does that.
"""

from tsmla_bridge.engines.flash_mla import flash_mla_interface as flash_mla_interface
from tsmla_bridge.engines.flash_mla import fused_norm_rope_attn_rope_cast as fused_norm_rope_attn_rope_cast
from tsmla_bridge.engines.flash_mla.flash_mla_interface import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_decoding_metadata,
    get_mla_metadata,
)

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fused_norm_rope_attn_rope_cast",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "has_legacy",
]


def has_legacy() -> bool:
    """Whether calls with use_legacy=True run: they do, by the same kernels as all others."""
    return True
