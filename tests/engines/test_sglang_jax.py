"""The example's backend under the code of sglang-jax."""

import pytest

from tests.engines import sources


@pytest.mark.slow
def test_cases() -> None:
    if reason := sources.why_no_sglang_jax():
        pytest.skip(reason)
    folders = ["sglang-jax/python", "packages", "packages-sglang-jax"]
    sources.run_with(f"sglang-jax {sources.SGLANG_JAX}", folders, "tests/engines/sglang_jax_cases.py")
