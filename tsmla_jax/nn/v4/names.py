"""The names of a DeepSeek-V4 checkpoint's tensors, which have three spellings.

DeepSeek's own checkpoints say `layers.0.attn.wq_a.weight`. transformers' modules say
`model.layers.0.self_attn.q_a_proj.weight`. A model saved by transformers is between the two:
`model.layers.0.attn.wq_a.weight`, with `attn.norm` for DeepSeek's `attn.kv_norm`. This project names a tensor as
transformers' modules do.
"""

from __future__ import annotations

from tsmla_jax.nn.checkpoints.checkpoint import Checkpoint, CheckpointError

_WHOLE = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
_PARTS = {
    "attn": "self_attn",
    "ffn": "mlp",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "attn_sink": "sinks",
    "wq_a": "q_a_proj",
    "wq_b": "q_b_proj",
    "wkv": "kv_proj",
    "wgate": "gate_proj",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
    "q_norm": "q_a_norm",
    "norm": "kv_norm",
    "ape": "position_bias",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
# Names that differ by more than single parts: in transformers' modules the indexer is a part of the compressor, a
# scorer is a part of the indexer, and the gate's bias has another name.
_OWNERS = {
    "self_attn.indexer.compressor.": "self_attn.compressor.indexer.",
    "self_attn.indexer.weights_proj.": "self_attn.compressor.indexer.scorer.weights_proj.",
    "self_attn.indexer.q_b_proj.": "self_attn.compressor.indexer.q_b_proj.",
    "mlp.gate.bias": "mlp.gate.e_score_correction_bias",
}


def module_name(stored: str) -> str:
    """The name in transformers' modules of the tensor that a checkpoint calls `stored`. A name outside the layers and
    the model's first and last parts stays as it is."""
    name = stored.removeprefix("model.")
    if name in _WHOLE:
        return _WHOLE[name]
    if not name.startswith("layers."):
        return f"model.{name}" if name.startswith(("embed_tokens.", "norm.", "hc_head.")) else stored
    name = ".".join(_PARTS.get(part, part) for part in name.split("."))
    for old, new in _OWNERS.items():
        name = name.replace(old, new)
    return f"model.{name}"


def stored_name(name: str) -> str:
    """The spelling that a model saved by transformers has for the tensor that its modules call `name`. `module_name`
    turns it back into `name`.
    """
    if not name.startswith("model.layers."):
        return "head.weight" if name == "lm_head.weight" else name
    for old, new in reversed(_OWNERS.items()):
        name = name.replace(new, old)
    for old, new in _PARTS.items():
        if "." in new:
            name = name.replace(f".{new}", f".{old}")
    parts = {new: old for old, new in _PARTS.items()}
    # Both the compressor and the MLP have a part called gate_proj.
    parts["gate_proj"] = "wgate" if ".self_attn." in name else "w1"
    return ".".join(parts.get(part, part) for part in name.split("."))


def stored_names(checkpoint: Checkpoint) -> dict[str, str]:
    """The names of a checkpoint's tensors, by the names that `module_name` gives them.

    Raises CheckpointError when the checkpoint holds one tensor in two spellings.
    """
    names: dict[str, str] = {}
    for stored in checkpoint.names():
        name = module_name(stored)
        if name in names:
            raise CheckpointError(
                f"{checkpoint.directory}: tensors {names[name]!r} and {stored!r} are two spellings of {name!r}"
            )
        names[name] = stored
    return names
