"""The rules that every operation's spec is checked with, and the texts of their errors.

Imports neither jax nor torch. An argument is described as `Array(shape, dtype)` with the dtype's name ("bfloat16"). A
shape holds ints or the symbolic dimensions of `jax.export`.

Errors: TypeError for an argument that isn't an array or isn't static, ValueError for a shape, dtype or value that is
not legal. A legal call that one implementation can't run gets that implementation's NotImplementedError, not one from
here.
"""

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

FP8 = "float8_e4m3fn"
FP8_MAX = 448.0
FLOATS = ("float16", "bfloat16", "float32", "float64")
VALUES = (*FLOATS, FP8)
SCALES = ("float32", "float64")
LEAST_SCALE = 2.0**-126
GREATEST_SCALE = 2.0**126
"""Scales that are numbers lie between these: float32 holds them and their reciprocals as normal numbers. Of any other
positive number it has the number or its reciprocal as 0, as infinity or as a subnormal number, which devices flush to
0."""
INDICES = ("int32",)
SLOTS = ("int32", "int64")
"""Dtypes of a slot mapping where a front end takes the engines' own, which are int64."""

Dim = Any  # an int or a symbolic dimension, which has no class that could be named without importing jax


@dataclass(frozen=True)
class Array:
    """Shape and dtype name of one argument."""

    shape: tuple[Dim, ...]
    dtype: str


OptionalArray = Array | None
Scale = Array | float | None

Spec = TypeVar("Spec")
Describe = Callable[[str, Any], Any]
"""Makes the Array of an argument from its name and value; TypeError if the value is no array."""


def spec_of(
    make_spec: Callable[..., Spec], arguments: Mapping[str, Any], describe: Describe, describe_scale: Describe
) -> Spec:
    """The spec that make_spec returns for these arguments, whose arrays and scales the front end's `describe` and
    `describe_scale` have turned into Array and Scale.

    make_spec's annotations say which arguments are arrays (Array), which of them may be None (Array | None), and which
    are scales (Scale). All others are static and are passed on unchanged."""
    describers = _describers(make_spec, describe, describe_scale)
    return make_spec(**{
        name: describers[name](name, value) if name in describers else value for name, value in arguments.items()
    })  # fmt: skip


@functools.cache
def _describers(make_spec: Callable[..., Any], describe: Describe, describe_scale: Describe) -> dict[str, Describe]:
    """How to describe each parameter of `make_spec` that may be an array."""
    by_type: dict[Any, Describe] = {
        Array: describe,
        OptionalArray: lambda name, value: None if value is None else describe(name, value),
        Scale: describe_scale,
    }
    return {name: by_type[hint] for name, hint in get_type_hints(make_spec).items() if hint in by_type}


def attention_out_dtype(dtype: str) -> str:
    """The dtype of a result computed from `dtype`: the same, bfloat16 for fp8."""
    return "bfloat16" if dtype == FP8 else dtype


def attention_lse_dtype(q_dtype: str) -> str:
    """The dtype of the scores' log-sum-exp: float32, float64 for a float64 query."""
    return "float64" if q_dtype == "float64" else "float32"


def unknown_implementation(implementation: object, legal: Sequence[str]) -> ValueError:
    """The error for a name that no implementation has."""
    return ValueError(f"implementation: got {implementation!r}; legal: None, {listed([repr(name) for name in legal])}")


def not_runnable(op: str, implementation: str | tuple[str, ...] | None, reasons: Sequence[str]) -> NotImplementedError:
    """The error for an implementation, or several, that can't run this call, or for None: none was named, and none is
    chosen. It carries every reason."""
    return NotImplementedError(f"{op}: implementation={implementation!r} can't run this call: {'; '.join(reasons)}")


def not_differentiable(op: str, alternative: str) -> NotImplementedError:
    """The error for a derivative that an implementation doesn't have."""
    return NotImplementedError(f"{op} has no derivative in this implementation; {alternative}")


def not_an_array(name: str, value: object, legal: str = "an array") -> TypeError:
    """The error for an argument that should have been an array; `legal` is the front end's word for one."""
    return TypeError(f"{name}: got {type(value).__name__}; legal: {legal}")


def static_int(name: str, value: object, minimum: int = 0, maximum: int | None = 2**31 - 1) -> int:
    """`value` as an int. TypeError if it is traced or no int, ValueError if it is less than `minimum`, or greater than
    `maximum`: indices, lengths and slots are int32. None is no maximum."""
    if isinstance(value, bool):
        raise TypeError(f"{name}: got {value}; legal: an int >= {minimum}")
    try:
        result = operator.index(value)  # type: ignore[arg-type]
    except Exception as e:  # jax's tracers raise a class that can't be named without importing jax
        kind = type(value)
        is_traced = kind.__module__.partition(".")[0] == "jax"
        advice = " (under jax.jit bind it with functools.partial or static_argnames: it can't be traced)"
        got = f"{name}: got {kind.__name__}; legal: a static int >= {minimum}"
        raise TypeError(got + advice if is_traced else got) from e
    if result < minimum:
        raise ValueError(f"{name}: got {result}; legal: an int >= {minimum}")
    if maximum is not None and result > maximum:
        raise ValueError(f"{name}: got {result}; legal: an int from {minimum} to {maximum}")
    return result


