"""The pair of scales that the attention kernels read from device memory: what logits and outputs are multiplied by.
The sparse kernel reads three factors in the same way.

Scales given as tensors are multiplied on the device, at every call, so a CUDA graph reads them at every replay. Python
numbers are written to the device, usually once for each stream and pair of values, and found again by value, whichever
call they came from. Only the stream or the capture that wrote a pair uses it, so streams need no ordering and nothing
waits. Calls through torch's operators keep nothing: torch.compile may serve every allocation from a graph's memory,
captured or not, and takes that memory back.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import torch

from tsmla_bridge.runtime import devices
from tsmla_bridge.runtime.tensors import Scale, as_number, describe_scale
from tsmla_kernels.contract.rules import check_scale

Pair = tuple[float, float] | torch.Tensor
"""(logits' scale, outputs' scale) as numbers, or as a float32 tensor [2] (float64 on a CPU if a scale is)."""

Factors = tuple[float, float, float] | torch.Tensor
"""(the logits' factor, the first cache's, the second cache's) as numbers, or as a float32 tensor [3] (float64 on a CPU
if a scale is)."""


class Premultiplied(NamedTuple):
    """The Pair or the Factors of a call as a tensor, for a caller that makes those of many calls at once. It is passed
    as softmax_scale; the call's other scales are part of it, and are not multiplied again."""

    factors: torch.Tensor


MAX_PAIRS = 256
"""Pairs kept for a stream: a model needs some for each kind of layer. Beyond that all are dropped and written anew."""

DEFAULT_STREAM = 0
"""The legacy default stream. CUDA can't capture it, so a call there doesn't ask whether a capture is under way."""

GREATEST = torch.finfo(torch.float32).max

_lock = threading.Lock()
_of_stream: dict[tuple[int, int], dict[tuple[float, ...], torch.Tensor]] = {}
# Memory that a capture allocates belongs to its graph and is useless elsewhere: one capture a stream is remembered.
_of_capture: dict[tuple[int, int], tuple[int, dict[tuple[float, ...], torch.Tensor]]] = {}

_of_thread = threading.local()


@contextlib.contextmanager
def none_kept() -> Iterator[None]:
    """A context in which this thread's calls keep no pairs that they write. Outside of a capture they use pairs that
    are kept already."""
    before = _keeps_none()
    _of_thread.keeps_none = True
    try:
        yield
    finally:
        _of_thread.keeps_none = before


def _keeps_none() -> bool:
    return getattr(_of_thread, "keeps_none", False)


def check(name: str, scale: object, *, optional: bool = True) -> None:
    """Raise the contract's ValueError / TypeError unless `scale` is a legal number, or a float32 or float64 scalar
    tensor, or None if `optional`."""
    check_scale(name, describe_scale(name, scale), optional)


def is_usual(scale: object, like: torch.Tensor) -> bool:
    """Fast, conservative check: True only if this is a tensor that `check` accepts, on the device of `like`. It may be
    False for legal ones."""
    return (
        type(scale) is torch.Tensor
        and scale.dtype is torch.float32
        and scale.dim() == 0
        and scale.get_device() == like.get_device() >= 0
    )


def product(softmax_scale: Scale, q_scale: Scale | None, k_scale: Scale | None, out_scale: Scale | None) -> Pair:
    """The pair for a call's scales: softmax_scale * q_scale * k_scale, and out_scale; None is 1.

    Numbers are multiplied as numbers and rounded to float32 at the end; where one is a tensor all are float32 (float64
    on a CPU if a tensor is), and multiplied in this order. The front end for jax does the same, so the results are
    bitwise the same."""
    query: Scale = 1.0 if q_scale is None else q_scale
    key: Scale = 1.0 if k_scale is None else k_scale
    out: Scale = 1.0 if out_scale is None else out_scale
    numbers = not (isinstance(softmax_scale, torch.Tensor) or isinstance(query, torch.Tensor))
    usual = key is out and not isinstance(softmax_scale, torch.Tensor) and not torch.compiler.is_compiling()
    if usual and (numbers or _is_plain(query)) and _is_plain(key):
        index = key.get_device()
        stream, softmax = devices.current_stream(index), _float32(softmax_scale)
        if isinstance(query, torch.Tensor):  # in two operations: ([0, 1] + [number, 0] * query) * key
            constant, factor = on_device((0.0, 1.0), index, stream), on_device((softmax, 0.0), index, stream)
            return torch.addcmul(constant, factor, query) * key
        # The usual call, in one operation: [number, 1] * key.
        return on_device((softmax * _float32(query), 1.0), index, stream) * key
    softmax_scale, query, key, out = map(as_number, (softmax_scale, query, key, out))
    given = [scale for scale in (softmax_scale, query, key, out) if isinstance(scale, torch.Tensor)]
    if not given:
        return softmax_scale * query * key, out  # type: ignore[return-value]
    on_cpu = given[0].device.type == "cpu"
    dtype = torch.float64 if on_cpu and any(scale.dtype == torch.float64 for scale in given) else torch.float32
    like = (dtype, given[0].device)
    if not numbers or torch.compiler.is_compiling():
        logits = _tensor(softmax_scale, like) * _tensor(query, like) * _tensor(key, like)
    else:
        # The product of two float32s is exact as a double, and is rounded when it meets a tensor of float32.
        wide = query == 1.0 or dtype == torch.float64
        number = softmax_scale * query if wide else _float32(softmax_scale) * _float32(query)
        logits = _tensor(key, like) * number
    return torch.stack((logits, _tensor(out, like)))


