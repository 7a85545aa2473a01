"""What the bridge asks of torch about devices and streams, in one place: what is cheap enough for every call, and what
is asked once and kept."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch

# torch's own fast ways; a build without CUDA has none of them and never gets as far as calling them.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_empty_strided = getattr(_guards, "_empty_strided_cuda", None)


def kind(device: torch.device) -> str:
    """ "cuda", "cpu", "meta", or another type of torch's devices."""
    return device.type


def current_stream(index: int) -> int:
    """The cudaStream_t of the device's current stream."""
    if _raw_stream is None:
        return torch.cuda.current_stream(index).cuda_stream
    return _raw_stream(index)


def current_device() -> int:
    """The index of the current device."""
    return torch.cuda.current_device() if _current_device is None else _current_device()


def new_tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Uninitialised memory on the current device, past torch's dispatcher: as code that torch compiles gets it."""
    if _empty_strided is None:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
    return _empty_strided(shape, strides, dtype)


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return _is_capturing()


@functools.cache
def capability(index: int) -> tuple[int, int]:
    """The compute capability."""
    return torch.cuda.get_device_capability(index)


def arch(index: int) -> str:
    """What kernels for the device are compiled for, as in CUTE_DSL_ARCH: "sm_90a"."""
    major, minor = capability(index)
    return f"sm_{major}{minor}a"


def is_blackwell(index: int) -> bool:
    """Whether the device is one of those that the package tokenspeed_mla is written for."""
    return capability(index)[0] == 10


@functools.cache
def num_sms(index: int) -> int:
    """Multiprocessors of the device."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def capture_id(stream: int) -> int | None:
    """A number that tells the capture which `stream` is part of from all others; None if the driver doesn't say."""
    driver = _driver()
    if driver is None:
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    result = driver.cuStreamGetCaptureInfo(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number))
    active = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
    return number.value if result == 0 and status.value == active else None


@functools.cache
def _driver() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        return library if library.cuStreamGetCaptureInfo else None
    except (OSError, AttributeError):
        return None


@functools.cache
def torch_device(index: int) -> torch.device:
    """The CUDA device with this index."""
    return torch.device("cuda", index)


def made_current(index: int) -> AbstractContextManager[Any]:
    """A context in which the CUDA device with this index is the current one."""
    return contextlib.nullcontext() if current_device() == index else torch.cuda.device(index)


def index_of(device: torch.device) -> int:
    """The index of a CUDA device, the current one's if it names none."""
    return current_device() if device.index is None else device.index
