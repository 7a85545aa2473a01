"""The `tsmla` command. A subcommand imports the front end that it needs, and says what to install if that is
missing."""

from __future__ import annotations

import signal
from typing import NoReturn

from tsmla_kernels.interrupts import end_interrupted


def main() -> NoReturn:
    """The entry point of the `tsmla` script. What it runs is imported after Ctrl-C has its answer: imports take most of
    the first second."""
    signal.signal(signal.SIGINT, end_interrupted)
    from tsmla_kernels.cli import command

    command.main()
