"""A Hugging Face checkpoint directory, turned into the parameters of `tsmla_jax.generate.model`.

Tensors are read one at a time, so that the host holds about one layer beside the memory map, or on a mesh one device's
experts of a layer. Block-scaled matrices in e4m3 and experts in MXFP4 may stay so.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tsmla_jax.generate.config import ModelConfig, MoEConfig
from tsmla_jax.generate.mesh import (
    CONTEXT,
    EXPERT,
    ONE_DEVICE,
    MeshShape,
    check_mesh,
    experts_of,
    make_mesh,
    put,
    put_head,
    put_shards,
)
from tsmla_jax.generate.model import Params
from tsmla_jax.nn import Checkpoint, CheckpointError, MLAConfig, V4Config, V32Config
from tsmla_jax.nn.checkpoints.checkpoint import int4_parts
from tsmla_jax.nn.checkpoints.quantised import is_activation_scale, refuse_config, refuse_tensors
from tsmla_jax.nn.checkpoints.weights import LayerWeights, is_chooser
from tsmla_jax.nn.mla.names import stored_names as names_of_others
from tsmla_jax.nn.mla.weights import WEIGHTS as MLA_WEIGHTS
from tsmla_jax.nn.products.block_scaled import BLOCK, PRODUCTS, BlockScaled, stack_size, with_products
from tsmla_jax.nn.products.mxfp4 import MXFP4, can_be_kept
from tsmla_jax.nn.v4.names import stored_names
from tsmla_jax.nn.v4.weights import WEIGHTS as V4_WEIGHTS
from tsmla_jax.nn.v32.weights import WEIGHTS as V32_WEIGHTS

Array = np.ndarray[Any, Any]

# Projections of MLA that may stay block-scaled. kv_b_proj may not: decode sums over its rows.
_NARROW = ("q_proj.weight", "q_a_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight", "o_proj.weight")

ATTENTION_WEIGHTS: dict[type, LayerWeights[Any]] = {
    MLAConfig: MLA_WEIGHTS,
    V32Config: V32_WEIGHTS,
    V4Config: V4_WEIGHTS,
}


class ProgressBar:
    """A line on stderr that fills up: tqdm's if it is installed, else a plain one; nothing if stderr is no terminal."""

    def __init__(self, total: int, label: str, *, enabled: bool = True) -> None:
        """
        Args:
          total: the number of steps.
          label: what the steps do.
          enabled: False prints nothing at all.
        """
        self._total, self._label, self._done, self._last = total, label, 0, 0.0
        self._plain = enabled and sys.stderr.isatty()
        self._tqdm: Any = None
        try:
            tqdm = importlib.import_module("tqdm")
        except ImportError:
            return
        self._plain = False
        self._tqdm = tqdm.tqdm(
            total=total, desc=label, unit="tensor", file=sys.stderr, disable=None if enabled else True
        )

    def step(self) -> None:
        """Counts one more step as done."""
        self._done += 1
        if self._tqdm is not None:
            self._tqdm.update(1)
        elif self._plain and (self._done == self._total or time.monotonic() - self._last > 0.1):
            self._last = time.monotonic()
            filled = 30 * self._done // self._total
            line = f"\r{self._label}: [{'#' * filled}{'.' * (30 - filled)}] {self._done}/{self._total}"
            print(line, end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the line."""
        if self._tqdm is not None:
            self._tqdm.close()
        elif self._plain:
            print(file=sys.stderr)


class _Reader:
    """Reads tensors by saving's names (`_model_tensors`), and remembers which of the checkpoint's tensors were read."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        dtype: Any,
        *,
        mesh: Mesh | None,
        keep_fp8: bool,
        progress: bool,
    ) -> None:
        self.dtype, self.mesh = dtype, mesh
        self._checkpoint, self._keep_fp8 = checkpoint, keep_fp8
        self._stored = spelled_names(checkpoint, config)
        self._expected = expected_names(checkpoint, config)
        refuse_tensors(checkpoint, self._expected)
        self._read: set[str] = set()
        scales = {checkpoint.scale_name(stored) for stored in self._expected}
        self._bar = ProgressBar(len(self._expected - scales), "loading", enabled=progress)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def __call__(self, name: str, shape: Sequence[int], dtype: Any = None, rows: slice = slice(None)) -> Array:
        """A tensor of this shape, or some of its rows, on the host."""
        stored = self._stored.get(name, name)
        dtype = self.dtype if dtype is None else dtype
        value = self._checkpoint.read(stored, shape=shape, dtype=dtype, rows=rows)
        self.mark(name)
        return value

    def chooser(self, name: str, shape: Sequence[int], dtype: Any = None) -> Array:
        """A tensor of this shape, by which experts or keys are chosen. CheckpointError if a value is not finite."""
        value = self(name, shape, dtype)
        self._checkpoint.check_finite(self._stored.get(name, name), value)
        return value

    def put(self, name: str, shape: Sequence[int], dtype: Any = None) -> jax.Array:
        """A tensor on the device, or on every device of the mesh."""
        value: jax.Array = self.put_all(self(name, shape, dtype))
        return value

    def put_head(self, name: str, shape: Sequence[int]) -> jax.Array:
        """The output projection on the device, or on the mesh as `mesh.put_head` puts it."""
        output = self(name, shape)
        return jax.numpy.asarray(output) if self.mesh is None else put_head(self.mesh, output)

    def put_all(self, tree: Any) -> Any:
        """A tree of arrays on the device, or on every device of the mesh."""
        return put(self.mesh, P(), tree)

    def mark(self, name: str) -> None:
        """Counts a tensor as read: this process has read it, or others do."""
        stored = self._stored.get(name, name)
        if stored not in self._read:
            self._bar.step()
        self._read |= {stored, self._checkpoint.scale_name(stored) or stored}

    def keeps(self, *names: str) -> bool:
        """Whether block-scaled matrices are to stay so, and all these are block-scaled."""
        return self._keep_fp8 and all(self._checkpoint.is_block_scaled(self._stored.get(name, name)) for name in names)

    def narrow(self, name: str, shape: Sequence[int]) -> BlockScaled:
        """A matrix that stays block-scaled, on the host."""
        stored = self._stored.get(name, name)
        values, scales = self._checkpoint.read_block_scaled(stored, shape=shape)
        self.mark(name)
        return BlockScaled(values, scales)  # type: ignore[arg-type]  # of numpy, until it goes to the device

    def keeps_fp4(self, *names: str) -> bool:
        """Whether block-scaled matrices are to stay so, and all these are in MXFP4."""
        return self._keep_fp8 and all(self._checkpoint.is_fp4(self._stored.get(name, name)) for name in names)

    def fp4(self, name: str, shape: Sequence[int]) -> MXFP4:
        """A matrix that stays in MXFP4, on the host."""
        values, scales = self._checkpoint.read_fp4(self._stored.get(name, name), shape=shape)
        self.mark(name)
        return MXFP4(values, scales)  # type: ignore[arg-type]  # of numpy, until it goes to the device

    def check_tied(self) -> None:
        """Raises CheckpointError if an output projection that config.json ties to the embedding differs from it."""
        names = [self._stored.get(name, name) for name in ("model.embed_tokens.weight", "lm_head.weight")]
        if names[1] not in self._checkpoint:
            return
        embedding, head = (self._checkpoint.stored(name) for name in names)
        same = (embedding.shape, embedding.dtype) == (head.shape, head.dtype)
        if not same or any(one.tobytes() != other.tobytes() for one, other in zip(embedding, head, strict=True)):
            raise CheckpointError(
                f"{self._checkpoint.info(names[1]).file}: tensor {names[1]!r} differs from {names[0]!r}, though"
                " config.json ties them; legal: tie_word_embeddings false"
            )

    def close(self) -> None:
        """Ends the progress bar."""
        self._bar.close()

    def refuse_others(self) -> None:
        """Raises CheckpointError if expected tensors were not read: a model without them would be another model."""
        self._checkpoint.refuse_others(self._expected - self._read)


