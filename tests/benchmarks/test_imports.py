"""What benchmarks and examples import from the packages is there: most of them run on a GPU only."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))
PACKAGES = ("tsmla_jax", "tsmla_kernels", "tsmla_bridge", "benchmarks")


def imported_names(path: Path) -> list[tuple[str, str | None]]:
    """(module, name) of each import from the packages in a file, those inside of functions too."""
    found: list[tuple[str, str | None]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.module, alias.name) for alias in node.names]
    return [(module, name) for module, name in found if module.split(".")[0] in PACKAGES]


def exists(module: str, name: str | None) -> bool:
    """Whether a module, or a name or submodule of it, can be imported."""
    try:
        found = importlib.import_module(module)
        if name is not None and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in PACKAGES:
            pytest.skip(f"{module} needs {error.name}")
        return False
    return True


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_imported_names_exist(path: Path) -> None:
    missing = [f"{module}: {name}" for module, name in imported_names(path) if not exists(module, name)]
    assert not missing


def test_a_missing_name_is_found(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("def f():\n    from tsmla_jax import mla_decode, gone\n    import tsmla_jax.nowhere\n")
    assert [name for name in imported_names(program) if not exists(*name)] == [
        ("tsmla_jax", "gone"), ("tsmla_jax.nowhere", None),
    ]  # fmt: skip
