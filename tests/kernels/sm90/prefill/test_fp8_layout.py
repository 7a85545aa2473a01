"""fp8 prefill reads and writes matrices of V and P without bank conflicts, which no run without a GPU would show."""

import numpy as np
import pytest

from tests.emulator.warp_model import LANES

pytest.importorskip("cutlass")

from tsmla_kernels.sm90.prefill.softmax import p_address
from tsmla_kernels.sm90.prefill.transpose import transpose_addresses


def assert_no_conflicts(addresses: np.ndarray) -> None:
    """The eight rows of each of four matrices lie in eight groups of banks."""
    assert (np.sort((addresses // 16 % 8).reshape(4, 8)) == np.arange(8)).all()


@pytest.mark.parametrize("block", [96, 128, 192])
def test_v_is_transposed_without_conflicts(block: int) -> None:
    for warp in range(2):
        addresses = transpose_addresses(LANES, warp, landing=0, transposed=0, block=block)
        for step in range(4):
            assert_no_conflicts(addresses.source ^ step * 16)
            assert_no_conflicts(addresses.target ^ step * 32)


def test_p_is_stored_without_conflicts() -> None:
    for warp in range(4):
        for k in range(4):
            assert_no_conflicts(p_address(32 * warp + LANES, LANES, 0) ^ k * 32)
