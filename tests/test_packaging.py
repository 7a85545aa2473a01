"""The packages: what importing them costs and brings along, what the wheel holds, that it works outside the tree."""

import configparser
import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from tests.engines import sources
from tsmla_bridge.engines import versions
from tsmla_jax.ops.explain import OPERATIONS
from tsmla_kernels import __version__
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

# The same by the front end for torch, in a process where no jax can be imported.
USE_TORCH = """
import sys
sys.modules["jax"] = None
import torch, tsmla_kernels, tsmla_bridge
cache = torch.ones((3, 16, 576), dtype=torch.bfloat16)
out = tsmla_bridge.mla_decode(torch.ones((1, 1, 2, 576), dtype=torch.bfloat16), cache,
                              torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32),
                              softmax_scale=0.1)
assert out.eq(1).all() and out.shape == (1, 1, 2, 512)
print(tsmla_kernels.__file__, tsmla_bridge.__file__, sep="\\n")
"""

REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
PLUGINS = ("vllm.general_plugins", "sglang.srt.plugins")

# What the engines' metadata says of packages that this one needs, or that share requirements with these.
ENGINE_PINS = {
    "vllm 0.26.0": (
        "torch==2.11.0", "nvidia-cutlass-dsl[cu13]==4.6.0", "apache-tvm-ffi==0.1.10", "numba==0.65.0",
        "tokenspeed-mla==0.1.8", "quack-kernels>=0.4.0", "flashinfer-python==0.6.14", "compressed-tensors==0.17.0",
        "transformers>=5.5.3",
    ),
    "vllm 0.30.0": (
        "torch==2.13.0", "nvidia-cutlass-dsl[cu13]==4.7.1", "apache-tvm-ffi==0.1.11", "numba==0.65.0",
        "tokenspeed-mla==0.1.8", "quack-kernels==0.6.5", "flashinfer-python==0.6.18.post1",
        "compressed-tensors==0.17.0", "transformers>=5.10.4",
    ),
    "vllm 0.31.0": (
        "torch==2.13.0", "nvidia-cutlass-dsl[cu13]==4.7.1", "apache-tvm-ffi==0.1.11", "numba==0.65.0",
        "tokenspeed-mla==0.1.8", "quack-kernels==0.6.5", "flashinfer-python==0.7.0.post1",
        "compressed-tensors==0.17.0", "transformers>=5.10.4,<5.18.0",
    ),
    "vllm 0.32.0": (
        "torch==2.13.0", "nvidia-cutlass-dsl[cu13]==4.8.0", "apache-tvm-ffi==0.1.11", "numba==0.65.0",
        "tokenspeed-mla==0.2.15", "quack-kernels==0.6.5", "flashinfer-python==0.7.0.post1",
        "compressed-tensors==0.17.0", "transformers>=5.16.1,<5.20.0",
    ),
    "vllm 0.33.0": (
        "torch==2.14.0", "nvidia-cutlass-dsl[cu13]==4.8.0", "apache-tvm-ffi==0.1.11", "numba==0.65.0",
        "tokenspeed-mla==2.0.3", "quack-kernels==0.6.5", "flashinfer-python==0.7.2.post1", "compressed-tensors==0.17.0",
        "transformers>=5.16.1,<5.21.0",
    ),
    "sglang 0.5.17": ("sglang==0.5.17",),
    "sglang 0.5.23": ("sglang==0.5.23",),
}  # fmt: skip


def run(command: Sequence[str | Path], cwd: Path | str = "/") -> str:
    """The standard output of a program that has to succeed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def python(code: str, *, paths: str = PATHS, executable: str = sys.executable, cwd: str = "/") -> str:
    """The standard output of `code` run in a fresh interpreter on the CPU, where LLVM optimises little."""
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
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


def test_any_module_may_be_imported_first() -> None:
    """The catalog imports all records, and what looks for compiled objects imports the catalog."""
    names = (
        "catalog",
        "kernel",
        "launch",
        "object_cache",
        "options",
        "sm100.record",
        "topk.chunks",
        "topk.logits_kernel",
        "topk.record",
    )
    modules = ["tsmla_bridge.ops", "tsmla_jax.ops.indexer_topk.cute", *(f"tsmla_kernels.{name}" for name in names)]
    code = f"""
