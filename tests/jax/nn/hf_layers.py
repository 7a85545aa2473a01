"""transformers' own sparse attention layers, eager, float32: their results, and our layers set up beside them."""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsmla_jax.nn import Step, v4, v32

V4_LAYERS = {"sliding": 0, "csa": 1, "hca": 2, "csa, few chosen": 1}
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


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer of transformers in one pass without a cache, and the same layer of ours.

    Attributes:
        family: `tsmla_jax.nn.v32` or `tsmla_jax.nn.v4`.
        layer: index of the layer in the model.
        fields, tensors: the fields of its config.json, and its weights by their names below `self_attn.`.
        config, params: ours, from these.
        x, y: input and output, f32 [2, length, E].
        page_size: of our caches.
    """

    family: ModuleType
    layer: int
    fields: dict[str, Any]
    tensors: dict[str, np.ndarray]
    config: Any
    params: dict[str, jax.Array]
    x: np.ndarray
    y: np.ndarray
    page_size: int

    def cache(self, pages: int, dtype: Any = jnp.float32, indexer_dtype: Any = jnp.float32) -> Any:
        """Empty caches; V4's with states for three texts."""
        if self.family is v32:
            return v32.init_cache(self.config, pages, self.page_size, kv_dtype=dtype, indexer_dtype=indexer_dtype)
        return v4.init_cache(
            self.config,
            window_pages=pages,
            compressed_pages=pages,
            num_states=3,
            page_size=self.page_size,
            dtype=dtype,
            indexer_dtype=indexer_dtype,
        )

    def step(self, tables: jax.Array, seq_lens: jax.Array, cu_seqlens_q: jax.Array, total_tokens: int) -> Any:
        """A step of one or two texts over the pages of `tables`."""
        step = Step.ragged(tables, seq_lens, cu_seqlens_q, total_tokens=total_tokens, page_size=self.page_size)
        if self.family is v32:
            return step
        return v4.make_step(
            self.config,
            step,
            state_slots=jnp.asarray([2, 0], jnp.int32)[: tables.shape[0]],
            compressed_tables=tables[::-1],
            cos_sin=v4.rope_table(self.config, self.x.shape[1]),
            page_size=self.page_size,
        )


@functools.cache
def case(name: str) -> Case:
    """The layer "v3.2" or "glm-5", or a kind of V4's layers."""
    if name == "v3.2":
        return _v32_case()
    if name == "glm-5":
        return glm_cases(["full"])[0]
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    index, topk = V4_LAYERS[name], 5 if "few" in name else 200
    config = DeepseekV4Config(**V4_FIELDS, index_topk=topk, rope_scaling=dict(V4_YARN), attn_implementation="eager")
    rotary = modeling.DeepseekV4RotaryEmbedding(config)

    def run(layer: Any, x: Any, positions: Any, mask: Any) -> Any:
        embeddings = {label: rotary(x, position_ids=positions, layer_type=label) for label in ("main", "compress")}
        return layer(x, position_embeddings=embeddings, position_ids=positions, attention_mask=mask)[0]

    tensors, x, y = _results_of(
        lambda: modeling.DeepseekV4Attention(config, index), run, 37 + 300, seed=3, window=V4_FIELDS["sliding_window"]
    )
    own = v4.V4Config.from_hf(config.to_dict(), index)
    return Case(v4, index, config.to_dict(), tensors, own, v4.params_from_hf(own, tensors), x, y, page_size=8)


def _v32_case() -> Case:
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

    config = DeepseekV32Config(**V32_FIELDS, rope_parameters=dict(V32_ROPE), attn_implementation="eager")
    rotary = modeling.DeepseekV32RotaryEmbedding(config)

    def run(layer: Any, x: Any, positions: Any, mask: Any) -> Any:
        return layer(x, rotary(x, position_ids=positions), mask, position_ids=positions)[0]

    tensors, x, y = _results_of(lambda: modeling.DeepseekV32Attention(config, 0), run, 21 + 300, seed=5)
    own = v32.V32Config.from_hf(config.to_dict())
    return Case(v32, 0, config.to_dict(), tensors, own, v32.params_from_hf(own, tensors), x, y, page_size=16)


def glm_cases(indexer_types: list[str]) -> list[Case]:
    """Layers of GLM-5.2 of these types, of one input each: a shared one takes what the layer before it chose."""
    import torch
    from transformers import GlmMoeDsaConfig
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as modeling

    rope = {"rope_type": "default", "rope_theta": 1e6}
    sizes = {**V32_FIELDS, "num_hidden_layers": len(indexer_types), "index_n_heads": 14, "v_head_dim": 40}
    more = {"rope_parameters": rope, "indexer_types": indexer_types, "attn_implementation": "eager"}
    config = GlmMoeDsaConfig(**sizes, **more)
    rotary, chosen, cases = modeling.GlmMoeDsaRotaryEmbedding(config), [torch.empty(0)], []

    def run(layer: Any, x: Any, positions: Any, mask: Any) -> Any:
        before = {"prev_topk_indices": chosen[-1]}
        y, _, indices = layer(x, rotary(x, position_ids=positions), mask, position_ids=positions, **before)
        chosen.append(indices)
        return y

    for layer in range(len(indexer_types)):
        make = functools.partial(modeling.GlmMoeDsaAttention, config, layer)
        tensors, x, y = _results_of(make, run, 21 + 300, seed=5 + layer)
        own = v32.V32Config.from_hf(config.to_dict(), layer)
        params = v32.params_from_hf(own, tensors)
        cases.append(Case(v32, layer, config.to_dict(), tensors, own, params, x, y, page_size=16))
    return cases


def _results_of(
    make: Callable[[], Any], run: Callable[..., Any], length: int, *, seed: int, window: int | None = None
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Random weights, input and output of a layer of transformers; with a window nothing further back is seen."""
    import torch

    torch.manual_seed(seed)
    layer = make()
    for key, parameter in layer.named_parameters():
        scale, shift = (0.2, 1.0) if "norm" in key else (parameter.shape[-1] ** -0.5, 0.0)
        if "position_bias" in key or key == "sinks":
            scale = 1.0
        parameter.data = torch.randn_like(parameter) * scale + shift
    x = torch.randn(2, length, 48)
    positions = torch.arange(length)[None].expand(2, -1)
    distance = positions[0][:, None] - positions[0]
    hidden = (distance < 0) | (distance >= (length if window is None else window))
    mask = torch.zeros(length, length).masked_fill(hidden, torch.finfo(torch.float32).min)
    with torch.no_grad():
        y = run(layer, x, positions, mask[None, None].expand(2, 1, -1, -1))
    tensors = {key: value.detach().numpy() for key, value in layer.state_dict().items() if "rotary" not in key}
    return tensors, x.numpy(), y.numpy()
