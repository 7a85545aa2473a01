"""The package's host code on numbers: its functions run with a `cute` whose tensors are an offset and a layout.

The DSL traces the host functions of tokenspeed-mla into code that runs before a launch. They compute with sizes and
strides, by plain arithmetic that runs here on the CPU, up to the first step that needs the compiler.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


class Layout:
    def __init__(self, shape: Any, stride: Any = None) -> None:
        self.shape = shape
        self.stride = compact_strides(shape) if stride is None else stride

    def address(self, *coordinates: Any) -> Any:
        """The offset of coordinates, flat ones (numbers or numpy arrays), one for each mode."""
        flat = list(leaves(self.stride))
        assert len(coordinates) == len(flat)
        return sum(c * s for c, s in zip(coordinates, flat, strict=True))

    def size(self) -> int:
        return int(np.prod(list(leaves(self.shape))))

    def last(self) -> int:
        return sum((n - 1) * s for n, s in zip(leaves(self.shape), leaves(self.stride), strict=True))


class Tensor:
    """A tensor whose iterator counts elements from the start of the array it is a view of."""

    def __init__(self, iterator: Any, layout: Layout, element_type: Any = None) -> None:
        self.iterator, self.layout, self.element_type = iterator, layout, element_type

    @property
    def shape(self) -> Any:
        return self.layout.shape

    @property
    def stride(self) -> Any:
        return self.layout.stride

    def address(self, *coordinates: Any) -> Any:
        return self.iterator + self.layout.address(*coordinates)


def dense(shape: tuple[int, ...], element_type: Any = None) -> Tensor:
    """A row-major array's tensor."""
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return Tensor(0, Layout(shape, strides), element_type)


def leaves(tree: Any) -> Any:
    if isinstance(tree, tuple):
        for part in tree:
            yield from leaves(part)
    else:
        yield tree


def compact_strides(shape: Any, start: int = 1) -> Any:
    """Column-major, as cute's default."""
    if not isinstance(shape, tuple):
        return start
    strides = []
    for part in shape:
        strides.append(compact_strides(part, start))
        start *= int(np.prod(list(leaves(part))))
    return tuple(strides)


def assume(value: Any, divby: int) -> Any:
    assert value % divby == 0, f"{value} is said to be a multiple of {divby}"
    return value


CUTE = types.SimpleNamespace(
    make_layout=Layout,
    make_tensor=Tensor,
    assume=assume,
    ceil_div=lambda a, b: -(-a // b),
    size=lambda x: int(np.prod(list(leaves(x)))),
    cosize=lambda layout: layout.last() + 1,
    shape=lambda x: x,
    # An iterator counts bytes in the workspace and elements elsewhere.
    recast_ptr=lambda pointer, dtype=None: pointer,
)
CUTLASS = types.SimpleNamespace(const_expr=lambda x: x)


def code_as_written(function: Any) -> types.CodeType:
    """The code of a function as in its file: compiling a kernel replaces the function's code with the DSL's rewrite."""
    path = inspect.getsourcefile(sys.modules[function.__module__])
    assert path
    waiting = [module_as_written(path)]
    while waiting:
        code = waiting.pop()
        if code.co_qualname == function.__qualname__:
            return code
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    raise AssertionError(f"{function.__qualname__} isn't in {path}")


@functools.cache
def module_as_written(path: str) -> types.CodeType:
    return compile(Path(path).read_text(), path, "exec")


def numeric(function: Any, **names: Any) -> Callable[..., Any]:
    """A function of the package, undecorated, with numbers for `cute` and `cutlass` and `names` for other globals."""
    raw = inspect.unwrap(function)
    scope = {**raw.__globals__, "cute": CUTE, "cutlass": CUTLASS, "Int32": int, **names}
    made = types.FunctionType(code_as_written(raw), scope, raw.__name__, raw.__defaults__, raw.__closure__)
    made.__kwdefaults__ = raw.__kwdefaults__
    return made


class Reached(Exception):
    """A step of a function at which its local variables are wanted."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__("reached")
        self.arguments = arguments


def stop(*arguments: Any) -> Any:
    raise Reached(*arguments)


def locals_at_stop(function: Callable[..., Any], *arguments: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The local variables of `function` when it calls `stop`, and the arguments of that call."""
    try:
        function(*arguments)
    except Reached as reached:
        traceback = reached.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code is function.__code__:  # type: ignore[attr-defined]
                return dict(traceback.tb_frame.f_locals), reached.arguments
            traceback = traceback.tb_next
    raise AssertionError(f"{function} didn't stop")
