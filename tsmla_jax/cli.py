"""The `tsmla` command: generate, doctor, compile and cache, each in a module of its own that is imported when it runs.

Flags are argparse's with absl's beside them (`--verbosity`, `--logtostderr`, ...), which stand before the subcommand.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from absl import app, flags, logging
from absl.flags import argparse_flags

from tsmla_kernels import __version__

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

# What a wrong argument, a bad file or a missing package raises in this library: the message says it all, so the user
# gets one line. Anything else is a fault of ours and keeps its traceback.
_USER_ERRORS = (ValueError, NotImplementedError, OSError, ImportError)


@dataclass(frozen=True)
class Command:
    """A subcommand: its line in --help, and where its two functions are.

    `add` takes the subcommand's parser and adds its arguments; `run` takes the parsed arguments and returns the exit
    status. Both are names in `module`.
    """

    summary: str
    module: str
    add: str
    run: str


COMMANDS = {
    "generate": Command(
        "generate tokens from a DeepSeek checkpoint directory",
        "tsmla_jax.generate.command",
        "add_arguments",
        "run",
    ),
    "doctor": Command(
        "say which devices, versions and implementations there are, and what to install for the others",
        "tsmla_jax.doctor",
        "add_arguments",
        "run",
    ),
    "compile": Command(
        "compile kernels into the on-disk cache ahead of use, on a machine with or without a GPU",
        "tsmla_jax.kernel_commands",
        "add_compile_arguments",
        "run_compile",
    ),
    "cache": Command(
        "list, verify and prune the on-disk cache of compiled kernels",
        "tsmla_jax.kernel_commands",
        "add_cache_arguments",
        "run_cache",
    ),
}


def _function(command: Command, name: str) -> Callable[..., int]:
    function: Callable[..., int] = getattr(importlib.import_module(command.module), name)
    return function


class _Parser(argparse_flags.ArgumentParser):
    """argparse with absl's flags, and usage errors in one line instead of the whole usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _SubParser(_Parser):
    """A subcommand's parser. absl's flags belong to the parser above, or each would be read twice."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(inherited_absl_flags=None, **kwargs)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the whole command line, `argv[0]` included; exits with status 2 and one line when it is wrong."""
    parser = _Parser(prog="tsmla", description="DeepSeek's multi-head latent attention for JAX.")
    parser.add_argument("--version", action="version", version=f"tsmla {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_SubParser)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.summary, description=command.summary)
        # Only what the command line names is imported, so that `tsmla --help` doesn't wait for all of them.
        if name in argv[1:]:
            _function(command, command.add)(subparser)
    try:
        parsed: argparse.Namespace = parser.parse_args(list(argv[1:]))
    except flags.Error as error:  # absl's own flags say so by raising
        parser.error(str(error))
    if flags.FLAGS["verbosity"].using_default_value:
        # Else app.run turns INFO on, and jax tells about every backend that it doesn't find.
        logging.set_verbosity(logging.WARNING)
    return parsed


def _one_line(error: BaseException) -> str:
    """The error's message in one line. A missing package's says how to get it; a missing module of ours is no user's
    error and is raised again."""
    line = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ImportError):
        from tsmla_jax import doctor

        if (error.name or "").startswith("tsmla_"):
            raise error
        line += doctor.install_hint(error.name)
    return line


def _flush_nowhere() -> None:
    """Let the interpreter's last flush of a closed pipe succeed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(arguments: argparse.Namespace) -> int:
    """Run the parsed subcommand and return its exit status: 2 and one line on stderr for an error of the user's."""
    command = COMMANDS[arguments.command]
    try:
        status = _function(command, command.run)(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        _flush_nowhere()
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except _USER_ERRORS as error:
        logging.debug("Where it was raised:", exc_info=True)
        print(f"tsmla {arguments.command}: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_USER_ERROR


def main() -> NoReturn:
    """The entry point of the `tsmla` script."""
    try:
        app.run(run, flags_parser=parse)
    except ImportError as error:  # a subcommand's module wants a package that isn't there
        print(f"tsmla: error: {_one_line(error)}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    raise AssertionError("app.run exits")


if __name__ == "__main__":
    main()