def factors(
    softmax_scale: Scale, q_scale: Scale | None, kv_scale: Scale | None, compressed_kv_scale: Scale | None
) -> Factors:
    """The factors of a call of sparse_mla: softmax_scale * q_scale and the two others; None is 1."""
    given = [1.0 if s is None else as_number(s) for s in (softmax_scale, q_scale, kv_scale, compressed_kv_scale)]
    known = [scale for scale in given if isinstance(scale, torch.Tensor)]
    if not known:
        softmax, query, first, second = given
        return softmax * query, first, second
    on_cpu = known[0].device.type == "cpu"
    dtype = torch.float64 if on_cpu and any(scale.dtype == torch.float64 for scale in known) else torch.float32
    like = (dtype, known[0].device)
    if not any(isinstance(scale, torch.Tensor) for scale in given[:2]):
        # As in the front end for jax: numbers beside an array are rounded to the factors' dtype, then multiplied.
        softmax, query = given[:2] if dtype == torch.float64 else map(_float32, given[:2])
        logits = _tensor(softmax * query, like)
    else:
        logits = _tensor(given[0], like) * _tensor(given[1], like)
    return torch.stack((logits, _tensor(given[2], like), _tensor(given[3], like)))


def on_device(pair: Pair | Factors, index: int, stream: int) -> torch.Tensor:
    """The pair or the factors as a float32 tensor on device `index`, ready on `stream`, its current stream. The caller
    keeps it until the launch."""
    if not isinstance(pair, tuple):
        return pair
    if stream != DEFAULT_STREAM and devices.is_capturing():
        return _in_capture(pair, index, stream)
    known = _of_stream.get((index, stream))
    if known is not None and (found := known.get(pair)) is not None:
        return found
    written = _write(pair, index)
    if _keeps_none():
        return written
    with _lock:
        known = _of_stream.setdefault((index, stream), {})
        if len(known) >= MAX_PAIRS:
            known.clear()
        known[pair] = written
    return written


def _in_capture(pair: tuple[float, ...], index: int, stream: int) -> torch.Tensor:
    if _keeps_none() or (capture := devices.capture_id(stream)) is None:
        return _write(pair, index)
    with _lock:
        before, known = _of_capture.get((index, stream), (None, {}))
        if before != capture:
            known = {}
            _of_capture[index, stream] = (capture, known)
        if (found := known.get(pair)) is None:
            found = known[pair] = _write(pair, index)
        return found


def _write(numbers: tuple[float, ...], index: int) -> torch.Tensor:
    """Write the numbers to the device by small kernels that carry them as arguments, usually one for a pair. A copy
    from the host could not be captured."""
    dtype, device = torch.float32, devices.torch_device(index)
    first, *others = (_float32(value) for value in numbers)
    last = others[-1]
    if len(numbers) == 2 and abs(last - first) <= GREATEST:  # linspace takes the difference times 0: NaN if infinite
        return torch.linspace(first, last, 2, dtype=dtype, device=device)
    written = torch.full((len(numbers),), last, dtype=dtype, device=device)
    for i, value in enumerate((first, *others)):
        if value != last:
            written[i].fill_(value)
    return written


def _is_plain(scale: Scale) -> TypeGuard[torch.Tensor]:
    """Whether this is an ordinary float32 tensor on the current CUDA device, and no dispatch mode is active."""
    return (
        type(scale) is torch.Tensor
        and scale.dtype == torch.float32
        and not torch._C._len_torch_dispatch_stack()
        and devices.kind(scale.device) == "cuda"
        and devices.current_device() == scale.get_device()
    )


def _tensor(scale: Scale, like: tuple[torch.dtype, torch.device]) -> torch.Tensor:
    dtype, device = like
    if isinstance(scale, torch.Tensor):
        return scale.to(device, dtype)
    return torch.full((), scale, dtype=dtype, device=device)


def _float32(value: Any) -> float:
    """The float32 nearest to a number."""
    return ctypes.c_float(value).value
