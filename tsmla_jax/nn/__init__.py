"""The MLA layer: config, rope, the functional form, the Flax layer, and Hugging Face weights.

Flax is imported only when a layer (`MLAttention`, `V32Attention`, `V4Attention`) is first used, safetensors only when a
checkpoint is opened.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tsmla_jax.nn import deepseek_v4, deepseek_v32, functional
from tsmla_jax.nn.checkpoint import Checkpoint, CheckpointError
from tsmla_jax.nn.config import MLAConfig, YarnConfig
from tsmla_jax.nn.deepseek_v4 import V4Config
from tsmla_jax.nn.deepseek_v32 import V32Config
from tsmla_jax.nn.hf import hf_attention_shapes, load_hf_attention, params_from_hf
from tsmla_jax.nn.params import Params, init_params, param_shapes, param_specs

if TYPE_CHECKING:
    from tsmla_jax.nn.layer import MLAttention
    from tsmla_jax.nn.sparse_layers import V4Attention, V32Attention

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "MLAConfig",
    "MLAttention",
    "Params",
    "V4Attention",
    "V4Config",
    "V32Attention",
    "V32Config",
    "YarnConfig",
    "deepseek_v4",
    "deepseek_v32",
    "functional",
    "hf_attention_shapes",
    "init_params",
    "load_hf_attention",
    "param_shapes",
    "param_specs",
    "params_from_hf",
]


_FLAX = {
    "MLAttention": "tsmla_jax.nn.layer",
    "V4Attention": "tsmla_jax.nn.sparse_layers",
    "V32Attention": "tsmla_jax.nn.sparse_layers",
}


def __getattr__(name: str) -> Any:
    if name not in _FLAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_FLAX[name]), name)
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] != "flax":
            raise
        raise ImportError(f"{name} needs the package flax: pip install 'tsmla-jax[flax]'") from None
