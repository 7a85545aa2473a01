"""Mistral's own `params.json`, as the fields of a Hugging Face config of Mistral Small 4.

Mistral Large 3 is published with this file, and has the layers and the routing of Mistral Small 4 in other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tsmla_jax.nn.checkpoints.known_fields import Legal, check_values

_NAMES = {
    "activation": "hidden_act",
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
_SAME = (
    "dtype", "kv_lora_rank", "max_position_embeddings", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "rope_theta", "v_head_dim", "vocab_size",
)  # fmt: skip
_EXPERTS = {
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "route_every_n": "moe_layer_freq",
    "routed_scale": "routed_scaling_factor",
}
_YARN = {
    "alpha": "beta_slow",
    "beta": "beta_fast",
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}
_SCALE = {"beta": "llama_4_scaling_beta", "original_max_position_embeddings": "original_max_position_embeddings"}
# Other fields, and the values that each may have.
_LEGAL: Legal = {
    "bias": (False,), "causal": (True,), "model_type": ("transformer",), "sliding_window": (), "use_biases": (False,),
}  # fmt: skip
_EXPERTS_LEGAL: Legal = {"renorm_strategy": ("WEIGHTS",), "use_load_balancing_bias": (False,)}
_YARN_LEGAL: Legal = {"apply_scale": (False,)}
# Fields that are ignored: about images, about sizes that other fields give, and about how Mistral computes.
_PASSED_OVER = ("head_dim", "max_seq_len", "multimodal", "vision_encoder")
_EXPERTS_PASSED_OVER = ("expert_model_parallel", "expert_parallel")


def hf_fields(params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of a Hugging Face config that say what Mistral's `params.json` says.

    Args:
        params: the parsed file.
        where: its name in an error.

    Raises:
        ValueError: no MLA or no experts, or a field describes another model or a quantised format; names it.
    """
    groups: dict[str, Mapping[str, Any]] = {}
    for name in ("moe", "yarn", "llama_4_scaling"):
        group = params.get(name)
        if group is not None and not isinstance(group, Mapping):
            raise ValueError(f"{where}: {name}: got {group!r:.60}; legal: an object, or null")
        groups[name] = group or {}
    if not params.get("kv_lora_rank") or not groups["moe"]:
        raise ValueError(f"{where}: must have 'kv_lora_rank' and 'moe', as Mistral Large 3 has")
    fields = _renamed(params, where, _NAMES | dict.fromkeys(_SAME), _LEGAL, (*_PASSED_OVER, *groups))
    fields |= _renamed(groups["moe"], f"{where}: moe", _EXPERTS, _EXPERTS_LEGAL, _EXPERTS_PASSED_OVER)
    rope = _renamed(groups["yarn"], f"{where}: yarn", _YARN, _YARN_LEGAL)
    scale = _renamed(groups["llama_4_scaling"], f"{where}: llama_4_scaling", _SCALE, {})
    period = "original_max_position_embeddings"
    check_values(rope, f"{where}: yarn", {period: (scale.get(period, rope.get(period)),)})
    if rope:
        # apply_scale is about cos and sin; the logits have yarn's factor in any case.
        rope |= {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}
    return fields | {"model_type": "mistral4", "norm_topk_prob": True, "rope_parameters": rope | scale}


def _renamed(
    given: Mapping[str, Any],
    where: str,
    names: Mapping[str, str | None],
    legal: Legal,
    passed_over: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The fields in `names` under their other names (None: the same name).

    ValueError for a value that is not `legal`, and for an unknown field that is not null, false, 0, {} or [].
    """
    check_values(given, where, legal)
    fields = {}
    for name, value in given.items():
        if name in names:
            fields[names[name] or name] = value
        elif name not in legal and name not in passed_over and value not in (None, False, {}, []):
            raise ValueError(f"{where}: {name}: got {value!r:.60}; legal: None")
    return fields
