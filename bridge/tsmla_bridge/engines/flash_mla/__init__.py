"""The public surface of DeepSeek's package flash_mla for serving, on this project's kernels.

The same functions with the same parameters, layouts and results, for engines that call that package (LMDeploy,
TokenSpeed): dense decode, sparse decode over DeepSeek-V3.2's packed cache and V4's two, sparse prefill (without
max_logits). vLLM and SGLang choose the package's own kernels by name, and don't import it.

`tsmla_bridge.install_as_flash_mla()` makes `import flash_mla` find this one.
"""

from tsmla_bridge.engines.flash_mla import flash_mla_interface as flash_mla_interface
from tsmla_bridge.engines.flash_mla.flash_mla_interface import (
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]