def spelled_names(checkpoint: Checkpoint, config: ModelConfig) -> dict[str, str]:
    """The stored names of a text model's tensors, by saving's `_model_tensors`; one for the three of an int4 weight."""
    if isinstance(config.attention, tuple):
        return stored_names(checkpoint)
    names = set(checkpoint.names())
    for weight in {name.removesuffix("_packed") for name in names if name.endswith(".weight_packed")}:
        if checkpoint.is_int4(weight):
            names = names.difference(int4_parts(weight)) | {weight}
    if any(name.startswith(_TEXT_MODEL) for name in names):  # beside one of images, as in Kimi-K2.5
        return {name.removeprefix(_TEXT_MODEL): name for name in names if name.startswith(_TEXT_MODEL)}
    return names_of_others(names)


def expected_names(checkpoint: Checkpoint, config: ModelConfig) -> set[str]:
    """The names, as in `spelled_names`, of the checkpoint's tensors that a model of this config has a use for."""
    names = spelled_names(checkpoint, config)
    return {stored for name, stored in names.items() if not _is_left_out(name, stored, config)}


_TEXT_MODEL = "language_model."


def _is_left_out(name: str, stored: str, config: ModelConfig) -> bool:
    """Whether a model of this config has no use for a tensor that its checkpoint may hold."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    drafting = stored.startswith(("mtp.", "model.mtp.")) or (layer and int(layer[1]) >= config.num_layers)
    copied = config.tie_word_embeddings and name == "lm_head.weight"
    # transformers stores two unused matrices of each expert that returns its input.
    expert = re.match(r"model\.layers\.\d+\.shortcut\.experts\.(\d+)\.", name)
    unused = expert and config.moe is not None and int(expert[1]) >= config.moe.num_experts
    return bool(drafting or copied or unused) or is_activation_scale(stored) or stored.endswith("rotary_emb.inv_freq")


def load_model(
    checkpoint_dir: str | Path,
    config: ModelConfig,
    *,
    dtype: Any | None = None,
    keep_fp8: bool | None = None,
    fp8_products: str | None = None,
    mesh: MeshShape = ONE_DEVICE,
    progress: bool = False,
) -> Params:
    """All parameters of a checkpoint but those of multi-token prediction (layers past `config.num_layers`).

    Args:
      checkpoint_dir: the directory, with one safetensors file or shards and their index.
      config: the model, as `ModelConfig.from_hf(checkpoint_dir)` reads it.
      dtype: the dtype of the parameters; None takes the config's dtype. The router and its bias are f32, in which
        routing is computed, and so are V4's norms, sinks, position biases and streams.
      keep_fp8: matrices of MLA, of the MLPs and of the experts that are e4m3 with scales for blocks of 128 x 128 stay
        so (`BlockScaled`), except kv_b_proj, and MLPs and experts whose width is no multiple of 128; experts in MXFP4
        stay so (`MXFP4`), if kernels take their sizes. Experts that share one tensor are widened, and all other
        matrices, as those of V4's attention. False widens all. None keeps them unless jax's default backend is cpu.
      fp8_products: how to multiply by block-scaled matrices. "quantized" quantises their activations to e4m3 for
        each 128 columns, as DeepSeek's code does; "exact" keeps the activations' dtype and widens the weights, in
        block_scaled_matmul's kernel unless a product has many rows; None is "exact" where that kernel is chosen, and
        elsewhere leaves it to other kernels or to XLA to widen the weights.
      mesh: the devices that the parameters go to (`EngineOptions.mesh`). Experts and, if its rows divide, an output
        projection that is not the embedding are split over the devices of each copy of the model; every device has all
        other parameters. A process reads only its part of the experts.
      progress: show a progress bar on stderr, if that is a terminal.

    Returns:
      the pytree described at `tsmla_jax.generate.model.Params`; on a mesh as `mesh.put_params` leaves it.

    Raises:
      ValueError: the mesh does not go with the model or with jax's devices; fp8_products is none of the three; the
        weights are in a format that isn't read; a tensor is missing, misshapen or of another model, or one that chooses
        has illegal values; the output projection differs from the embedding it is tied to; or a file is truncated.
      ImportError: the package safetensors is not installed (`pip install 'tsmla-jax[hf]'`).
    """
    if fp8_products not in PRODUCTS:
        raise ValueError(f"fp8_products: got {fp8_products!r}; legal: {', '.join(map(repr, PRODUCTS))}")
    dtype, hidden = jnp.dtype(config.dtype if dtype is None else dtype), (config.hidden_size,)
    # V4 computes with its norms in f32 whatever the other parameters' dtype is.
    norm_dtype = dtype if config.streams is None else jnp.dtype(jnp.float32)
    keep_fp8 = jax.default_backend() != "cpu" if keep_fp8 is None else keep_fp8
    check_mesh(config, mesh)
    checkpoint, options = Checkpoint(checkpoint_dir), {"keep_fp8": keep_fp8, "progress": progress}
    refuse_config(checkpoint)
    with contextlib.closing(_Reader(checkpoint, config, dtype, mesh=make_mesh(mesh), **options)) as read:
        params: dict[str, Any] = {
            "embed": read.put("model.embed_tokens.weight", (config.vocab_size, *hidden)),
            "norm": read.put("model.norm.weight", hidden, norm_dtype),
            "layers": [],
        }
        if config.tie_word_embeddings:
            read.check_tied()
        else:
            params["lm_head"] = read.put_head("lm_head.weight", (config.vocab_size, *hidden))
        if config.streams is not None:
            count = config.streams.count
            params["streams"] = _read_streams(read, "model.hc_head.hc_", count, count * config.hidden_size, 1)
        for index in range(config.num_layers):
            params["layers"].append(_read_layer(read, config, index, norm_dtype))
        read.refuse_others()
    loaded: Params = with_products(params, fp8_products)
    return loaded


_SAMPLES, _SAMPLE_BYTES = 16, 4096


def sample_checkpoint(checkpoint_dir: str | Path) -> str:
    """A hash of a checkpoint's files: of their names and sizes, and of bytes in 16 places of each, as reading all would
    take minutes. Checkpoints of one model that were trained apart differ there.

    Raises:
      ValueError, OSError: a file can't be read, or is not as `Checkpoint` needs it.
    """
    digest, checkpoint = hashlib.sha256(), Checkpoint(checkpoint_dir)
    for path in sorted({checkpoint.info(name).file for name in checkpoint.names()}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for place in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * place // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _read_layer(read: _Reader, config: ModelConfig, index: int, norm_dtype: Any) -> dict[str, Any]:
    prefix, hidden, kind = f"model.layers.{index}", (config.hidden_size,), config.mlp_layers[index]
    layer = {
        "attention_norm": read.put(f"{prefix}.input_layernorm.weight", hidden, norm_dtype),
        "attention": _read_attention(read, f"{prefix}.self_attn", config, index, norm_dtype),
        "mlp_norm": read.put(f"{prefix}.post_attention_layernorm.weight", hidden, norm_dtype),
    }
    if kind == "shortcut":
        layer["shortcut"] = _read_moe(read, f"{prefix}.shortcut", config, by_token=False)
    if kind in ("moe", "hash_moe"):
        layer["mlp"] = _read_moe(read, f"{prefix}.mlp", config, by_token=kind == "hash_moe")
    else:
        keep = read.keeps(*mlp_names(f"{prefix}.mlp")) and config.intermediate_size % BLOCK == 0
        gate_up, down = _read_mlp(read, f"{prefix}.mlp", config.hidden_size, config.intermediate_size, keep)
        layer["mlp"] = read.put_all({"gate_up": gate_up, "down": down})
    if config.streams is not None:
        count = config.streams.count
        for name, block in (("attention_streams", "attn_hc"), ("mlp_streams", "ffn_hc")):
            width = count * config.hidden_size
            layer[name] = _read_streams(read, f"{prefix}.{block}.", (2 + count) * count, width, 3)
    return layer


def _read_attention(read: _Reader, prefix: str, config: ModelConfig, index: int, norm_dtype: Any) -> dict[str, Any]:
    attention = config.layer(index).attention
    weights = ATTENTION_WEIGHTS[type(attention)]
    kept = ("norm.weight", "sinks", "position_bias")
    tensors: dict[str, Any] = {}
    for name, shape in weights.hf_attention_shapes(attention).items():
        whole = f"{prefix}.{name}"
        if not isinstance(attention, V4Config) and name in _NARROW and read.keeps(whole):
            tensors[name] = read.narrow(whole, shape)
        else:
            own = norm_dtype if name.endswith(kept) else None
            tensors[name] = (read.chooser if is_chooser(name) else read)(whole, shape, own)
    params: dict[str, Any] = read.put_all(weights.params_from_hf(attention, tensors))
    return params


def _read_streams(read: _Reader, prefix: str, rows: int, width: int, scales: int) -> dict[str, jax.Array]:
    shapes = {"fn": (rows, width), "base": (rows,), "scale": (scales,)}
    return {name: read.put(f"{prefix}{name}", shape, np.float32) for name, shape in shapes.items()}


def mlp_names(prefix: str) -> list[str]:
    """The tensors of an MLP: gate, up and down."""
    return [f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down")]


def _read_mlp(read: _Reader, prefix: str, hidden: int, width: int, keep: bool) -> tuple[Any, Any]:
    """gate and up in one matrix [2 I, C], and down [C, I]; block-scaled if `keep`."""
    return _read_parts(read.narrow if keep else read, prefix, hidden, width)


def _read_parts(reader: Callable[..., Any], prefix: str, hidden: int, width: int) -> tuple[Any, Any]:
    """The weights that `_read_mlp` returns, read by `reader`, a function of a tensor's name and shape."""
    shapes = [(width, hidden), (width, hidden), (hidden, width)]
    gate, up, down = (reader(name, shape) for name, shape in zip(mlp_names(prefix), shapes, strict=True))
    return jax.tree.map(lambda *parts: np.concatenate(parts), gate, up), down


