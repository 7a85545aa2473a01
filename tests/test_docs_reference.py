"""The documentation's reference: each public name has an entry, and each entry names every argument."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from tsmla_kernels.cli import command as commands

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PUBLIC = (
    "tsmla_jax",
    "tsmla_jax.nn",
    "tsmla_jax.nn.v32",
    "tsmla_jax.nn.v4",
    "tsmla_jax.sparse",
    "tsmla_jax.generate",
    "tsmla_bridge",
)
# Methods of one object in three modules, which the reference has once, and names of types.
LAYER_WEIGHTS = {
    "hf_attention_shapes",
    "init_params",
    "load_hf_attention",
    "param_specs",
    "params_from_hf",
    "params_to_hf",
    "save_hf_attention",
}
TYPES = {"Kind", "Params", "Preference"}
# V32Config and V4Config are public in nn, too.
AT_HOME = {"tsmla_jax.nn.v32.V32Config", "tsmla_jax.nn.v4.V4Config"}


def _names() -> list[str]:
    """Dotted names of all public functions and classes."""
    found = []
    for module in PUBLIC:
        package = importlib.import_module(module)
        for name in package.__all__:
            if name not in LAYER_WEIGHTS | TYPES and callable(getattr(package, name)):
                found.append(f"{module}.{name}")
    return [name for name in found if name not in AT_HOME]


def _entries() -> set[str]:
    """What the pages show, by the name in the page."""
    return {name for page in DOCS.rglob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)}


def _object(name: str) -> Any:
    """What a dotted name of the pages stands for."""
    found: Any = None
    path = ""
    for part in name.split("."):
        path = f"{path}.{part}".lstrip(".")
        # A function may have the name of its module: the package's own attribute comes first.
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
    return found


def _documented(docstring: str) -> list[str]:
    """The names in a docstring's Args or Attributes."""
    section = re.search(r"^(?:Args|Attributes):\n((?: +.*\n|\n)*)", docstring + "\n", re.MULTILINE)
    if section is None:
        return []
    indent = re.match(" +", section[1])
    assert indent
    entries = re.findall(rf"^ {{{len(indent[0])}}}([*\w]+(?:, [*\w]+)*):", section[1], re.MULTILINE)
    return [name.lstrip("*") for names in entries for name in names.split(", ")]


def test_every_public_name_has_an_entry() -> None:
    assert sorted(set(_names()) - _entries()) == []


@pytest.mark.parametrize("module", ["tsmla_jax.nn", "tsmla_jax.nn.v32", "tsmla_jax.nn.v4"])
def test_the_functions_of_one_name_are_those_of_each_layers_module(module: str) -> None:
    assert set(importlib.import_module(module).__all__) >= LAYER_WEIGHTS


@pytest.mark.parametrize("name", sorted(_entries()))
def test_an_entry_names_every_argument(name: str) -> None:
    found = _object(name)
    docstring = inspect.getdoc(found) or ""
    if dataclasses.is_dataclass(found) or hasattr(found, "_fields"):
        expected = [*getattr(found, "__dataclass_fields__", getattr(found, "_fields", ()))]
        # The builder cuts attributes that share a line at the first comma; arguments may share one.
        attributes = docstring.partition("Attributes:")[2].partition("\n\n")[0]
        assert not re.search(r"^ +\w+, \w+(?:, \w+)*:", attributes, re.MULTILINE)
    elif inspect.isclass(found):
        docstring = f"{docstring}\n\n{inspect.getdoc(found.__init__) or ''}"
        signature = inspect.signature(found.__init__)
        expected = [name for name in signature.parameters if name not in ("self", "args", "kwargs")]
        if f"arguments and errors of `{found.__mro__[1].__name__}`" in docstring:
            expected = []
    else:
        expected = list(inspect.signature(found).parameters)
    assert sorted(_documented(docstring)) == sorted(expected)


def _options(name: str) -> list[str]:
    """The long options of a command."""
    parser = argparse.ArgumentParser()
    commands.COMMANDS[name].load().add_arguments(parser)
    options = [option for action in parser._actions for option in action.option_strings]
    return [option for option in options if option.startswith("--")]


def test_every_option_is_on_the_page_of_commands() -> None:
    page = (DOCS / "reference" / "commands.md").read_text()
    options = [option for name in commands.COMMANDS for option in _options(name)]
    assert [option for option in options if f"`{option}" not in page] == ["--help"] * 6


def test_commands_in_the_pages_have_their_options() -> None:
    known = {name: _options(name) for name in commands.COMMANDS}
    found = []
    for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for name, rest in re.findall(r"\btsmla (\w+)((?:[^`\n#]|\\\n)*)", page.read_text()):
            found += [(name, option, page.name) for option in re.findall(r"--[a-z][a-z-]*", rest) if name in known]
    assert len(found) > 20
    assert [(name, option, page) for name, option, page in found if option not in known[name]] == []


def test_every_environment_variable_is_on_the_page_of_commands() -> None:
    """Those with this project's prefix, that a string of the code names."""
    page = (DOCS / "reference" / "commands.md").read_text()
    read = set()
    for folder in ("tsmla_jax", "kernels", "bridge"):
        for source in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(source.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    read.update(re.findall(r"^TSMLA_[A-Z0-9_]+$", node.value))
    read.remove("TSMLA_SPARSE")  # a backend's name in vLLM
    assert sorted(name for name in read if f"`{name}`" not in page) == []
