"""A checkpoint small enough that every test may have its own: the demo's writer with toy dimensions."""

from pathlib import Path
from typing import Any

import numpy as np

from examples import make_checkpoint

TINY = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}


# Short of everything but indexer heads: with few of them many keys score exactly 0.
TINY_V32 = {**TINY, "index_n_heads": 16, "index_head_dim": 12, "index_topk": 9}
TINY_V4 = {
    "vocab_size": 101,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128],
    "num_attention_heads": 2,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 8,
    "sliding_window": 8,
    "index_n_heads": 16,
    "index_head_dim": 12,
    "index_topk": 5,
    "hc_mult": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.0,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SIZES = {"v2": {**TINY, "q_lora_rank": None}, "v3": TINY, "v3.2": TINY_V32, "v4": TINY_V4}


def tiny_config(model: str = "v3", **overrides: Any) -> dict[str, Any]:
    """A model's config.json in f32 with toy dimensions."""
    return {**make_checkpoint.make_config(101, "float32", False, False, model), **_SIZES[model], **overrides}


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Its tensors by their names in checkpoints, f32; every token can be spoken."""
    return dict(make_checkpoint.weights(config, list(range(config["vocab_size"])), seed))


def write_tiny(
    directory: Path, tensors: dict[str, np.ndarray] | None = None, model: str = "v3", **overrides: Any
) -> Path:
    """Writes the checkpoint as one file; `tensors` replaces the random ones."""
    config = tiny_config(model, **overrides)
    directory.mkdir(parents=True, exist_ok=True)
    make_checkpoint.write_safetensors(
        directory / "model.safetensors", tiny_tensors(config) if tensors is None else tensors
    )
    make_checkpoint.write_json(directory / "config.json", config)
    return directory
