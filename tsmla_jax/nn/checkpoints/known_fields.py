"""Model types and fields of a Hugging Face config that describe other arithmetic than DeepSeek's, refused by name.

Several models store their layers under DeepSeek's names and in DeepSeek's sizes, and multiply, rotate or choose keys in
another way. A config is read only if its model type, where it names one, is one whose layer is computed here, and if
each field that speaks of attention is known, or says that the thing it is named after is absent.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

Legal = Mapping[str, tuple[Any, ...]]
"""Names of fields, and the values beside null that each may have."""

MLA_TYPES = (
    "axk1",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
    "kimi_k3",
    "kimi_linear",
    "longcat_flash",
    "mistral4",
    "sarvam_mla",
    "youtu",
)
"""Model types that have layers of DeepSeek-V2's attention, some of them with changes: V32_TYPES have an indexer,
SCALED_TYPES and LONGCAT_TYPES factors, GATES gates, and NOPE_TYPES rotate nothing."""
SCALED_TYPES = ("mistral4",)
"""The types of MLA_TYPES whose queries may have a factor by their position."""
LONGCAT_TYPES = ("longcat_flash",)
"""The types of MLA_TYPES whose queries and latents are multiplied by constants."""
NOPE_TYPES = ("kimi_k3", "kimi_linear")
"""The types of MLA_TYPES that rotate nothing."""
GATES = {"bailing_hybrid": "head", "kimi_k3": "element"}
"""The types of MLA_TYPES whose results a gate multiplies, each with its `MLAConfig.output_gate`."""
HYBRID_TYPES = ("bailing_hybrid", *NOPE_TYPES)
"""The types of MLA_TYPES whose other layers have linear attention."""
V32_TYPES = ("deepseek_v32", "glm_moe_dsa")
SHARING_TYPES = ("glm_moe_dsa",)
"""The types of V32_TYPES whose layers may share a choice of keys; their indexer's rope is interleaved."""
V4_TYPES = ("deepseek_v4",)

_FULL = ("full", "F")
# Which layers choose keys, and how: fields that engines read from configs of V3.2 and V4.
_CHOICE: Legal = {
    "cli_factor": (1,),
    "index_k_norm_type": ("layer",),
    "index_kpool": (1,),
    "index_topk_freq": (1,),
    "indexer_rope_interleave": (False,),
}
_CHOICE_LAYERS: Legal = {"index_topk_pattern": _FULL, "indexer_types": _FULL}
# The same in configs of GLM-5, where index_topk_freq may be above 1. rope_interleave is here because transformers
# rotates interleaved pairs whatever it says.
_SHARED_CHOICE: Legal = {
    "cli_factor": (1,),
    "index_k_norm_type": ("layer",),
    "index_kpool": (1,),
    "indexer_rope_interleave": (True,),
    "rope_interleave": (True,),
}
_SHARED_LAYERS: Legal = {"index_topk_pattern": ("F", "full", "S", "shared"), "indexer_types": ("full", "shared")}
# Fields whose values are not checked here, except that of index_topk_freq, which is checked in all configs but GLM-5's.
# index_skip_topk_offset says nothing unless layers share a choice.
_CHOICE_KNOWN = ("index_topk_freq", "index_head_dim", "index_n_heads", "index_skip_topk_offset", "index_topk")

_MLA: Legal = {
    "is_causal": (True,),
    "layer_group_size": (1,),
    "layers_block_type": (),
    "sliding_window": (),
    "use_bidirectional_attention": (False,),
    "use_mla": (True,),
}
# transformers multiplies by both factors whatever the two mla_scale fields say.
_LONGCAT: Legal = {
    "attention_method": ("MLA",),
    "mla_scale_kv_lora": (True,),
    "mla_scale_q_lora": (True,),
    "rope_interleave": (True,),
}
# Fields of layers with linear attention; the field by which NOPE_TYPES say that they rotate nothing; and the field of
# Kimi-K3's gate.
_HYBRID_PARTS = re.compile(r"^(kda|linear)_|^layer_group_size$")
_NOPE: Legal = {"mla_use_nope": (True,)}
_GATED: Legal = {"mla_use_output_gate": (True,)}
_MLA_KNOWN = (
    "attention_bias",
    "kv_lora_rank",
    "num_attention_heads",
    "partial_rotary_factor",
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "rope_interleave",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "routed_scaling_factor",
)
_V4: Legal = {
    "attention_bias": (False,),
    "candidate_source_layer_id": (-1,),
    "engram_max_ngram_size": (1,),
    "is_causal": (True,),
    "num_key_value_heads": (1,),
    "q_head_norm": (True,),
}
_V4_KNOWN = (
    *_MLA_KNOWN,
    "compress_rate_csa",
    "compress_rate_hca",
    "compress_rates",
    "compress_ratios",
    "compress_rope_theta",
    "engram_pad_token_id",
)

# A part of a name that says the field is about attention, or about a factor.
_ATTENTION_PARTS = re.compile(
    r"(^|_)(attention|attn|candidate|engram|gate|gated|index|indexer|kda|kv|linear|mla|multiplier|nope|qk|qkv|rope"
    r"|rotary|scale|scaling|sink|sinks|softcap|softcapping|softmax|swa)(_|$)|^compress_"
)
# A part of a name that says the field is about training, drafts, other input than text, or the way to compute.
_OTHER_PARTS = re.compile(
    r"(^|_)(audio|aux|draft|dropout|dspark|eagle|flash|implementation|initializer|kv_cache|loss|mtp|nextn|vision)(_|$)"
)


