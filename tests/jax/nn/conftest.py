"""An oracle for the MLA layer: transformers' own attention, eager, in float64, decoding with a DynamicCache."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

PROMPT_LENS = (7, 1, 12)
DECODE_LEN = 4

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "max_position_embeddings": 40960,
    "rope_theta": 10000.0,
    # Far from the epsilon of the two a-layernorms, which don't use this one.
    "rms_norm_eps": 1e-3,
}
# The ramp goes from the second to the sixth of the 8 frequencies.
YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}


@dataclasses.dataclass(frozen=True)
class Oracle:
    """One attention layer of transformers and its results.

    Attributes:
        config: the fields of its config.json.
        tensors: its weights by their name below `self_attn.`.
        x: input of each request, f64 [length, E].
        y: output for each request, f64 [length, E]; the prompt in one pass, then token by token from the cache.
        prompt_lens: where decoding began.
    """

    config: dict[str, Any]
    tensors: dict[str, np.ndarray[Any, Any]]
    x: tuple[np.ndarray[Any, Any], ...]
    y: tuple[np.ndarray[Any, Any], ...]
    prompt_lens: tuple[int, ...]


@functools.cache
def _run_oracle(family: str, yarn: bool, q_lora_rank: int | None, bias: bool) -> Oracle:
    import torch
    from transformers import DeepseekV2Config, DeepseekV3Config, DynamicCache
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    fields = {**TINY, "q_lora_rank": q_lora_rank, "attention_bias": bias}
    if yarn:
        fields["rope_scaling"] = dict(YARN)
    config = (DeepseekV2Config if family == "v2" else DeepseekV3Config)(**fields, attn_implementation="eager")
    torch.manual_seed(17)
    layer: Any
    if family == "v2":
        layer, rotary = v2.DeepseekV2Attention(config, 0).double(), v2.DeepseekV2RotaryEmbedding(config)
    else:
        layer, rotary = v3.DeepseekV3Attention(config, 0).double(), v3.DeepseekV3RotaryEmbedding(config)
    for name, parameter in layer.named_parameters():
        # Norm weights and biases away from their neutral values, so that leaving one out shows.
        scale, shift = (0.2, 1.0) if "layernorm" in name else (parameter.shape[-1] ** -0.5, 0.0)
        parameter.data = torch.randn_like(parameter) * scale + shift

    def forward(x: Any, start: int, cache: Any) -> Any:
        length = x.shape[1]
        positions = torch.arange(start, start + length)[None]
        keys = torch.arange(start + length)[None]
        mask = torch.where(keys <= positions[0, :, None], 0.0, -torch.inf).double()[None, None]
        return layer(
            hidden_states=x,
            attention_mask=mask,
            past_key_values=cache,
            position_embeddings=rotary(x, positions),
        )[0]

    xs, ys = [], []
    with torch.no_grad():
        # The second request is so small that the epsilon of the norms decides its result.
        for prompt_len, size in zip(PROMPT_LENS, (1.0, 2e-3, 1.0), strict=True):
            x = torch.randn(1, prompt_len + DECODE_LEN, fields["hidden_size"], dtype=torch.float64) * size
            cache = DynamicCache(config=config)
            parts = [forward(x[:, :prompt_len], 0, cache)]
            parts += [forward(x[:, i : i + 1], i, cache) for i in range(prompt_len, x.shape[1])]
            xs.append(x[0].numpy())
            ys.append(torch.cat(parts, dim=1)[0].numpy())
    tensors = {name: value.numpy() for name, value in layer.state_dict().items()}
    return Oracle(fields, tensors, tuple(xs), tuple(ys), PROMPT_LENS)


@pytest.fixture(scope="session")
def oracle() -> Callable[..., Oracle]:
    """oracle(family, yarn, q_lora_rank, bias): transformers' layer "v2" or "v3" and its results; computed once each."""
    pytest.importorskip("torch", reason="the oracle needs torch: pip install 'tsmla-jax[dev]'")
    pytest.importorskip("transformers", reason="the oracle needs transformers: pip install 'tsmla-jax[dev]'")

    def run(family: str, yarn: bool, q_lora_rank: int | None, bias: bool = False) -> Oracle:
        return _run_oracle(family, yarn, q_lora_rank, bias)

    return run
