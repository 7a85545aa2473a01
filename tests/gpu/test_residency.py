"""More blocks than a GPU runs at a time, and fewer: the gradient of prefill ends, with the same bits where it is
deterministic. In a process of its own, because what never ends can't be stopped otherwise."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.gpu import residency

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_in_torch")]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("front_end", residency.FRONT_ENDS)
def test_the_gradient_ends_with_any_number_of_blocks(
    front_end: str, deterministic: bool, child_environment: dict[str, str]
) -> None:
    environment = {**child_environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment.pop("JAX_PLATFORMS", None)
    command = [sys.executable, "-m", "tests.gpu.residency", "--front_end", front_end]
    command += ["--deterministic"] * deterministic
    done = subprocess.run(command, env=environment, check=True, timeout=180, stdout=subprocess.PIPE, text=True)
    fits, half, twice = map(json.loads, done.stdout.splitlines())
    assert [x["blocks"] / fits["blocks"] for x in (half, twice)] == [0.5, 2.0]
    for other in (half, twice):
        if deterministic:
            assert other["digest"] == fits["digest"]
        assert other["apart"] < 1e-3