def _read_moe(read: _Reader, prefix: str, config: ModelConfig, *, by_token: bool) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    choices = moe.choice.num_experts
    router = read.chooser(f"{prefix}.gate.weight", (choices, config.hidden_size), np.float32)
    params = {"router": read.put_all(router)}
    if by_token:
        name = f"{prefix}.gate.tid2eid"
        table = read(name, (config.vocab_size, moe.top_k), np.int64)  # as it is stored: no value wraps around
        if table.min() < 0 or table.max() >= moe.num_experts:
            raise CheckpointError(
                f"tensor {name!r} names experts {table.min()} to {table.max()}; legal: 0 to {moe.num_experts - 1}"
            )
        params["expert_table"] = read.put_all(table.astype(np.int32))
    elif moe.routing == "noaux_tc":
        bias = read.chooser(f"{prefix}.gate.e_score_correction_bias", (choices,), np.float32)
        params["correction_bias"] = read.put_all(bias)
    kept = read.keeps_fp4(*_expert_names(read, prefix, range(moe.num_experts))) and not _is_merged(read, prefix)
    if kept and can_be_kept(config.hidden_size, moe.intermediate_size):
        return params | _read_fp4_experts(read, prefix, config.hidden_size, moe)
    stacks = _put_stacks(read, prefix, moe, partial(_read_experts, read, prefix, config.hidden_size, moe))
    return {**params, "gate_up": stacks[0], "down": stacks[1]}