def check_mla(fields: Mapping[str, Any], where: str) -> None:
    """ValueError that names the field, if a config describes attention that isn't one of MLA_TYPES'.

    Args:
        fields: the config's fields. Without a model_type, the other fields decide.
        where: the config's name in an error.
    """
    check_model_type(fields, where, MLA_TYPES)
    has_indexer = fields.get("model_type") in (None, *V32_TYPES)
    if fields.get("use_sliding_window") is False:
        fields = {**fields, "sliding_window": None}
    hybrid = fields.get("model_type") in HYBRID_TYPES
    if hybrid:
        fields = {name: value for name, value in fields.items() if not _HYBRID_PARTS.search(name)}
    check_values(fields, where, _MLA)
    kinds: dict[str | None, tuple[str, ...]] = {None: ("full_attention", "indexed_attention")}
    kinds |= dict.fromkeys(V32_TYPES, ("indexed_attention",))
    kinds |= dict.fromkeys(HYBRID_TYPES, ("full_attention", "linear_attention"))
    layers: Legal = {"layer_types": kinds.get(fields.get("model_type"), ("full_attention",))}
    if has_indexer:
        shares = fields.get("model_type") in SHARING_TYPES
        check_values(fields, where, _SHARED_CHOICE if shares else _CHOICE)
        layers = {**layers, **(_SHARED_LAYERS if shares else _CHOICE_LAYERS)}
    _check_layers(fields, where, layers)
    known = (*_CHOICE, *_CHOICE_LAYERS, *_CHOICE_KNOWN) if has_indexer else ()
    if fields.get("model_type") in LONGCAT_TYPES:
        check_values(fields, where, _LONGCAT)
        known = tuple(_LONGCAT)
    if fields.get("model_type") in NOPE_TYPES:
        check_values(fields, where, _NOPE)
        known = tuple(_NOPE)
    if fields.get("model_type") == "kimi_k3":
        check_values(fields, where, _GATED)
        known = (*_NOPE, *_GATED)
    refuse_named(fields, where, _ATTENTION_PARTS, (*_MLA, *_MLA_KNOWN, *known))


def check_v32(fields: Mapping[str, Any], where: str) -> None:
    """ValueError that names the field, if a config describes attention other than V3.2's and GLM-5's. Arguments: as in
    `check_mla`."""
    check_model_type(fields, where, V32_TYPES)
    check_mla(fields, where)


def check_v4(fields: Mapping[str, Any], where: str) -> None:
    """ValueError that names the field, if a config describes attention other than DeepSeek-V4's. Arguments: as in
    `check_mla`."""
    check_model_type(fields, where, V4_TYPES)
    check_values(fields, where, _V4)
    check_values(fields, where, _CHOICE)
    _check_layers(fields, where, _CHOICE_LAYERS)
    refuse_named(fields, where, _ATTENTION_PARTS, (*_V4, *_V4_KNOWN, *_CHOICE, *_CHOICE_LAYERS, *_CHOICE_KNOWN))
    check_aliases(fields, where, {"window_size": "sliding_window"})


def check_model_type(fields: Mapping[str, Any], where: str, legal: tuple[str, ...]) -> None:
    """ValueError if a config has a model type that is not in `legal`; it may have none."""
    model_type = fields.get("model_type")
    if model_type is not None and model_type not in legal:
        raise ValueError(f"{where}: model_type: got {model_type!r:.60}; legal: {', '.join(legal)}")


def check_values(fields: Mapping[str, Any], where: str, legal: Legal) -> None:
    """ValueError for a field with a value that is neither null nor legal."""
    for name, values in legal.items():
        value = fields.get(name)
        if value is not None and value not in values:
            raise ValueError(f"{where}: {name}: got {value!r:.60}; legal: {', '.join(map(repr, (*values, None)))}")


def check_aliases(fields: Mapping[str, Any], where: str, names: Mapping[str, str]) -> None:
    """ValueError if an alias (a name in `names`) has another value than the field that it stands for. An alias
    may be absent."""
    for alias, name in names.items():
        value, legal = fields.get(alias), fields.get(name)
        if value is not None and value != legal:
            raise ValueError(f"{where}: {alias}: got {value!r:.60}; legal: None, or {name!r}'s value, {legal!r:.60}")


def refuse_named(fields: Mapping[str, Any], where: str, parts: re.Pattern[str], known: Collection[str]) -> None:
    """ValueError for an unknown field whose name has one of `parts`, unless its name also has one of _OTHER_PARTS or
    its value says nothing: null, false, 0, an empty value, or 1, which as a factor changes nothing. The value true is
    refused.
    """
    for name, value in fields.items():
        says_nothing = not value or (value == 1 and value is not True)
        if not says_nothing and name not in known and parts.search(name) and not _OTHER_PARTS.search(name):
            why = "models of this type have no such field"
            raise ValueError(f"{where}: {name}: got {value!r:.60}; legal: None, as {why}")


def _check_layers(fields: Mapping[str, Any], where: str, legal: Legal) -> None:
    """ValueError for a field that is neither null nor a list (or a text) of legal entries; their number is not
    checked."""
    for name, entries in legal.items():
        value = fields.get(name)
        if value is not None and not (isinstance(value, list | str) and all(entry in entries for entry in value)):
            raise ValueError(f"{where}: {name}: got {value!r:.80}; legal: {_either(entries)} for each layer, or null")


def _either(entries: tuple[Any, ...]) -> str:
    """The legal entries in words; of the two spellings of _FULL the first."""
    return " or ".join(map(repr, entries[:1] if entries == _FULL else entries))
