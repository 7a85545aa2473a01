"""The suite's short cuts reach jax as it is now."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler
from jax._src.interpreters import mlir

from tests import speed


@pytest.mark.skipif(not speed.KNOWN, reason="this jax lowers as it does for its users")
def test_programs_of_a_module_share_an_mlir_context() -> None:
    context: object = mlir.make_ir_context
    before = context.cache_info()  # type: ignore[attr-defined]
    for shift in (1, 2):
        jax.jit(lambda x, shift=shift: x + shift)(jnp.ones(3))
    after = context.cache_info()  # type: ignore[attr-defined]
    assert after.misses <= before.misses + 1 and after.hits > before.hits


@pytest.mark.skipif(not speed.KNOWN, reason="this jax compiles as it does for its users")
def test_a_program_is_compiled_once_for_each_way_to_optimise(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_it = [], compiler.backend_compile_and_load
    note = lambda *given, **named: (compiled.append(given), compile_it(*given, **named))[1]  # noqa: E731
    monkeypatch.setattr(compiler, "backend_compile_and_load", note)
    before = jax.config.read("jax_disable_most_optimizations")
    for little in (True, True, False, False, True):
        jax.config.update("jax_disable_most_optimizations", little)
        jax.clear_caches()
        assert float(jax.jit(lambda x: x * 2.5 + 7.25)(np.float32(2))) == 12.25
    jax.config.update("jax_disable_most_optimizations", before)
    assert len(compiled) == 2


PROGRAM = """
import jax
from tests import speed
speed.share_programs()
jax.jit(lambda x: x * 3 + 1)(1.0)
"""


def test_a_kept_folder_serves_later_processes(tmp_path: Path, child_environment: dict[str, str]) -> None:
    """The second process finds what the first one compiled, and compiles nothing else."""
    environment = child_environment | {"TSMLA_TEST_PROGRAMS": str(tmp_path), "TSMLA_PLAIN_TESTS": ""}
    found = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
        found.append(sorted(path.name for path in tmp_path.glob("jit_*-cache")))
    assert found[0] and found[0] == found[1]
