"""Device functions that the Hopper kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("cutlass")

from tsmla_kernels.sm90.warp import quotient, remainder


@pytest.mark.parametrize("function", [quotient, remainder])
class TestPowersOfTwo:
    """Divisions that are shifts and masks, with Python's integers in place of a register."""

    @pytest.mark.parametrize("divisor", [1, 2, 8, 128])
    def test_a_power_of_two_divides(self, function: Callable[[Any, int], Any], divisor: int) -> None:
        whole = {quotient: lambda value: value // divisor, remainder: lambda value: value % divisor}[function]
        assert [function(value, divisor) for value in range(-9, 300)] == [whole(value) for value in range(-9, 300)]

    @pytest.mark.parametrize("divisor", [-2, 0, 3, 24])
    def test_another_divisor_is_refused(self, function: Callable[[Any, int], Any], divisor: int) -> None:
        with pytest.raises(ValueError, match=f"divisor is {divisor}; legal: a power of 2"):
            function(56, divisor)
