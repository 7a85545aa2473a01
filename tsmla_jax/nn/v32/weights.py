"""The parameters of one layer of DeepSeek-V3.2 or GLM-5: MLA's, and those of the indexer if the layer has one.

When heads are split, every device has the whole indexer and its cache, because all devices must choose the same keys.
"""

from typing import cast

from tsmla_jax.nn.checkpoints.weights import LayerWeights
from tsmla_jax.nn.inputs import check_config
from tsmla_jax.nn.mla import weights as mla
from tsmla_jax.nn.v32 import functional
from tsmla_jax.nn.v32.config import V32Config


def param_shapes(config: V32Config) -> dict[str, tuple[int, ...]]:
    """Shapes of V3.2's weights: those of `tsmla_jax.nn.param_shapes`, and indexer_wq_b [rank, Hi, Di], indexer_wk [E,
    Di], indexer_k_norm [Di] and its bias indexer_k_norm_bias, indexer_weights_proj [E, Hi]; without an indexer
    (`V32Config.has_indexer`) none of these.

    Args:
        config: the layer's shape.

    Raises:
        TypeError: config is no V32Config.
    """
    check_config(config, V32Config)
    if not config.has_indexer:
        return mla.param_shapes(config.mla)
    heads, width, hidden = config.index_n_heads, config.index_head_dim, config.mla.hidden_size
    return {
        **mla.param_shapes(config.mla),
        "indexer_wq_b": (cast(int, config.mla.q_lora_rank), heads, width),
        "indexer_wk": (hidden, width),
        "indexer_k_norm": (width,),
        "indexer_k_norm_bias": (width,),
        "indexer_weights_proj": (hidden, heads),
    }


def _hf_name(name: str) -> str:
    owner = "indexer." if name.startswith("indexer_") else ""
    return owner + mla.hf_name(name.removeprefix("indexer_"))


WEIGHTS = LayerWeights(V32Config.from_hf, param_shapes, _hf_name, unfold=functional.unfold)
