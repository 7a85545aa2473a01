"""The plug-in under the code of SGLang's released versions."""

import pytest

from tests.engines import sources

CASES = {
    # It imports FlashMLA from sgl-kernel, and its ranks of context parallelism are not served.
    "0.5.17": ("sglang_cases.py", "sglang_sgl_kernel_cases.py"),
    "0.5.23": ("sglang_cases.py", "sglang_flash_mla_cases.py", "sglang_joining_cases.py", "sglang_ranks_cases.py"),
}
SERVED = [(version, cases) for version in sources.SGLANG for cases in CASES[version]]


@pytest.mark.slow
@pytest.mark.parametrize(("version", "cases"), SERVED)
def test_cases(version: str, cases: str) -> None:
    if reason := sources.why_not("sglang", version):
        pytest.skip(reason)
    sources.run_cases("sglang", version, f"tests/engines/{cases}")
