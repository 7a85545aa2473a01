"""XLA's kernels as programmatic dependent launches: none loads anything before it has waited for the kernel in front.

Our kernels let the next one start early, so what they write is whole only behind that wait. The emulated machine tests
the same of our own kernels. jax 0.11.2 launches its kernels so by default, jax 0.10.2 if a flag asks for it.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ENTRY = re.compile(r"\.entry (\S+?)\((.*?)\n\}", re.DOTALL)
LOAD = re.compile(r"\b(?:ld\.global|ld\.volatile\.global|ld\.relaxed\.\w+\.global|cp\.async|atom\.global)")
STEPS = """
import os, sys
from tests.jax import step_kernels
step_kernels.prepare()
os.environ["XLA_FLAGS"] += f" --xla_gpu_enable_pdl=true --xla_dump_to={sys.argv[1]} --xla_dump_emitter_re=.*"
step_kernels.compiled(*sys.argv[2].split(","), 1, 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["v2-lite,bf16", "v3-slice,fp8"])
def test_no_kernel_loads_before_it_waits(model: str, tmp_path: Path, child_environment: dict[str, str]) -> None:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("needs jax's CUDA plug-in: pip install 'jax[cuda13]'")
    command = [sys.executable, "-c", STEPS, str(tmp_path), model]
    ran = subprocess.run(command, env=child_environment, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    kernels = [found for path in tmp_path.glob("*.ptx") for found in ENTRY.finditer(path.read_text())]
    assert len(kernels) > 5
    for name, body in (found.groups() for found in kernels):
        wait, load = body.find("griddepcontrol.wait"), LOAD.search(body)
        assert wait >= 0, f"{name} does not wait"
        assert load is None or load.start() > wait, f"{name} loads before it waits"
