"""The parameters of `tsmla_jax.generate.model`, turned into a Hugging Face checkpoint directory: `load_model` inverted.

Each expert has its own tensors, as in DeepSeek's checkpoints. jax keeps the host's copy of a stack of experts as long
as the parameter lives, so the host needs room for the stacks of all layers; experts in MXFP4 are taken one by one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from tsmla_jax.generate.config import ModelConfig, MoEConfig
from tsmla_jax.generate.loading import ATTENTION_WEIGHTS, expected_names, mlp_names, spelled_names
from tsmla_jax.generate.model import Params, folded_width
from tsmla_jax.nn import Checkpoint
from tsmla_jax.nn.checkpoints.checkpoint_writer import MAX_SHARD_BYTES, save_checkpoint
from tsmla_jax.nn.checkpoints.weights import check_dtype, open_checkpoint
from tsmla_jax.nn.mla.names import longcat_name
from tsmla_jax.nn.products.block_scaled import BlockScaled, stack_size
from tsmla_jax.nn.products.mxfp4 import MXFP4
from tsmla_jax.nn.v4.names import stored_name

_HEAD = "lm_head.weight"  # a checkpoint may store it beside the embedding that it is tied to
# Tensors that `load_model` keeps in f32 (or i32), whatever its `dtype` is.
_F32 = re.compile(r"\.(mlp|shortcut)\.gate\.(weight|e_score_correction_bias|tid2eid)$")
_F32_OF_V4 = re.compile(r"norm\.weight$|\.sinks$|\.position_bias$|\.hc_head\.|\.(attn|ffn)_hc\.")


def save_model(
    checkpoint_dir: str | Path,
    params: Params,
    config: ModelConfig,
    *,
    base: str | Path | Checkpoint | None = None,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes all parameters of a model as safetensors under the Hugging Face names; `load_model` can read them.

    Args:
      checkpoint_dir: the folder to write to, made if it is not there; it must not hold safetensors yet.
      params: the pytree described at `tsmla_jax.generate.model.Params`, whole in this process, on a mesh or not. It may
        be folded (`model.fold`).
      config: the model.
      base: a checkpoint of this model whose other files (config, tokenizer, chat template, code) and other tensors, as
        for multi-token prediction, are copied. None writes only the weights: you must then write config.json yourself.
      dtype: float32, bfloat16 or float16, for the parameters that the `dtype` of `load_model` applies to; None keeps
        each parameter's dtype. Block-scaled parameters stay block-scaled; experts in MXFP4 are widened, to bfloat16
        if `dtype` is None; and a table of experts is int64.
      max_shard_bytes: if the tensors take more bytes than this in all, they go to several files with an index. A file
        holds at least one tensor, however large.

    Raises:
      ValueError: params do not fit config, dtype is none of the three, or max_shard_bytes is below 1; the folder holds
        safetensors; base holds an int4 weight, lacks a tensor, has others that the model would use, has one in another
        shape, has one block-scaled where the parameter is not, or the other way round, or can't hold the scales in its
        own dtype.
      ImportError: the package safetensors is not installed (`pip install 'tsmla-jax[hf]'`).
    """
    check_dtype(dtype)
    if len(params["layers"]) != config.num_layers:
        raise ValueError(f"params: has {len(params['layers'])} layers; legal: the config's, {config.num_layers}")
    shape, wanted = params["embed"].shape, (config.vocab_size, config.hidden_size)
    if shape != wanted:
        raise ValueError(f"params: embed has shape {shape}; legal: {wanted}, the config's")
    given = None if base is None else open_checkpoint(base)
    if packed := next((name for name in (given.names() if given else ()) if name.endswith(".weight_packed")), None):
        raise ValueError(f"base: tensor {packed!r} is of an int4 weight; legal: a checkpoint that stores none")
    tensors = _stored_tensors(params, config, given, None if dtype is None else jnp.dtype(dtype))
    save_checkpoint(checkpoint_dir, tensors, base=given, max_shard_bytes=max_shard_bytes)


