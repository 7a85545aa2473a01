"""The parameters of one MLA layer as a plain pytree.

In each weight that depends on heads, the heads are a separate axis, so that tensor parallelism splits this one axis.
kv_b_proj is kept as two parts, W_UK and W_UV, because a decode step uses them separately.
"""

from tsmla_jax.nn.checkpoints.weights import LayerWeights
from tsmla_jax.nn.mla import functional
from tsmla_jax.nn.mla.config import MLAConfig
from tsmla_jax.nn.mla.names import stored_names
from tsmla_jax.nn.mla.shapes import param_shapes as param_shapes


def hf_name(name: str) -> str:
    """The name, after `self_attn.`, of the tensor behind a parameter; w_uk and w_uv have one, named by kv_b_proj."""
    return f"{name.removesuffix('_bias')}.bias" if name.endswith("_bias") else f"{name}.weight"


WEIGHTS = LayerWeights(
    lambda directory, layer: MLAConfig.from_hf(directory),
    param_shapes,
    hf_name,
    stored_names=lambda checkpoint: stored_names(checkpoint.names()),
    unfold=functional.unfold,
)
