"""The shapes of one MLA layer's parameters."""

from __future__ import annotations

from tsmla_jax.nn.inputs import check_config
from tsmla_jax.nn.mla.config import MLAConfig


def param_shapes(config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter.

    q_proj [E, H, N + R], or q_a_proj [E, rank], q_a_layernorm [rank] and q_b_proj [rank, H, N + R]; kv_a_proj_with_mqa
    [E, L + R] (latent first, rope last); kv_a_layernorm [L]; w_uk [H, N, L] and w_uv [H, V, L] (the two parts of
    Hugging Face's kv_b_proj); o_proj [H, V, E]; with an output_gate also g_proj [E, H] or [E, H, V]; with
    attention_bias also q_a_proj_bias (if there is a q_a_proj), kv_a_proj_with_mqa_bias and o_proj_bias.

    Args:
        config: the layer's shape.

    Raises:
        TypeError: config is no MLAConfig.
    """
    check_config(config, MLAConfig)
    heads, hidden, rank = config.num_attention_heads, config.hidden_size, config.q_lora_rank
    shapes: dict[str, tuple[int, ...]] = {}
    if rank is None:
        shapes["q_proj"] = (hidden, heads, config.qk_head_dim)
    else:
        shapes["q_a_proj"] = (hidden, rank)
        shapes["q_a_layernorm"] = (rank,)
        shapes["q_b_proj"] = (rank, heads, config.qk_head_dim)
    shapes["kv_a_proj_with_mqa"] = (hidden, config.cache_dim)
    shapes["kv_a_layernorm"] = (config.kv_lora_rank,)
    shapes["w_uk"] = (heads, config.qk_nope_head_dim, config.kv_lora_rank)
    shapes["w_uv"] = (heads, config.v_head_dim, config.kv_lora_rank)
    shapes["o_proj"] = (heads, config.v_head_dim, hidden)
    if config.output_gate is not None:
        each = (heads,) if config.output_gate == "head" else (heads, config.v_head_dim)
        shapes["g_proj"] = (hidden, *each)
    if config.attention_bias:
        if rank is not None:
            shapes["q_a_proj_bias"] = (rank,)
        shapes["kv_a_proj_with_mqa_bias"] = (config.cache_dim,)
        shapes["o_proj_bias"] = (hidden,)
    return shapes
