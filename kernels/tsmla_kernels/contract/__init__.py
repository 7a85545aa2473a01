"""What every operation accepts and returns, in one place for both front ends: specs, rules and error texts."""

from tsmla_kernels.contract.attention import *  # noqa: F403
from tsmla_kernels.contract.attention import __all__ as __all__
