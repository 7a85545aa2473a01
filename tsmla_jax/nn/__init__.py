"""Attention layers: configs, the functional forms, the Flax layers, and Hugging Face weights.

`tsmla_jax.nn.functional` is MLA's (DeepSeek-V2, V3, Kimi-K2); `tsmla_jax.nn.v32` and `tsmla_jax.nn.v4` hold the sparse
layers; `tsmla_jax.nn.context_parallel` deals out the keys of a text to devices; `tsmla_jax.nn.batch_invariant` computes
a row's products in one order for any number of rows. Flax is imported only when a layer (`MLAttention`, `V32Attention`,
`V4Attention`) is first used, safetensors only when a checkpoint is opened or written.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from tsmla_jax.nn import batch_invariant, context_parallel, v4, v32
from tsmla_jax.nn.checkpoints.checkpoint import Checkpoint, CheckpointError
from tsmla_jax.nn.checkpoints.weights import Params
from tsmla_jax.nn.dot_product import dot_product_attention
from tsmla_jax.nn.mla import functional
from tsmla_jax.nn.mla.config import MLAConfig, QueryScale
from tsmla_jax.nn.mla.shapes import param_shapes
from tsmla_jax.nn.mla.weights import WEIGHTS
from tsmla_jax.nn.segments import Segments, segment_attention, segment_attention_kv
from tsmla_jax.nn.step import Step
from tsmla_jax.nn.v4 import V4Config
from tsmla_jax.nn.v32 import V32Config
from tsmla_jax.nn.yarn import YarnConfig

if TYPE_CHECKING:
    from tsmla_jax.nn.mla.layer import MLAttention
    from tsmla_jax.nn.v4.layer import V4Attention
    from tsmla_jax.nn.v32.layer import V32Attention

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "MLAConfig",
    "MLAttention",
    "Params",
    "QueryScale",
    "Segments",
    "Step",
    "V4Attention",
    "V4Config",
    "V32Attention",
    "V32Config",
    "YarnConfig",
    "batch_invariant",
    "context_parallel",
    "dot_product_attention",
    "functional",
    "hf_attention_shapes",
    "init_params",
    "load_hf_attention",
    "param_shapes",
    "param_specs",
    "params_from_hf",
    "params_to_hf",
    "save_hf_attention",
    "segment_attention",
    "segment_attention_kv",
    "v4",
    "v32",
]

hf_attention_shapes = WEIGHTS.hf_attention_shapes
init_params = WEIGHTS.init_params
load_hf_attention = WEIGHTS.load_hf_attention
param_specs = WEIGHTS.param_specs
params_from_hf = WEIGHTS.params_from_hf
params_to_hf = WEIGHTS.params_to_hf
save_hf_attention = WEIGHTS.save_hf_attention

_FLAX = {
    "MLAttention": "tsmla_jax.nn.mla.layer",
    "V4Attention": "tsmla_jax.nn.v4.layer",
    "V32Attention": "tsmla_jax.nn.v32.layer",
}

if importlib.util.find_spec("flax") is None:
    # `import *` takes what there is; a layer that is named says what it needs.
    __all__ = [name for name in __all__ if name not in _FLAX]


def __getattr__(name: str) -> Any:
    if name not in _FLAX:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_FLAX[name]), name)
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] != "flax":
            raise
        raise ImportError(f"{name} needs the package flax: pip install 'tsmla-jax[flax]'") from None


def __dir__() -> list[str]:
    return sorted(__all__)