def _stored_tensors(
    params: Params, config: ModelConfig, base: Checkpoint | None, dtype: Any
) -> Iterator[tuple[str, Any]]:
    """Every tensor, by its name and in its dtype in the new checkpoint."""
    is_v4 = config.streams is not None
    spelled = {} if base is None else spelled_names(base, config)
    others = set() if base is None else expected_names(base, config)
    new_name = stored_name if is_v4 else longcat_name if "shortcut" in config.mlp_layers else str
    tensors: Iterable[tuple[str, Any]] = _model_tensors(params, config)
    if config.tie_word_embeddings and base is not None and _HEAD in base:
        tensors = itertools.chain(tensors, [(_HEAD, params["embed"])])
    for name, value in tensors:
        stored = new_name(name) if base is None else spelled.get(name, name)
        if base is not None:
            others -= {stored, base.scale_name(stored) or stored}
        kept = isinstance(value, BlockScaled) or _F32.search(name) or (is_v4 and _F32_OF_V4.search(name))
        yield stored, value if kept or dtype is None else np.asarray(value).astype(dtype)
    if base is not None:
        base.refuse_others(others)


def _model_tensors(params: Params, config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Every tensor, by the name that loading asks for: its name in transformers' modules, but each expert has tensors
    of its own, and LongCat-Flash's tensors are named as in DeepSeek's checkpoints."""
    yield "model.embed_tokens.weight", params["embed"]
    yield "model.norm.weight", params["norm"]
    if not config.tie_word_embeddings:
        yield _HEAD, params["lm_head"]
    if config.streams is not None:
        yield from ((f"model.hc_head.hc_{name}", value) for name, value in params["streams"].items())
    for index, layer in enumerate(params["layers"]):
        prefix, attention = f"model.layers.{index}", config.layer(index).attention
        yield f"{prefix}.input_layernorm.weight", layer["attention_norm"]
        yield f"{prefix}.post_attention_layernorm.weight", layer["mlp_norm"]
        tensors = ATTENTION_WEIGHTS[type(attention)].params_to_hf(attention, layer["attention"])
        yield from ((f"{prefix}.self_attn.{name}", value) for name, value in tensors.items())
        if "router" in layer["mlp"]:
            assert config.moe is not None
            yield from _moe_tensors(f"{prefix}.mlp", layer["mlp"], config.moe)
        else:
            mlp = _unpadded(f"{prefix}.mlp", layer["mlp"], config.intermediate_size)
            yield from _mlp_tensors(f"{prefix}.mlp", *mlp)
        if "shortcut" in layer:
            assert config.moe is not None
            yield from _moe_tensors(f"{prefix}.shortcut", layer["shortcut"], config.moe)
        if config.streams is not None:
            for streams, block in (("attention_streams", "attn_hc"), ("mlp_streams", "ffn_hc")):
                yield from ((f"{prefix}.{block}.{name}", value) for name, value in layer[streams].items())


def _unpadded(prefix: str, mlp: Mapping[str, Any], width: int) -> tuple[Any, Any]:
    """gate_up and down of the dense MLP named `prefix`, as they were before `model.fold` padded the width. ValueError
    if the width is neither the config's nor that width padded."""
    gate_up, down = mlp["gate_up"], mlp["down"]
    if down.shape[1] == width:
        return gate_up, down
    if down.shape[1] != folded_width(width):
        raise ValueError(f"params: {prefix} has width {down.shape[1]}; legal: the config's intermediate_size, {width}")
    hidden = down.shape[0]
    return gate_up.reshape(2, -1, hidden)[:, :width].reshape(-1, hidden), down[:, :width]


def _mlp_tensors(prefix: str, gate_up: Any, down: Any) -> Iterator[tuple[str, Any]]:
    """gate_up [2 I, C] and down [C, I] as three tensors."""
    halves = [jax.tree.map(lambda rows, half=half: np.split(np.asarray(rows), 2)[half], gate_up) for half in (0, 1)]
    yield from zip(mlp_names(prefix), (*halves, down), strict=True)


def _moe_tensors(prefix: str, mlp: Mapping[str, Any], moe: MoEConfig) -> Iterator[tuple[str, Any]]:
    yield f"{prefix}.gate.weight", mlp["router"]
    if "expert_table" in mlp:
        yield f"{prefix}.gate.tid2eid", np.asarray(mlp["expert_table"]).astype(np.int64)
    elif moe.routing == "noaux_tc":
        yield f"{prefix}.gate.e_score_correction_bias", mlp["correction_bias"]
    if "shared_down" in mlp or isinstance(mlp["down"], MXFP4):
        yield from _apart_tensors(prefix, mlp, moe)
        return
    routed, shared = zip(*(_experts(prefix, mlp[name], moe) for name in ("gate_up", "down")), strict=True)
    for expert, weights in enumerate(zip(*routed, strict=True)):
        yield from _mlp_tensors(f"{prefix}.experts.{expert}", *weights)
    if moe.num_shared:
        yield from _mlp_tensors(f"{prefix}.shared_experts", *_together(*shared))


def _apart_tensors(prefix: str, mlp: Mapping[str, Any], moe: MoEConfig) -> Iterator[tuple[str, Any]]:
    """The tensors of a layer with experts in MXFP4, which are widened to bfloat16, and with shared experts as separate
    parameters.
    """
    for expert in range(moe.num_experts):
        own = (jax.tree.map(lambda array, e=expert: array[e], mlp[name]) for name in ("gate_up", "down"))
        wide = (np.asarray(weight.widened(jnp.bfloat16)) for weight in own)
        yield from _mlp_tensors(f"{prefix}.experts.{expert}", *wide)
    if moe.num_shared:
        yield from _mlp_tensors(f"{prefix}.shared_experts", mlp["shared_gate_up"], mlp["shared_down"])


def _parts_of(values: Any, count: int) -> int:
    """The least number of stacks, each with its own padding (`stack_size`), that the values of `count` weights may
    consist of; 0 if no number fits. Stacks without padding count as 1, however many they are.
    """
    parts = (parts for parts in range(1, count + 1) if count % parts == 0)
    return next((n for n in parts if n * stack_size(count // n, *values.shape[1:]) == values.shape[0]), 0)


def _experts(prefix: str, stack: Any, moe: MoEConfig) -> tuple[list[Any], Any]:
    """The routed experts of a stack, [M, K] each, and the stack of the shared experts, on the host. A stack that is
    split over devices has the shared experts once in each part, after the routed ones.
    """
    stack = jax.tree.map(np.asarray, stack)
    length = (stack.scales if isinstance(stack, BlockScaled) else stack).shape[0]
    if moe.num_shared:
        shards = (length - moe.num_experts) // moe.num_shared
    else:  # the parts can be found only by the unused values at the end of each
        shards = _parts_of(stack.values, moe.num_experts) if isinstance(stack, BlockScaled) else 1
    if shards < 1 or moe.num_experts % shards or length != moe.num_experts + shards * moe.num_shared:
        raise ValueError(
            f"params: {prefix} has {length} experts; legal: {moe.num_experts} routed ones, and {moe.num_shared} shared "
            f"ones after the routed ones of each device"
        )

    def apart(array: Any) -> Any:
        # A block-scaled stack may hold more matrices than it has experts (`stack_size`).
        parts = array.reshape(shards, -1, *array.shape[1:])
        each = moe.num_experts // shards
        routed = parts[:, :each].reshape(-1, *array.shape[1:])
        return routed, parts[0, each : each + moe.num_shared]

    if not isinstance(stack, BlockScaled):
        routed, shared = apart(stack)
        return list(routed), shared
    (values, shared_values), (scales, shared_scales) = apart(stack.values), apart(stack.scales)
    return [BlockScaled(*one) for one in zip(values, scales, strict=True)], BlockScaled(shared_values, shared_scales)


def _together(gate_up: Any, down: Any) -> tuple[Any, Any]:
    """S MLPs, [S, 2 I, C] and [S, C, I], as one MLP of width S I, which returns the sum of their results."""

    def rows(weight: Any) -> Any:
        return weight.reshape(len(weight), 2, -1, weight.shape[2]).swapaxes(0, 1).reshape(-1, weight.shape[2])

    def columns(weight: Any) -> Any:
        return weight.swapaxes(0, 1).reshape(weight.shape[1], -1)

    return jax.tree.map(rows, gate_up), jax.tree.map(columns, down)
