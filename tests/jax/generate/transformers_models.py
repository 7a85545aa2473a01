"""Small models of transformers with random weights, and what they generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 1024,
    "initializer_range": 0.4,
    "eos_token_id": None,
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}

V3 = {"q_lora_rank": 24, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "num_mtp_layers": 0}

V3_ONLY = ("intermediate_size", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "first_k_dense_replace")

EXPERTS = ("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "first_k_dense_replace")

LONGCAT_OTHERS = (
    "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_experts_per_tok", "first_k_dense_replace",
)  # fmt: skip

# So many heads that no key is refused by all of them: those all score 0, and torch breaks ties as it likes.
INDEXER = {"index_n_heads": 16, "index_head_dim": 24}

# Of both models: heads wider than V3's, a value as wide as a key.
GLM = {
    "q_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "v_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}

LONGCAT = {
    "q_lora_rank": 24,
    "ffn_hidden_size": 64,
    "expert_ffn_hidden_size": 24,
    "num_layers": 2,
    "head_dim": 8,
    "moe_topk": 3,
    "zero_expert_num": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}

MISTRAL = {
    "q_lora_rank": 24,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    # The factor of queries rises at positions 48 and 96: texts cross both in prompts, chunks and decode.
    "rope_parameters": {
        **YARN, "mscale_all_dim": 1.0, "original_max_position_embeddings": 48, "llama_4_scaling_beta": 0.5,
    },
}  # fmt: skip

V4 = {
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "sliding_window": 16,
    "o_groups": 3,
    "o_lora_rank": 10,
    "num_key_value_heads": 1,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "rope_scaling": {key: value for key, value in YARN.items() if not key.startswith(("mscale", "rope_theta"))},
    # Low enough to clip something.
    "swiglu_limit": 1.5,
}

# The class, its config, and a seed of weights whose every greedy choice is clear (checked below).
MODELS = {
    "v3": ("DeepseekV3", {**V3, "rope_parameters": YARN, "norm_topk_prob": True, "routed_scaling_factor": 2.5}, 3),
    "v2-lite": (
        "DeepseekV2",
        {"q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 2, "tie_word_embeddings": True},
        3,
    ),
    "v2": (
        "DeepseekV2",
        {"q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
         "n_shared_experts": 1, "routed_scaling_factor": 4.0, "rope_parameters": YARN},
        2,
    ),
    "v3.2": ("DeepseekV32", {**V3, **INDEXER, "index_topk": 12, "rope_parameters": YARN}, 1),
    # GLM-5.2: of its four layers two have an indexer.
    "glm-5": (
        "GlmMoeDsa",
        {**GLM, **INDEXER, "index_topk": 12, "num_hidden_layers": 4, "index_topk_freq": 2, "index_skip_topk_offset": 1},
        1,
    ),
    "glm-4.7-flash": ("Glm4MoeLite", {**GLM, "mlp_layer_types": ["dense", "sparse", "sparse"]}, 1),
    "longcat-flash": ("LongcatFlash", LONGCAT, 2),
    "mistral-small-4": ("Mistral4", MISTRAL, 2),
    "youtu": ("Youtu", {"q_lora_rank": 24, "rope_parameters": YARN, "tie_word_embeddings": True}, 1),
    "v4": ("DeepseekV4", {**V4, **INDEXER, "index_topk": 7}, 1),
}  # fmt: skip


def randomise(model: Any) -> None:
    """Random values for tensors that transformers begins at 0 or 1, or with a spread that would hide them."""
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in key:
                value.add_(0.2 * torch.randn_like(value))
            elif "e_score_correction_bias" in key:
                value.copy_(0.2 * torch.randn_like(value))
            elif key.endswith("tid2eid"):
                experts = model.config.n_routed_experts
                value.copy_(torch.stack([torch.randperm(experts)[: value.shape[1]] for _ in value]))
            elif key.endswith(("sinks", "position_bias")):
                value.copy_(torch.randn_like(value))
            elif "_hc." in key or ".hc_head." in key:
                spread = value.shape[-1] ** -0.5 if key.endswith("fn") else 0.3
                value.copy_(spread * torch.randn_like(value) + key.endswith("scale"))


def saved_model(name: str, directory: Path) -> Any:
    """A random model of transformers, saved."""
    kind, extra, seed = MODELS[name]
    torch.manual_seed(seed)
    without = {"DeepseekV4": V3_ONLY, "LongcatFlash": LONGCAT_OTHERS, "Youtu": EXPERTS}.get(kind, ())
    sizes = {key: value for key, value in SIZES.items() if key not in without}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **extra})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    randomise(model)
    model.save_pretrained(directory)
    return model


def reference_logits(name: str, tokens: list[int], directory: Path) -> Any:
    """Saves a random model, and transformers' logits [T, V] after each of these tokens."""
    with torch.no_grad():
        return saved_model(name, directory)(torch.tensor([tokens])).logits[0].numpy()


def reference_tokens(name: str, prompts: list[list[int]], new_tokens: int, directory: Path) -> list[list[int]]:
    """Saves a random model and lets transformers continue the prompts, one by one."""
    model = saved_model(name, directory)
    with torch.no_grad():
        tokens = []
        for prompt in prompts:
            ids = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            tokens.append(ids[0, len(prompt) :].tolist())
            # Equal tokens say something only where the best logit stands clear of the second.
            best = model(ids).logits[0, len(prompt) - 1 : -1].topk(2).values
            assert (best[:, 0] - best[:, 1]).min() > 1e-3
    return tokens
