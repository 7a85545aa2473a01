"""`tsmla explain`: which implementation runs a call on this machine, and why the others can't."""

from __future__ import annotations

import argparse
import ast
import os
import re
from typing import Any

from tsmla_jax.cli import doctor

_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "fp8": "float8_e4m3fn",
    "i32": "int32",
    "u8": "uint8",
}
_ARRAY = re.compile(r"([a-z0-9_]+)\[([0-9, ]*)\]")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tsmla explain`."""
    parser.add_argument("op", nargs="?", metavar="OP", help="an operation (default: all, at DeepSeek's sizes)")
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="NAME=VALUE",
        help="the call's arguments, arrays as a dtype and a shape: q=bf16[8,1,128,576] softmax_scale=0.1 (default: the"
        f" usual calls at DeepSeek's sizes); dtypes: {', '.join(_DTYPES)}",
    )


def run(args: argparse.Namespace) -> int:
    """Print the explanations; ValueError for an unknown operation or an argument that isn't legal."""
    # The answer needs no memory, and other programs may be using the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from tsmla_jax.ops.explain import OPERATIONS

    if args.op is not None and args.op not in OPERATIONS:
        raise ValueError(f"OP: got {args.op!r}; legal: {', '.join(OPERATIONS)}")
    if args.arguments:
        given = dict(map(_argument, args.arguments))
        try:
            print(OPERATIONS[args.op].explain(**given))
        except TypeError as error:
            raise ValueError(str(error)) from None
        return 0
    for call in doctor.usual_calls():
        if args.op in (None, call.op):
            print("\n".join(doctor.lines_of(call)))
    return 0


def _argument(text: str) -> tuple[str, Any]:
    """The name and the value of NAME=VALUE: an array without memory, a Python literal, or a string."""
    name, equals, value = text.partition("=")
    if not (equals and name and value):
        raise ValueError(f"got {text!r}; legal: NAME=VALUE, as in q=bf16[8,1,128,576] or causal=False")
    if (array := _ARRAY.fullmatch(value)) is None:
        try:
            return name, ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return name, value
    import jax

    dtype, shape = array.groups()
    if dtype not in {*_DTYPES, *_DTYPES.values()}:
        raise ValueError(f"{name}: got dtype {dtype!r}; legal: {', '.join(_DTYPES)}")
    sizes = tuple(int(size) for size in shape.split(",") if size.strip())
    return name, jax.ShapeDtypeStruct(sizes, _DTYPES.get(dtype, dtype))
