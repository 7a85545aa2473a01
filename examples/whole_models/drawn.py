"""Weights that are drawn on the GPU, in place of a checkpoint's, the same ones for every backend of an engine.

Matrices have the variance of 1 / (their inputs), norms are 1 and biases 0, as in random_checkpoint.py; e4m3 weights get
scales that give them this variance. A parameter's numbers follow from its name.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

GREATEST_E4M3 = 400.0  # of the values before their scales
MOST_AT_ONCE = 1 << 28  # the most numbers that are drawn at once, in 16 bits


def draw_all(model: torch.nn.Module) -> None:
    """Fill all parameters of a model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw(name, parameter, model)


def draw(name: str, parameter: Tensor, model: torch.nn.Module) -> None:
    """Fill a parameter. The scales of caches, which vLLM fills by itself, keep their values."""
    owner, _, own = name.rpartition(".")
    generator = torch.Generator(device=parameter.device).manual_seed(zlib.crc32(name.encode()))
    if "weight_scale" in own:
        weight = getattr(model.get_submodule(owner), own[: own.index("_scale")])
        parameter.fill_(greatest(weight) / GREATEST_E4M3)
    elif parameter.dim() > 1:
        narrow = parameter.dtype == torch.float8_e4m3fn
        most = GREATEST_E4M3 if narrow else greatest(parameter)
        for part in parts(parameter):
            part.copy_(torch.empty_like(part, dtype=torch.bfloat16).uniform_(-most, most, generator=generator))
    elif own.endswith("bias"):
        parameter.zero_()
    elif own.endswith("weight"):
        parameter.fill_(1)


def greatest(weight: Tensor) -> float:
    """The bound of uniform values whose variance is 1 / inputs."""
    return math.sqrt(3 / weight.shape[-1])


def parts(parameter: Tensor) -> Iterator[Tensor]:
    """A parameter in pieces of its first axis that are not too large to draw."""
    rows = max(1, MOST_AT_ONCE * len(parameter) // max(1, parameter.numel()))
    yield from parameter.split(rows)
