"""The MLA layer: config, rope, the functional form, the Flax layer, and Hugging Face weights.

Flax is imported only when `MLAttention` is first used, safetensors only when a checkpoint is opened.
"""

from typing import TYPE_CHECKING, Any

from tsmla_jax.nn import functional
from tsmla_jax.nn.checkpoint import Checkpoint, CheckpointError
from tsmla_jax.nn.config import MLAConfig, YarnConfig
from tsmla_jax.nn.hf import hf_attention_shapes, load_hf_attention, params_from_hf
from tsmla_jax.nn.params import Params, init_params, param_shapes, param_specs

if TYPE_CHECKING:
    from tsmla_jax.nn.layer import MLAttention

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "MLAConfig",
    "MLAttention",
    "Params",
    "YarnConfig",
    "functional",
    "hf_attention_shapes",
    "init_params",
    "load_hf_attention",
    "param_shapes",
    "param_specs",
    "params_from_hf",
]


def __getattr__(name: str) -> Any:
    if name != "MLAttention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from tsmla_jax.nn.layer import MLAttention
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] != "flax":
            raise
        raise ImportError("MLAttention needs the package flax: pip install 'tsmla-jax[flax]'") from None
    return MLAttention
