"""Tensors as arguments: described to the contract, checked, and turned into the arrays that the kernels read.

A view that a kernel can read as a dense array, or as a part of one, is passed on without a copy. Only `joined` copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from tsmla_kernels import contract
from tsmla_kernels.contract.rules import SCALES, show, spec_of
from tsmla_kernels.sm90.decode.config import reads_heads_first

Spec = TypeVar("Spec")

Scale = float | torch.Tensor
"""A Python number, or a float32 or float64 scalar tensor on the device of the call's other tensors."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "int8", "uint8", "int32", "int64")
}

TENSOR = "a torch.Tensor"
"""What the contract's errors call an array here."""

WIDE_COLUMNS = 64
"""The pitch of a wide tensor's rows is a multiple of this many elements."""

HEADS_FIRST_COLUMNS = 64
"""The width of rows whose heads come first in memory is a multiple of this many elements."""

ROW_BYTES = 16
"""Addresses and strides that TMA reads are multiples of this many bytes."""

TensorGuards = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)
"""torch's guard of compiled code; None in a version of torch that no longer has it here."""


def likeness(*tensors: torch.Tensor) -> Callable[..., bool]:
    """A function that compares other tensors with these, one by one. It returns True if they have the same classes,
    dtypes, devices, sizes, strides and requires_grad, and torch's modes (dispatch, autocast, inference) are the same as
    now. Without TensorGuards it always returns False."""
    if TensorGuards is None:
        return lambda *others: False
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def describe(name: str, value: Any) -> contract.Array:
    """Shape and dtype of a tensor argument; TypeError if it is no tensor, or one without strides (a sparse one,
    say)."""
    if not isinstance(value, torch.Tensor):
        raise contract.not_an_array(name, value, TENSOR)
    if value.layout != torch.strided:
        raise TypeError(f"{name}: got a tensor of layout {value.layout}; legal: torch.strided (.to_dense() makes one)")
    return contract.Array(tuple(value.shape), dtype_name(value.dtype))


def describe_scale(name: str, value: Any) -> Any:
    """A scale for the contract: tensors by shape and dtype; float32 and float64 scalars of numpy as numbers; anything
    else unchanged, for the contract to judge."""
    return describe(name, value) if isinstance(value, torch.Tensor) else as_number(value)


def as_number(scale: Any) -> Any:
    """A float32 or float64 scalar of numpy as the number that it is; anything else, tensors too, unchanged."""
    scalar = isinstance(scale, (np.generic, np.ndarray)) and scale.shape == () and scale.dtype.name in SCALES
    return float(scale) if scalar else scale


def describe_call(make_spec: Callable[..., Spec], **arguments: Any) -> Spec:
    """The spec of a call, from the contract's function `make_spec`; raises as that does, and ValueError unless all
    tensors are on the device of the first one."""
    spec = spec_of(make_spec, arguments, describe, describe_scale)
    first = next(name for name, value in arguments.items() if isinstance(value, torch.Tensor))
    same_device(first, arguments[first], arguments)
    return spec


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name as the contract and the catalog have it."""
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str, dtype: Any) -> str:
    """`dtype_name` of an argument; TypeError if it is no torch.dtype."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: got {type(dtype).__name__}; legal: a torch.dtype")
    return dtype_name(dtype)


def accumulation_dtype(dtype: str) -> torch.dtype:
    """The dtype to compute in: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == "float64" else torch.float32


def same_device(first: str, tensor: torch.Tensor, others: dict[str, Any]) -> None:
    """ValueError unless all the tensors among `others` are where `tensor`, named `first`, is."""
    for name, other in others.items():
        if isinstance(other, torch.Tensor) and other.device != tensor.device:
            raise ValueError(f"{name}: got a tensor on {other.device}; it must be on {first}'s device, {tensor.device}")


def without_head_axis(kv_cache: torch.Tensor) -> torch.Tensor:
    """The cache as [P, Z, D]: engines also pass it as [P, 1, Z, D], with its one key head."""
    if isinstance(kv_cache, torch.Tensor) and kv_cache.dim() == 4 and kv_cache.shape[1] == 1:
        return kv_cache.select(1, 0)
    return kv_cache


def query_of_pair(q: Any, latent_dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A pair of latent_dim latent columns and rope columns as the kernels read it, without a copy: (the one tensor that
    both are columns of, None), or both as they are. In the second form the latents may lie in memory as [H, ..., L].

    Raises ValueError for any other pair, TypeError if q is no tuple of tensors."""
    if not isinstance(q, tuple):
        raise contract.not_an_array("q", q, TENSOR)
    latent, rope = _two(q)
    for part in q:
        describe("q", part)
    if latent.dtype != rope.dtype:
        dtypes = f"{dtype_name(latent.dtype)} and {dtype_name(rope.dtype)}"
        raise ValueError(f"q: got a pair of dtypes {dtypes}; legal: two tensors of one dtype")
    if latent.device != rope.device:
        raise ValueError(
            f"q: got a pair on the devices {latent.device} and {rope.device}; legal: two tensors on one device"
        )
    shapes = f"shapes {show(tuple(latent.shape))} and {show(tuple(rope.shape))}"
    if latent.dim() < 2 or latent.shape[:-1] != rope.shape[:-1]:
        raise ValueError(f"q: got a pair of {shapes}; legal: [..., H, L] and [..., H, R], alike but for the last axis")
    width = latent.shape[-1] + rope.shape[-1]
    one = (
        latent.stride(-1) == 1
        and latent.stride() == rope.stride()
        and latent.untyped_storage().data_ptr() == rope.untyped_storage().data_ptr()
        and rope.storage_offset() == latent.storage_offset() + latent.shape[-1]
    )
    if one:
        _check_latent_columns(latent, rope, latent_dim)
        return latent.as_strided((*latent.shape[:-1], width), latent.stride()), None
    if not (latent.is_contiguous() or is_heads_first(latent)) or row_step(rope) == 0:
        raise ValueError(
            f"q: got a pair of {shapes}, strides {show(latent.stride())} and {show(rope.stride())}; legal: the latent"
            " and the rope columns of one tensor, or a latent part that is contiguous (or is as [H, ..., L], with H a"
            " power of 2 and L a multiple of 64) and rope rows of adjacent columns at one stride, a multiple of 16"
            " bytes and at least a row; torch.cat(q, -1) makes one of them"
        )
    _check_latent_columns(latent, rope, latent_dim)
    return latent, rope


