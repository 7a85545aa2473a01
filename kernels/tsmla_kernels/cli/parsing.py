"""Common parts of all subcommands: errors of one line, and reading the files that flags name. Imports no kernels, so
that `tsmla --help` is quick."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from absl.flags import argparse_flags

EXIT_USER_ERROR = 2
MOST_TEXT = 2**26
"""Bytes of the longest file that a flag may name: some ten million token ids. A device or a pipe may never end."""


class Parser(argparse_flags.ArgumentParser):
    """argparse with absl's flags, and with usage errors in one line, in the words of this project's other errors: what
    was typed, what is legal, and the nearest flag."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses what it doesn't know: argparse leaves a subcommand's unknown arguments to the parser above, which
        names neither the subcommand nor its help."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown))
        return parsed, []

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"{self.prog}: error: {_in_our_words(message)} (see {self.prog} --help)\n")

    def _unknown(self, arguments: Sequence[str]) -> str:
        """The error for arguments that the parser doesn't know, with the flag that was probably meant."""
        said = "unrecognized arguments: " + " ".join(arguments)
        flag = next((each for each in arguments if each.startswith("-")), "").partition("=")[0]
        near = difflib.get_close_matches(flag.replace("_", "-"), list(self._option_string_actions), n=1)
        return said + (f"; did you mean {near[0]}?" if near else "")


def _in_our_words(message: str) -> str:
    """An error of argparse as "FLAG: got ...; legal: ...". Others stay as they are."""
    if choice := re.fullmatch(r"argument (.+?): invalid choice: (.+) \(choose from (.+)\)", message):
        legal = [each.strip(" '") for each in choice[3].split(",")]
        near = difflib.get_close_matches(choice[2].strip("'"), legal, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        return f"{choice[1]}: got {choice[2]}; legal: {', '.join(legal)}{meant}"
    if value := re.fullmatch(r"argument (.+?): invalid (\w+) value: (.+)", message):
        return f"{value[1]}: got {value[3]}; legal: {_KINDS.get(value[2], value[2])}"
    return message.removeprefix("argument ")


_KINDS = {"int": "an int", "float": "a number"}


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
    """The cache of compiled kernels: its directory, and why processes can't keep what they compile there, None
    if they can."""

    directory: str
    problem: str | None


def examine_cache() -> CacheState:
    """The cache of this user. Makes nothing."""
    from tsmla_kernels import object_cache

    return CacheState(str(object_cache.directory()), object_cache.why_not_kept())


def render_cache(state: CacheState) -> list[str]:
    """The lines of a report for a terminal."""
    said = [] if state.problem is None else [f"  each process compiles again what it can't load: {state.problem}"]
    return ["Cache of compiled kernels", f"  {state.directory}", *said]
