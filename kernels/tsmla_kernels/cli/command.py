"""The subcommands of `tsmla`, its command line and its exit statuses. `tsmla --help` imports neither the model nor the
kernels.

Flags are argparse's; absl's flags (`--verbosity`, `--logtostderr`, ...) stand before the subcommand.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from absl import app, flags, logging

from tsmla_kernels import __version__
from tsmla_kernels.cli import packages
from tsmla_kernels.cli.parsing import EXIT_USER_ERROR, Parser
from tsmla_kernels.interrupts import EXIT_INTERRUPTED

EXIT_BROKEN_PIPE = 141

# A wrong argument, a bad file or a missing package raises one of these. Their message suffices, so the user gets one
# line. Any other exception is a fault of this library and keeps its traceback.
_USER_ERRORS = (ValueError, NotImplementedError, OSError, ImportError)


class Actions(NamedTuple):
    """The actions of a subcommand: `add_arguments` fills the subcommand's parser, and `run` takes the parsed arguments
    and returns the exit status."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Command:
    """A subcommand: its line in --help, and the function that imports its module when the command line names it."""

    summary: str
    load: Callable[[], Actions]


def _generate() -> Actions:
    from tsmla_jax.generate import command

    return Actions(command.add_arguments, command.run)


def _doctor() -> Actions:
    from tsmla_kernels.cli import doctor

    return Actions(doctor.add_arguments, doctor.run)


def _explain() -> Actions:
    from tsmla_jax.cli import explain

    return Actions(explain.add_arguments, explain.run)


def _compile() -> Actions:
    from tsmla_kernels.cli import objects

    return Actions(objects.add_compile_arguments, objects.run_compile)


def _cache() -> Actions:
    from tsmla_kernels.cli import objects

    return Actions(objects.add_cache_arguments, objects.run_cache)


def _wheel() -> Actions:
    from tsmla_kernels.cli import wheel

    return Actions(wheel.add_arguments, wheel.run)


COMMANDS = {
    "generate": Command("generate tokens from a DeepSeek checkpoint directory (needs jax)", _generate),
    "doctor": Command("say which devices, packages and engines there are, what runs, and what to install", _doctor),
    "explain": Command("say which implementation runs a call here, and why the others can't (needs jax)", _explain),
    "compile": Command("compile kernels into the on-disk cache ahead of use, with or without a GPU", _compile),
    "cache": Command("list, verify and prune the on-disk cache of compiled kernels", _cache),
    "wheel": Command("build a wheel of compiled kernels, which saves its installations from compiling them", _wheel),
}


class _SubParser(Parser):
    """A subcommand's parser. absl's flags belong to the parser above, or each would be read twice."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(inherited_absl_flags=None, **kwargs)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the whole command line, `argv[0]` included. If the command line is wrong, exit with status 2 and one line;
    if it has no argument, print the help and exit with status 0."""
    parser = Parser(prog="tsmla", description="DeepSeek's multi-head latent attention for JAX and PyTorch.")
    parser.add_argument("--version", action="version", version=f"tsmla {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_SubParser)
    named = next((argument for argument in argv[1:] if argument in COMMANDS), None)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.summary, description=command.summary)
        # Only the module that the command line names is imported, so that `tsmla --help` is quick.
        if name == named:
            try:
                command.load().add_arguments(subparser)
            except ImportError as error:  # a front end that isn't installed
                subparser.exit(EXIT_USER_ERROR, f"{subparser.prog}: error: {_one_line(error)}\n")
    if len(argv) == 1:
        parser.print_help()
        parser.exit()
    try:
        parsed: argparse.Namespace = parser.parse_args(list(argv[1:]))
    except flags.Error as error:  # a wrong absl flag raises instead of calling parser.error
        parser.error(str(error))
    if flags.FLAGS["verbosity"].using_default_value:
        # Otherwise app.run turns INFO on, and jax logs every backend that it doesn't find.
        logging.set_verbosity(logging.WARNING)
    return parsed


def _one_line(error: BaseException) -> str:
    """The error's message in one line, with how to install a missing package. A missing module of this project is a
    fault of the project, not of the user, and is raised again."""
    line = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ImportError):
        if (error.name or "").startswith("tsmla_"):
            raise error
        if "pip install" not in line:
            line += packages.install_hint(error.name)
    return line


def _flush_nowhere() -> None:
    """Make the interpreter's last flush succeed although the pipe is closed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(arguments: argparse.Namespace) -> int:
    """Run the parsed subcommand and return its exit status: 2, with one line on stderr, for a user's error."""
    command = COMMANDS[arguments.command]
    try:
        status = command.load().run(arguments)
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


def _open_streams() -> None:
    """Give a process that was started without stdout or stderr streams that lead nowhere; Python has None for them."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def main() -> NoReturn:
    """Run the command line of this process, and exit."""
    _open_streams()
    app.run(run, flags_parser=parse)
    raise AssertionError("app.run exits")
