"""What the `tsmla` commands of both distributions share. Imports no kernels, so that `tsmla --help` is quick."""

from __future__ import annotations

import argparse
from typing import NoReturn

EXIT_USER_ERROR = 2
COMPILE_SUMMARY = "compile kernels into the on-disk cache ahead of use, on a machine with or without a GPU"
CACHE_SUMMARY = "list, verify and prune the on-disk cache of compiled kernels"


class OneLineErrors(argparse.ArgumentParser):
    """argparse with usage errors in one line instead of the whole usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")