import importlib, sys
before = set(sys.modules)
for name in {modules}:
    importlib.import_module(name)
    for made in set(sys.modules) - before:
        if made.startswith("tsmla_"):
            del sys.modules[made]
"""
    python(code)


def test_the_folders_of_packages_are_no_packages() -> None:
    for folder in ("kernels", "bridge"):
        assert not (ROOT / folder / "__init__.py").exists()


class Built(NamedTuple):
    """A distribution as it is uploaded."""

    wheel: Path
    sdist: Path


def hatchling(project: Path, folder: Path, *targets: str) -> None:
    """Build these targets, "wheel" or "sdist", of the project in a folder."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    for target in targets:
        command += ["--target", target]
    run(command, cwd=project)


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """From the folder where `make wheel` has built it, else built from the tree."""
    if ready := os.environ.get("TSMLA_DIST"):
        folder = Path(ready)
    else:
        folder = tmp_path_factory.mktemp("dist")
        hatchling(ROOT, folder, "wheel", "sdist")
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)


@pytest.fixture(scope="module")
def wheel(distribution: Built) -> Path:
    return distribution.wheel


def metadata_of(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(archive.read(path))


def entry_points_of(wheel: Path) -> configparser.ConfigParser:
    archive = zipfile.ZipFile(wheel)
    (path,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    points = configparser.ConfigParser()
    points.read_string(archive.read(path).decode())
    return points


def check_holds(wheel: Path, packages: set[str]) -> None:
    """The wheel holds these packages whole and no other."""
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == packages
    for package in packages:
        assert f"{package}/py.typed" in names
        folder = PACKAGES[package]
        sources = {path.relative_to(folder).as_posix() for path in (folder / package).rglob("*.py")}
        assert sources <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".cubin", ".pyc"))]


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel: Path) -> None:
    check_holds(wheel, set(PACKAGES))


