"""The packages: what importing them costs and brings along, what the wheel holds, that it works outside the tree."""

import email
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tsmla_jax.ops.explain import OPERATIONS
from tsmla_kernels.catalog import KERNELS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"tsmla_jax": ROOT, "tsmla_kernels": ROOT / "kernels", "tsmla_bridge": ROOT / "bridge"}
PATHS = os.pathsep.join(str(folder) for folder in PACKAGES.values())
HEAVY = {"torch", "flax", "cutlass", "transformers", "safetensors", "matplotlib", "tokenspeed_mla"}

# One small decode, that says which file it came from.
USE = """
import jax.numpy as jnp, numpy as np, tsmla_jax, tsmla_kernels, tsmla_bridge
cache = jnp.ones((3, 16, 576), jnp.bfloat16)
out = tsmla_jax.mla_decode(jnp.ones((1, 1, 2, 576), jnp.bfloat16), cache, jnp.array([[2, 0]], jnp.int32),
                           jnp.array([20], jnp.int32), softmax_scale=0.1)
np.testing.assert_array_equal(np.asarray(out, np.float32), np.ones((1, 1, 2, 512), np.float32))
print(tsmla_jax.__file__, tsmla_kernels.__file__, tsmla_bridge.__file__, sep="\\n")
"""


def python(code: str, *, paths: str = PATHS, executable: str = sys.executable, cwd: str = "/") -> str:
    """The standard output of `code` run in a fresh interpreter on the CPU."""
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [executable, "-c", code], capture_output=True, text=True, env=environment, cwd=cwd, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(module: str) -> set[str]:
    """The top-level modules that importing `module` brings."""
    return set(python(f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})").split())


def test_importing_the_jax_front_end_is_light() -> None:
    assert imported("tsmla_jax") & HEAVY == set()


def test_every_public_name_is_there() -> None:
    code = "import tsmla_jax as t\nfor m in (t, t.sparse): print(*[name for name in m.__all__ if not hasattr(m, name)])"
    assert python(code).split() == []


def test_importing_starts_no_backend() -> None:
    code = "import tsmla_jax; from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    assert python(code) == "False\n"


def test_importing_the_bridge_brings_no_jax() -> None:
    assert imported("tsmla_bridge") & {"jax", "jaxlib", "cutlass"} == set()


def test_importing_the_contract_brings_neither_jax_nor_torch() -> None:
    assert imported("tsmla_kernels.contract") & {"jax", "jaxlib", "torch", "cutlass"} == set()


def test_the_folders_of_packages_are_no_packages() -> None:
    for folder in ("kernels", "bridge"):
        assert not (ROOT / folder / "__init__.py").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    for package, folder in PACKAGES.items():
        assert f"{package}/py.typed" in names
        sources = {path.relative_to(folder).as_posix() for path in (folder / package).rglob("*.py")}
        assert sources <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".cubin", ".pyc"))]


def test_the_wheels_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(path))
    assert metadata["Requires-Python"] == "<3.14,>=3.11"
    extras = {"cuda13", "cuda12", "flax", "torch", "hf", "blackwell", "bench", "dev"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras
    always = {need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need}
    assert {re.split(r"[<>=\[]", need)[0] for need in always} == {"jax", "absl-py", "numpy"}
    assert "jax>=0.9.1" in always
    (path,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "tsmla = tsmla_jax.cli:main" in archive.read(path).decode()


def test_the_wheel_works_outside_the_tree(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    files = python(USE, paths=str(tmp_path / "site"), cwd=str(tmp_path)).split()
    assert all(Path(file).is_relative_to(tmp_path / "site") for file in files), files


@pytest.mark.slow
def test_the_wheel_installs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    venv.create(folder, with_pip=True)
    executable = str(folder / "bin" / "python")
    subprocess.run([executable, "-m", "pip", "install", "--quiet", str(wheel)], check=True, capture_output=True)
    files = python(USE, paths="", executable=executable, cwd=str(tmp_path)).split()
    assert all(Path(file).is_relative_to(folder) for file in files), files
    # Without the extras the command still runs, and says what to install for the rest.
    doctor = subprocess.run(
        [folder / "bin" / "tsmla", "doctor"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert doctor.returncode == 0, doctor.stderr
    assert "mla_decode, bf16: xla" in doctor.stdout
    assert 'pip install "tsmla-jax[flax]"' in doctor.stdout


def test_the_readmes_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    jitted = [block for block in blocks if "@jax.jit" in block]
    assert len(jitted) == 1
    assert python(jitted[0]) == "(8, 1, 16, 512) bfloat16\n"


def test_the_readmes_table_is_the_tree() -> None:
    readme = (ROOT / "README.md").read_text()
    table = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", readme, flags=re.MULTILINE)
    assert {op for op, *_ in table} == set(OPERATIONS)
    for op, anywhere, hopper, blackwell in table:
        (api,) = (ROOT / "tsmla_jax" / "ops").rglob(f"{op}/api.py")
        there = {name for name in ("reference", "xla", "cute") if api.with_name(f"{name}.py").exists()}
        assert set(re.findall("reference|xla", anywhere)) == there - {"cute"}, op
        assert ("cute" in hopper) == ("cute" in there), op
        assert ("cute" in blackwell) == (f"{op}_sm100" in KERNELS), op


def test_the_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme and "make test" in readme


def test_ci_runs_the_suite() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()
