"""DeepSeek-V4's attention layer; as a Flax module it is `tsmla_jax.nn.V4Attention`."""

from tsmla_jax.nn.v4.config import Kind, V4Config
from tsmla_jax.nn.v4.functional import V4Cache, attend, init_cache
from tsmla_jax.nn.v4.prefill import CHECKPOINT_NAMES, V4Prefill, prefill
from tsmla_jax.nn.v4.step import V4Step, make_step, rope_table
from tsmla_jax.nn.v4.weights import WEIGHTS, param_shapes

__all__ = [
    "CHECKPOINT_NAMES",
    "Kind",
    "V4Cache",
    "V4Config",
    "V4Prefill",
    "V4Step",
    "attend",
    "hf_attention_shapes",
    "init_cache",
    "init_params",
    "load_hf_attention",
    "make_step",
    "param_shapes",
    "param_specs",
    "params_from_hf",
    "params_to_hf",
    "prefill",
    "rope_table",
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
