"""Kernels of a layer in compiled decode steps of few texts: no more than there are, as each costs time."""

import importlib.util
import subprocess
import sys

import pytest

MOST = {
    "v2-lite,bf16,1": 8, "v2-lite,fp8,1": 8, "v3-slice,fp8,1": 9, "v3.2-slice,fp8,1": 17, "v4-slice,fp8,1": 19,
    "v2-lite,bf16,16": 13, "v3.2-slice,fp8,16": 27,
}  # fmt: skip
"""By model, format of the weights and texts."""


@pytest.mark.slow
@pytest.mark.parametrize("point", MOST)
def test_a_layer_has_no_more_kernels(point: str, child_environment: dict[str, str]) -> None:
    """By XLA's compiler, which needs the plug-in's packages and no GPU."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("needs jax's CUDA plug-in: pip install 'jax[cuda13]'")
    command = [sys.executable, "-m", "tests.jax.step_kernels", f"{point},2,4"]
    ran = subprocess.run(command, env=child_environment, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    (line,) = ran.stdout.splitlines()
    name, count = line.split(": ")[:2]
    assert name == point and float(count.split()[0]) <= MOST[point], line
