"""The attention layer of DeepSeek-V3.2 and GLM-5; as a Flax module it is `tsmla_jax.nn.V32Attention`."""

from tsmla_jax.nn.v32.config import V32Config
from tsmla_jax.nn.v32.functional import V32Cache, attend, form_of, init_cache
from tsmla_jax.nn.v32.prefill import CHECKPOINT_NAMES, V32Prefill, prefill
from tsmla_jax.nn.v32.weights import WEIGHTS, param_shapes

__all__ = [
    "CHECKPOINT_NAMES",
    "V32Cache",
    "V32Config",
    "V32Prefill",
    "attend",
    "form_of",
    "hf_attention_shapes",
    "init_cache",
    "init_params",
    "load_hf_attention",
    "param_shapes",
    "param_specs",
    "params_from_hf",
    "params_to_hf",
    "prefill",
    "save_hf_attention",
]

hf_attention_shapes = WEIGHTS.hf_attention_shapes
init_params = WEIGHTS.init_params
load_hf_attention = WEIGHTS.load_hf_attention
param_specs = WEIGHTS.param_specs
params_from_hf = WEIGHTS.params_from_hf
params_to_hf = WEIGHTS.params_to_hf
save_hf_attention = WEIGHTS.save_hf_attention


def __dir__() -> list[str]:
    return sorted(__all__)
