"""The rules that every specification of an operation is made of, and the texts of their errors.

Imports neither jax nor torch; see contract.py, which is where the operations' own rules are.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FP8 = "float8_e4m3fn"
FP8_MAX = 448.0
FLOATS = ("float16", "bfloat16", "float32", "float64")
VALUES = (*FLOATS, FP8)
SCALES = ("float32", "float64")

Dim = Any  # an int or a symbolic dimension; the latter has no common base class to name without importing jax


@dataclass(frozen=True)
class Array:
    """Shape and dtype name of one argument."""

    shape: tuple[Dim, ...]
    dtype: str


def unknown_implementation(implementation: object, legal: Sequence[str]) -> ValueError:
    """The error for an implementation that has no such name."""
    return ValueError(f"implementation: got {implementation!r}; legal: None, {listed([repr(name) for name in legal])}")


def not_runnable(op: str, implementation: str, reasons: Sequence[str]) -> NotImplementedError:
    """The error for an implementation that was named and can't run this call: it carries every reason."""
    return NotImplementedError(f"{op}: implementation={implementation!r} can't run this call: {'; '.join(reasons)}")


def not_differentiable(op: str, alternative: str) -> NotImplementedError:
    """The error for a derivative that an implementation doesn't have."""
    return NotImplementedError(f"{op} has no derivative in this implementation; {alternative}")


def not_an_array(name: str, value: object) -> TypeError:
    """The error for an argument that should have been an array."""
    return TypeError(f"{name}: got {type(value).__name__}; legal: an array")


def static_int(name: str, value: object, minimum: int = 0) -> int:
    """`value` as an int, or TypeError / ValueError: a traced or floating value is not a static int."""
    if isinstance(value, bool):
        raise TypeError(f"{name}: got {value}; legal: an int >= {minimum}")
    try:
        result = operator.index(value)  # type: ignore[arg-type]
    except Exception as e:  # jax's tracers raise a class of their own, which this module can't name
        raise TypeError(
            f"{name}: got {type(value).__name__}; legal: a static int >= {minimum} (under jax.jit bind it with"
            " functools.partial or static_argnames: it decides shapes, so it can't be traced)"
        ) from e
    if result < minimum:
        raise ValueError(f"{name}: got {result}; legal: an int >= {minimum}")
    return result


def static_dim(name: str, value: Any) -> Dim:
    """`value` as a size: an int, or a symbolic dimension of jax.export, which has neither dtype nor __index__."""
    if hasattr(value, "dtype") or hasattr(value, "__index__") or value is None or isinstance(value, float | str):
        return static_int(name, value)
    return value


def static_bool(name: str, value: object) -> bool:
    """`value` if it is a bool, or TypeError: a traced flag can't choose code."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}; legal: True or False, static")
    return value


def cache_shape(kv_cache: Array) -> tuple[Dim, int, int]:
    """P, Z and D of a paged cache [P, Z, D]."""
    check_dtype("kv_cache", kv_cache, VALUES)
    check_rank("kv_cache", kv_cache, 3, "[P, Z, D]")
    num_pages, page_size, head_dim = kv_cache.shape
    for axis, size in (("Z", page_size), ("D", head_dim)):
        if not isinstance(size, int):
            raise ValueError(f"kv_cache: got shape {show(kv_cache.shape)}; {axis} must be a static int")
        if size < 1:
            raise ValueError(f"kv_cache: got shape {show(kv_cache.shape)}; {axis} must be at least 1")
    return num_pages, page_size, head_dim


def table_shape(block_tables: Array) -> tuple[Dim, Dim]:
    """B and M of block tables [B, M]."""
    check_rank("block_tables", block_tables, 2, "[B, M]")
    check_int32("block_tables", block_tables)
    return block_tables.shape[0], block_tables.shape[1]


def check_rank(name: str, array: Array, rank: int, legal: str) -> None:
    """ValueError unless the array has `rank` axes; `legal` names them."""
    if len(array.shape) != rank:
        raise ValueError(f"{name}: got shape {show(array.shape)} of rank {len(array.shape)}; legal: {legal}")


def check_dtype(name: str, array: Array, legal: Sequence[str]) -> None:
    """ValueError unless the dtype is one of `legal`."""
    if array.dtype not in legal:
        raise ValueError(f"{name}: got dtype {array.dtype}; legal: {listed(legal)}")


def check_int32(name: str, array: Array) -> None:
    """ValueError unless int32: what indexes a cache is never converted quietly."""
    check_dtype(name, array, ("int32",))


def check_integers(name: str, array: Array, shape: tuple[Dim, ...], legal: str, where: str) -> None:
    """ValueError unless int32 of this shape; `where` says which argument decides it."""
    check_rank(name, array, len(shape), legal)
    if array.shape != shape:
        raise ValueError(f"{name}: got shape {show(array.shape)}; legal: {legal} = {show(shape)} ({where})")
    check_int32(name, array)


def check_static_last(name: str, array: Array) -> None:
    """ValueError unless the last axis is an int and not empty."""
    last = array.shape[-1]
    if not isinstance(last, int) or last < 1:
        raise ValueError(f"{name}: got shape {show(array.shape)}; its last axis must be a static int >= 1")


def check_at_least_one(name: str, shape: tuple[Dim, ...], axis: int, letter: str) -> None:
    """ValueError if this axis is empty; a symbolic one never is."""
    if isinstance(shape[axis], int) and shape[axis] < 1:
        raise ValueError(f"{name}: got shape {show(shape)}; {letter} must be at least 1")


def check_scale(name: str, scale: Array | float | None, optional: bool = True) -> None:
    """ValueError / TypeError unless a number or a float32 scalar array (float64 under x64), or None where optional."""
    legal = "a float or a float32 scalar array" + (", or None for 1" if optional else "")
    if scale is None and optional:
        return
    if isinstance(scale, Array):
        if scale.shape != ():
            raise ValueError(f"{name}: got an array of shape {show(scale.shape)}; legal: {legal}")
        if scale.dtype not in SCALES:
            raise ValueError(f"{name}: got an array of dtype {scale.dtype}; legal: {legal}")
    elif isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"{name}: got {type(scale).__name__}; legal: {legal}")


def show(shape: tuple[Dim, ...]) -> str:
    """A shape as the errors write it."""
    return "[" + ", ".join(str(d) for d in shape) + "]"


def listed(names: Sequence[str]) -> str:
    """Names as the errors write them."""
    return ", ".join(names)
