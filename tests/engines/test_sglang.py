"""The plug-in under the code of SGLang's released versions."""

import pytest

from tests.engines import sources


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", ["sglang_cases.py", "sglang_flash_mla_cases.py", "sglang_joining_cases.py", "sglang_ranks_cases.py"]
)
@pytest.mark.parametrize("version", sources.SGLANG)
def test_cases(version: str, cases: str) -> None:
    if reason := sources.why_not("sglang", version):
        pytest.skip(reason)
    sources.run_cases("sglang", version, f"tests/engines/{cases}")
