"""The rules of the helpers around a paged cache: slots of positions, and a new cache."""

from __future__ import annotations

from typing import Any

from tsmla_kernels.contract.rules import (
    SLOTS,
    VALUES,
    Array,
    OptionalArray,
    check_dtype,
    check_ints,
    check_size,
    show,
    static_int,
)


def check_slots(block_tables: Array, positions: Array, requests: OptionalArray, page_size: object) -> int:
    """The page size of a call of `slots`; ValueError / TypeError naming the argument that is not legal."""
    check_ints("block_tables", block_tables, "B M", dtypes=SLOTS)
    check_dtype("positions", positions, SLOTS)
    if requests is not None:
        check_ints("positions", positions, "T", dtypes=SLOTS)
        check_ints("requests", requests, "T", (positions.shape[0], "T, positions's tokens"), dtypes=SLOTS)
    else:
        if len(positions.shape) not in (1, 2):
            raise ValueError(f"positions: got shape {show(positions.shape)}; legal: [B], [B, S], or [T] with requests")
        check_size("positions", positions, 0, block_tables.shape[0], "B, block_tables's requests")
    return static_int("page_size", page_size, minimum=1)


def has_slots(page: Any, page_size: int) -> Any:
    """Which pages of an array (of jax or torch) have slots in int32: those of 0 or more whose last slot is below
    2^31."""
    return (page >= 0) & (page <= 2**31 // page_size - 1)  # a bound that is an int32 itself


def check_new_cache(num_pages: object, page_size: object, head_dim: object, dtype: str) -> tuple[int, int, int]:
    """The shape of a new cache; ValueError / TypeError naming the argument that is not legal."""
    if dtype not in VALUES:
        raise ValueError(f"dtype: got {dtype}; legal: {', '.join(VALUES)}")
    return (
        static_int("num_pages", num_pages),
        static_int("page_size", page_size, minimum=1),
        static_int("head_dim", head_dim, minimum=1),
    )
