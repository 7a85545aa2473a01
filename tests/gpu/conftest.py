"""The GPU that torch needs. tests/conftest.py has the cache of compiled objects, for all tests marked gpu."""

from __future__ import annotations

import pytest
import torch

from tsmla_bridge.runtime import loaded_kernels
from tsmla_kernels.catalog import MLA_DECODE


@pytest.fixture
def hopper_in_torch() -> None:
    """Skips a test of a kernel that torch launches where it can't."""
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    if reasons := loaded_kernels.reasons(MLA_DECODE, torch.device("cuda")):
        pytest.skip("; ".join(reasons))
