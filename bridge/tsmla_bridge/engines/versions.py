"""The engines that have a plug-in here: which are installed, whether their versions were tested, and the flag to pass.

Imports no engine: versions come from the installed distributions' metadata.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tsmla_kernels import __version__
from tsmla_kernels.cli.packages import version_of

logger = logging.getLogger(__name__)


class Engine(NamedTuple):
    """An engine with a plug-in.

    distribution: its name on the package index.
    tested: the versions whose own code the tests run, oldest first.
    significant: how many leading numbers of a version must equal those of a tested version.
    flags: the command line that chooses the backends.
    sparse_flags: the settings for models with DeepSeek-V3.2's sparse attention, None if there is no backend for them.
    """

    distribution: str
    tested: tuple[str, ...]
    significant: int
    flags: str
    sparse_flags: str | None = None


VLLM = Engine(
    "vllm",
    ("0.26.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    2,
    "--attention-backend CUSTOM",
    "TSMLA_VLLM=sparse in the environment, and --attention-backend CUSTOM",
)
SGLANG = Engine(
    "sglang",
    ("0.5.17", "0.5.23"),
    3,
    "--attention-backend tsmla --page-size 64",
    "TSMLA_SGLANG=flash_mla in the environment, and --dsa-prefill-backend flashmla_sparse --dsa-decode-backend"
    " flashmla_kv --kv-cache-dtype fp8_e4m3",
)
ENGINES = (VLLM, SGLANG)


@dataclass(frozen=True)
class Found:
    """An engine, for `tsmla doctor`.

    version: None where it isn't installed.
    status: what `status_of` says of that version; the tested versions where the engine isn't installed.
    flags, sparse_flags: the Engine's.
    """

    engine: str
    version: str | None
    status: str
    flags: str
    sparse_flags: str | None = None


def examine() -> tuple[Found, ...]:
    """All engines, installed or not."""
    return tuple(_examine(engine, version_of(engine.distribution)) for engine in ENGINES)


def render(found: Iterable[Found]) -> list[str]:
    """The lines of a report for a terminal."""
    lines = ["Engines, and the flags that choose the backends of this project"]
    for engine in found:
        lines.append(f"  {engine.engine:8}{engine.version or 'not installed':16}{engine.status}")
        lines.append(f"          {engine.flags}")
        if engine.sparse_flags is not None:
            lines.append(f"          DeepSeek-V3.2, GLM-5: {engine.sparse_flags}")
    return lines


def _examine(engine: Engine, version: str | None) -> Found:
    status = f"tested: {', '.join(engine.tested)}" if version is None else status_of(engine, version)
    return Found(engine.distribution, version, status, engine.flags, engine.sparse_flags)


def status_of(engine: Engine, version: str) -> str:
    """In words, whether a version counts as tested: its leading numbers, `engine.significant` of them, are those of a
    version whose own code the tests run."""
    if any(numbers(version, engine.significant) == numbers(tested, engine.significant) for tested in engine.tested):
        return "tested"
    oldest, newest = numbers(engine.tested[0]), numbers(engine.tested[-1])
    between = oldest < numbers(version) < newest
    return f"{'between tested versions' if between else 'untested'}; tested: {', '.join(engine.tested)}"


def warn_if_untested(engine: Engine, version: str) -> None:
    """Log a warning if the engine's version neither counts as tested nor lies between tested ones. To be called where a
    backend is chosen."""
    if status_of(engine, version).startswith("untested"):
        logger.warning(
            "tsmla's backends for %s were not tested with its version %s (tested: %s)",
            engine.distribution, version, ", ".join(engine.tested),
        )  # fmt: skip


@functools.cache
def say_active(engine: Engine, what: str) -> None:
    """Log, once in a process for each `what`, that a backend of this project serves the engine. To be called where its
    kernels are loaded. The logger is below the engine's own, whose level and output it takes."""
    logging.getLogger(f"{engine.distribution}.tsmla").info("tsmla %s: %s", __version__, what)


def numbers(version: str, count: int = 3) -> tuple[int, ...]:
    """The first `count` numbers of a version, for comparisons."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:count])


def is_before(version: str, release: tuple[int, int]) -> bool:
    """Whether a version is older than a release. A build from a repository without tags calls itself "dev" or
    "0.1.dev": it says nothing of its age, and counts as newer."""
    return (0, 2) <= numbers(version, 2) < release
