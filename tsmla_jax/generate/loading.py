"""A Hugging Face checkpoint directory, turned into the parameters of `tsmla_jax.generate.model`.

Tensors are read one at a time; on the host there is never more than one layer beside the memory map. Block-scaled fp8
weights come dequantised to the dtype asked for.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from tsmla_jax.generate.config import ModelConfig
from tsmla_jax.generate.model import Params
from tsmla_jax.nn import Checkpoint, hf_attention_shapes, params_from_hf

Read = Callable[[str, Sequence[int]], np.ndarray[Any, Any]]


class ProgressBar:
    """One line on stderr that fills up: tqdm's where it is installed, a plain one elsewhere; silent off a terminal."""

    def __init__(self, total: int, label: str, *, enabled: bool = True) -> None:
        """
        Args:
          total: steps.
          label: what is being counted.
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
        """One more is done."""
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


def load_model(
    checkpoint_dir: str | Path, config: ModelConfig, *, dtype: Any | None = None, progress: bool = False
) -> Params:
    """All parameters of a checkpoint; layers past `config.num_layers` (multi-token prediction) are left alone.

    Args:
      checkpoint_dir: the directory, with one safetensors file or shards and their index.
      config: the model, as `ModelConfig.from_hf(checkpoint_dir)` reads it.
      dtype: of the parameters; None takes the config's. The router and its bias stay f32, where routing happens.
      progress: show a progress bar on stderr.

    Returns:
      the pytree described at `tsmla_jax.generate.model.Params`.

    Raises:
      ValueError: a tensor is missing or misshapen or a file is truncated; the text names the file and the tensor.
      ImportError: the package safetensors is not installed (`pip install 'tsmla-jax[hf]'`).
    """
    dtype = jnp.dtype(config.dtype if dtype is None else dtype)
    checkpoint = Checkpoint(checkpoint_dir)
    bar = ProgressBar(_tensor_count(config), "loading", enabled=progress)

    def read(name: str, shape: Sequence[int], dtype: Any = dtype) -> np.ndarray[Any, Any]:
        value = checkpoint.read(name, shape=shape, dtype=dtype)
        bar.step()
        return value

    hidden = (config.hidden_size,)
    try:
        params: dict[str, Any] = {
            "embed": jnp.asarray(read("model.embed_tokens.weight", (config.vocab_size, *hidden))),
            "norm": jnp.asarray(read("model.norm.weight", hidden)),
            "layers": [],
        }
        if not config.tie_word_embeddings:
            params["lm_head"] = jnp.asarray(read("lm_head.weight", (config.vocab_size, *hidden)))
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}"
            attention = {
                name: read(f"{prefix}.self_attn.{name}", shape)
                for name, shape in hf_attention_shapes(config.attention).items()
            }
            layer = {
                "attention_norm": jnp.asarray(read(f"{prefix}.input_layernorm.weight", hidden)),
                "attention": params_from_hf(config.attention, attention),
                "mlp_norm": jnp.asarray(read(f"{prefix}.post_attention_layernorm.weight", hidden)),
            }
            if config.is_moe_layer(index):
                layer["mlp"] = _read_moe(read, f"{prefix}.mlp", config, dtype)
            else:
                gate_up, down = _read_mlp(read, f"{prefix}.mlp", config.hidden_size, config.intermediate_size)
                layer["mlp"] = {"gate_up": jnp.asarray(gate_up), "down": jnp.asarray(down)}
            params["layers"].append(layer)
    finally:
        bar.close()
    return params


def _tensor_count(config: ModelConfig) -> int:
    count = 2 + (not config.tie_word_embeddings)
    for layer in range(config.num_layers):
        count += 2 + len(hf_attention_shapes(config.attention))
        if config.is_moe_layer(layer):
            assert config.moe is not None
            count += (
                1 + (config.moe.routing == "noaux_tc") + 3 * config.moe.num_experts + 3 * bool(config.moe.num_shared)
            )
        else:
            count += 3
    return count


def _read_mlp(read: Read, prefix: str, hidden: int, width: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """gate and up in one array [2 I, C], and down [C, I]."""
    gate = read(f"{prefix}.gate_proj.weight", (width, hidden))
    up = read(f"{prefix}.up_proj.weight", (width, hidden))
    return np.concatenate([gate, up]), read(f"{prefix}.down_proj.weight", (hidden, width))


def _read_moe(
    read: Callable[..., np.ndarray[Any, Any]], prefix: str, config: ModelConfig, dtype: Any
) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None
    hidden, width = config.hidden_size, moe.intermediate_size
    params = {"router": jnp.asarray(read(f"{prefix}.gate.weight", (moe.num_experts, hidden), np.float32))}
    if moe.routing == "noaux_tc":
        bias = read(f"{prefix}.gate.e_score_correction_bias", (moe.num_experts,), np.float32)
        params["correction_bias"] = jnp.asarray(bias)
    gate_up = np.empty((moe.num_experts, 2 * width, hidden), dtype)
    down = np.empty((moe.num_experts, hidden, width), dtype)
    for expert in range(moe.num_experts):
        gate_up[expert], down[expert] = _read_mlp(read, f"{prefix}.experts.{expert}", hidden, width)
    params["gate_up"], params["down"] = jnp.asarray(gate_up), jnp.asarray(down)
    if moe.num_shared:
        shared = _read_mlp(read, f"{prefix}.shared_experts", hidden, width * moe.num_shared)
        params["shared_gate_up"], params["shared_down"] = (jnp.asarray(weight) for weight in shared)
    return params
