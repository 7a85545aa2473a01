"""The weights of drawn.py as a load format of vLLM. This module is imported with vLLM."""

from __future__ import annotations

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from examples.whole_models.drawn import draw_all

FORMAT = "drawn"
"""vLLM's load_format of these weights."""


@register_model_loader(FORMAT)
class DrawnLoader(DummyModelLoader):
    """Draws all parameters of a model."""

    def load_weights(self, model: torch.nn.Module, model_config: object) -> None:
        draw_all(model)