def static_dim(name: str, value: Any) -> Dim:
    """`value` as a size: an int, or a symbolic dimension of jax.export, which unlike jax's arrays has no dtype."""
    is_symbol = type(value).__module__.partition(".")[0] == "jax" and not hasattr(value, "dtype")
    return value if is_symbol else static_int(name, value)


def static_bool(name: str, value: object) -> bool:
    """`value`. TypeError unless it is a bool: a traced flag can't choose code."""
    if not isinstance(value, bool):
        kind = type(value)
        got = f"{kind.__module__}.{kind.__name__}" if kind.__name__ == "bool" else kind.__name__  # numpy has its own
        raise TypeError(f"{name}: got {got}; legal: True or False, static")
    return value


def cache_shape(kv_cache: Array) -> tuple[Dim, int, int]:
    """P, Z and D of a paged cache [P, Z, D]."""
    check_dtype("kv_cache", kv_cache, VALUES)
    check_rank("kv_cache", kv_cache, "P Z D")
    num_pages, page_size, head_dim = kv_cache.shape
    for axis, size in (("Z", page_size), ("D", head_dim)):
        if not isinstance(size, int):
            raise ValueError(f"kv_cache: got shape {show(kv_cache.shape)}; {axis} must be a static int")
        if size < 1:
            raise ValueError(f"kv_cache: got shape {show(kv_cache.shape)}; {axis} must be at least 1")
    return num_pages, page_size, head_dim


def least_latent_dim(head_dim: int) -> int:
    """The least L of rows of D = L + R columns. No model has a rope part wider than its latent; if R is greater than L,
    the two were swapped."""
    return -(-head_dim // 2)


def table_shape(block_tables: Array) -> tuple[Dim, Dim]:
    """B and M of block tables [B, M]."""
    check_ints("block_tables", block_tables, "B M")
    return block_tables.shape[0], block_tables.shape[1]


def check_rank(name: str, array: Array, axes: str, note: str = "") -> None:
    """ValueError unless the array has the axes of this legend ("T H D"); `note` ends the error's text."""
    legal = named_axes(axes)
    if len(array.shape) != len(legal):
        raise ValueError(
            f"{name}: got shape {show(array.shape)} of rank {len(array.shape)}; legal: {show(legal)}{note}"
        )


def named_axes(axes: str) -> tuple[str, ...]:
    """The axes of a legend: what stands between spaces, but "B + 1" and "R / 2" are one axis."""
    return tuple(re.split(r"(?<![+/]) (?![+/])", axes))


def check_dtype(name: str, array: Array, legal: Sequence[str]) -> None:
    """ValueError unless the dtype is one of `legal`."""
    if array.dtype not in legal:
        raise ValueError(f"{name}: got dtype {array.dtype}; legal: {listed(legal)}")


def check_array(name: str, array: Array, axes: str, dtypes: Sequence[str], *sizes: tuple[Dim, str]) -> None:
    """ValueError unless the array has the axes of the legend, one of the dtypes and, for its first axes, these sizes,
    each with the words that say whose size it is."""
    check_rank(name, array, axes)
    check_dtype(name, array, dtypes)
    for axis, (size, meaning) in enumerate(sizes):
        check_size(name, array, axis, size, meaning)


def check_ints(name: str, array: Array, axes: str, *sizes: tuple[Dim, str], dtypes: Sequence[str] = INDICES) -> None:
    """`check_array` for int32, or other `dtypes`: an integer that indexes a cache is never converted quietly."""
    check_array(name, array, axes, dtypes, *sizes)


def check_size(name: str, array: Array, axis: int, size: Dim, meaning: str) -> None:
    """ValueError unless `axis` of the array has this size; `meaning` says whose size that is."""
    if array.shape[axis] != size:
        raise ValueError(f"{name}: got shape {show(array.shape)}; axis {axis} must be {size} ({meaning})")


def check_static_last(name: str, array: Array) -> None:
    """ValueError unless the last axis is an int and not empty."""
    last = array.shape[-1]
    if not isinstance(last, int) or last < 1:
        raise ValueError(f"{name}: got shape {show(array.shape)}; its last axis must be a static int >= 1")


def check_at_least_one(name: str, shape: tuple[Dim, ...], axis: int, letter: str) -> None:
    """ValueError if this axis is empty; a symbolic one never is."""
    if isinstance(shape[axis], int) and shape[axis] < 1:
        raise ValueError(f"{name}: got shape {show(shape)}; {letter} must be at least 1")


def check_scales(**scales: Scale) -> None:
    """Apply `check_scale` to each. softmax_scale must be given; the others may be None, which means 1."""
    for name, scale in scales.items():
        check_scale(name, scale, optional=name != "softmax_scale")


def check_scale(name: str, scale: Scale, optional: bool = True) -> None:
    """ValueError / TypeError unless `scale` is a number from LEAST_SCALE to GREATEST_SCALE, a float32 scalar array
    (float64 under x64), or None if `optional`. The value of an array is not known here."""
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
    elif not is_scale(scale):
        raise ValueError(f"{name}: got {scale}; legal: a positive number, 1.2e-38 to 8.5e37")


def is_scale(number: float) -> bool:
    """Whether a number can be a scale; False for NaN."""
    return LEAST_SCALE <= number <= GREATEST_SCALE


def show(shape: Sequence[Dim]) -> str:
    """A shape as the errors write it."""
    return f"[{', '.join(map(str, shape))}]"


def listed(names: Sequence[str]) -> str:
    """Names as the errors write them."""
    return ", ".join(names)
