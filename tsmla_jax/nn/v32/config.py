"""The shape of one attention layer of DeepSeek-V3.2 or GLM-5, read from a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from tsmla_jax.nn.checkpoints.hf_config import hf_field, read_hf_config
from tsmla_jax.nn.checkpoints.known_fields import SHARING_TYPES, check_v32
from tsmla_jax.nn.mla.config import MLAConfig
from tsmla_kernels.contract.rules import static_int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class V32Config:
    """One attention layer of DeepSeek-V3.2 or of GLM-5, 5.1, 5.2 or 5.3.

    Attributes:
        mla: the attention itself; needs q_lora_rank, as the indexer's queries come from the normed low-rank query.
        index_n_heads: Hi, heads of the indexer.
        index_head_dim: Di, width of each of these heads; their first qk_rope_head_dim columns are rotated.
        index_topk: how many keys a token attends to at most.
        index_rope_interleave: whether the indexer rotates pairs 2i, 2i + 1 (GLM-5) or i, i + R / 2 (V3.2).
        has_indexer: whether the layer chooses keys. A layer that doesn't (GLM-5.2's IndexShare) has neither parameters
            of an indexer nor a cache of indexer keys, and attends to the keys that a layer before it chose.

    Raises:
        ValueError: a value is not legal.
    """

    mla: MLAConfig
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048
    index_rope_interleave: bool = False
    has_indexer: bool = True

    def __post_init__(self) -> None:
        for name in ("index_n_heads", "index_head_dim", "index_topk"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ValueError(f"V32Config: {name}: got {value!r}; legal: a positive integer")
        if self.mla.q_lora_rank is None:
            raise ValueError(
                "V32Config: mla.q_lora_rank: got None; legal: a positive integer, as the indexer's queries need it"
            )
        plain = {"query_scale": None, "scale_latents": False, "rotates": True, "output_gate": None}
        for name, legal in plain.items():
            if (got := getattr(self.mla, name)) != legal:
                raise ValueError(f"V32Config: mla.{name}: got {got}; legal: {legal}")
        if self.index_head_dim < self.mla.qk_rope_head_dim:
            raise ValueError(
                f"V32Config: index_head_dim: got {self.index_head_dim}; legal: at least qk_rope_head_dim ="
                f" {self.mla.qk_rope_head_dim}"
            )

    @property
    def index_rope_layout(self) -> str:
        """The order of the indexer's rotated columns, as the operations name it."""
        return "interleaved" if self.index_rope_interleave else "halves"

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path, layer: int = 0) -> V32Config:
        """Reads the attention's fields of a Hugging Face config.

        Args:
            source: the parsed config, or the path of a `config.json` or of the directory that holds it. Its model_type
                is deepseek_v32, glm_moe_dsa (GLM-5, 5.1, 5.2, 5.3) or absent, which means deepseek_v32.
            layer: the layer's index. It matters if layers differ: some layers of GLM-5.2 and 5.3 have no indexer
                (`layers_with_indexer`).

        Raises:
            ValueError: as `MLAConfig.from_hf`; or the indexer is not one of these models': layers of deepseek_v32 share
                a choice (index_topk_freq, indexer_types), the indexer's rope is the other model's, or an index_ field
                is unknown; or layer is negative. With glm_moe_dsa also as `layers_with_indexer`, or there is no such
                layer.
            TypeError: source is neither a mapping, a str nor a Path; or layer is no int.
        """
        fields, where = read_hf_config(source)
        layer = static_int("layer", layer)
        check_v32(fields, where)
        sizes = {name: hf_field(fields, name, int, where) for name in ("index_n_heads", "index_head_dim", "index_topk")}
        mla = MLAConfig.from_hf(fields if isinstance(source, Mapping) else source)
        if fields.get("model_type") not in SHARING_TYPES:
            return cls(mla, **sizes)
        chooses = layers_with_indexer(fields, where)
        if layer >= len(chooses):
            raise ValueError(f"layer: got {layer}; legal: 0 to {len(chooses) - 1}, as {where} says")
        return cls(mla, **sizes, index_rope_interleave=True, has_indexer=chooses[layer])


def layers_with_indexer(fields: Mapping[str, Any], where: str) -> tuple[bool, ...]:
    """Whether each layer of a GLM-5 model has an indexer; a layer without one attends to keys that a layer before it
    chose.

    The rule is transformers': indexer_types if given, else index_topk_pattern, else every index_topk_freq-th layer from
    layer index_skip_topk_offset - 1 on, and all layers before that one.

    Args:
        fields: the fields of a Hugging Face config that `check_v32` lets pass: illegal entries of the two lists are
            not noticed here.
        where: how an error names the config.

    Raises:
        ValueError: a field is missing or lacks an entry for some layer; a number is out of its range; two fields
            disagree; or the first layer has no indexer.
    """
    num_layers = hf_field(fields, "num_hidden_layers", int, where)
    if not 1 <= num_layers <= _MAX_LAYERS:
        raise ValueError(f"{where}: num_hidden_layers: got {num_layers}; legal: 1 to {_MAX_LAYERS}")
    found: dict[str, tuple[bool, ...]] = {}
    for name, full in (("indexer_types", "full"), ("index_topk_pattern", "F")):
        entries = fields.get(name)
        if entries is None:
            continue
        if len(entries) < num_layers:
            raise ValueError(f"{where}: {name}: got {len(entries)} entries; legal: one for each of {num_layers} layers")
        found[name] = tuple(entry in (full, "full") for entry in entries[:num_layers])
    freq = hf_field(fields, "index_topk_freq", int, where, default=1)
    offset = hf_field(fields, "index_skip_topk_offset", int, where, default=2)
    if freq < 1 or offset < 1:
        name, value = ("index_topk_freq", freq) if freq < 1 else ("index_skip_topk_offset", offset)
        raise ValueError(f"{where}: {name}: got {value}; legal: at least 1")
    if not found or (freq > 1 and fields.get("index_skip_topk_offset") is not None):
        found["index_topk_freq"] = tuple(max(i - offset + 1, 0) % freq == 0 for i in range(num_layers))
    (first, chooses), *others = found.items()
    for name, other in others:
        if other != chooses:
            layer = next(i for i in range(num_layers) if other[i] != chooses[i])
            raise ValueError(f"{where}: {first} and {name} disagree on whether layer {layer} has an indexer")
    if not chooses[0]:
        raise ValueError(f"{where}: {first}: the first layer has no indexer; legal: an indexer in this layer")
    return chooses


_MAX_LAYERS = 10_000