def _is_merged(read: _Reader, prefix: str) -> bool:
    """Whether all experts share two tensors, gate_up_proj and down_proj, as in transformers' modules."""
    return f"{prefix}.experts.gate_up_proj" in read


def _expert_names(read: _Reader, prefix: str, experts: range) -> list[str]:
    """The tensors of these routed experts, if each expert has its own."""
    owners = () if _is_merged(read, prefix) else experts
    return [name for expert in owners for name in mlp_names(f"{prefix}.experts.{expert}")]


def _read_experts(read: _Reader, prefix: str, hidden: int, moe: MoEConfig, experts: range) -> tuple[Any, Any]:
    """gate_up [N + S, 2 I, C] and down [N + S, C, I], on the host: these N routed experts, then the shared ones."""
    width, merged, shared = moe.intermediate_size, _is_merged(read, prefix), f"{prefix}.shared_experts"
    names = _expert_names(read, prefix, range(moe.num_experts)) + (mlp_names(shared) if moe.num_shared else [])
    keep = not merged and width % BLOCK == 0 and read.keeps(*names)

    count, both = len(experts) + moe.num_shared, ((2 * width, hidden), (hidden, width))
    stacks = tuple(_empty_stack(count, shape, read.dtype, keep) for shape in both)

    def place(index: Any, weights: Any) -> None:
        jax.tree.map(lambda stack, weight: stack.__setitem__(index, weight), stacks, weights)

    for index, expert in enumerate(() if merged else experts):
        place(index, _read_mlp(read, f"{prefix}.experts.{expert}", hidden, width, keep))
    if merged:
        rows = slice(experts.start, experts.stop)
        shapes = [(moe.num_experts, *shape) for shape in both]
        own = (f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj")
        parts = (read(name, shape, rows=rows) for name, shape in zip(own, shapes, strict=True))
        place(slice(len(experts)), tuple(parts))
    if moe.num_shared:
        gate_up, down = _read_mlp(read, shared, hidden, width * moe.num_shared, keep)
        place(slice(len(experts), count), _apart(gate_up, down, moe.num_shared))
    return stacks


def _read_fp4_experts(read: _Reader, prefix: str, hidden: int, moe: MoEConfig) -> dict[str, Any]:
    """The routed experts in MXFP4, and the shared ones as one MLP of their own, block-scaled where they can be."""
    width, shared = moe.intermediate_size, f"{prefix}.shared_experts"

    def stacks_of(experts: range) -> Any:
        each = [_read_parts(read.fp4, f"{prefix}.experts.{expert}", hidden, width) for expert in experts]
        return jax.tree.map(lambda *parts: np.stack(parts), *each)

    gate_up, down = _put_stacks(read, prefix, moe, stacks_of)
    found: dict[str, Any] = {"gate_up": gate_up, "down": down}
    if moe.num_shared:
        keep = moe.num_shared * width % BLOCK == 0 and read.keeps(*mlp_names(shared))
        parts = _read_mlp(read, shared, hidden, moe.num_shared * width, keep)
        found |= zip(("shared_gate_up", "shared_down"), map(read.put_all, parts), strict=True)
    return found


def _put_stacks(read: _Reader, prefix: str, moe: MoEConfig, stacks_of: Callable[[range], Any]) -> Any:
    """A layer's two stacks of experts, on their device or mesh. stacks_of: reads the stacks of some experts."""
    if (mesh := read.mesh) is None:
        return read.put_all(stacks_of(range(moe.num_experts)))
    shards = mesh.shape[EXPERT] * mesh.shape[CONTEXT]
    stacks = put_shards(mesh, lambda shard: stacks_of(experts_of(moe, shards, shard)))
    for name in _expert_names(read, prefix, range(moe.num_experts)):
        read.mark(name)
    return stacks


def _empty_stack(count: int, shape: tuple[int, int], dtype: Any, keep: bool) -> Any:
    if not keep:
        return np.empty((count, *shape), dtype)
    blocks = tuple(-(-size // BLOCK) for size in shape)
    return BlockScaled(
        np.zeros((stack_size(count, *shape), *shape), jnp.float8_e4m3fn),  # type: ignore[arg-type]
        np.empty((count, *blocks), np.float32),  # type: ignore[arg-type]
    )


def _apart(gate_up: Any, down: Any, count: int) -> tuple[Any, Any]:
    """An MLP of width count * I, [2 count I, C] and [C, count I], as `count` MLPs of width I whose sum is that MLP."""

    def rows(weight: Array) -> Array:
        parts = weight.reshape(2, count, -1, weight.shape[1])
        return parts.swapaxes(0, 1).reshape(count, -1, weight.shape[1])

    def columns(weight: Array) -> Array:
        return weight.reshape(weight.shape[0], count, -1).swapaxes(0, 1)

    return jax.tree.map(rows, gate_up), jax.tree.map(columns, down)
