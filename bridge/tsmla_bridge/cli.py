"""The `tsmla` command of the distribution without jax: `tsmla doctor`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Sequence
from typing import Any

from tsmla_bridge.engines import versions
from tsmla_kernels import __version__

PACKAGES = ("torch", "nvidia-cutlass-dsl", "tokenspeed-mla", "tsmla-jax")


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point of the `tsmla` script; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="tsmla",
        description="DeepSeek's multi-head latent attention for PyTorch.",
        epilog="generate, explain, compile and cache come with the distribution tsmla-jax",
    )
    parser.add_argument("--version", action="version", version=f"tsmla {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    summary = "say which GPUs, packages and serving engines there are, and how the engines are told to use the kernels"
    doctor = commands.add_parser("doctor", help=summary, description=summary)
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        return 0
    as_json = parser.parse_args(argv).json
    report = examine()
    print(json.dumps(report, indent=2) if as_json else render(report))
    return 0


def examine() -> dict[str, Any]:
    """Look at this machine. Starts CUDA if torch can use it; allocates nothing on a GPU."""
    packages = {name: versions.version_of(name) for name in PACKAGES}
    return {
        "version": __version__,
        "python": platform.python_version(),
        "packages": packages,
        "gpus": _gpus() if packages["torch"] else [],
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
    return "\n".join([*lines, "", *versions.render(found)])
