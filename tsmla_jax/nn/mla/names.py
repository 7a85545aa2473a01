"""Names of tensors in checkpoints of LongCat-Flash and in Mistral's format, by their names in DeepSeek's checkpoints.

A layer of LongCat-Flash has two attentions, two dense MLPs and one mixture of experts. It is read as two layers: the
first has `shortcut.`, the experts whose result the second adds at its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# ---- LongCat-Flash

_TWICE = re.compile(r"^model\.layers\.(\d+)\.(self_attn|mlps|input_layernorm|post_attention_layernorm)\.([01])\.(.+)$")
_ONCE = re.compile(r"^model\.layers\.(\d+)\.mlp\.(.+)$")
_ROUTER = {
    "gate.weight": "router.classifier.weight",
    "gate.e_score_correction_bias": "router.e_score_correction_bias",
}
_GATE = {stored: own for own, stored in _ROUTER.items()}
_HALF = re.compile(r"^model\.layers\.(\d+)\.(self_attn|mlp|input_layernorm|post_attention_layernorm|shortcut)\.(.+)$")

# ---- Mistral's own, beside a config in params.json: Mistral Large 3

_LAYER = re.compile(r"^layers\.(\d+)\.(.+)\.weight$")
_WHOLE = {
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "tok_embeddings.weight": "model.embed_tokens.weight",
}
_IN_LAYER = {
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate",
}
_MLP = re.compile(r"^(feed_forward|shared_experts|experts\.\d+)\.(w[123])$")
_OWNERS = {"feed_forward": "mlp"}
_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_OF_IMAGES = ("patch_merger.", "pre_mm_projector_norm.", "vision_encoder.", "vision_language_adapter.")


def stored_names(names: Iterable[str]) -> dict[str, str]:
    """The names of a checkpoint's tensors, by their names in DeepSeek's checkpoints. Both are the same unless the
    checkpoint is LongCat-Flash's or in Mistral's format. In Mistral's format, tensors for images are left out.
    """
    names = list(names)
    if any(name.endswith(".attention.wkv_a_with_mqa.weight") for name in names):
        return {_of_mistral(name): name for name in names if not name.startswith(_OF_IMAGES)}
    if any(".self_attn." in name and _TWICE.match(name) for name in names):
        return {_of_longcat(name): name for name in names}
    return {name: name for name in names}


def _of_longcat(stored: str) -> str:
    if found := _TWICE.match(stored):
        layer, part, half, rest = found.groups()
        return f"model.layers.{2 * int(layer) + int(half)}.{'mlp' if part == 'mlps' else part}.{rest}"
    if found := _ONCE.match(stored):
        layer, rest = found.groups()
        return f"model.layers.{2 * int(layer)}.shortcut.{_GATE.get(rest, rest)}"
    return stored


def _of_mistral(stored: str) -> str:
    found = _LAYER.match(stored)
    if found is None:
        return _WHOLE.get(stored, stored)
    layer, rest = found.groups()
    if part := _MLP.match(rest):
        owner = _OWNERS.get(part[1], f"mlp.{part[1]}")
        return f"model.layers.{layer}.{owner}.{_MATRICES[part[2]]}.weight"
    return f"model.layers.{layer}.{_IN_LAYER[rest]}.weight" if rest in _IN_LAYER else stored


def longcat_name(name: str) -> str:
    """The name in a checkpoint of LongCat-Flash of the tensor that DeepSeek's checkpoints would call `name`."""
    found = _HALF.match(name)
    if found is None:
        return name
    layer, part, rest = found.groups()
    prefix = f"model.layers.{int(layer) // 2}"
    if part == "shortcut":
        return f"{prefix}.mlp.{_ROUTER.get(rest, rest)}"
    return f"{prefix}.{'mlps' if part == 'mlp' else part}.{int(layer) % 2}.{rest}"
