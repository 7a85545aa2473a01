"""Pallas for Triton, where the installed jax has it."""

from __future__ import annotations

import jax

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError:
    # jax says that a release to come will have it no more.
    plgpu = None  # type: ignore[assignment]


def why_no_triton() -> list[str]:
    """Why a kernel written in it can't run on jax's default device; empty if it can."""
    if plgpu is None:
        return [f"jax {jax.__version__} has no Pallas for Triton"]
    if jax.default_backend() != "gpu":
        return [f"it is a kernel for NVIDIA GPUs; jax's default device is a {jax.default_backend()}"]
    return []
