"""The parameters of one DeepSeek-V4 layer.

Axes: E hidden width, H heads, D head width, G output groups, Hi and Di heads and width of the indexer.
"""

from tsmla_jax.nn.checkpoints.weights import LayerWeights
from tsmla_jax.nn.inputs import check_config
from tsmla_jax.nn.v4 import functional
from tsmla_jax.nn.v4.config import V4Config
from tsmla_jax.nn.v4.names import stored_name, stored_names

_HF_PREFIX = {"compressor": "compressor.", "indexer": "compressor.indexer."}


def param_shapes(config: V4Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter.

    q_a_proj [E, rank], q_a_norm [rank], q_b_proj [rank, H, D], kv_proj [E, D], kv_norm [D], sinks [H],
    o_a_proj [G, H D / G, o_rank], o_b_proj [G o_rank, E]. With a compressor, of row width W (D, or 2 D when windows
    overlap): compressor_kv_proj and compressor_gate_proj [E, W], compressor_position_bias [ratio, W] and
    compressor_kv_norm [D]. With an indexer the same four as indexer_*, D replaced by Di, and indexer_q_b_proj
    [rank, Hi, Di] and indexer_weights_proj [E, Hi].

    Args:
        config: the layer's shape.

    Raises:
        TypeError: config is no V4Config.
    """
    check_config(config, V4Config)
    heads, width, hidden, rank = config.num_attention_heads, config.head_dim, config.hidden_size, config.q_lora_rank
    groups = config.o_groups
    shapes: dict[str, tuple[int, ...]] = {
        "q_a_proj": (hidden, rank),
        "q_a_norm": (rank,),
        "q_b_proj": (rank, heads, width),
        "kv_proj": (hidden, width),
        "kv_norm": (width,),
        "sinks": (heads,),
        "o_a_proj": (groups, heads * width // groups, config.o_lora_rank),
        "o_b_proj": (groups * config.o_lora_rank, hidden),
    }
    for name, channels in config.compressors:
        columns = channels * (2 if config.overlap else 1)
        shapes[f"{name}_kv_proj"] = (hidden, columns)
        shapes[f"{name}_gate_proj"] = (hidden, columns)
        shapes[f"{name}_position_bias"] = (config.ratio, columns)
        shapes[f"{name}_kv_norm"] = (channels,)
    if config.kind == "csa":
        shapes["indexer_q_b_proj"] = (rank, config.index_n_heads, config.index_head_dim)
        shapes["indexer_weights_proj"] = (hidden, config.index_n_heads)
    return shapes


def _hf_name(name: str) -> str:
    owner, _, rest = name.partition("_")
    if owner not in _HF_PREFIX:
        return name if name == "sinks" else f"{name}.weight"
    if rest == "position_bias":
        return f"{_HF_PREFIX[owner]}{rest}"
    return f"{_HF_PREFIX[owner]}{'scorer.' if rest == 'weights_proj' else ''}{rest}.weight"


WEIGHTS = LayerWeights(V4Config.from_hf, param_shapes, _hf_name, stored_names, stored_name, functional.unfold)
