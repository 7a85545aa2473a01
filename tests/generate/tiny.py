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


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A DeepSeek-V3 config.json in f32 with toy dimensions."""
    return {**make_checkpoint.make_config(101, "float32", False, False), **TINY, **overrides}


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Its tensors by Hugging Face name, f32; every token can be spoken."""
    return dict(make_checkpoint.weights(config, list(range(config["vocab_size"])), seed))


def write_tiny(directory: Path, tensors: dict[str, np.ndarray] | None = None, **overrides: Any) -> Path:
    """Writes the checkpoint as one file; `tensors` replaces the random ones."""
    config = tiny_config(**overrides)
    directory.mkdir(parents=True, exist_ok=True)
    make_checkpoint.write_safetensors(
        directory / "model.safetensors", tiny_tensors(config) if tensors is None else tensors
    )
    make_checkpoint.write_json(directory / "config.json", config)
    return directory
