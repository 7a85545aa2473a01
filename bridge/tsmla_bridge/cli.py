"""The `tsmla` command of the distribution without jax: doctor, compile and cache."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import signal
import sys
from collections.abc import Sequence
from typing import Any

from tsmla_bridge.engines import versions
from tsmla_kernels import __version__, command_line, commands
from tsmla_kernels.command_line import CACHE_SUMMARY, COMPILE_SUMMARY, EXIT_USER_ERROR, OneLineErrors
from tsmla_kernels.interrupts import EXIT_INTERRUPTED, end_interrupted

PACKAGES = ("torch", "nvidia-cutlass-dsl", "tokenspeed-mla", "tsmla-jax")


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point of the `tsmla` script; returns the exit status: 2, with a line on stderr, for a user's error."""
    parser = OneLineErrors(
        prog="tsmla",
        description="DeepSeek's multi-head latent attention for PyTorch.",
        epilog="generate and explain come with the distribution tsmla-jax",
    )
    parser.add_argument("--version", action="version", version=f"tsmla {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary, add_arguments, run in (
        ("doctor", "say which GPUs, packages and serving engines there are, and how the engines are told to use the"
         " kernels", _add_doctor_arguments, _run_doctor),
        ("compile", COMPILE_SUMMARY, commands.add_compile_arguments, commands.run_compile),
        ("cache", CACHE_SUMMARY, commands.add_cache_arguments, commands.run_cache),
    ):  # fmt: skip
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        add_arguments(subparser)
        subparser.set_defaults(run=run)
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        return 0
    arguments = parser.parse_args(argv)
    before = signal.signal(signal.SIGINT, end_interrupted)
    try:
        status: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, OSError, ImportError) as error:
        print(f"tsmla {arguments.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    finally:
        signal.signal(signal.SIGINT, before)
    return status


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _run_doctor(arguments: argparse.Namespace) -> int:
    report = examine()
    print(json.dumps(report, indent=2) if arguments.json else render(report))
    return 0


def examine() -> dict[str, Any]:
    """Look at this machine. Starts CUDA if torch can use it; allocates nothing on a GPU."""
    packages = {name: versions.version_of(name) for name in PACKAGES}
    return {
        "version": __version__,
        "python": platform.python_version(),
        "packages": packages,
        "gpus": _gpus() if packages["torch"] else [],
        "cache": dataclasses.asdict(command_line.examine_cache()),
        "engines": [dataclasses.asdict(engine) for engine in versions.examine()],
    }


def _gpus() -> list[str]:
    """Name and architecture of each GPU that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        found.append(f"{torch.cuda.get_device_name(index)}  sm_{major}{minor}")
    return found


def render(report: dict[str, Any]) -> str:
    """The report as text for a terminal."""
    lines = [f"tsmla {report['version']}, Python {report['python']}", "", "GPUs"]
    lines += [f"  {gpu}" for gpu in report["gpus"]] or [
        "  none that torch can use; the kernels need a Hopper or Blackwell GPU"
    ]
    lines += ["", "Packages"]
    lines += [f"  {name:20}{version or 'not installed'}" for name, version in report["packages"].items()]
    found = [versions.Found(**engine) for engine in report["engines"]]
    cache = command_line.render_cache(command_line.CacheState(**report["cache"]))
    return "\n".join([*lines, "", *cache, "", *versions.render(found)])
