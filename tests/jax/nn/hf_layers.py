"""transformers' own sparse attention layers, eager, float32: configs, weights, inputs and what they compute."""

import functools
from typing import Any

import numpy as np

MAX_CALL = 2 * 90


def run_split(data: Any, run: Any, cache: Any, x: np.ndarray, y: np.ndarray, length: int) -> Any:
    """The caches after the first `length` tokens of both sequences of x, in calls whose sizes hypothesis draws and
    padding makes equal. What comes out of every call is held to y on the way.

    run(x, cache, seq_lens, cu_seqlens_q) is a layer's step, which gives its cache away.
    """
    import jax
    from hypothesis import strategies as st

    cache, done = jax.tree.map(lambda leaf: leaf.copy(), cache), [0, 0]
    while min(done) < length:
        counts = [min(length - n, data.draw(st.sampled_from([0, 1, 2, 5, 31, MAX_CALL // 2]))) for n in done]
        if not any(counts):  # whoever has tokens left takes one
            counts = [min(length - n, 1) for n in done]
        rows = [x[r, done[r] : done[r] + n] for r, n in enumerate(counts)]
        padding = np.zeros((MAX_CALL - sum(counts), x.shape[2]), np.float32)
        done = [a + n for a, n in zip(done, counts, strict=True)]
        lens, cu = np.asarray(done, np.int32), np.asarray([0, counts[0], sum(counts)], np.int32)
        out, cache = run(np.concatenate([*rows, padding]), cache, lens, cu)
        for r, first in ((0, 0), (1, counts[0])):
            got = np.asarray(out)[first : first + counts[r]]
            np.testing.assert_allclose(got, y[r, done[r] - counts[r] : done[r]], rtol=1e-5, atol=1e-5)
    return cache


V4_LENGTH = 37 + 300
V4_LAYERS = {"sliding": 0, "csa": 1, "hca": 2, "csa, few chosen": 3}
V4_FIELDS: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "sliding_window": 16,
    "o_groups": 3,
    "o_lora_rank": 10,
    # So many heads that no key is refused by all of them: those all score 0, and torch breaks ties as it likes.
    "index_n_heads": 16,
    "index_head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "compress_rope_theta": 40000.0,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32,
    "n_routed_experts": 4,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 2,
}
V4_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1}


@functools.cache
def v4_layer(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Config, weights, input [2, V4_LENGTH, E] and output of one layer of transformers, in one pass without a cache."""
    import torch
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    index = V4_LAYERS[name] % 3 if name != "csa, few chosen" else 1
    topk = 5 if "few" in name else 200
    config = DeepseekV4Config(**V4_FIELDS, index_topk=topk, rope_scaling=dict(V4_YARN), attn_implementation="eager")
    torch.manual_seed(3)
    layer, rotary = modeling.DeepseekV4Attention(config, index), modeling.DeepseekV4RotaryEmbedding(config)
    for key, parameter in layer.named_parameters():
        scale, shift = (
            (0.2, 1.0) if "norm" in key else (1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5, 0.0)
        )
        if "position_bias" in key:
            scale = 1.0
        parameter.data = torch.randn_like(parameter) * scale + shift
    x = torch.randn(2, V4_LENGTH, V4_FIELDS["hidden_size"])
    positions = torch.arange(V4_LENGTH)[None].expand(2, -1)
    distance = positions[0][:, None] - positions[0]
    hidden = (distance < 0) | (distance >= V4_FIELDS["sliding_window"])
    mask = torch.zeros(V4_LENGTH, V4_LENGTH).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
    embeddings = {label: rotary(x, position_ids=positions, layer_type=label) for label in ("main", "compress")}
    with torch.no_grad():
        y, _ = layer(
            x, position_embeddings=embeddings, position_ids=positions, attention_mask=mask.expand(2, 1, -1, -1)
        )
    tensors = {key: value.detach().numpy() for key, value in layer.state_dict().items()}
    return config.to_dict(), tensors, x.numpy(), y.numpy()


V32_LENGTH = 21 + 300
V32_FIELDS: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    # So many heads that no key is refused by all of them: those all score 0, and torch breaks ties as it likes.
    "index_n_heads": 16,
    "index_head_dim": 24,
    "index_topk": 12,
    "max_position_embeddings": 4096,
    "num_hidden_layers": 1,
}
V32_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 160,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}


@functools.cache
def v32_layer() -> tuple[dict[str, Any], dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Config, weights, input [2, V32_LENGTH, E] and output of transformers' layer, in one pass without a cache."""
    import torch
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

    config = DeepseekV32Config(**V32_FIELDS, rope_parameters=dict(V32_ROPE), attn_implementation="eager")
    torch.manual_seed(5)
    layer, rotary = modeling.DeepseekV32Attention(config, 0), modeling.DeepseekV32RotaryEmbedding(config)
    for key, parameter in layer.named_parameters():
        scale, shift = (0.2, 1.0) if "norm" in key else (parameter.shape[-1] ** -0.5, 0.0)
        parameter.data = torch.randn_like(parameter) * scale + shift
    x = torch.randn(2, V32_LENGTH, V32_FIELDS["hidden_size"])
    positions = torch.arange(V32_LENGTH)[None].expand(2, -1)
    future = positions[0][None, :] > positions[0][:, None]
    mask = torch.zeros(V32_LENGTH, V32_LENGTH).masked_fill(future, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        y, _ = layer(x, rotary(x, position_ids=positions), mask.expand(2, 1, -1, -1), position_ids=positions)
    return config.to_dict(), {k: t.detach().numpy() for k, t in layer.state_dict().items()}, x.numpy(), y.numpy()
