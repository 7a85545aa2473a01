"""Checks that refuse a checkpoint whose weights are quantised in a format that isn't read.

fp8 with scales for blocks or for whole matrices, and fp4 and int4 with scales for 32 values of a row are read
(`Checkpoint.read`). Other formats are found by the tensors' names and dtypes, and for a whole model by config.json
first. A single layer may be plain in a model of quantised experts, so config.json is not asked about it.
"""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from tsmla_jax.nn.checkpoints.checkpoint import Checkpoint, CheckpointError
from tsmla_jax.nn.checkpoints.dequantise import INT4_GROUP
from tsmla_jax.nn.checkpoints.hf_config import read_optional_config
from tsmla_jax.nn.checkpoints.known_fields import Legal, check_values

# Fields of config.json that describe a quantisation, and fields in them that name a format beside quant_method.
_GROUPS = ("quantization_config", "compression_config", "quantization")
_METHODS = ("quant_algo", "quant_type", "format", "config_groups", "bits", "load_in_4bit", "load_in_8bit")
_READ = (
    "'fp8' with scales for blocks or whole matrices, DeepSeek-V4's fp4, compressed-tensors' pack-quantized int4, or"
    " weights that are not quantised"
)
# What compressed-tensors says of the int4 weights that are read.
_INT4: Legal = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group",),
    "group_size": (INT4_GROUP,),
    "dynamic": (False,),
    "actorder": (),
}
# Endings of the names of tensors that a format has beside the weights or in their place.
_TENSORS = re.compile(
    r"[._](weight_(packed|shape|scale|scale_2|scales|global_scale|zero_point|g_idx|offset|format)"
    r"|(input|output|activation)_(scale|global_scale|zero_point|offset)|qweight|qzeros|scales|g_idx|SCB|SCB_.*|codes"
    r"|codebooks|deq_scale|quant_bias|blocks|absmax|nested_absmax|quant_map|nested_quant_map|quant_state\..*)$"
)


def refuse_config(checkpoint: Checkpoint) -> None:
    """CheckpointError if config.json, or the hf_quant_config.json of modelopt, names a format that isn't read."""
    config, where = read_optional_config(checkpoint.directory / "config.json")
    text = config.get("text_config")
    for fields in (config, text if isinstance(text, Mapping) else {}):
        for group in _GROUPS:
            _refuse_group(fields.get(group), f"{where}: {group}")
    beside, where = read_optional_config(checkpoint.directory / "hf_quant_config.json")
    _refuse_group(beside.get("quantization"), f"{where}: quantization")


def _refuse_group(group: Any, where: str) -> None:
    if not group:
        return
    if not isinstance(group, Mapping):
        raise CheckpointError(f"{where}: got {group!r:.60}; legal: an object or null")
    details = [f"{name} {group[name]!r:.60}" for name in _METHODS if group.get(name)]
    method = group.get("quant_method")
    if method == "compressed-tensors" and group.get("format") == "pack-quantized":
        _refuse_unlike_int4(group, where)
        return
    if method not in (None, "fp8") or (method is None and details):
        what = f"quant_method: got {method!r:.60}" + (f" with {details[0]}" if details else "")
        raise CheckpointError(f"{where}: {what}; legal: {_READ}")
    # Activations are not quantised here, so their fixed scales don't matter. They are accepted where config.json says
    # that a weight has one scale for the whole matrix.
    fixed = group.get("activation_scheme") == "static" and group.get("weight_block_size", 0) is None
    if group.get("activation_scheme") not in (None, "dynamic") and not fixed:
        raise CheckpointError(
            f"{where}: activation_scheme: got {group['activation_scheme']!r:.60}; legal: 'dynamic', null, or"
            " 'static' with a weight_block_size of null"
        )


def _refuse_unlike_int4(group: Mapping[str, Any], where: str) -> None:
    """CheckpointError for weights of compressed-tensors that aren't symmetric int4 with a scale for 32 values."""
    try:
        check_values(
            group, where, {"quantization_status": ("compressed",), "kv_cache_scheme": (), "transform_config": ()}
        )
        for name, scheme in _object(group, "config_groups", where, default={"config_groups": {}}).items():
            one = f"{where}: config_groups.{name}"
            if not isinstance(scheme, Mapping):
                raise ValueError(f"{one}: got {scheme!r:.60}; legal: an object")
            check_values(
                scheme, one, {"input_activations": (), "output_activations": (), "format": ("pack-quantized",)}
            )
            weights = _object(scheme, "weights", one)
            if missing := [name for name in ("num_bits", "type", "group_size") if weights.get(name) is None]:
                raise ValueError(f"{one}.weights: field {missing[0]!r} is missing")
            check_values(weights, f"{one}.weights", _INT4)
    except ValueError as error:
        raise CheckpointError(
            f"{error}; of compressed-tensors' formats, only int4 weights with a scale for 32 values are read"
        ) from None


def _object(
    fields: Mapping[str, Any], name: str, where: str, default: Mapping[str, Any] = MappingProxyType({})
) -> Mapping[str, Any]:
    """An object among fields, `default` if it is absent, null, false, 0 or empty; ValueError for anything else."""
    found = fields.get(name) or default
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}: {name}: got {found!r:.60}; legal: an object, or null")
    return found


def is_activation_scale(name: str) -> bool:
    """Whether a tensor is the fixed scale of a product's activations. Such scales are ignored: activations are not
    quantised here."""
    return name.endswith(("_activation_scale", ".activation_scale"))


def refuse_tensors(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """CheckpointError that names a tensor, if there is one of a format that isn't read.

    Args:
        checkpoint: the checkpoint; only its headers are read.
        names: the names of the tensors that a model or a layer is made of.
    """
    others = []
    for name in sorted(names):
        if checkpoint.is_int4(name):
            continue
        info = checkpoint.info(name)
        is_integer = not jnp.issubdtype(info.dtype, jnp.floating) and not checkpoint.is_fp4(name)
        if is_integer and (checkpoint.scale_name(name) or f"{name}_scale" in checkpoint):
            raise checkpoint.unlike(name, "a weight")
        if _TENSORS.search(name):
            others.append(name)
    if others:
        raise CheckpointError(
            f"{checkpoint.info(others[0]).file}: tensor {others[0]!r} is of quantised weights in a format that isn't"
            f" read; legal: {_READ}"
        )
