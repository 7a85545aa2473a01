"""Names of tensors in LongCat-Flash's checkpoints, and names that the same tensors would have in DeepSeek's.

A layer of LongCat-Flash has two attentions, two dense MLPs and one mixture of experts. It is read as two layers: the
first has `shortcut.`, the experts whose result is added after the second.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_TWICE = re.compile(r"^model\.layers\.(\d+)\.(self_attn|mlps|input_layernorm|post_attention_layernorm)\.([01])\.(.+)$")
_ONCE = re.compile(r"^model\.layers\.(\d+)\.mlp\.(.+)$")
_ROUTER = {
    "gate.weight": "router.classifier.weight",
    "gate.e_score_correction_bias": "router.e_score_correction_bias",
}
_GATE = {stored: own for own, stored in _ROUTER.items()}
_HALF = re.compile(r"^model\.layers\.(\d+)\.(self_attn|mlp|input_layernorm|post_attention_layernorm|shortcut)\.(.+)$")


def stored_names(names: Iterable[str]) -> dict[str, str]:
    """The names of a checkpoint's tensors, by the names that DeepSeek's would have; the same ones if the checkpoint is
    none of LongCat-Flash."""
    names = list(names)
    if not any(".self_attn." in name and _TWICE.match(name) for name in names):
        return {name: name for name in names}
    return {_module_name(name): name for name in names}


def _module_name(stored: str) -> str:
    if found := _TWICE.match(stored):
        layer, part, half, rest = found.groups()
        return f"model.layers.{2 * int(layer) + int(half)}.{'mlp' if part == 'mlps' else part}.{rest}"
    if found := _ONCE.match(stored):
        layer, rest = found.groups()
        return f"model.layers.{2 * int(layer)}.shortcut.{_GATE.get(rest, rest)}"
    return stored


def stored_name(name: str) -> str:
    """The name in a checkpoint of LongCat-Flash, by the one that DeepSeek's would have."""
    found = _HALF.match(name)
    if found is None:
        return name
    layer, part, rest = found.groups()
    prefix = f"model.layers.{int(layer) // 2}"
    if part == "shortcut":
        return f"{prefix}.mlp.{_ROUTER.get(rest, rest)}"
    return f"{prefix}.{'mlps' if part == 'mlp' else part}.{int(layer) % 2}.{rest}"
