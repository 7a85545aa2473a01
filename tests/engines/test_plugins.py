"""The plug-ins without an engine: registering breaks nothing, and versions are told apart."""

import logging
import subprocess
import sys
from types import ModuleType

import pytest

from tsmla_bridge.engines import sglang, versions, vllm
from tsmla_kernels import __version__


@pytest.mark.parametrize(
    ("version", "before"),
    [("0.27.1", True), ("0.28.0", False), ("0.28.0rc1", False), ("0.26.0+cu129", True), ("dev", False),
     ("0.1.dev1+g3f2a1c", False), ("", False)],
)  # fmt: skip
def test_a_version_that_says_nothing_is_not_an_old_one(version: str, before: bool) -> None:
    assert versions.is_before(version, (0, 28)) == before


@pytest.mark.parametrize("plugin", [vllm, sglang])
def test_registering_without_the_engine_says_so(plugin: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "not registered with this version of" in caplog.text


@pytest.mark.parametrize("name", ["TSMLA_VLLM", "TSMLA_VLLM_FP8_QUERIES"])
def test_a_variable_that_is_not_understood(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = f"{name}: got 'false', which is taken as if it were not set; legal: "
    for value in (None, "sparse" if name == "TSMLA_VLLM" else "0", "false"):
        if value is not None:
            monkeypatch.setenv(name, value)
        assert said not in caplog.text
        vllm.register()
    assert said in caplog.text


def test_sglangs_variable_that_is_not_understood(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TSMLA_SGLANG", "flashmla")
    sglang.register()
    assert "TSMLA_SGLANG: got 'flashmla', which is taken as if it were not set; legal: '', 'flash_mla'" in caplog.text


OLDER_IMPORTS = """
import importlib.metadata, logging, sys, types
logging.basicConfig(level=logging.INFO)
version = importlib.metadata.version
importlib.metadata.version = lambda name: "0.5.17" if name == "sglang" else version(name)
sys.modules["sgl_kernel"] = types.ModuleType("sgl_kernel")
sys.modules["sgl_kernel"].__path__ = []
import tsmla_bridge.engines.sglang as plugin
assert plugin.version_of("sglang") == "0.5.17"
plugin.register()
plugin.register()
import sgl_kernel.flash_mla
from sgl_kernel.flash_mla import FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
assert sgl_kernel.flash_mla.get_mla_metadata is get_mla_metadata
assert sys.modules["sgl_kernel.flash_mla"] is plugin.sgl_kernel_flash_mla is sgl_kernel.flash_mla
print(flash_mla_with_kvcache.__module__, get_mla_metadata())
"""


def run_with_flash_mla(program: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A Python program in a process of its own with TSMLA_SGLANG=flash_mla."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"TSMLA_SGLANG": "flash_mla"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "before",
    [
        "",
        "import types; sys.modules['sgl_kernel.flash_mla'] = types.ModuleType('x')",
        "import types; sys.modules['flash_mla'] = types.ModuleType('x')",
    ],
)
def test_older_sglangs_variable_gives_sgl_kernels_flash_mla(before: str, child_environment: dict[str, str]) -> None:
    done = run_with_flash_mla(f"import sys; {before}\n{OLDER_IMPORTS}", child_environment)
    if before:
        assert done.returncode and "SGLang's FlashMLA backends run on their own kernels" in done.stderr
    else:
        assert done.stdout.startswith("tsmla_bridge.engines.sglang.sgl_kernel_flash_mla (FlashMLASchedMeta"), (
            done.stderr
        )


SGLANG_IMPORTS = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from tsmla_bridge.engines.sglang import register
register()
register()
import flash_mla
from flash_mla import fused_norm_rope_attn_rope_cast
from flash_mla.flash_mla_interface import FlashMLASchedMeta
from tsmla_bridge.engines.flash_mla import selected
assert flash_mla.flash_mla_interface.FlashMLASchedMeta is FlashMLASchedMeta
assert flash_mla.fused_norm_rope_attn_rope_cast is fused_norm_rope_attn_rope_cast
print(flash_mla.__name__, selected._lse_is_read)
"""


@pytest.mark.parametrize("before", ["", "import types; sys.modules['flash_mla'] = types.ModuleType('flash_mla')"])
def test_sglangs_variable_gives_flash_mla(before: str, child_environment: dict[str, str]) -> None:
    done = run_with_flash_mla(f"import sys; {before}\n{SGLANG_IMPORTS}", child_environment)
    if before:
        assert done.returncode and "SGLang's FlashMLA backends run on their own kernels" in done.stderr
    else:
        assert done.stdout == "tsmla_bridge.engines.flash_mla False\n", done.stderr
        assert done.stderr.count("FlashMLA's backends run on these kernels") == 1


@pytest.mark.parametrize("engine", versions.ENGINES)
def test_a_backend_that_serves_says_so_once(engine: versions.Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=engine.distribution):
        for _ in range(2):
            versions.say_active(engine, "a test runs on this backend")
    said = [f"tsmla {__version__}: a test runs on this backend"]
    assert [record.getMessage() for record in caplog.records if record.name == f"{engine.distribution}.tsmla"] == said


@pytest.mark.parametrize("plugin", [vllm, sglang])
def test_registering_imports_neither_torch_nor_jax(plugin: ModuleType, child_environment: dict[str, str]) -> None:
    code = f"import sys; from {plugin.__name__} import register; register()\n"
    code += "print({'torch', 'jax'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("engine", "version", "said"),
    [
        (versions.VLLM, "0.33.0", "tested"),
        (versions.VLLM, "0.33.2+cu130", "tested"),
        (versions.VLLM, "0.27.1", "between tested versions; tested: 0.26.0, 0.30.0, 0.31.0, 0.32.0, 0.33.0"),
        (versions.VLLM, "0.34.0", "untested; tested: 0.26.0, 0.30.0, 0.31.0, 0.32.0, 0.33.0"),
        (versions.VLLM, "0.22.1", "untested; tested: 0.26.0, 0.30.0, 0.31.0, 0.32.0, 0.33.0"),
        (versions.SGLANG, "0.5.23", "tested"),
        (versions.SGLANG, "0.5.24", "untested; tested: 0.5.17, 0.5.23"),
        (versions.SGLANG, "dev", "untested; tested: 0.5.17, 0.5.23"),
    ],
)
def test_versions(engine: versions.Engine, version: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    assert versions.status_of(engine, version) == said
    versions.warn_if_untested(engine, version)
    assert bool(caplog.records) == said.startswith("untested")
