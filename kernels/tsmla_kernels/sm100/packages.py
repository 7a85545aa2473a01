"""The packages by other authors whose kernels run on Blackwell, and how a module of theirs is imported. Imports no
cutlass."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tsmla_kernels.kernel import Package

TOKENSPEED = Package("tokenspeed_mla", "tokenspeed-mla", 'pip install "tokenspeed-mla>=2.0,<3"', "2.0.4")
"""Dense decode and prefill. The version is the one with which the adapter was compiled and compared."""

FLASHINFER = Package("flashinfer", "flashinfer-python", 'pip install "flashinfer-python>=0.7.2,<0.7.3"', "0.7.2.post1")
"""The indexer's logits (Apache-2.0)."""

CUDNN = Package("cudnn", "nvidia-cudnn-frontend", "pip install nvidia-cudnn-frontend==1.32.0", "1.32.0")
"""Attention over selected rows (Apache-2.0 and MIT)."""

PACKAGES = (TOKENSPEED, FLASHINFER, CUDNN)


@contextlib.contextmanager
def needed(package: Package) -> Iterator[None]:
    """A context for imports from the package: if they fail, the error says what to install."""
    try:
        yield
    except ImportError as e:
        raise ModuleNotFoundError(
            f"the Blackwell kernels need {package.distribution}: {e}; {package.install}", name=e.name
        ) from e


def module_of(package: Package, name: str) -> ModuleType:
    """The module `name` (a dotted path inside the package), imported without the code of the packages above it.

    Those import torch and compiled libraries, which a kernel's class doesn't need. While the module is imported, empty
    packages stand in for them; afterwards the process has none of these modules, so that a later import of the whole
    package is not disturbed.

    Raises ModuleNotFoundError if the package isn't installed, or has no such module.
    """
    with needed(package):
        found = importlib.util.find_spec(package.module)
        if found is None or found.origin is None:
            raise ModuleNotFoundError(f"No module named {package.module!r}", name=package.module)
        with _stand_ins(package.module, Path(found.origin).parent, name.split(".")[:-1]):
            return importlib.import_module(f"{package.module}.{name}")


@contextlib.contextmanager
def _stand_ins(module: str, folder: Path, parts: list[str]) -> Iterator[None]:
    """Inside, empty packages stand for `module`, in `folder`, and for the packages `parts` below it."""

    def inside() -> dict[str, ModuleType]:
        return {name: x for name, x in sys.modules.items() if name == module or name.startswith(f"{module}.")}

    before = inside()
    for name in before:
        del sys.modules[name]
    try:
        for count in range(len(parts) + 1):
            name = ".".join((module, *parts[:count]))
            stand_in = ModuleType(name)
            stand_in.__path__ = [str(folder.joinpath(*parts[:count]))]
            sys.modules[name] = stand_in
        yield
    finally:
        for name in inside():
            del sys.modules[name]
        sys.modules.update(before)
