"""What the bridge asks of torch about devices and streams, in one place: what is cheap enough for every call, and what
is asked once and kept."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def _fast(owner: Any, name: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """What torch makes its public function of, at less cost; the public one where torch lacks it (without CUDA)."""
    return getattr(owner, name, otherwise)


# Called as they are: a function around each would cost as much as it does.

current_device: Callable[[], int] = _fast(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The index of the current device."""

current_stream: Callable[[int], int] = _fast(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
"""The cudaStream_t of the current stream of the device with this index."""

is_capturing: Callable[[], bool] = _fast(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
"""Whether the current stream is being captured into a CUDA graph."""

new_tensor: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor] = _fast(
    _guards,
    "_empty_strided_cuda",
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda"),
)
"""Uninitialised memory on the current device, of this shape, strides and dtype, past torch's dispatcher: as code that
torch compiles gets it."""

borrow: Callable[[int, int], int] = _fast(
    torch._C,
    "_cuda_cudaCachingAllocator_raw_alloc",
    lambda size, stream: torch.cuda.caching_allocator_alloc(size, stream=stream),
)
"""The address of so many bytes of torch's on the current device, for work on this stream; `give_back` when that is
launched."""

give_back: Callable[[int], None] = _fast(
    torch._C, "_cuda_cudaCachingAllocator_raw_delete", torch.cuda.caching_allocator_delete
)
"""Let the allocator have again what `borrow` gave."""


def kind(device: torch.device) -> str:
    """ "cuda", "cpu", "meta", or another type of torch's devices."""
    return device.type


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