def test_the_wheels_metadata(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    assert metadata["Requires-Python"] == "<3.14,>=3.11"
    extras = {"jax", "cuda13", "cuda12", "torch", "torch-cuda13", "flax", "hf", "blackwell", "bench", "dev"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras
    always = {need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need}
    assert {re.split(r"[<>=\[]", need)[0] for need in always} == {"absl-py", "numpy"}
    assert dict(entry_points_of(wheel)["console_scripts"]) == {"tsmla": "tsmla_kernels.cli:main"}
    assert metadata.get_all("Project-URL") == [f"Repository, {REPOSITORY}"]


def test_the_address_of_the_repository_is_that_of_pyproject() -> None:
    for name in ("README.md", "docs/index.md"):
        assert f"git+{REPOSITORY}" in (ROOT / name).read_text(), name
    assert f'repo_url = "{REPOSITORY}"' in (ROOT / "zensical.toml").read_text()
    assert f"repository-code: {REPOSITORY}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_source_distribution_builds_the_same_wheel(distribution: Built, tmp_path: Path) -> None:
    shutil.unpack_archive(distribution.sdist, tmp_path)
    (tree,) = tmp_path.iterdir()
    hatchling(tree, tmp_path / "again", "wheel")
    again = tmp_path / "again" / distribution.wheel.name
    assert again.read_bytes() == distribution.wheel.read_bytes()


def test_the_version_is_that_of_the_last_release(distribution: Built) -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    versions, days = zip(*re.findall(r"^## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE), strict=True)
    assert list(versions) == sorted(versions, key=lambda version: [int(part) for part in version.split(".")])[::-1]
    assert metadata_of(distribution.wheel)["Version"] == __version__ == versions[0]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {__version__}\ndate-released: {days[0]}\n" in citation


def test_it_holds_the_license(distribution: Built) -> None:
    text = (ROOT / "LICENSE").read_bytes()
    assert metadata_of(distribution.wheel).get_all("License-File") == ["LICENSE"]
    archive = zipfile.ZipFile(distribution.wheel)
    (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
    assert archive.read(path) == text


def test_the_description_leads_nowhere_into_the_tree(distribution: Built) -> None:
    """An index shows it without the files beside it."""
    description = metadata_of(distribution.wheel).get_payload()
    assert isinstance(description, str) and description.startswith("# tsmla")
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", description) == []


def test_the_pages_links_lead_somewhere() -> None:
    """In the tree, as on a repository's web pages; `make docs` checks those of the site."""
    folders = (ROOT / name for name in ("benchmarks", "bridge", "docs", "examples", "kernels"))
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    found = [(page, link) for page in pages for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())]
    assert len(found) > 100 and [link for link in found if not (link[0].parent / link[1]).exists()] == []


@pytest.mark.parametrize("group", PLUGINS)
def test_the_wheel_names_the_plug_ins(wheel: Path, group: str) -> None:
    module, _, function = entry_points_of(wheel)[group]["tsmla"].partition(":")
    # Neither an engine nor torch is imported before the engine calls the function.
    code = f"import sys, {module}; assert callable({module}.{function}); print('torch' in sys.modules)"
    assert python(code) == "False\n"


@pytest.mark.parametrize("program", [USE, USE_TORCH], ids=["jax", "torch"])
def test_the_wheel_works_outside_the_tree(wheel: Path, program: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    files = python(program, paths=str(tmp_path / "site"), cwd=str(tmp_path)).split()
    assert all(Path(file).is_relative_to(tmp_path / "site") for file in files), files


@pytest.mark.parametrize(
    ("absent", "used", "said"),
    [
        ("jax", "import tsmla_jax", 'tsmla_jax needs jax: pip install "tsmla-jax[jax]"'),
        ("torch", "import tsmla_bridge; tsmla_bridge.mla_decode", 'tsmla_bridge needs torch: pip install "tsmla-jax['),
    ],
)
def test_a_front_end_without_its_package_says_what_to_install(absent: str, used: str, said: str) -> None:
    code = f"import sys; sys.modules[{absent!r}] = None\ntry:\n    {used}\nexcept ImportError as error: print(error)"
    assert python(code).startswith(said)


class Reader(NamedTuple):
    """The extras that somebody installs, a program that these have to run, what they may not bring, and words of the
    doctor's report."""

    extras: str
    program: str
    left_out: tuple[str, ...]
    doctor: str


READERS = (
    Reader("", "", ("jax", "torch"), "neither front end has its package"),
    Reader("[jax]", USE, ("torch",), 'pip install "tsmla-jax[flax]"'),
    Reader("[flax,hf]", USE, ("torch",), "mla_decode, bf16: xla"),
    Reader("[torch]", USE_TORCH, ("jax", "jaxlib", "flax"), "tensors on a CPU: the reference"),
)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.extras)
@pytest.mark.parametrize("kind", Built._fields)
def test_each_readers_line_in_an_empty_environment(
    distribution: Built, kind: str, reader: Reader, tmp_path: Path
) -> None:
    folder = tmp_path / "empty"
    venv.create(folder, with_pip=True)
    executable = str(folder / "bin" / "python")
    command = [executable, "-m", "pip", "install", "--quiet", f"{getattr(distribution, kind)}{reader.extras}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Could not find a version" in done.stderr:
        pytest.skip("pip has no index with these packages")
    assert done.returncode == 0, done.stderr
    lines = run([executable, "-m", "pip", "list", "--format=freeze"]).splitlines()
    assert not {line.partition("==")[0] for line in lines} & set(reader.left_out)
    if reader.program:
        files = python(reader.program, paths="", executable=executable, cwd=str(tmp_path)).split()
        assert all(Path(file).is_relative_to(folder) for file in files), files
    # Without the extras the command still runs, and says what to install for the rest.
    doctor = run([folder / "bin" / "tsmla", "doctor"], cwd=tmp_path)
    assert "--attention-backend CUSTOM" in doctor and reader.doctor in doctor


def test_the_engines_pins_are_those_of_the_tested_versions() -> None:
    tested = [f"{engine.distribution} {version}" for engine in versions.ENGINES for version in engine.tested]
    assert list(ENGINE_PINS) == tested


@pytest.mark.parametrize("engine", [name for name in ENGINE_PINS if name.startswith("vllm")])
def test_the_pins_are_those_of_the_engines_metadata(engine: str) -> None:
    if reason := sources.why_not(*engine.split()):
        pytest.skip(reason)
    (metadata,) = (sources.folder() / engine.replace(" ", "-")).glob("*.dist-info/METADATA")
    asked = email.message_from_string(metadata.read_text()).get_all("Requires-Dist", [])
    requirements = {(each.name, frozenset(each.extras), each.specifier) for each in map(Requirement, asked)}
    for pin in map(Requirement, ENGINE_PINS[engine]):
        assert (pin.name, frozenset(pin.extras), pin.specifier) in requirements, pin


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINE_PINS)
def test_the_torch_front_end_resolves_beside_an_engine(wheel: Path, engine: str) -> None:
    """By pip's resolver, with the versions that the engine's metadata pins; nothing is installed."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed"]

    def resolve(*requirements: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*pip, *requirements], capture_output=True, text=True, timeout=900, check=False)

    done = resolve(f"{wheel}[torch]", *ENGINE_PINS[engine])
    if done.returncode and resolve(*ENGINE_PINS[engine]).returncode:
        pytest.skip(f"pip's index doesn't have what {engine} pins")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_index_takes_it(distribution: Built) -> None:
    """Twine reads the metadata and renders the description as the package index does."""
    pytest.importorskip("twine")
    said = run([sys.executable, "-m", "twine", "--no-color", "check", "--strict", *distribution])
    assert said.count("PASSED") == 2, said


@pytest.mark.parametrize("begins", ["import jax.numpy", "from tsmla_jax.nn import", "import torch"])
def test_the_readmes_example_runs(begins: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (block,) = (block for block in blocks if block.startswith(begins))
    assert python(block).strip() == block.rstrip().rpartition("# ")[2]


def test_the_readmes_table_is_the_tree() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.+?) \| (.+?) \|$", readme, flags=re.MULTILINE)
    table = [(op, *where) for ops, *where in rows for op in re.findall(r"\w+", ops)]
    assert sorted(op for op, *_ in table) == sorted(OPERATIONS)
    for op, anywhere, hopper in table:
        there = set(OPERATIONS[op].table)
        assert set(re.findall("reference|xla", anywhere)) == there - {"cute"}, op
        assert (hopper != "none: xla") == ("cute" in there), op
    (blackwell,) = re.findall(r"On Blackwell the kernels of (.*) come with the extra", readme, flags=re.DOTALL)
    assert {f"{op}_sm100" for op in re.findall(r"`(\w+)`", blackwell)} == {op for op in KERNELS if "_sm100" in op}


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120 and max(map(len, lines)) <= 110
    first = next(number for number, line in enumerate(lines, 1) if re.search(r"\b0\.\d\d times\b", line))
    assert first <= 25  # the first result


def test_the_readme_names_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "make demo" in readme and "make test" in readme


def test_ci_runs_the_suite() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


def test_make_test_gpu_runs_every_test_that_is_marked() -> None:
    """It names no folder: tests marked gpu lie beside those of the same code on a CPU, too."""
    make = ["make", "--dry-run", "test-gpu"]
    shown = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True)
    (command,) = (line for line in shown.stdout.splitlines() if "-m gpu" in line)
    assert command.endswith(" -m gpu")
