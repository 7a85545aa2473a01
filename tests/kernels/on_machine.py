"""What the tests of kernels on the emulated machine share."""

from __future__ import annotations

import re

from tsmla_bridge.ops import plans
from tsmla_bridge.runtime import loaded_kernels, scales

MASKED_KEYS = re.compile(
    r"mla_prefill_backward: ((no barrier orders a WGMMA|WGMMA reads) .* a store |"
    r"no barrier orders a store .* a read of another warp \(|shared memory is written again before a WGMMA )"
)
"""The gradient's scores of rows behind the last key may see them before or after the other warpgroup's zeros, or both:
they are masked (sm90/prefill/backward/products.py, `zero_keys`)."""


def forget() -> None:
    """No plan, kernel or scale of an earlier call."""
    for kept in (plans._plans, plans.latest_plans, loaded_kernels._loaded, scales._of_stream, scales._of_capture):
        kept.clear()
