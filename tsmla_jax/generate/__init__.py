"""Whole models with the attention of `tsmla_jax.nn`: a checkpoint is loaded, texts are generated, and parameters are
saved again. The models are DeepSeek's V2 to V4, and the others that model_types.py names. `tsmla generate` is
`command.py`.
"""

from tsmla_jax.generate.config import ModelConfig, MoEConfig
from tsmla_jax.generate.engine import Engine, Generation, Tokens
from tsmla_jax.generate.figures import Figures
from tsmla_jax.generate.loading import load_model
from tsmla_jax.generate.mesh import MeshShape
from tsmla_jax.generate.plan import EngineOptions
from tsmla_jax.generate.saving import save_model

__all__ = [
    "Engine",
    "EngineOptions",
    "Figures",
    "Generation",
    "MeshShape",
    "MoEConfig",
    "ModelConfig",
    "Tokens",
    "load_model",
    "save_model",
]


def __dir__() -> list[str]:
    return sorted(__all__)
