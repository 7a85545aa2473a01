"""The shape of one DeepSeek-V4 attention layer, its parameters, and both from Hugging Face's config and names.

Axes: E hidden width, H heads, D head width, R rope width, G output groups, Hi and Di heads and width of the indexer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from tsmla_jax.nn.checkpoint import Checkpoint
from tsmla_jax.nn.config import YarnConfig, hf_field, read_hf_config, rope_fields
from tsmla_jax.nn.deepseek_v4_names import stored_names

Kind = Literal["sliding", "csa", "hca"]
_KINDS: dict[str, Kind] = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "sliding_window",
    "o_groups",
    "o_lora_rank",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
)
_RATIOS: dict[Kind, int] = {"sliding": 0, "csa": 4, "hca": 128}


@dataclasses.dataclass(frozen=True)
class V4Config:
    """One V4 attention layer.

    Attributes:
        kind: "sliding" (window alone), "csa" (overlapping windows, an indexer chooses) or "hca" (all entries seen).
        ratio: tokens a compressed entry; 0 for "sliding".
        hidden_size, num_attention_heads, head_dim, rope_dim, q_lora_rank: E, H, D, R (the last columns of D) and rank.
        sliding_window: tokens a query sees as they are, its own included.
        o_groups, o_lora_rank: of the grouped output projection; H is a multiple of o_groups.
        index_n_heads, index_head_dim, index_topk: of a csa layer's indexer.
        rope_theta, yarn: of this layer: plain for sliding layers, the compressor's for the others.
        rms_norm_eps: of every norm.
    """

    kind: Kind
    ratio: int
    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    head_dim: int = 512
    rope_dim: int = 64
    sliding_window: int = 128
    o_groups: int = 8
    o_lora_rank: int = 1024
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    rope_theta: float = 10000.0
    yarn: YarnConfig | None = None
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.kind not in _RATIOS:
            raise ValueError(f"V4Config: {self.kind=} must be one of {', '.join(_RATIOS)}")
        if (self.ratio == 0) != (self.kind == "sliding") or self.ratio < 0:
            raise ValueError(f"V4Config: {self.ratio=} must be 0 for a sliding layer and positive for the others")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and field.name != "ratio" and (type(value) is not int or value <= 0):
                raise ValueError(f"V4Config: {field.name}={value!r} must be a positive integer")
        if self.rope_dim % 2 or self.rope_dim > min(self.head_dim, self.index_head_dim):
            raise ValueError(f"V4Config: {self.rope_dim=} must be even and at most head_dim and index_head_dim")
        if self.num_attention_heads % self.o_groups:
            raise ValueError(f"V4Config: {self.num_attention_heads=} must be a multiple of {self.o_groups=}")

    @property
    def overlap(self) -> bool:
        """Whether compressor rows hold two series and entries pool two windows."""
        return self.kind == "csa"

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path, layer: int) -> V4Config:
        """Layer `layer` of a Hugging Face config, as transformers writes it or as the checkpoints first had it.

        Raises ValueError naming the field (and the file, when `source` is a path) that is missing or not legal.
        """
        fields, where = read_hf_config(source)
        sizes = {name: hf_field(fields, name, int, where) for name in _SIZES}
        kind = _layer_kind(fields, where, layer)
        factor = hf_field(fields, "partial_rotary_factor", float, where, default=64 / 512)
        rope_dim = hf_field(fields, "qk_rope_head_dim", int, where, default=int(sizes["head_dim"] * factor))
        rates = hf_field(fields, "compress_rates", dict, where, default={})
        legacy = {"csa": "compress_rate_csa", "hca": "compress_rate_hca"}
        ratio = 0
        if kind != "sliding":
            long_name = next(name for name, short in _KINDS.items() if short == kind)
            ratio = hf_field(rates, long_name, int, where, default=_RATIOS[kind])
            ratio = hf_field(fields, legacy[kind], int, where, default=ratio)
        theta, yarn = _layer_rope(fields, where, kind)
        eps = hf_field(fields, "rms_norm_eps", float, where, default=1e-6)
        try:
            return cls(
                kind=kind, ratio=ratio, rope_dim=rope_dim, rope_theta=theta, yarn=yarn, rms_norm_eps=eps, **sizes
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def _layer_kind(fields: Mapping[str, Any], where: str, layer: int) -> Kind:
    types, ratios = fields.get("layer_types"), fields.get("compress_ratios")
    if not isinstance(types, list) and not isinstance(ratios, list):
        raise ValueError(f"{where}: field 'layer_types' (or 'compress_ratios') must be a list")
    name = "layer_types" if isinstance(types, list) else "compress_ratios"
    entries: list[Any] = types if isinstance(types, list) else cast(list[Any], ratios)
    if not 0 <= layer < len(entries):
        raise ValueError(f"layer: got {layer}; legal: 0 to {len(entries) - 1}, the entries of {name!r} in {where}")
    known: dict[Any, Kind] = _KINDS if isinstance(types, list) else {ratio: kind for kind, ratio in _RATIOS.items()}
    if entries[layer] not in known:
        raise ValueError(
            f"{where}: field {name!r}: layer {layer} has type {entries[layer]!r}; legal: {', '.join(map(str, known))}"
        )
    return known[entries[layer]]


def _layer_rope(fields: Mapping[str, Any], where: str, kind: Kind) -> tuple[float, YarnConfig | None]:
    """theta and yarn of a layer; only layers with a compressor are extended, and their cos and sin are not scaled."""
    label = "main" if kind == "sliding" else "compress"
    parameters = hf_field(fields, "rope_parameters", dict, where, default=None)
    if parameters is None:
        parameters = hf_field(fields, "rope_scaling", dict, where, default={})
    if isinstance(parameters.get(label), dict):
        own = dict(parameters[label])
    else:
        own = {} if kind == "sliding" else dict(parameters)
        name, default = ("rope_theta", 10000.0) if kind == "sliding" else ("compress_rope_theta", 160000.0)
        own["rope_theta"] = hf_field(fields, name, float, where, default=default)
    own.pop("partial_rotary_factor", None)  # it is what rope_dim comes from
    theta, yarn = rope_fields({"rope_parameters": own}, where)
    if yarn is not None and yarn.attention_factor is None:
        yarn = dataclasses.replace(yarn, attention_factor=1.0)
    return theta, yarn


def v4_param_shapes(config: V4Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter.

    q_a_proj [E, rank], q_a_norm [rank], q_b_proj [rank, H, D], kv_proj [E, D], kv_norm [D], sinks [H],
    o_a_proj [G, H D / G, o_rank], o_b_proj [G o_rank, E]. With a compressor, of row width W (D, or 2 D when windows
    overlap): compressor_kv_proj and compressor_gate_proj [E, W], compressor_position_bias [ratio, W] and
    compressor_kv_norm [D]. With an indexer the same four as indexer_*, D replaced by Di, and indexer_q_b_proj
    [rank, Hi, Di] and indexer_weights_proj [E, Hi].
    """
    heads, width, hidden, rank = config.num_attention_heads, config.head_dim, config.hidden_size, config.q_lora_rank
    groups = config.o_groups
    shapes: dict[str, tuple[int, ...]] = {
        "q_a_proj": (hidden, rank),
        "q_a_norm": (rank,),
        "q_b_proj": (rank, heads, width),
        "kv_proj": (hidden, width),
        "kv_norm": (width,),
        "sinks": (heads,),
        "o_a_proj": (groups, heads * width // groups, config.o_lora_rank),
        "o_b_proj": (groups * config.o_lora_rank, hidden),
    }
    for name, channels in compressors(config):
        columns = channels * (2 if config.overlap else 1)
        shapes[f"{name}_kv_proj"] = (hidden, columns)
        shapes[f"{name}_gate_proj"] = (hidden, columns)
        shapes[f"{name}_position_bias"] = (config.ratio, columns)
        shapes[f"{name}_kv_norm"] = (channels,)
    if config.kind == "csa":
        shapes["indexer_q_b_proj"] = (rank, config.index_n_heads, config.index_head_dim)
        shapes["indexer_weights_proj"] = (hidden, config.index_n_heads)
    return shapes


def v4_param_specs(config: V4Config, heads_axis: str | None) -> dict[str, PartitionSpec]:
    """How to split the parameters over the heads: `heads_axis` names the mesh axis, whose size divides o_groups.

    Heads, sinks and output groups are split; the shared latent, the compressors and the indexer are replicated, as the
    caches are. Under `shard_map`, `attend` returns the partial sum over the local heads, for the caller to psum.
    """
    per_head = {
        "q_b_proj": PartitionSpec(None, heads_axis, None),
        "sinks": PartitionSpec(heads_axis),
        "o_a_proj": PartitionSpec(heads_axis, None, None),
        "o_b_proj": PartitionSpec(heads_axis, None),
    }
    return {name: per_head.get(name, PartitionSpec()) for name in v4_param_shapes(config)}


def compressors(config: V4Config) -> list[tuple[str, int]]:
    """Name and channels of the layer's compressors."""
    both = [("compressor", config.head_dim), ("indexer", config.index_head_dim)]
    return both[: {"sliding": 0, "hca": 1, "csa": 2}[config.kind]]


_HF_PREFIX = {"compressor": "compressor.", "indexer": "compressor.indexer."}


def v4_hf_shapes(config: V4Config) -> dict[str, tuple[int, ...]]:
    """Names below `self_attn.` and shapes ([out, in]) of one layer in a Hugging Face checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in v4_param_shapes(config).items():
        hf_name = _hf_name(name)
        if len(shape) == 1 or name.endswith("position_bias"):
            shapes[hf_name] = shape
        elif name == "o_a_proj":
            groups, inner, rank = shape
            shapes[hf_name] = (groups * rank, inner)
        else:
            shapes[hf_name] = (int(np.prod(shape[1:])), shape[0])
    return shapes


def _hf_name(name: str) -> str:
    owner, _, rest = name.partition("_")
    if owner not in _HF_PREFIX:
        return name if name == "sinks" else f"{name}.weight"
    if rest == "position_bias":
        return f"{_HF_PREFIX[owner]}{rest}"
    return f"{_HF_PREFIX[owner]}{'scorer.' if rest == 'weights_proj' else ''}{rest}.weight"


def v4_params_from_hf(
    config: V4Config, tensors: Mapping[str, Any], dtype: DTypeLike | None = None
) -> dict[str, jax.Array]:
    """Parameters from the arrays of one layer by their name below `self_attn.`.

    Raises ValueError for a tensor that is missing or has another shape than `v4_hf_shapes` says.
    """
    hf_shapes, params = v4_hf_shapes(config), {}
    for name, shape in v4_param_shapes(config).items():
        hf_name = _hf_name(name)
        if hf_name not in tensors:
            raise ValueError(f"tensor {hf_name!r} is missing")
        array = np.asarray(tensors[hf_name])
        if array.shape != hf_shapes[hf_name]:
            raise ValueError(f"tensor {hf_name!r} must have shape {hf_shapes[hf_name]}, got {array.shape}")
        if name == "o_a_proj":
            groups, inner, rank = shape
            array = array.reshape(groups, rank, inner).transpose(0, 2, 1)
        elif not (len(shape) == 1 or name.endswith("position_bias")):
            array = array.T.reshape(shape)
        params[name] = jnp.asarray(array, dtype=dtype)
    return params


def load_hf_v4_attention(
    checkpoint_dir: str | Path | Checkpoint,
    layer: int,
    *,
    config: V4Config | None = None,
    dtype: DTypeLike | None = None,
    prefix: str = "model.layers.{layer}.self_attn.",
) -> dict[str, jax.Array]:
    """The parameters of one V4 layer from safetensors; arguments and errors of `load_hf_attention`.

    Names may be spelled in any of the ways of `deepseek_v4_names`.
    """
    if layer < 0:
        raise ValueError(f"{layer=} must be >= 0")
    checkpoint = checkpoint_dir if isinstance(checkpoint_dir, Checkpoint) else Checkpoint(checkpoint_dir)
    config = V4Config.from_hf(checkpoint.directory, layer) if config is None else config
    start = prefix.format(layer=layer)
    stored = stored_names(checkpoint)
    tensors = {
        name: checkpoint.read(stored.get(start + name, start + name), shape=shape, dtype=dtype)
        for name, shape in v4_hf_shapes(config).items()
    }
    return v4_params_from_hf(config, tensors)
