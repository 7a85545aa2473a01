"""The plug-in under the code of vLLM's released versions."""

import pytest

from tests.engines import sources
from tsmla_bridge.engines import versions


@pytest.mark.slow
@pytest.mark.parametrize("version", sources.VLLM)
@pytest.mark.parametrize("cases", ["vllm_cases", "vllm_sparse_cases", "vllm_serving_cases"])
def test_cases(version: str, cases: str) -> None:
    if reason := sources.why_not("vllm", version):
        pytest.skip(reason)
    sources.run_cases("vllm", version, f"tests/engines/{cases}.py")


def test_the_tested_versions_are_those_that_doctor_names() -> None:
    assert (versions.VLLM.tested, versions.SGLANG.tested) == (sources.VLLM, sources.SGLANG)
