"""Model types that `ModelConfig` reads: what an absent field means, other names of fields, and refused fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from tsmla_jax.nn.checkpoints.hf_config import hf_field
from tsmla_jax.nn.checkpoints.known_fields import Legal, check_aliases, check_values, refuse_named

Routing = Literal["greedy", "group_limited_greedy", "noaux_tc"]
LONGCAT = "longcat_flash"

# The routing of a checkpoint without `topk_method`: transformers writes none for V3, whose only routing is noaux_tc.
DEFAULT_ROUTING: dict[str, Routing] = {
    "deepseek_v2": "greedy",
    "deepseek_v3": "noaux_tc",
    "deepseek_v32": "noaux_tc",
    "deepseek_v4": "noaux_tc",
    "glm4_moe_lite": "noaux_tc",
    "glm_moe_dsa": "noaux_tc",
    "kimi_k2": "noaux_tc",
    "longcat_flash": "noaux_tc",
    "mistral4": "greedy",
    "youtu": "greedy",
}
# Values that transformers' configuration of each model type takes for a field that `config.json` leaves out; where that
# configuration lacks the field, the value that says what transformers' code computes. transformers has no configuration
# of Kimi-K2, whose file must give all these fields. Sizes are required of every model type: a file without them is cut
# short.
_V3_DEFAULTS: dict[str, Any] = {
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
}
_GLM_DEFAULTS: dict[str, Any] = {
    **_V3_DEFAULTS,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
    },
    "deepseek_v3": _V3_DEFAULTS,
    "deepseek_v32": {**_V3_DEFAULTS, "max_position_embeddings": 163840},
    "deepseek_v4": {
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "max_position_embeddings": 1048576,
        "eos_token_id": 1,
    },
    "glm4_moe_lite": {
        **_GLM_DEFAULTS,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
    },
    "glm_moe_dsa": _GLM_DEFAULTS,
    "kimi_k2": {},
    "longcat_flash": {
        "norm_topk_prob": False,
        "routed_scaling_factor": 6.0,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 0,
        "max_position_embeddings": 131072,
        "eos_token_id": 2,
        "rms_norm_eps": 1e-5,
    },
    "mistral4": {
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "max_position_embeddings": 1048576,
        "eos_token_id": 2,
    },
    # A model without experts.
    "youtu": {
        "n_routed_experts": None,
        "first_k_dense_replace": 0,
        "max_position_embeddings": 131072,
        "eos_token_id": 128001,
        "tie_word_embeddings": True,
    },
}

# Names that other configs have for fields, and the name of each field here.
_ALIASES = {
    "moe_renormalize": "norm_topk_prob",
    "moe_topk": "num_experts_per_tok",
    "n_hash_layers": "num_hash_layers",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_local_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
}
# Words in a field's name which say that the field is about embeddings, residuals, experts or logits of other models.
_MODEL_PARTS = re.compile(
    r"(^|_)(depth|emb|embedding|hash|hc|hyper|latent|logit|logits|loop|loops|mhc|mup|ngram|residual|sandwich|swiglu"
    r"|zero)(_|$)"
)
_MODEL_KNOWN = ("output_router_logits",)
_KNOWN = {
    "deepseek_v4": ("hc_eps", "hc_mult", "hc_sinkhorn_iters", "num_hash_layers", "n_hash_layers", "swiglu_limit"),
    LONGCAT: ("zero_expert_num", "zero_expert_type"),
}
_MODEL: Legal = {
    "hidden_activation": ("silu",),
    "mlp_bias": (False,),
    "post_norm": (False,),
    "routed_expert_hidden_size": (),
    "router_bias": (False,),
    "use_post_norm": (False,),
}
_LONGCAT: Legal = {
    "n_group": (1,),
    "n_shared_experts": (0,),
    "norm_topk_prob": (False,),
    "scoring_func": ("softmax",),
    "topk_group": (1,),
    "topk_method": ("noaux_tc",),
    "zero_expert_type": ("identity",),
}
# One group only: with several, transformers routes Mistral Small 4's tokens in a way that isn't written here.
_MISTRAL: Legal = {"n_group": (1,), "topk_group": (1,)}
# LongCat-Flash's names for sizes.
_LONGCAT_SIZES = {
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "ffn_hidden_size": "intermediate_size",
    "moe_topk": "num_experts_per_tok",
}


def default_of(model_type: str, name: str, otherwise: Any = None) -> dict[str, Any]:
    """The keyword argument `default` of `hf_field`, as a dict: the model type's value for an absent field, or else
    `otherwise`. The dict is empty if that value is None: the field is then required.
    """
    default = DEFAULTS[model_type].get(name, otherwise)
    return {} if default is None else {"default": default}


def check_fields(fields: Mapping[str, Any], where: str, model_type: str) -> None:
    """Raises a ValueError that names the field, if a field (attention's aside) describes a model that we don't run.

    Args:
        fields: the fields of the config, or of its text model.
        where: how an error names these fields.
        model_type: the model type of these fields.
    """
    check_values(fields, where, {**_MODEL, **(_MISTRAL if model_type == "mistral4" else {})})
    check_aliases(fields, where, _ALIASES)
    refuse_named(fields, where, _MODEL_PARTS, (*_MODEL_KNOWN, *_KNOWN.get(model_type, ())))


TEXT_AND_IMAGES = {"kimi_k25": ("deepseek_v3", "kimi_k2"), "mistral3": ("mistral4",)}
"""Model types of text and images, Kimi-K2.5's and Mistral Small 4's, and the legal types of their text models."""


def text_fields(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of the text model inside a model of TEXT_AND_IMAGES, with the whole model's dtype if it has none of
    its own. Kimi-K2.5's text model may have no model type: transformers then reads it as a DeepSeek-V3 model.
    """
    text, legal = hf_field(fields, "text_config", dict, where), TEXT_AND_IMAGES[fields["model_type"]]
    check_values(text, f"{where}: text_config", {"model_type": legal})
    outside = {name: fields[name] for name in ("torch_dtype", "dtype") if fields.get(name) and not text.get(name)}
    return {**outside, **text, "model_type": text.get("model_type") or legal[0]}


def longcat_fields(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of LongCat-Flash by the names of other models; a layer of it is two of ours."""
    check_values(fields, where, _LONGCAT)
    layers = hf_field(fields, "num_layers", int, where)
    check_values(fields, where, {"num_hidden_layers": (layers, 2 * layers)})
    sizes = {name: hf_field(fields, own, int, where) for own, name in _LONGCAT_SIZES.items()}
    return {**fields, **sizes, "num_hidden_layers": 2 * layers, "scoring_func": None}
