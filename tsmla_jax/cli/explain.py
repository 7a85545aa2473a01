"""`tsmla explain`: which implementation runs a call, here or on a GPU that is elsewhere, and why the others can't."""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tsmla_jax.cli.usual_calls import lines_of, usual_calls

_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "fp8": "float8_e4m3fn",
    "i32": "int32",
    "u8": "uint8",
}
_ARRAY = re.compile(r"(\w+)\[([^\[\]]*)\]")
_ARRAYS = re.compile(rf"{_ARRAY.pattern}(?:,{_ARRAY.pattern})*")
_WORDS = {"true": True, "false": False, "none": None}

# Legal values as the errors of calls name them, and how they are written on a command line.
_LEGAL = {
    r"^an array\b.*": "a dtype and a shape, as in bf16[8,1,128,576]",
    r"^(True or False), static$": r"\1",
    r" \(under jax\.jit .*\)$": "",
    r"\bfloat32 scalar array\b": "scalar array, f32[]",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tsmla explain`."""
    parser.add_argument("op", nargs="?", metavar="OP", help="an operation (default: all, at DeepSeek's sizes)")
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="NAME=VALUE",
        help="the call's arguments, arrays as a dtype and a shape: 'q=bf16[8,1,128,576]' softmax_scale=0.1 (default:"
        f" the usual calls at DeepSeek's sizes); dtypes: {', '.join(_DTYPES)}; several arrays with a comma between"
        " them",
    )
    parser.add_argument("--arch", help="answer for a GPU of this architecture, as sm_90a, whatever this machine has")


def run(args: argparse.Namespace) -> int:
    """Print the explanations. Raises a ValueError for an unknown operation or architecture, or an argument that isn't
    legal.
    """
    # The answer needs no memory, and other programs may be using the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from tsmla_jax.ops import device
    from tsmla_jax.ops.explain import OPERATIONS

    if args.op is not None and args.op not in OPERATIONS:
        raise ValueError(f"OP: got {args.op!r}; legal: {', '.join(OPERATIONS)}")
    if args.arch is not None and args.arch not in device.NUM_SMS:
        raise ValueError(f"--arch: got {args.arch!r}; legal: {', '.join(device.NUM_SMS)}")
    with contextlib.nullcontext() if args.arch is None else device.planned_for(args.arch):
        if args.arguments:
            print(_explanation(OPERATIONS[args.op], args.arguments))
        else:
            said: set[str] = set()
            for call in usual_calls():
                if args.op in (None, call.op):
                    # Usually one reason blocks every kernel: print it once.
                    first, *reasons = lines_of(call)
                    print(first, *(reason for reason in reasons if reason not in said), sep="\n")
                    said.update(reasons)
    if args.arch is None and device.gpu() is None:
        print(f"--arch {next(iter(device.NUM_SMS))} answers for a GPU that is not here")
    return 0


def _explanation(operation: Any, arguments: Sequence[str]) -> str:
    """The explanation of the operation's call with these arguments NAME=VALUE."""
    parameters = inspect.signature(operation.function).parameters
    texts: dict[str, str] = {}
    given: dict[str, Any] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not (equals and name and text):
            raise ValueError(f"got {argument!r}; legal: NAME=VALUE, as in q=bf16[8,1,128,576] or causal=false")
        if name not in parameters:
            raise ValueError(f"{name}: {operation.name} has no such argument; legal: {', '.join(parameters)}")
        if name in texts:
            raise ValueError(f"{name}: got {texts[name]} and {text}; legal: one of them")
        texts[name], given[name] = text, _value(name, text)
        if parameters[name].annotation == "CompressorState":
            given[name] = _state(name, text, given[name])
    required = [name for name, each in parameters.items() if each.default is each.empty]
    if missing := [name for name in required if name not in texts]:
        raise ValueError(f"{operation.name} needs {', '.join(missing)}, too; legal: NAME=VALUE for each of them")
    try:
        return str(operation.explain(**given))
    except (TypeError, ValueError) as error:
        raise ValueError(_in_words(str(error), texts)) from None


def _value(name: str, text: str) -> Any:
    """A value: an array without memory, a list of several, a Python literal, true, false or none, or a string."""
    if _ARRAYS.fullmatch(text):
        arrays = [_array(name, *found) for found in _ARRAY.findall(text)]
        return arrays[0] if len(arrays) == 1 else arrays
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _array(name: str, dtype: str, shape: str) -> Any:
    import jax

    if dtype not in {*_DTYPES, *_DTYPES.values()}:
        raise ValueError(f"{name}: got dtype {dtype!r}; legal: {', '.join(_DTYPES)}")
    sizes = [size.strip() for size in shape.split(",")] if shape.strip() else []
    if not all(size.isdecimal() for size in sizes):
        raise ValueError(f"{name}: got shape [{shape}]; legal: sizes with commas between them, as in [8,1,128,576]")
    return jax.ShapeDtypeStruct(tuple(map(int, sizes)), _DTYPES.get(dtype, dtype))


def _state(name: str, text: str, arrays: Any) -> Any:
    from tsmla_jax.sparse import CompressorState

    fields = CompressorState._fields
    if not isinstance(arrays, list) or len(arrays) != len(fields):
        example = f"{name}=f32[8,8,2,1024],i32[8,8]"
        raise ValueError(f"{name}: got {text}; legal: the arrays {' and '.join(fields)}, as in {example}")
    return CompressorState(*arrays)


def _in_words(said: str, texts: Mapping[str, str]) -> str:
    """The error of a call in the words of a command line: with the typed text in place of a Python type."""
    found = re.fullmatch(r"(\w+): got (\w+); legal: (.*)", said, re.DOTALL)
    if found is None or found[1] not in texts:
        return said
    legal = found[3]
    for python, words in _LEGAL.items():
        legal = re.sub(python, words, legal)
    return f"{found[1]}: got {texts[found[1]]}; legal: {legal}"
