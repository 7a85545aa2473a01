"""flash_mla's names of DeepSeek-V4.1's attention with norm, rope and casts fused, which no kernel here computes."""

from __future__ import annotations

from typing import Any, NoReturn


def prefill(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises NotImplementedError for every call."""
    _refuse("prefill")


def decode(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises NotImplementedError for every call."""
    _refuse("decode")


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"flash_mla.fused_norm_rope_attn_rope_cast.{name}: no kernel of this project computes DeepSeek-V4.1's fused"
        " attention; serve that model without tsmla's flash_mla (TSMLA_SGLANG unset)"
    )
