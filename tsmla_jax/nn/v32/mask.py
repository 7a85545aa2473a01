"""The mask form of V3.2's and GLM-5's layers: why it can't serve a step or has no kernel, and the sizes that decide."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike

from tsmla_jax.nn.mla.config import MLAConfig
from tsmla_jax.nn.v32.config import V32Config
from tsmla_kernels.contract.forms import StepSizes
from tsmla_kernels.sm90.prefill.config import SELECTION_HEAD_DIMS


def head_dims(mla: MLAConfig) -> tuple[int, int]:
    """The widths of a head's key and value."""
    return mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim


def step_sizes(config: V32Config, *, tokens: int, requests: int, longest: int) -> StepSizes:
    """The sizes of a layer's step, for the rule that chooses its form."""
    mla = config.mla
    return StepSizes(
        tokens=tokens,
        requests=requests,
        longest=longest,
        heads=mla.num_attention_heads,
        selected=config.index_topk,
        columns=sum(head_dims(mla)),
    )


def mask_refusals(*, quantised: bool, shared_keys: bool) -> list[str]:
    """Why the mask can't serve a step; empty if it can.

    quantised: whether absorbed queries are quantised.
    shared_keys: whether the devices of a mesh axis share the keys.
    """
    refused = ["q_scale quantises absorbed queries, and the mask has none"] if quantised else []
    return refused + ["the keys are shared by the devices of a mesh axis"] * shared_keys


def mask_reasons(config: V32Config, dtype: DTypeLike) -> list[str]:
    """Why the mask form would have no kernel with activations of `dtype`; empty if it has one."""
    widths, name, reasons = head_dims(config.mla), jnp.dtype(dtype).name, []
    if widths not in SELECTION_HEAD_DIMS:
        legal = ", ".join(f"{k} and {v}" for k, v in SELECTION_HEAD_DIMS)
        reasons.append(f"the head dims are {widths[0]} and {widths[1]}; the mask's kernel takes {legal}")
    if name not in ("bfloat16", "float16"):
        reasons.append(f"x's dtype is {name}; the mask's kernel takes bfloat16 and float16")
    return reasons
