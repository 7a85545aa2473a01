"""Ctrl-C of the `tsmla` command."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

EXIT_INTERRUPTED = 130


def _copy_of_stderr() -> int:
    try:
        return os.dup(2)
    except OSError:  # the process was started without
        return 2


# The compiler lends descriptor 2 to a file for moments.
_STDERR = _copy_of_stderr()


def end_interrupted(*_: object) -> NoReturn:
    """End the process with one line and status 130, from a signal's handler.

    The process ends at once, because a KeyboardInterrupt would have to pass through the compilers' C++ frames, and ends
    in a segmentation fault there."""
    with contextlib.suppress(Exception):  # a stream that was being written to can't be flushed
        assert sys.__stdout__ is not None
        sys.__stdout__.flush()
    # Not through sys.stderr, which is another stream while a kernel is being compiled.
    with contextlib.suppress(OSError):
        os.write(_STDERR, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)
