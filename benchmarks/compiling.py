"""Compiling the kernels of a benchmark before its clock runs, or with --compile_only on another machine, without a GPU.

Where TSMLA_CACHE_DIR names a folder, the objects go there, and a run elsewhere finds them in a copy of it.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import sys
from collections.abc import Iterable
from typing import Any

from absl import flags
from harness import ARCH

COMPILE_ONLY = flags.DEFINE_bool("compile_only", False, "compile what the points need, and end")


def compile_all(wanted: Iterable[tuple[str, Any]]) -> None:
    """Compile these objects, kernels' names and configurations, a process a core. With --compile_only the program ends
    then."""
    from tsmla_kernels import object_cache
    from tsmla_kernels.catalog import KERNELS

    pairs = list(dict.fromkeys(wanted))
    missing = [(name, config) for name, config in pairs if not object_cache.is_stored(KERNELS[name], config, ARCH)]
    if missing:
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(min(len(missing), os.cpu_count() or 1), spawn) as pool:
            list(pool.map(_compile_one, missing))
    if COMPILE_ONLY.value:
        print(f"{len(pairs)} objects in {object_cache.directory()}, {len(missing)} of them new")
        sys.exit(0)


def _compile_one(wanted: tuple[str, Any]) -> None:
    from tsmla_kernels import object_cache
    from tsmla_kernels.catalog import KERNELS

    name, config = wanted
    object_cache.load_or_compile(KERNELS[name], config, ARCH)
