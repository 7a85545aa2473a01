"""Pallas for Triton, where the installed jax has it, and what the GPU that its kernels are compiled for can do."""

from __future__ import annotations

import re
from typing import Any

import jax
from jax.experimental import pallas as pl

from tsmla_jax.ops import device

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:
    # jax announces that a coming release removes it.
    plgpu = None  # type: ignore[assignment]

dot: Any = getattr(plgpu, "dot", None) or getattr(pl, "dot", None)
"""The product of two tiles in a kernel. jax 0.9.1 has it outside of its Triton package."""

_LEAST = 8, 0
"""The compute capability from which Triton multiplies bf16."""
_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_LEAST_SHARED = 99
"""KiB of shared memory that a program may have, by compute capability, and on all other GPUs from _LEAST on."""


def compute_capability() -> tuple[int, int]:
    """The compute capability of the architecture to lower for (`ops.device.target_arch`), which is the GPU's unless
    another is planned for; (9, 0) without either, as Pallas assumes."""
    named = re.fullmatch(r"sm_(\d+)(\d)[a-z]?", device.target_arch() or "sm_90a")
    return (int(named[1]), int(named[2])) if named else (9, 0)


def shared_memory() -> int:
    """Bytes of shared memory that a program may have on a GPU of `compute_capability`."""
    return 1024 * _SHARED.get(compute_capability(), _LEAST_SHARED)


def why_not(*faults: tuple[Any, str]) -> list[str]:
    """Why a kernel in Pallas for Triton can't serve a call on jax's default device; empty if it can.

    faults: what a call must not have, each with the words for it; the first one that is there is the reason.
    """
    return why_no_triton() or [words for there, words in faults if there][:1]


def why_no_triton() -> list[str]:
    """Why kernels in Pallas for Triton can't run on jax's default device; empty if they can."""
    if plgpu is None:
        return [f"jax {jax.__version__} has no Pallas for Triton"]
    if jax.default_backend() != "gpu":
        return [f"it is a kernel for NVIDIA GPUs; jax's default device is a {jax.default_backend()}"]
    if (found := compute_capability()) < _LEAST:
        legal, got = (".".join(map(str, version)) for version in (_LEAST, found))
        return [f"it needs a GPU of compute capability {legal} or more (an A100); this one has {got}"]
    return []
