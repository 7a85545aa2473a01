"""Writing a Hugging Face checkpoint directory: safetensors files, their index, and what a base checkpoint adds.

Nothing here knows about attention. The writer keeps the tensors of one file at a time.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np

from tsmla_jax.nn.checkpoints.checkpoint import INDEX_NAME, INDEX_NAMES, SINGLE_NAME, Checkpoint
from tsmla_jax.nn.products.block_scaled import BlockScaled

MAX_SHARD_BYTES = 5 * 10**9
"""The most bytes of the tensors in one file, unless it holds a single tensor."""

# What belongs to a model beside its weights: config, tokenizer, chat template, code.
_COPIED = (".json", ".txt", ".model", ".jinja", ".py")

Array = np.ndarray[Any, Any]


def save_checkpoint(
    checkpoint_dir: str | Path,
    tensors: Iterable[tuple[str, Any]],
    *,
    base: Checkpoint | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes tensors to one safetensors file, or to several with an index. If writing a tensor fails, the files
    written so far are removed, and so is the folder if it was made here.

    Args:
        checkpoint_dir: the folder, made if it is not there; it must not hold safetensors yet.
        tensors: their names in the checkpoint, and arrays, or `BlockScaled` of them, whose scales are stored under
            base's name for them, else as `<name>_scale_inv`.
        base: a checkpoint whose other tensors and files (config, tokenizer) are copied.
        max_shard_bytes: the most bytes of the tensors in one file, unless it holds a single tensor.

    Raises:
        ValueError: the folder holds safetensors; max_shard_bytes is below 1; a name comes twice; base lacks a tensor or
            has it in another shape; a tensor is block-scaled here and not in base, or the other way round; or its
            scales don't fit the dtype in which base stores them.
        ImportError: the package safetensors is not installed (`pip install 'tsmla-jax[hf]'`).
    """
    directory = Path(checkpoint_dir)
    there = [*directory.glob("*.safetensors"), *directory.glob(INDEX_NAME)]
    if there:
        raise ValueError(f"{there[0]}: is there already; legal: a folder without safetensors")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes: got {max_shard_bytes}; legal: a positive number of bytes")
    made = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    try:
        weight_map, total = _write_shards(directory, _all_tensors(tensors, base), max_shard_bytes, written)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        if made:
            with contextlib.suppress(OSError):  # another program may have put something there
                directory.rmdir()
        raise
    if base is not None:
        for source in sorted(base.directory.iterdir()):
            if source.is_file() and source.suffix in _COPIED and source.name not in INDEX_NAMES:
                shutil.copyfile(source, directory / source.name)
    _publish(directory, written, weight_map, total)


def _all_tensors(tensors: Iterable[tuple[str, Any]], base: Checkpoint | None) -> Iterator[tuple[str, Array]]:
    """The arrays to write: those given, with their scales, and the rest of base."""
    names: set[str] = set()
    for name, value in tensors:
        for part, array in _arrays_of(name, value, base):
            if part in names:
                raise ValueError(f"tensor {part!r} comes twice")
            names.add(part)
            yield part, array
    for name in base.names() if base else ():
        if base is not None and name not in names:
            yield name, base.stored(name)


def _arrays_of(name: str, value: Any, base: Checkpoint | None) -> Iterator[tuple[str, Array]]:
    """The arrays that are stored for one tensor: itself, or its e4m3 values and their scales."""
    narrow, found = isinstance(value, BlockScaled), None
    if base is not None:
        info, shape = base.info(name), tuple(value.shape)
        if info.shape != shape:
            raise ValueError(f"tensor {name!r} has shape {shape}; legal: that of {info.file}, {info.shape}")
        found = base.scale_name(name)
        if (found is not None) != narrow:
            these, those = ("has", "has none") if narrow else ("has no", "has them")
            raise ValueError(
                f"tensor {name!r} {these} block scales, and in base ({info.file}) it {those}; legal: as in base, or "
                f"base=None and your own config.json, whose quantization_config says what is stored"
            )
    if not narrow:
        yield name, np.asarray(value)
        return
    yield name, np.asarray(value.values)
    scales = np.asarray(value.scales)
    if base is None or found is None:
        yield f"{name}_scale_inv", scales
    else:
        yield found, _scales_as(base.info(found).dtype, scales, found)


def _scales_as(dtype: np.dtype[Any], scales: Array, name: str) -> Array:
    """f32 scales in the dtype in which base stores them (one byte holds a power of two). ValueError if it can't hold
    them."""
    wanted = np.dtype(ml_dtypes.float8_e8m0fnu) if dtype.itemsize == 1 else dtype
    stored = scales.astype(wanted)
    if not np.array_equal(stored.astype(np.float32), scales):
        raise ValueError(f"tensor {name!r} is {dtype.name} in base, which can't hold these scales")
    return stored.view(dtype) if dtype.itemsize == 1 else stored


def _write_shards(
    directory: Path, tensors: Iterator[tuple[str, Array]], max_shard_bytes: int, written: list[Path]
) -> tuple[dict[str, int], int]:
    """Writes the files under temporary names and appends them to `written`. Returns the index of each tensor's file,
    and the bytes of all tensors."""
    save_file = _require_save_file()
    weight_map: dict[str, int] = {}
    shard: dict[str, Array] = {}
    size = total = 0

    def write() -> None:
        written.append(directory / f"{len(written) + 1:05}.safetensors.part")
        # Older versions of transformers refuse a file that doesn't say whose format it has.
        save_file(shard, written[-1], metadata={"format": "pt"})

    for name, array in tensors:
        if shard and size + array.nbytes > max_shard_bytes:
            write()
            shard, size = {}, 0
        weight_map[name] = len(written)
        shard[name] = np.asarray(array, order="C")
        size += array.nbytes
        total += array.nbytes
    write()
    return weight_map, total


def _publish(directory: Path, written: list[Path], weight_map: dict[str, int], total: int) -> None:
    """Gives the files their final names, and writes the index if there are several."""
    if len(written) == 1:
        written[0].rename(directory / SINGLE_NAME)
        return
    names = [f"model-{place + 1:05}-of-{len(written):05}.safetensors" for place in range(len(written))]
    for path, name in zip(written, names, strict=True):
        path.rename(directory / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: names[place] for name, place in sorted(weight_map.items())},
    }
    (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _require_save_file() -> Callable[..., None]:
    """safetensors' writer; imported late, because only checkpoints need the package."""
    try:
        from safetensors.numpy import save_file
    except ImportError:
        raise ImportError("writing a checkpoint needs the package safetensors: pip install 'tsmla-jax[hf]'") from None
    return cast(Callable[..., None], save_file)
