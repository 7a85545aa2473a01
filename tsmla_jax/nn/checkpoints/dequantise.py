"""Weights of fp8, fp4 and int4 with scales, as checkpoints store them, widened on the host."""

from typing import Any

import numpy as np
from jax.typing import DTypeLike

DEFAULT_BLOCK = (128, 128)
FP4_BLOCK = (1, 32)
INT4_GROUP = 32
"""Values of a row that share a scale in int4."""
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)


def dequantise_blocks(
    weight: np.ndarray[Any, Any],
    scales: np.ndarray[Any, Any],
    *,
    block: tuple[int, int] = DEFAULT_BLOCK,
    dtype: DTypeLike = np.float32,
) -> np.ndarray[Any, Any]:
    """weight[i, j] * scales[i // block[0], j // block[1]], multiplied in f32.

    Args:
        weight: fp8 [M, N].
        scales: f32 [ceil(M / block[0]), ceil(N / block[1])].
        block: the rows and columns that share a scale.
        dtype: the dtype of the result.

    Raises:
        ValueError: scales of another shape.
    """
    rows, columns = weight.shape
    legal = (-(-rows // block[0]), -(-columns // block[1]))
    if scales.shape != legal:
        blocks = f"weight of shape {weight.shape} in blocks of {block[0]} x {block[1]}"
        raise ValueError(f"scales: got shape {scales.shape}; legal: {legal}, for a {blocks}")
    # A table of the 256 values is faster than ml_dtypes' conversion of fp8.
    table = np.arange(256, dtype=np.uint8).view(weight.dtype).astype(np.float32)
    codes = weight.view(np.uint8)
    result = np.empty(weight.shape, dtype=np.dtype(dtype))
    for block_row in range(legal[0]):
        band = slice(block_row * block[0], (block_row + 1) * block[0])
        result[band] = table[codes[band]] * np.repeat(scales[block_row], block[1])[:columns]
    return result


def dequantise_whole(
    weight: np.ndarray[Any, Any],
    scales: np.ndarray[Any, Any],
    rows: slice = slice(None),
    *,
    dtype: DTypeLike = np.float32,
) -> np.ndarray[Any, Any]:
    """A matrix times its one scale, or each matrix of a stack times its own, multiplied in f32.

    Args:
        weight: fp8 [M, N] or [E, M, N].
        scales: f32 with one element, or one for each matrix of the stack.
        rows: the part of the first axis that is wanted.
        dtype: the dtype of the result.
    """
    table = np.arange(256, dtype=np.uint8).view(weight.dtype).astype(np.float32)
    part = weight[rows]
    stack = part if weight.ndim == 3 else part[None]
    each = scales.reshape(-1)[rows] if weight.ndim == 3 else scales.reshape(1)
    result = np.empty(stack.shape, dtype=np.dtype(dtype))
    for matrix, scale, wide in zip(stack, each, result, strict=True):
        wide[...] = table[matrix.view(np.uint8)] * scale
    return result.reshape(part.shape)


def dequantise_fp4(
    packed: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], *, dtype: DTypeLike = np.float32
) -> np.ndarray[Any, Any]:
    """e2m1 values, two a byte and the lower four bits first, times the scale of their 32 columns, multiplied in f32.

    Args:
        packed: bytes [M, N / 2].
        scales: f32 [M, ceil(N / 32)].
        dtype: the dtype of the result [M, N].

    Raises:
        ValueError: scales of another shape.
    """
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    legal = (rows, -(-columns // FP4_BLOCK[1]))
    if scales.shape != legal:
        raise ValueError(f"scales: got shape {scales.shape}; legal: {legal}, for packed of shape {packed.shape}")
    codes = packed.view(np.uint8)
    values = np.stack([_E2M1[codes & 15], _E2M1[codes >> 4]], axis=-1).reshape(rows, columns)
    return (values * np.repeat(scales, FP4_BLOCK[1], axis=1)[:, :columns]).astype(dtype)


def dequantise_int4(
    packed: np.ndarray[Any, Any], scales: np.ndarray[Any, Any], columns: int, *, dtype: DTypeLike = np.float32
) -> np.ndarray[Any, Any]:
    """Values of -8 to 7, eight an int32 (the lowest four bits first), times the scale of their 32 columns: multiplied
    in f32, then converted to `dtype`.

    Args:
        packed: int32 [M, ceil(N / 8)], of values with 8 added.
        scales: f32 [M, ceil(N / 32)].
        columns: N.
        dtype: the dtype of the result [M, N].

    Raises:
        ValueError: packed or scales of another shape.
    """
    rows = packed.shape[0]
    legal = (rows, -(-columns // 8)), (rows, -(-columns // INT4_GROUP))
    if (packed.shape, scales.shape) != legal:
        got = f"{packed.shape} and {scales.shape} with columns = {columns}"
        raise ValueError(f"packed, scales: got shapes {got}; legal: {legal[0]} and {legal[1]}")
    codes = np.ascontiguousarray(packed).astype("<i4").view(np.uint8)  # two values a byte
    values = (np.stack([codes & 15, codes >> 4], axis=-1).reshape(rows, -1)[:, :columns]).astype(np.float32) - 8
    return (values * np.repeat(scales, INT4_GROUP, axis=1)[:, :columns]).astype(dtype)
