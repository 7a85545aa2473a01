"""What a type checker says of the public functions, and of the programs of the README and the guides."""

from __future__ import annotations

import doctest
import importlib
import inspect
import itertools
import re
import sys
import typing
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OVERLOADED = [
    f"{package}.{name}"
    for package in ("tsmla_jax", "tsmla_bridge")
    for name in ("mla_decode", "mla_prefill", "mla_prefill_kv", "sparse_mla")
]
REVEALED = """
import jax, jax.numpy as jnp, torch, tsmla_bridge, tsmla_jax

q, cache, ints = jnp.ones((1, 1, 8, 576)), jnp.ones((1, 64, 576)), jnp.ones((1, 1), jnp.int32)
reveal_type(tsmla_jax.mla_decode(q, cache, ints, ints[0], softmax_scale=1.0))
reveal_type(tsmla_jax.mla_decode(q, cache, ints, ints[0], softmax_scale=1.0, return_lse=True))
reveal_type(tsmla_jax.write_kv_cache(cache, q[0, 0], None, ints[0]))
x, n = torch.ones(1, 1, 8, 576), torch.ones(1, 1, dtype=torch.int32)
reveal_type(tsmla_bridge.mla_decode(x, x[0], n, n[0], softmax_scale=1.0))
reveal_type(tsmla_bridge.mla_decode(x, x[0], n, n[0], softmax_scale=1.0, return_lse=True))
"""
TYPES = ["Array", "tuple[Array, Array]", "Array", "Tensor", "tuple[Tensor, Tensor]"]


FLAGS = ("return_lse", "return_max_logits")
"""Arguments that add a result; a function has an overload for each of their combinations."""


@pytest.mark.parametrize("name", OVERLOADED)
def test_overloads_have_the_functions_arguments(name: str) -> None:
    """An argument that is new in one of the signatures is in all."""
    package, _, attribute = name.partition(".")
    function = getattr(importlib.import_module(package), attribute)
    found = typing.get_overloads(function)
    want = {parameter.name: parameter for parameter in inspect.signature(function).parameters.values()}
    flags = [flag for flag in FLAGS if flag in want]
    asked = []
    for overload in found:
        parameters = inspect.signature(overload).parameters
        assert list(parameters) == list(want)
        asked.append(tuple(parameters[flag].annotation == "Literal[True]" for flag in flags))
        assert all(parameters[flag].annotation in ("Literal[True]", "Literal[False]") for flag in flags)
        assert [p for n, p in parameters.items() if n not in flags] == [p for n, p in want.items() if n not in flags]
    assert sorted(asked) == sorted(itertools.product((False, True), repeat=len(flags)))


def _programs() -> dict[str, str]:
    """The README's programs, and those of a page of the guides as one."""
    readme = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    programs = {f"readme_{number}": program for number, program in enumerate(readme)}
    for page in [ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]:
        code = "\n".join(re.findall(r"```pycon\n(.*?)```", page.read_text(), re.DOTALL))
        if code:
            lines = [example.source for example in doctest.DocTestParser().get_examples(code)]
            programs["page_" + re.sub(r"\W", "_", page.stem)] = "".join(lines)
    return programs


def _checked(folder: Path, programs: dict[str, str]) -> str:
    """mypy's words of all programs, in one run."""
    mypy = pytest.importorskip("mypy.api", reason="needs mypy")
    for name, program in programs.items():
        (folder / f"{name}.py").write_text(program)
    paths = ", ".join(f'"{ROOT / part}"' for part in (".", "kernels", "bridge"))
    (folder / "mypy.toml").write_text(
        f"[tool.mypy]\nmypy_path = [{paths}]\nnamespace_packages = true\nexplicit_package_bases = true\n"
        'allow_redefinition = true\nignore_missing_imports = true\nfollow_imports = "silent"\n'
        f'cache_dir = "{ROOT / ".mypy_cache" / "programs"}"\npython_version = "3.11"\n'
        '[[tool.mypy.overrides]]\nmodule = ["cutlass.*", "cuda.*"]\nfollow_imports = "skip"\n'
    )
    files = sorted(str(folder / f"{name}.py") for name in programs)
    said, errors, _ = mypy.run(["--config-file", str(folder / "mypy.toml"), *files])
    return str(said) + str(errors)


@pytest.mark.slow
def test_programs_pass_a_type_checker(tmp_path: Path) -> None:
    said = _checked(tmp_path, _programs())
    assert said.startswith("Success"), said


@pytest.mark.slow
def test_results_have_plain_types(tmp_path: Path) -> None:
    said = _checked(tmp_path, {"revealed": REVEALED})
    found = re.findall(r'Revealed type is "(.*)"', said)
    assert [re.sub(r"[\w.]+\.(?=Array|Tensor)", "", each) for each in found] == TYPES, said


def test_dir_is_what_a_package_offers() -> None:
    for package in ("tsmla_jax", "tsmla_jax.nn", "tsmla_jax.sparse", "tsmla_jax.generate", "tsmla_bridge"):
        module = importlib.import_module(package)
        assert dir(module) == sorted(module.__all__), package
    assert "MLAttention" in dir(sys.modules["tsmla_jax.nn"])
    assert "generate" in dir(sys.modules["tsmla_jax"])
