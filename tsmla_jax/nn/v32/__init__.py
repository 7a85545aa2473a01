"""DeepSeek-V3.2's attention layer; `V32Attention` is in `tsmla_jax.nn`."""

from tsmla_jax.nn.v32.config import V32Config
from tsmla_jax.nn.v32.functional import V32Cache, attend, init_cache
from tsmla_jax.nn.v32.weights import (
    hf_attention_shapes,
    load_hf_attention,
    param_shapes,
    param_specs,
    params_from_hf,
)

__all__ = [
    "V32Cache",
    "V32Config",
    "attend",
    "hf_attention_shapes",
    "init_cache",
    "load_hf_attention",
    "param_shapes",
    "param_specs",
    "params_from_hf",
]
