"""examples/skyrl_tx under the model and the generator of SkyRL tx's released versions."""

import pytest

from tests.engines import sources


@pytest.mark.slow
@pytest.mark.parametrize("version", sources.SKYRL_TX)
def test_cases(version: str) -> None:
    if reason := sources.why_not("skyrl-tx", version):
        pytest.skip(reason)
    sources.run_cases("skyrl-tx", version, "tests/engines/skyrl_tx_cases.py")
