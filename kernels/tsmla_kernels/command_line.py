"""The common parts of the `tsmla` commands of both distributions. Imports no kernels, so that `tsmla --help` is
quick."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

EXIT_USER_ERROR = 2
MOST_TEXT = 2**26
"""Bytes of the longest file that a flag may name: some ten million token ids. A device or a pipe may never end."""
COMPILE_SUMMARY = "compile kernels into the on-disk cache ahead of use, on a machine with or without a GPU"
CACHE_SUMMARY = "list, verify and prune the on-disk cache of compiled kernels"


class OneLineErrors(argparse.ArgumentParser):
    """argparse with usage errors in one line instead of the whole usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def read_text(flag: str, path: Path) -> str:
    """The UTF-8 text of the file that a flag names. A pipe is legal, and is read to its end.

    Raises:
      ValueError: there is no such file, it can't be read, isn't UTF-8, or is longer than MOST_TEXT; names the flag.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_TEXT + 1)
    except FileNotFoundError:
        raise ValueError(f"{flag} {path}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"{flag} {path}: can't be read: {error.strerror or error}") from None
    if len(content) > MOST_TEXT:
        raise ValueError(f"{flag} {path}: goes on after {MOST_TEXT} bytes; legal: at most that many")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {path}: not UTF-8 text: {error}") from None


@dataclass(frozen=True)
class CacheState:
    """What `tsmla doctor` says of the cache: its directory, and why processes can't keep what they compile there, None
    if they can."""

    directory: str
    problem: str | None


def examine_cache() -> CacheState:
    """The cache of this user. Makes nothing."""
    from tsmla_kernels import object_cache

    return CacheState(str(object_cache.directory()), object_cache.why_not_kept())


def render_cache(state: CacheState) -> list[str]:
    """The lines of a report for a terminal."""
    said = [] if state.problem is None else [f"  each process compiles what isn't in it: {state.problem}"]
    return ["Cache of compiled kernels", f"  {state.directory}", *said]
