"""A Hugging Face checkpoint directory of safetensors files: names, shapes and tensors, quantised weights dequantised.

Nothing here knows about attention. Tensors are read one at a time out of a memory map, so opening a checkpoint of
hundreds of gigabytes reads no more than its config, index and headers. Values are numpy arrays (bf16 and fp8 as
ml_dtypes), ready for `jnp.asarray` or `jax.device_put` with a sharding.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from tsmla_jax.nn.checkpoints.dequantise import (
    DEFAULT_BLOCK,
    FP4_BLOCK,
    INT4_GROUP,
    dequantise_blocks,
    dequantise_fp4,
    dequantise_int4,
    dequantise_whole,
)
from tsmla_jax.nn.checkpoints.hf_config import read_json, why_no_file
from tsmla_jax.nn.checkpoints.safetensors_header import CheckpointError as CheckpointError
from tsmla_jax.nn.checkpoints.safetensors_header import TensorInfo, read_header, require_safetensors

INDEX_NAME = "model.safetensors.index.json"
INDEX_NAMES = (INDEX_NAME, "consolidated.safetensors.index.json")  # the second is Mistral's own
SINGLE_NAME = "model.safetensors"

_FP8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
_BYTES = (np.dtype(np.int8), np.dtype(np.uint8))


class Checkpoint:
    """A checkpoint directory, opened for reading.

    Looks for an index (`model.safetensors.index.json` or Mistral's `consolidated.safetensors.index.json`), then
    `model.safetensors`, then a lone `*.safetensors`. A shard is opened when one of its tensors is first asked for.

    Args:
        directory: the checkpoint's folder.

    Raises:
        CheckpointError: there is no such directory or no safetensors file in it, a shard or the index is missing, the
            index isn't one, a file without an index is broken, or config.json has an illegal weight_block_size.
        ImportError: the package safetensors is not installed (`pip install 'tsmla-jax[hf]'`).
    """

    def __init__(self, directory: str | Path) -> None:
        require_safetensors()
        self.directory = Path(directory)
        try:
            found = self.directory.is_dir()
        except OSError as error:
            raise CheckpointError(f"{self.directory}: cannot be read: {error.strerror}") from None
        if not found:
            raise CheckpointError(f"{self.directory}: no such checkpoint directory")
        self._headers: dict[Path, dict[str, TensorInfo]] = {}
        self._maps: dict[Path, np.memmap[Any, Any]] = {}
        self._files = self._locate()
        self.block = self._block_size()

    def names(self) -> tuple[str, ...]:
        """Every tensor's name, sorted."""
        return tuple(sorted(self._files))

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor, without reading it.

        Args:
            name: the tensor's name in the checkpoint.

        Raises:
            CheckpointError: the checkpoint has no such tensor, or its file is broken.
        """
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self.directory}: tensor {name!r} is missing")
        header = self._header(file)
        if name not in header:
            raise CheckpointError(f"{file}: tensor {name!r} is missing, though the index places it there")
        return header[name]

    def read(
        self,
        name: str,
        *,
        shape: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        rows: slice = slice(None),
    ) -> np.ndarray[Any, Any]:
        """One tensor's values.

        Quantised weights come dequantised. An fp8 tensor has its scales in a tensor beside it, `<name>_scale_inv` in
        f32 (DeepSeek-V3's format) or, for `<module>.weight`, `<module>.scale` in powers of two (V4's): one scale per
        block, of 128 x 128 unless config.json says otherwise, with smaller blocks at the edges; or one for each whole
        matrix. An fp4 tensor has bytes of two e2m1 values each, the lower four bits first, and one such scale per 32
        values of a row (V4's experts). An int4 weight is stored in three tensors under other names (`is_int4`).

        Args:
            name: the tensor's name in the checkpoint.
            shape: the shape it must have; not checked if None.
            dtype: what to convert to; None keeps the stored dtype, and makes a dequantised tensor bfloat16.
            rows: the part of the first axis that is read; shape is the whole tensor's.

        Returns:
            a copy, not a view of the file.

        Raises:
            CheckpointError: a missing tensor, another shape, integers to be read as floats (or the other way round), an
                fp8 tensor without scales, scales that are misshapen, not finite or (but for int4) negative, block
                scales of a tensor that is neither fp8 nor fp4, values past the greatest float16 to be read as such, or
                a file that is truncated or not safetensors. The text names the file or folder and, if one is at fault,
                the tensor.
        """
        if self.is_int4(name):
            return self._read_int4(name, shape, dtype)[rows]
        info = self.info(name)
        fp4 = self.is_fp4(name)
        if info.dtype in _BYTES and not fp4 and self.scale_name(name) is not None:
            raise self.unlike(name, "a weight")
        stored_shape = (info.shape[0], 2 * info.shape[1]) if fp4 else info.shape
        if shape is not None and stored_shape != tuple(shape):
            raise CheckpointError(f"{info.file}: tensor {name!r} must have shape {tuple(shape)}, got {stored_shape}")
        raw = self._raw(info)
        narrow = ml_dtypes.bfloat16 if dtype is None else dtype
        if fp4:
            scales = self._scales(name, info, stored_shape, FP4_BLOCK)
            with np.errstate(over="ignore"):  # `_in_range` finds overflows
                wide = dequantise_fp4(raw, scales, dtype=narrow)[rows]
            return self._in_range(name, wide, raw)
        if info.dtype in _FP8:
            scales = self._scales(name, info, stored_shape, self.block)
            if self._is_whole_scaled(name):
                with np.errstate(over="ignore"):  # `_in_range` finds overflows
                    return self._in_range(name, dequantise_whole(raw, scales, rows, dtype=narrow), raw)
            with np.errstate(over="ignore"):  # `_in_range` finds overflows
                wide = dequantise_blocks(raw, scales, block=self.block, dtype=narrow)[rows]
            return self._in_range(name, wide, raw)
        if (scale_name := self.scale_name(name)) is not None:
            raise CheckpointError(
                f"{info.file}: tensor {name!r} is {info.dtype.name} and has block scales {scale_name!r}; legal: scales"
                " of fp8 and fp4 tensors"
            )
        kind = info.dtype if dtype is None else np.dtype(dtype)
        if jnp.issubdtype(kind, jnp.floating) != jnp.issubdtype(info.dtype, jnp.floating):
            raise self.unlike(name, kind.name)
        part = raw[rows] if raw.ndim else raw
        with np.errstate(over="ignore"):
            return self._in_range(name, np.array(part, dtype=kind), part)

    def _in_range(self, name: str, value: np.ndarray[Any, Any], stored: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """`value`; CheckpointError if it was converted to float16 and has infinities although `stored` has none."""
        if value.dtype == np.float16 != stored.dtype and np.isinf(value).any():
            of_floats = jnp.issubdtype(stored.dtype, jnp.floating)
            if not of_floats or not np.isinf(stored.astype(np.float32)).any():
                raise CheckpointError(
                    f"{self.info(name).file}: tensor {name!r} has values past the greatest float16, 65504; legal:"
                    " another dtype"
                )
        return value

    def unlike(self, name: str, wanted: str) -> CheckpointError:
        """The error for a tensor that is stored as integers and read as floats, or the reverse.

        wanted: what it is read as: a dtype, or "a weight".
        """
        info, scale_name = self.info(name), self.scale_name(name)
        scales, legal = "", ""
        if scale_name is not None:
            scales = f", with scales {scale_name!r} of shape {self.info(scale_name).shape},"
            if (shape := self._fp4_scales(name)) is not None:
                legal = f"; for fp4 {scale_name!r} must have shape {shape}"
        return CheckpointError(
            f"{info.file}: tensor {name!r} is {info.dtype.name}{scales} and can't be read as {wanted}; legal quantised"
            f" weights: fp8 and fp4 with scales, and int4 as compressed-tensors packs it{legal}"
        )

    def check_finite(self, name: str, value: np.ndarray[Any, Any]) -> None:
        """Raises CheckpointError if values of a tensor are NaN or infinite. It is for tensors by which experts or keys
        are chosen, since later results may not show such values.

        Args:
            name: the tensor's name in the checkpoint.
            value: the tensor's values, as `read` returned them.
        """
        if not np.isfinite(value).all():
            raise CheckpointError(
                f"{self.info(name).file}: tensor {name!r} has NaN or infinite values; legal: finite values, because"
                " it decides which experts or keys are chosen"
            )

    def refuse_others(self, names: Iterable[str]) -> None:
        """Raises CheckpointError if there are tensors that were not read: the config then describes another model than
        the checkpoint holds. Rope frequencies, which old checkpoints hold, are let through: they are computed here.

        Args:
            names: the names, in the checkpoint, of the tensors that were not read.
        """
        others = sorted(name for name in names if not name.endswith("rotary_emb.inv_freq"))
        if others:
            some = ", ".join(map(repr, others[:3])) + (", ..." if len(others) > 3 else "")
            raise CheckpointError(
                f"{self.directory}: the config describes a model without {len(others)} of the tensors: {some}"
            )

    def is_fp4(self, name: str) -> bool:
        """Whether a tensor has two e2m1 values a byte and a scale for every 32 values of a row.

        Args:
            name: the tensor's name in the checkpoint.
        """
        scale_name = self.scale_name(name)
        return scale_name is not None and self.info(scale_name).shape == self._fp4_scales(name)

    def is_int4(self, name: str) -> bool:
        """Whether a weight is stored as compressed-tensors packs it: `<name>_packed`, int32 with eight values each, the
        lowest four bits first and 8 added to each value; `<name>_scale`, one for every 32 values of a row; and
        `<name>_shape`. Kimi-K2-Thinking's and K2.5's experts are.

        Args:
            name: the weight's name, which no tensor of the checkpoint has.
        """
        return name not in self and all(part in self for part in int4_parts(name))

    def _read_int4(self, name: str, shape: Sequence[int] | None, dtype: DTypeLike | None) -> np.ndarray[Any, Any]:
        """One tensor of `is_int4`, dequantised, after its parts have been checked against each other."""
        packed, scale, size = map(self.info, int4_parts(name))
        whole = tuple(self.read(int4_parts(name)[2]).ravel().tolist())
        integers = all(isinstance(axis, int) for axis in whole)
        if len(whole) != 2 or not integers or (shape is not None and whole != tuple(shape)):
            wanted = "two axes" if shape is None else f"shape {tuple(shape)}"
            raise CheckpointError(f"{size.file}: weight {name!r} must have {wanted}, got {whole}")
        rows, columns = whole
        for part, info, legal, kind in (
            (f"{name}_packed", packed, (rows, -(-columns // 8)), np.int32),
            (f"{name}_scale", scale, (rows, -(-columns // INT4_GROUP)), None),
        ):
            floats = jnp.issubdtype(info.dtype, jnp.floating) and info.dtype not in _FP8
            if info.shape != legal or not (floats if kind is None else info.dtype == kind):
                wanted = "float32, bfloat16 or float16" if kind is None else "int32"
                raise CheckpointError(
                    f"{info.file}: tensor {part!r} must have shape {legal} and be {wanted}, got {info.shape} and"
                    f" {info.dtype.name}; only int4 weights with a scale for every {INT4_GROUP} values are read"
                )
        scales = self._raw(scale).astype(np.float32)
        if not np.isfinite(scales).all():
            raise CheckpointError(f"{scale.file}: tensor {name + '_scale'!r} has scales that are not finite")
        narrow = ml_dtypes.bfloat16 if dtype is None else dtype
        with np.errstate(over="ignore"):  # `_in_range` finds overflows
            wide = dequantise_int4(self._raw(packed), scales, columns, dtype=narrow)
        return self._in_range(f"{name}_packed", wide, self._raw(packed))

    def _fp4_scales(self, name: str) -> tuple[int, int] | None:
        """The shape that a tensor's scales have if it is fp4; None if it can't be."""
        info = self.info(name)
        if info.dtype not in _BYTES or len(info.shape) != 2:
            return None
        return info.shape[0], -(-2 * info.shape[1] // FP4_BLOCK[1])

    def is_block_scaled(self, name: str) -> bool:
        """Whether a tensor is e4m3 with a scale for every 128 x 128 values, so that `read_block_scaled` takes it.

        Args:
            name: the tensor's name in the checkpoint.
        """
        return (
            name in self
            and self.info(name).dtype == ml_dtypes.float8_e4m3fn
            and self.block == DEFAULT_BLOCK
            and self.scale_name(name) is not None
            and not self._is_whole_scaled(name)
        )

    def _is_whole_scaled(self, name: str) -> bool:
        """Whether an fp8 tensor, a matrix [M, N] or a stack [E, M, N] as transformers holds experts, has one scale for
        each matrix, as in Mistral Small 4. False for a matrix of a single block whose scale has the shape of scales of
        blocks."""
        shape, scales = self.info(name).shape, self.info(self.scale_name(name) or name).shape
        blocks = tuple(-(-size // step) for size, step in zip(shape[-2:], self.block, strict=False))
        legal = ((), (1,), (1, 1)) if len(shape) == 2 else ((shape[0],), (shape[0], 1, 1))
        return len(shape) in (2, 3) and scales in legal and scales != blocks

    def read_block_scaled(
        self, name: str, *, shape: Sequence[int]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """One tensor of `is_block_scaled` as it is stored: its e4m3 values, and its f32 scales.

        Args:
            name: the tensor's name in the checkpoint.
            shape: the shape it must have.

        Raises:
            CheckpointError: as `read`.
        """
        info = self.info(name)
        if info.shape != tuple(shape):
            raise CheckpointError(f"{info.file}: tensor {name!r} must have shape {tuple(shape)}, got {info.shape}")
        return np.array(self._raw(info)), self._scales(name, info, info.shape, self.block)

    def read_fp4(self, name: str, *, shape: Sequence[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """One tensor of `is_fp4` as it is stored: bytes of two values, uint8, and the exponents of its scales, uint8,
        with 127 added. `shape` is the shape of the values. Raises CheckpointError as `read` does, and for scales that
        are no powers of two."""
        info = self.info(name)
        whole = info.shape[0], 2 * info.shape[1]
        if whole != tuple(shape):
            raise CheckpointError(f"{info.file}: tensor {name!r} must have shape {tuple(shape)}, got {whole}")
        mantissas, exponents = np.frexp(self._scales(name, info, whole, FP4_BLOCK))
        if (mantissas != 0.5).any():
            raise CheckpointError(f"{info.file}: tensor {name!r} has scales that are no powers of two")
        return np.array(self._raw(info)).view(np.uint8), (exponents + 126).astype(np.uint8)

    def stored(self, name: str) -> np.ndarray[Any, Any]:
        """One tensor's values as they are stored: a view of the memory map, nothing dequantised.

        Args:
            name: the tensor's name in the checkpoint.

        Raises:
            CheckpointError: as `info`.
        """
        return self._raw(self.info(name))

    def scale_name(self, name: str) -> str | None:
        """The name of the tensor that holds an fp8 or fp4 tensor's scales, or None if there is no such tensor.

        Args:
            name: the tensor's name in the checkpoint.
        """
        names = (f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scale")
        return next((scale for scale in names[: 2 if name.endswith(".weight") else 1] if scale in self), None)

    def _scales(
        self, name: str, info: TensorInfo, shape: tuple[int, ...], block: tuple[int, int]
    ) -> np.ndarray[Any, Any]:
        scale_name = self.scale_name(name)
        if scale_name is None:
            raise CheckpointError(
                f"{info.file}: tensor {name!r} is {info.dtype.name} but its block scales '{name}_scale_inv' are missing"
            )
        whole, scale_info = info.dtype in _FP8 and self._is_whole_scaled(name), self.info(scale_name)
        if len(shape) != 2 and not whole:
            raise CheckpointError(
                f"{info.file}: fp8 tensor {name!r} has shape {shape} and scales of shape {scale_info.shape}; legal: 2"
                " axes, or 3 and one scale for each matrix"
            )
        legal = tuple(-(-size // step) for size, step in zip(shape, block, strict=False))
        if scale_info.shape != legal and not whole:
            raise CheckpointError(
                f"{scale_info.file}: tensor {scale_name!r} must have shape {legal} (one scale per "
                f"{block[0]} x {block[1]} block of {shape}), got {scale_info.shape}"
            )
        raw = self._raw(scale_info)
        # Scales stored as int8 or uint8 are exponents.
        raw = raw.view(ml_dtypes.float8_e8m0fnu) if raw.dtype in _BYTES else raw
        if not jnp.issubdtype(raw.dtype, jnp.floating) or raw.dtype in _FP8:
            raise CheckpointError(
                f"{scale_info.file}: tensor {scale_name!r} is {raw.dtype.name}; legal for block scales: float32,"
                " bfloat16, float16, float64, float8_e8m0fnu or its bytes"
            )
        scales = raw.astype(np.float32)
        if not (scales >= 0).all() or np.isinf(scales).any():
            raise CheckpointError(
                f"{scale_info.file}: tensor {scale_name!r} has scales that are negative or not finite; legal: 0 or more"
            )
        return scales

    def _raw(self, info: TensorInfo) -> np.ndarray[Any, Any]:
        """A view of the stored values in the memory map."""
        if info.file not in self._maps:
            self._maps[info.file] = np.memmap(info.file, dtype=np.uint8, mode="r")
        return np.asarray(self._maps[info.file][info.start : info.stop]).view(info.dtype).reshape(info.shape)

    def _locate(self) -> dict[str, Path]:
        """The file that holds each tensor, by the tensor's name."""
        # A pipe, a device or a broken link of this name counts as found: the function that reads it refuses it.
        for index in (self.directory / name for name in INDEX_NAMES):
            if os.path.lexists(index):
                return self._read_index(index)
        single = self.directory / SINGLE_NAME
        if os.path.lexists(single):
            return dict.fromkeys(self._header(single), single)
        files = sorted(self.directory.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{self.directory}: holds neither {INDEX_NAME} nor {SINGLE_NAME}")
        if len(files) > 1:
            raise CheckpointError(
                f"{self.directory / INDEX_NAME}: the index is missing; without it {len(files)} shards"
                f" ({files[0].name}, ...) can't be read"
            )
        return dict.fromkeys(self._header(files[0]), files[0])

    def _read_index(self, index: Path) -> dict[str, Path]:
        try:
            content = read_json(index)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{index}: not a readable JSON index: {why}") from None
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index}: must hold an object 'weight_map' from tensor names to file names")
        for file in sorted(set(weight_map.values())):
            # A shard is a file of this directory: an index must not make us read elsewhere.
            if Path(file).name != file:
                raise CheckpointError(f"{index}: shard {file!r} must be a plain file name")
            shard = self.directory / file
            if what := why_no_file(shard, "the shard is missing"):
                raise CheckpointError(f"{shard}: {what}, though {index.name} names it")
        return {name: self.directory / file for name, file in weight_map.items()}

    def _header(self, file: Path) -> dict[str, TensorInfo]:
        if file not in self._headers:
            self._headers[file] = read_header(file)
        return self._headers[file]

    def _block_size(self) -> tuple[int, int]:
        """The block of fp8 scales: weight_block_size in config.json's quantization_config, or else DEFAULT_BLOCK."""
        try:
            config = read_json(self.directory / "config.json")
            block = config["quantization_config"]["weight_block_size"] or [*DEFAULT_BLOCK]
        except (OSError, ValueError, KeyError, TypeError):
            # The reader of config.json reports a missing or broken file; the block has a default.
            return DEFAULT_BLOCK
        if (
            not isinstance(block, list)
            or len(block) != 2
            or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in block)
        ):
            config_file = self.directory / "config.json"
            raise CheckpointError(
                f"{config_file}: field 'weight_block_size' must be two positive integers or null, got {block!r}"
            )
        return block[0], block[1]


def int4_parts(name: str) -> tuple[str, str, str]:
    """The tensors that a weight of `Checkpoint.is_int4` is stored in: values, scales and shape."""
    return f"{name}_packed", f"{name}_scale", f"{name}_shape"
