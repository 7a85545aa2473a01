"""Devices, streams and memory of torch: functions that are cheap enough for every call, and facts that are asked for
once and kept."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
Result = TypeVar("Result")

_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)


def _fast(owner: Any, name: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """torch's private function of this name, which costs less than the public one; if this torch has none (a build
    without CUDA, say), `otherwise`, which is or calls the public one."""
    return getattr(owner, name, otherwise)


# Used without a wrapper: a Python function around each would double its cost.

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
"""Uninitialised memory on the current device, of this shape, strides and dtype. It goes past torch's dispatcher, as the
code that torch.compile generates does."""

borrow: Callable[[int, int], int] = _fast(
    torch._C,
    "_cuda_cudaCachingAllocator_raw_alloc",
    lambda size, stream: torch.cuda.caching_allocator_alloc(size, stream=stream),
)
"""Allocate `size` bytes from torch's caching allocator on the current device for `stream`; returns the address. Free it
with `give_back` once the work is launched."""

give_back: Callable[[int], None] = _fast(
    torch._C, "_cuda_cudaCachingAllocator_raw_delete", torch.cuda.caching_allocator_delete
)
"""Free the address that `borrow` returned."""


def kind(device: torch.device) -> str:
    """The device's type: "cuda", "cpu", "meta", or another of torch's."""
    return device.type


@functools.cache
def capability(index: int) -> tuple[int, int]:
    """The compute capability of the CUDA device with this index."""
    return torch.cuda.get_device_capability(index)


def arch(index: int) -> str:
    """The architecture that kernels for the device are compiled for, written as in CUTE_DSL_ARCH: "sm_90a"."""
    major, minor = capability(index)
    return f"sm_{major}{minor}a"


def is_blackwell(index: int) -> bool:
    """Whether the device is a Blackwell GPU of compute capability 10.x, for which the package tokenspeed_mla is
    written."""
    return capability(index)[0] == 10


@functools.cache
def num_sms(index: int) -> int:
    """The number of multiprocessors of the CUDA device with this index."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def capture_id(stream: int) -> int | None:
    """The unique number of the capture that `stream` is part of; None if it is part of none, or the driver
    doesn't say."""
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
    """The index of a CUDA device; for a device without an index, the current device's index."""
    return current_device() if device.index is None else device.index


def in_own_precision(definition: Callable[P, Result]) -> Callable[P, Result]:
    """`definition`, a function of tensors on one device, with torch.autocast turned off: autocast would round the
    operands of a definition's products to 16 bits, and does not change what the kernels compute."""

    @functools.wraps(definition)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        device = next(x.device for x in args if isinstance(x, torch.Tensor))
        with torch.autocast(device.type, enabled=False):
            return definition(*args, **kwargs)

    return run