def joined(q: tuple[torch.Tensor, ...], latent_dim: int) -> torch.Tensor:
    """A pair of latent_dim latent columns and rope columns as one tensor, a copy. ValueError if they aren't two tensors
    or have another number of latent columns."""
    _check_latent_columns(*_two(q), latent_dim)
    return torch.cat(q, -1)


def _two(q: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(q) != 2:
        raise ValueError(
            f"q: got a tuple of {len(q)}; legal: one tensor, or the pair of its latent and its rope columns"
        )
    return q


def _check_latent_columns(latent: torch.Tensor, rope: torch.Tensor, latent_dim: int) -> None:
    widths = latent.shape[-1], rope.shape[-1]
    if widths[0] != contract.static_int("latent_dim", latent_dim, minimum=1):
        left = sum(widths) - latent_dim
        others = f"{left}" if left > 0 else "those of rope"
        raise ValueError(
            f"q: got a pair of {widths[0]} and {widths[1]} columns; legal: {latent_dim} latent ones (latent_dim)"
            f" and {others}"
        )


def is_heads_first(q: torch.Tensor) -> bool:
    """Whether q [..., H, L] is dense with its heads' axis in front, [H, ..., L], and the kernels read it so."""
    heads, width = q.shape[-2:]
    moved = q.movedim(-2, 0)
    return width % HEADS_FIRST_COLUMNS == 0 and reads_heads_first(heads) and moved.is_contiguous()


def row_step(rows: torch.Tensor) -> int:
    """Elements from one row of [..., R] to the next; 0 where TMA can't read the rows: their columns lie apart, they
    have no one stride, or it is smaller than a row or no multiple of 16 bytes."""
    if rows.shape[-1] > 1 and rows.stride(-1) != 1:
        return 0
    step: int | None = None
    count, width = 1, rows.shape[-1]
    for size, stride in zip(reversed(rows.shape[:-1]), reversed(rows.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if step is None:
            step = stride
        elif stride != step * count:
            return 0
        count *= size
    # The step is 0 if all rows are the same row in memory. TMA can't read a row repeatedly, so the result is 0, too.
    step = width if step is None else step
    return step if step >= width and step * rows.element_size() % ROW_BYTES == 0 else 0


def wide_shape(name: str, tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape [T, H, W] of the dense array that begins at this tensor's address and whose first V columns are the
    tensor, [T, H, V], which has gaps. ValueError if there is no such array, if W is no multiple of 64, or if the
    address is no multiple of 16."""
    tokens, heads, width = tensor.shape
    pitch = tensor.stride(1) if heads > 1 else tensor.stride(0)
    rows = tokens <= 1 or heads <= 1 or tensor.stride(0) == heads * pitch
    if tensor.stride(2) != 1 or not rows or pitch < width or pitch % WIDE_COLUMNS or tensor.data_ptr() % ROW_BYTES:
        raise ValueError(
            f"{name}: got shape {show(tuple(tensor.shape))} with strides {show(tensor.stride())} at address"
            f" {tensor.data_ptr():#x}; the kernel takes row-major tensors without gaps, or columns of one whose last"
            f" axis is a multiple of {WIDE_COLUMNS}, from a multiple of {ROW_BYTES} bytes on (.contiguous() copies)"
        )
    return tokens, heads, pitch


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """ValueError unless the tensor is row-major without gaps."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name}: got shape {show(tuple(tensor.shape))} with strides {show(tensor.stride())};"
            f" the kernel takes row-major tensors without gaps (.contiguous() copies into one)"
        )


def page_step(kv_cache: torch.Tensor, name: str = "kv_cache") -> int:
    """How many pages of Z * D elements lie from the start of one page of the cache [P, Z, D] to the start of the next:
    1 where it is dense, N for one layer's slice of a pool [P, N, Z, D]. ValueError if the kernels can't address it."""
    num_pages, page_size, head_dim = kv_cache.shape
    page, row, column = kv_cache.stride()
    size = page_size * head_dim
    rows_dense = (column == 1 or head_dim == 1) and (row == head_dim or page_size == 1)
    if rows_dense and (num_pages <= 1 or page == size):
        return 1
    if rows_dense and page > 0 and page % size == 0:
        if num_pages * (page // size) >= 2**31:
            raise ValueError(
                f"{name}: got strides {show(kv_cache.stride())} of {num_pages} pages; counted in pages of {size}"
                " elements its extent must stay below 2^31"
            )
        return page // size
    raise ValueError(
        f"{name}: got shape {show(tuple(kv_cache.shape))} with strides {show(kv_cache.stride())}; legal: rows of D"
        f" elements without gaps, and pages a multiple of Z * D = {size} elements apart (a layer's slice of a pool)"
    )


def whole_pages(cache: torch.Tensor, step: int) -> torch.Tensor:
    """The dense array, in the same memory, whose every `step`-th page is one of the cache's."""
    num_pages, *page = cache.shape
    shape = ((num_pages - 1) * step + 1, *page)
    return cache.as_strided(shape, torch.empty(shape, device="meta").stride())


def table_width(block_tables: torch.Tensor) -> int:
    """Entries from one row of the table to the next. A slice table[:, :M] is read as the wide table that it is a part
    of; ValueError if it isn't one, or its last row has no memory up to that width."""
    rows, width = block_tables.shape
    if block_tables.is_contiguous():
        return width
    row, column = block_tables.stride()
    end = block_tables.storage_offset() + rows * row
    storage = block_tables.untyped_storage().nbytes() // block_tables.element_size()
    if (column == 1 or width == 1) and row >= width and end <= storage:
        return row
    raise ValueError(
        f"block_tables: got shape {show(tuple(block_tables.shape))} with strides {show(block_tables.stride())}; legal:"
        " row-major, or the first columns of a row-major table (.contiguous() copies into one)"
    )


def check_written(name: str, tensor: torch.Tensor) -> None:
    """ValueError if several elements of a tensor that is to be written lie at one place in memory because of a stride
    of 0, as expand makes it. Other overlaps are not looked for."""
    if any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            f"{name}: got shape {show(tuple(tensor.shape))} with strides {show(tensor.stride())}; legal: a tensor whose"
            " elements lie at places of their own (.contiguous() copies into one)"
        )


def check_apart(name: str, written: torch.Tensor, read: Mapping[str, Any]) -> None:
    """ValueError if a dense tensor that a kernel writes lies in memory that the same launch reads: whether a value is
    read before it is overwritten depends on the order of the CTAs. The gaps of a tensor count as its memory.

    read: the call's tensors, and None, by argument.
    """
    if found := sharing_memory(written, read):
        raise ValueError(f"{name}: got memory of {found[0]}; legal: memory of its own")


def sharing_memory(written: torch.Tensor, read: Mapping[str, Any]) -> list[str]:
    """The arguments in `read` whose memory overlaps that of the dense tensor `written`; see `check_apart`."""
    first = written.data_ptr()
    last = first + written.nbytes
    return [
        argument
        for argument, tensor in read.items()
        if isinstance(tensor, torch.Tensor) and tensor.data_ptr() < last and first < _end(tensor)
    ]


def _end(tensor: torch.Tensor) -> int:
    """The address after a tensor's last element."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.data_ptr() + tensor.nbytes
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (steps + 1) * tensor.element_size()


def mark_written(*written: torch.Tensor) -> None:
    """Tell autograd that a kernel writes to these: a gradient that needs what they held raises, as after torch's own
    operations in place."""
    torch.autograd.graph.increment_version(written)


def check_lse_asked_for(return_lse: bool, lse: torch.Tensor | None) -> None:
    """ValueError / TypeError unless return_lse is a bool, and true where the caller has memory for lse."""
    contract.static_bool("return_lse", return_lse)
    if lse is not None and not return_lse:
        raise ValueError("lse: got a place for lse without return_lse=True; legal: None")


def check_output(name: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """ValueError / TypeError unless `tensor` is dense and can take a result of this shape and dtype on this device."""
    if not isinstance(tensor, torch.Tensor):
        raise contract.not_an_array(name, tensor, TENSOR)
    if tensor.shape != shape or tensor.dtype != dtype:
        got = f"{dtype_name(tensor.dtype)}{show(tuple(tensor.shape))}"
        raise ValueError(f"{name}: got {got}; legal: {dtype_name(dtype)}{show(shape)}")
    if tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}; it must be on the inputs' device, {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: got strides {show(tensor.stride())}; legal: row-major without gaps")
