"""Several processes that run one model together, by jax.distributed, and the end of a run in which one of them fails.

Each process runs the same command on the same prompts and decides the same; their devices make one mesh.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
from typing import NoReturn

HEARTBEAT_SECONDS = 20
"""A process that is not heard of for so long counts as dead: jax then ends the others, and says which one was lost."""


def join(coordinator_address: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Waits until all processes are there. Call it before jax has looked for devices. Without arguments it does
    nothing.

    Args:
      coordinator_address: HOST:PORT, where process 0 can be reached.
      num_processes: how many there are.
      process_id: which one this is, from 0.

    Raises:
      ValueError: some of the three are missing or not legal, or the processes don't find each other.
    """
    flags = {
        "--coordinator-address": coordinator_address,
        "--num-processes": num_processes,
        "--process-id": process_id,
    }
    given = [flag for flag, value in flags.items() if value is not None]
    if not given:
        return
    if coordinator_address is None or num_processes is None or process_id is None:
        missing = [flag for flag in flags if flag not in given]
        raise ValueError(f"{' and '.join(given)}: needs {' and '.join(missing)}, too")
    if not re.fullmatch(r".+:\d+", coordinator_address):
        raise ValueError(f"coordinator_address = {coordinator_address!r}; legal: HOST:PORT")
    if num_processes < 1:
        raise ValueError(f"num_processes = {num_processes}; legal: at least 1")
    if not 0 <= process_id < num_processes:
        raise ValueError(f"process_id = {process_id}; legal: 0 to {num_processes - 1}")

    import jax

    # This service would catch SIGTERM, and the process would live on.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address, num_processes, process_id, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
        )
    except RuntimeError as error:
        raise ValueError(f"coordinator_address = {coordinator_address!r}: {error}") from None


def check_agreement(**given: object) -> None:
    """Raises a ValueError in every process if one of them has another value than process 0.

    A step puts each process's values on that process's devices and takes them for the same everywhere: different
    prompts would give wrong tokens, and with different options a collective would wait for ever. In a run of one
    process this does nothing.

    Args:
      given: the values, each by its name in the error; two values are equal if their texts (`repr`) are.
    """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return
    digests = [hashlib.sha256(repr(value).encode()).digest() for value in given.values()]
    own = np.stack([np.frombuffer(digest, np.uint32) for digest in digests])
    every = multihost_utils.process_allgather(own)
    differs = (every != every[0]).any(axis=-1)
    if differs.any():
        process, value = np.argwhere(differs)[0]
        name = list(given)[value]
        raise ValueError(f"{name}: process {process} has another value than process 0; legal: the same for all")


def environment() -> dict[str, object]:
    """Facts that, beside the options, decide which program a process runs: each by its name in the error of
    `check_agreement`.
    """
    import jax

    from tsmla_kernels import __version__

    flags = {name: getattr(jax.config, name) for name in _FLAGS}
    check = os.environ.get("TSMLA_CHECK")
    return {"jax.__version__": jax.__version__, "tsmla_jax.__version__": __version__, "TSMLA_CHECK": check, **flags}


_FLAGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)


def end_at_once(status: int) -> NoReturn:
    """Ends this process, which has failed. An orderly end would wait for the others, which wait for this one; so this
    process ends at once, and jax ends the others, which have lost it.
    """
    for stream in (sys.stdout, sys.stderr):
        # A pipe whose reader has gone raises an OSError, which must not turn this into an orderly end.
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)
