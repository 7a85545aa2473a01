"""jax's devices, for `tsmla doctor`."""

from __future__ import annotations

import os
from typing import Any, NamedTuple


class Devices(NamedTuple):
    """jax's default backend and its devices in words; or the reason why no backend starts."""

    backend: str | None
    names: tuple[str, ...]
    on_gpu: bool
    failure: str | None


def examine() -> Devices:
    """Start jax's backend, and list its devices."""
    # The report needs no memory, and other programs may be using the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: JAX_PLATFORMS=cuda without CUDA
        said = (str(error).splitlines() or ["no platform that it may use is there"])[0]
        asked = os.environ.get("JAX_PLATFORMS")
        return Devices(None, (), False, f"{said} (JAX_PLATFORMS={asked})" if asked else said)
    on_gpu = any(device.platform == "gpu" for device in devices)
    return Devices(jax.default_backend(), tuple(map(_name, devices)), on_gpu, None)


def _name(device: Any) -> str:
    """A device in words, with the architecture of an NVIDIA GPU: "gpu:0  NVIDIA H200  sm_90"."""
    capability = getattr(device, "compute_capability", None) if device.platform == "gpu" else None
    arch = f"  sm_{str(capability).replace('.', '')}" if capability else ""
    return f"{device.platform}:{device.id}  {device.device_kind}{arch}"
