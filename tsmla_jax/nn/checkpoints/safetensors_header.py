"""Where the tensors of a safetensors file lie."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tsmla_jax.nn.checkpoints.hf_config import why_no_file

# Tensor types of the safetensors format that checkpoints use.
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


class CheckpointError(ValueError):
    """Something in a checkpoint is missing, misshapen, broken or in a format that isn't read; the text names the file
    or folder and, if any, the tensor."""


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        file: the safetensors file.
        dtype: stored element type.
        shape: stored shape.
        start, stop: byte range in the file.
    """

    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Where every tensor of a safetensors file lies, by its name.

    The package safetensors validates the file (lengths, offsets, overlaps); the byte ranges are then taken from the
    header itself, because not every version of its numpy reader knows the fp8 types. Raises CheckpointError for a file
    that is missing, broken or has tensors of a type that isn't read.
    """
    safe_open, safetensor_error = require_safetensors()
    if what := why_no_file(file, "no such file"):
        raise CheckpointError(f"{file}: {what}")  # opening a named pipe would wait for ever
    try:
        with safe_open(file, framework="np"), file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
    except safetensor_error as error:
        raise CheckpointError(f"{file}: truncated, or not a safetensors file: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(f"{file}: tensor {name!r} has dtype {entry['dtype']}; legal: {', '.join(_DTYPES)}")
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = TensorInfo(file, _DTYPES[entry["dtype"]], tuple(entry["shape"]), start, stop)
    return tensors


def require_safetensors() -> tuple[Any, type[Exception]]:
    """safetensors' opener and its error type; imported late, because only checkpoints need the package."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError("reading a checkpoint needs the package safetensors: pip install 'tsmla-jax[hf]'") from None
    return safe_open, SafetensorError
