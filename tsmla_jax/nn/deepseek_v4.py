"""DeepSeek-V4's attention: a sliding window and compressed entries of all that came before, in one softmax with a sink.

A layer compresses 4 tokens an entry and lets an indexer choose entries ("csa"), or 128 and sees all of them ("hca"), or
has the window alone ("sliding"). `attend` is prefill, chunked prefill and decode in one; what does not depend on the
layer, the window's slots and the rows of hca layers among it, is made once a step by `make_step`. Axes: T new tokens in
all, B requests, E hidden width, H heads, D head width (K = V = the shared latent), R rope width, G output groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

import tsmla_jax
from tsmla_jax.nn import functional
from tsmla_jax.nn.checkpoint import Checkpoint
from tsmla_jax.nn.config import MLAConfig, YarnConfig, hf_field, read_hf_config, rope_fields
from tsmla_jax.nn.params import Params
from tsmla_jax.nn.rope import inverse_frequencies
from tsmla_jax.ops.sparse.indexer import fold_weights

Kind = Literal["sliding", "csa", "hca"]
_KINDS: dict[str, Kind] = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "sliding_window",
    "o_groups",
    "o_lora_rank",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
)
_RATIOS: dict[Kind, int] = {"sliding": 0, "csa": 4, "hca": 128}


@dataclasses.dataclass(frozen=True)
class V4Config:
    """One V4 attention layer.

    Attributes:
        kind: "sliding" (window alone), "csa" (overlapping windows, an indexer chooses) or "hca" (all entries seen).
        ratio: tokens a compressed entry; 0 for "sliding".
        hidden_size, num_attention_heads, head_dim, rope_dim, q_lora_rank: E, H, D, R (the last columns of D) and rank.
        sliding_window: tokens a query sees as they are, its own included.
        o_groups, o_lora_rank: of the grouped output projection; H is a multiple of o_groups.
        index_n_heads, index_head_dim, index_topk: of a csa layer's indexer.
        rope_theta, yarn: of this layer: plain for sliding layers, the compressor's for the others.
        rms_norm_eps: of every norm.
    """

    kind: Kind
    ratio: int
    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int
    head_dim: int = 512
    rope_dim: int = 64
    sliding_window: int = 128
    o_groups: int = 8
    o_lora_rank: int = 1024
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    rope_theta: float = 10000.0
    yarn: YarnConfig | None = None
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.kind not in _RATIOS:
            raise ValueError(f"V4Config: {self.kind=} must be one of {', '.join(_RATIOS)}")
        if (self.ratio == 0) != (self.kind == "sliding") or self.ratio < 0:
            raise ValueError(f"V4Config: {self.ratio=} must be 0 for a sliding layer and positive for the others")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and field.name != "ratio" and (type(value) is not int or value <= 0):
                raise ValueError(f"V4Config: {field.name}={value!r} must be a positive integer")
        if self.rope_dim % 2 or self.rope_dim > min(self.head_dim, self.index_head_dim):
            raise ValueError(f"V4Config: {self.rope_dim=} must be even and at most head_dim and index_head_dim")
        if self.num_attention_heads % self.o_groups:
            raise ValueError(f"V4Config: {self.num_attention_heads=} must be a multiple of {self.o_groups=}")

    @property
    def overlap(self) -> bool:
        """Whether compressor rows hold two series and entries pool two windows."""
        return self.kind == "csa"

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path, layer: int) -> V4Config:
        """Layer `layer` of a Hugging Face config, as transformers writes it or as the checkpoints first had it.

        Raises ValueError naming the field (and the file, when `source` is a path) that is missing or not legal.
        """
        fields, where = read_hf_config(source)
        sizes = {name: hf_field(fields, name, int, where) for name in _SIZES}
        kind = _layer_kind(fields, where, layer)
        factor = hf_field(fields, "partial_rotary_factor", float, where, default=64 / 512)
        rope_dim = hf_field(fields, "qk_rope_head_dim", int, where, default=int(sizes["head_dim"] * factor))
        rates = hf_field(fields, "compress_rates", dict, where, default={})
        legacy = {"csa": "compress_rate_csa", "hca": "compress_rate_hca"}
        ratio = 0
        if kind != "sliding":
            long_name = next(name for name, short in _KINDS.items() if short == kind)
            ratio = hf_field(rates, long_name, int, where, default=_RATIOS[kind])
            ratio = hf_field(fields, legacy[kind], int, where, default=ratio)
        theta, yarn = _layer_rope(fields, where, kind)
        eps = hf_field(fields, "rms_norm_eps", float, where, default=1e-6)
        try:
            return cls(
                kind=kind, ratio=ratio, rope_dim=rope_dim, rope_theta=theta, yarn=yarn, rms_norm_eps=eps, **sizes
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def _layer_kind(fields: Mapping[str, Any], where: str, layer: int) -> Kind:
    types, ratios = fields.get("layer_types"), fields.get("compress_ratios")
    if not isinstance(types, list) and not isinstance(ratios, list):
        raise ValueError(f"{where}: field 'layer_types' (or 'compress_ratios') must be a list")
    entries: list[Any] = types if isinstance(types, list) else cast(list[Any], ratios)
    if not 0 <= layer < len(entries):
        raise ValueError(f"layer: got {layer}; legal: 0 to {len(entries) - 1}")
    known: dict[Any, Kind] = _KINDS if isinstance(types, list) else {ratio: kind for kind, ratio in _RATIOS.items()}
    if entries[layer] not in known:
        raise ValueError(f"{where}: layer {layer} has type {entries[layer]!r}; legal: {', '.join(map(str, known))}")
    return known[entries[layer]]


def _layer_rope(fields: Mapping[str, Any], where: str, kind: Kind) -> tuple[float, YarnConfig | None]:
    """theta and yarn of a layer; only layers with a compressor are extended, and their cos and sin are not scaled."""
    label = "main" if kind == "sliding" else "compress"
    parameters = hf_field(fields, "rope_parameters", dict, where, default=None)
    if parameters is None:
        parameters = hf_field(fields, "rope_scaling", dict, where, default={})
    if isinstance(parameters.get(label), dict):
        own = dict(parameters[label])
    else:
        own = {} if kind == "sliding" else dict(parameters)
        name, default = ("rope_theta", 10000.0) if kind == "sliding" else ("compress_rope_theta", 160000.0)
        own["rope_theta"] = hf_field(fields, name, float, where, default=default)
    own.pop("partial_rotary_factor", None)  # it is what rope_dim comes from
    theta, yarn = rope_fields({"rope_parameters": own}, where)
    if yarn is not None and yarn.attention_factor is None:
        yarn = dataclasses.replace(yarn, attention_factor=1.0)
    return theta, yarn


def v4_param_shapes(config: V4Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter.

    q_a_proj [E, rank], q_a_norm [rank], q_b_proj [rank, H, D], kv_proj [E, D], kv_norm [D], sinks [H],
    o_a_proj [G, H D / G, o_rank], o_b_proj [G o_rank, E]. With a compressor, of row width W (D, or 2 D when windows
    overlap): compressor_kv_proj and compressor_gate_proj [E, W], compressor_position_bias [ratio, W] and
    compressor_kv_norm [D]. With an indexer the same four as indexer_*, D replaced by Di, and indexer_q_b_proj
    [rank, Hi, Di] and indexer_weights_proj [E, Hi].
    """
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
    for name, channels in _compressors(config):
        columns = channels * (2 if config.overlap else 1)
        shapes[f"{name}_kv_proj"] = (hidden, columns)
        shapes[f"{name}_gate_proj"] = (hidden, columns)
        shapes[f"{name}_position_bias"] = (config.ratio, columns)
        shapes[f"{name}_kv_norm"] = (channels,)
    if config.kind == "csa":
        shapes["indexer_q_b_proj"] = (rank, config.index_n_heads, config.index_head_dim)
        shapes["indexer_weights_proj"] = (hidden, config.index_n_heads)
    return shapes


def v4_param_specs(config: V4Config, heads_axis: str | None) -> dict[str, PartitionSpec]:
    """How to split the parameters over the heads: `heads_axis` names the mesh axis, whose size divides o_groups.

    Heads, sinks and output groups are split; the shared latent, the compressors and the indexer are replicated, as the
    caches are. Under `shard_map`, `attend` returns the partial sum over the local heads, for the caller to psum.
    """
    per_head = {
        "q_b_proj": PartitionSpec(None, heads_axis, None),
        "sinks": PartitionSpec(heads_axis),
        "o_a_proj": PartitionSpec(heads_axis, None, None),
        "o_b_proj": PartitionSpec(heads_axis, None),
    }
    return {name: per_head.get(name, PartitionSpec()) for name in v4_param_shapes(config)}


def _compressors(config: V4Config) -> list[tuple[str, int]]:
    """Name and channels of the layer's compressors."""
    both = [("compressor", config.head_dim), ("indexer", config.index_head_dim)]
    return both[: {"sliding": 0, "hca": 1, "csa": 2}[config.kind]]


_HF_PREFIX = {"compressor": "compressor.", "indexer": "compressor.indexer."}


def v4_hf_shapes(config: V4Config) -> dict[str, tuple[int, ...]]:
    """Names below `self_attn.` and shapes ([out, in]) of one layer in a Hugging Face checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in v4_param_shapes(config).items():
        hf_name = _hf_name(name)
        if len(shape) == 1 or name.endswith("position_bias"):
            shapes[hf_name] = shape
        elif name == "o_a_proj":
            groups, inner, rank = shape
            shapes[hf_name] = (groups * rank, inner)
        else:
            shapes[hf_name] = (int(np.prod(shape[1:])), shape[0])
    return shapes


def _hf_name(name: str) -> str:
    owner, _, rest = name.partition("_")
    if owner not in _HF_PREFIX:
        return name if name == "sinks" else f"{name}.weight"
    if rest == "position_bias":
        return f"{_HF_PREFIX[owner]}{rest}"
    return f"{_HF_PREFIX[owner]}{'scorer.' if rest == 'weights_proj' else ''}{rest}.weight"


def v4_params_from_hf(
    config: V4Config, tensors: Mapping[str, Any], dtype: DTypeLike | None = None
) -> dict[str, jax.Array]:
    """Parameters from the arrays of one layer by their name below `self_attn.`.

    Raises ValueError for a tensor that is missing or has another shape than `v4_hf_shapes` says.
    """
    hf_shapes, params = v4_hf_shapes(config), {}
    for name, shape in v4_param_shapes(config).items():
        hf_name = _hf_name(name)
        if hf_name not in tensors:
            raise ValueError(f"tensor {hf_name!r} is missing")
        array = np.asarray(tensors[hf_name])
        if array.shape != hf_shapes[hf_name]:
            raise ValueError(f"tensor {hf_name!r} must have shape {hf_shapes[hf_name]}, got {array.shape}")
        if name == "o_a_proj":
            groups, inner, rank = shape
            array = array.reshape(groups, rank, inner).transpose(0, 2, 1)
        elif not (len(shape) == 1 or name.endswith("position_bias")):
            array = array.T.reshape(shape)
        params[name] = jnp.asarray(array, dtype=dtype)
    return params


def load_hf_v4_attention(
    checkpoint_dir: str | Path | Checkpoint,
    layer: int,
    *,
    config: V4Config | None = None,
    dtype: DTypeLike | None = None,
    prefix: str = "model.layers.{layer}.self_attn.",
) -> dict[str, jax.Array]:
    """The parameters of one V4 layer from safetensors; arguments and errors of `load_hf_attention`."""
    if layer < 0:
        raise ValueError(f"{layer=} must be >= 0")
    checkpoint = checkpoint_dir if isinstance(checkpoint_dir, Checkpoint) else Checkpoint(checkpoint_dir)
    config = V4Config.from_hf(checkpoint.directory, layer) if config is None else config
    start = prefix.format(layer=layer)
    tensors = {
        name: checkpoint.read(start + name, shape=shape, dtype=dtype) for name, shape in v4_hf_shapes(config).items()
    }
    return v4_params_from_hf(config, tensors)


def v4_rope_table(config: V4Config, num_positions: int) -> jax.Array:
    """cos and sin for positions 0 to num_positions - 1, f32 [N, R]; one table for all layers of one rope."""
    rope = MLAConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        qk_rope_head_dim=config.rope_dim,
        rope_theta=config.rope_theta,
        yarn=config.yarn,
    )
    return tsmla_jax.rope_table(jnp.asarray(inverse_frequencies(rope)), num_positions, scale=rope.rope_magnitude)


class V4Cache(NamedTuple):
    """One layer's caches and compressor states; None where its kind has none.

    window       [P, Z, D] floats or float8_e4m3fn, or uint8 [P, page_bytes]: every token's latent
    compressed   the same of compressed entries
    indexer      [P, Z, Di] floats, or uint8 [P, Z, Di + 4]: the indexer's compressed keys
    compressor, indexer_compressor   CompressorState
    """

    window: jax.Array
    compressed: jax.Array | None
    indexer: jax.Array | None
    compressor: tsmla_jax.CompressorState | None
    indexer_compressor: tsmla_jax.CompressorState | None


def init_v4_layer_cache(
    config: V4Config,
    *,
    window_pages: int,
    compressed_pages: int,
    num_states: int,
    page_size: int,
    dtype: DTypeLike = jnp.bfloat16,
    indexer_dtype: DTypeLike = jnp.uint8,
    spare: int = 0,
) -> V4Cache:
    """Empty caches; dtype uint8 is the packed layout (head_dim 512), indexer_dtype uint8 fp8 keys with scales.

    num_states: how many requests can be under way; spare: how many tokens a request may take back.
    """

    def cache(pages: int) -> jax.Array:
        if jnp.dtype(dtype) == jnp.uint8:
            return tsmla_jax.init_v4_cache(
                pages, layout="packed", cache_dtype="fp8", page_size=page_size, head_dim=config.head_dim
            )
        return jnp.zeros((pages, page_size, config.head_dim), dtype)

    states: list[tsmla_jax.CompressorState | None] = [
        tsmla_jax.init_compressor_state(
            num_states, ratio=config.ratio, channels=channels, overlap=config.overlap, spare=spare
        )
        for _, channels in _compressors(config)
    ]
    states += [None] * (2 - len(states))
    extra = 4 if jnp.dtype(indexer_dtype) == jnp.uint8 else 0
    return V4Cache(
        window=cache(window_pages),
        compressed=None if config.kind == "sliding" else cache(compressed_pages),
        indexer=(
            jnp.zeros((compressed_pages, page_size, config.index_head_dim + extra), indexer_dtype)
            if config.kind == "csa"
            else None
        ),
        compressor=states[0],
        indexer_compressor=states[1],
    )


class V4Step(NamedTuple):
    """What the layers of one kind share in one step (see `make_step`)."""

    positions: jax.Array
    seq_lens: jax.Array
    cu_seqlens_q: jax.Array
    state_slots: jax.Array
    window_write: jax.Array
    window_slots: jax.Array
    compressed_tables: jax.Array
    token_tables: jax.Array
    rows: tsmla_jax.MixedIndices | None


def make_step(
    config: V4Config,
    *,
    seq_lens: jax.Array,
    cu_seqlens_q: jax.Array,
    total_tokens: int,
    state_slots: jax.Array,
    window_tables: jax.Array,
    compressed_tables: jax.Array,
    page_size: int,
) -> V4Step:
    """The index rows of one step, for all layers of the config's kind, ratio and window.

    Args:
        config: of any such layer.
        seq_lens: [B] i32, the new tokens included.
        cu_seqlens_q: [B + 1] i32, where each request's new tokens start.
        total_tokens: T, static; tokens from cu_seqlens_q[B] on are padding.
        state_slots: [B] i32, each request's compressor states.
        window_tables: [B, M] i32, pages of the window cache; entries of pages wholly before the window are not read.
        compressed_tables: [B, Mc] i32, pages of the compressed caches (not read for sliding layers).
        page_size: Z of every cache, static.
    """
    requests, positions = functional.ragged_positions(cu_seqlens_q, seq_lens - jnp.diff(cu_seqlens_q), total_tokens)
    window = tsmla_jax.window_slots(
        positions, window_tables[requests], page_size=page_size, window=config.sliding_window
    )
    token_tables = compressed_tables[requests]
    rows = None
    if config.kind == "sliding":
        rows = tsmla_jax.build_mixed_sparse_indices(window)
    elif config.kind == "hca":
        chosen, lens = tsmla_jax.compressed_slots(positions, token_tables, ratio=config.ratio, page_size=page_size)
        rows = tsmla_jax.build_mixed_sparse_indices(window, chosen, lens)
    return V4Step(
        positions=positions,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        state_slots=state_slots,
        window_write=functional.slots_of(window_tables, requests, positions, page_size=page_size),
        window_slots=window,
        compressed_tables=compressed_tables,
        token_tables=token_tables,
        rows=rows,
    )


def attend(
    params: Params,
    config: V4Config,
    x: jax.Array,
    cache: V4Cache,
    step: V4Step,
    *,
    cos_sin: jax.Array,
    page_size: int,
    kv_scale: float | jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, V4Cache]:
    """Attention of new tokens over their window and their requests' compressed entries.

    Args:
        params: see `v4_param_shapes`.
        x: [T, E], requests packed one after the other.
        cache: holds the tokens before the new ones.
        step: of `make_step`, for this layer's kind.
        cos_sin: of `v4_rope_table`.
        page_size: Z, static.
        kv_scale: of float8_e4m3fn window and compressed caches.
        implementation: of `tsmla_jax.sparse_mla`, `tsmla_jax.compress_kv` and `tsmla_jax.indexer_logits`.

    Returns:
        y [T, E] and the caches with the new tokens written (in place if donated). Rows of padding mean nothing.
    """
    eps = config.rms_norm_eps
    low = functional.rms_norm(x @ params["q_a_proj"], params["q_a_norm"], eps)
    q = jnp.einsum("tr,rhd->thd", low, params["q_b_proj"])
    wide = q.astype(jnp.float32)
    q = (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)).astype(q.dtype)
    q = tsmla_jax.apply_rope(q, step.positions, cos_sin)

    kv = tsmla_jax.norm_rope(x @ params["kv_proj"], params["kv_norm"], step.positions, cos_sin, eps=eps)
    page = page_size if cache.window.dtype == jnp.uint8 else None
    window = tsmla_jax.write_v4_cache(cache.window, kv, step.window_write, kv_scale=kv_scale, page_size=page)
    cache = cache._replace(window=window)
    rows = step.rows
    if cache.compressed is not None and cache.compressor is not None:
        entries, state = _compress(params, config, "compressor", x, cache.compressor, step, cos_sin, implementation)
        slots = _entry_slots(entries, step, page_size)
        compressed = tsmla_jax.write_v4_cache(cache.compressed, entries.kv, slots, kv_scale=kv_scale, page_size=page)
        cache = cache._replace(compressed=compressed, compressor=state)
    if config.kind == "csa":
        rows, cache = _choose(params, config, x, low, cache, step, cos_sin, page_size, implementation)
    if rows is None:
        raise ValueError(f"step: got one made for another kind of layer; this layer is {config.kind!r}")
    out = tsmla_jax.sparse_mla(
        q,
        cache.window,
        rows.indices,
        rows.lengths,
        softmax_scale=config.head_dim**-0.5,
        latent_dim=config.head_dim,
        sinks=params["sinks"],
        compressed_kv_cache=cache.compressed,
        window=None if cache.compressed is None else rows.window,
        page_size=page,
        compressed_page_size=None if cache.compressed is None else page,
        kv_scale=kv_scale,
        compressed_kv_scale=None if cache.compressed is None else kv_scale,
        implementation=implementation,
    )
    # Values carry their own positions' rope; turned back by the query's, what is left is the distance.
    out = tsmla_jax.apply_rope(cast(jax.Array, out), step.positions, cos_sin, inverse=True)
    grouped = out.astype(x.dtype).reshape(x.shape[0], params["o_a_proj"].shape[0], -1)
    mixed = jnp.einsum("tgi,gir->tgr", grouped, params["o_a_proj"])
    return mixed.reshape(x.shape[0], -1) @ params["o_b_proj"], cache


def _compress(
    params: Params,
    config: V4Config,
    name: str,
    x: jax.Array,
    state: tsmla_jax.CompressorState,
    step: V4Step,
    cos_sin: jax.Array,
    implementation: str | None,
) -> tuple[tsmla_jax.CompressedEntries, tsmla_jax.CompressorState]:
    """The entries that the new tokens complete, normed and rotated, of one of the layer's compressors."""
    wide = x.astype(jnp.float32)
    projections = jnp.stack([params[f"{name}_kv_proj"], params[f"{name}_gate_proj"]], axis=1).astype(jnp.float32)
    kv_score = jnp.einsum("te,esw->tsw", wide, projections, precision="highest")
    entries, state = tsmla_jax.compress_kv(
        kv_score,
        params[f"{name}_position_bias"].astype(jnp.float32),
        state,
        state_slots=step.state_slots,
        seq_lens=step.seq_lens,
        cu_seqlens_q=step.cu_seqlens_q,
        ratio=config.ratio,
        overlap=config.overlap,
        implementation=implementation,
    )
    rows = tsmla_jax.norm_rope(
        entries.kv, params[f"{name}_kv_norm"], entries.positions * config.ratio, cos_sin, eps=config.rms_norm_eps
    )
    return entries._replace(kv=rows), state


def _entry_slots(entries: tsmla_jax.CompressedEntries, step: V4Step, page_size: int) -> jax.Array:
    """Where completed entries go, -1 for padding."""
    tables = step.compressed_tables[jnp.maximum(entries.requests, 0)]
    return tsmla_jax.positions_to_slots(entries.positions[:, None], tables, page_size)[:, 0]


def _choose(
    params: Params,
    config: V4Config,
    x: jax.Array,
    low: jax.Array,
    cache: V4Cache,
    step: V4Step,
    cos_sin: jax.Array,
    page_size: int,
    implementation: str | None,
) -> tuple[tsmla_jax.MixedIndices, V4Cache]:
    """The index rows of a csa layer: its indexer's compressed keys, their scores, the best of them."""
    if cache.indexer is None or cache.indexer_compressor is None:
        raise ValueError("cache: got none for the indexer; a csa layer needs one (see init_v4_layer_cache)")
    entries, state = _compress(params, config, "indexer", x, cache.indexer_compressor, step, cos_sin, implementation)
    slots = _entry_slots(entries, step, page_size)
    keys = tsmla_jax.write_indexer_cache(cache.indexer, entries.kv, slots)
    q = jnp.einsum("tr,rhd->thd", low, params["indexer_q_b_proj"]).astype(jnp.float32)
    q = tsmla_jax.apply_rope(q, step.positions, cos_sin)
    weights = x @ params["indexer_weights_proj"]
    if keys.dtype == jnp.uint8:
        q, weights = tsmla_jax.indexer_quantize(q, weights)
    else:
        weights = fold_weights(weights, config.index_head_dim)
    visible = jnp.maximum(step.positions + 1, 0) // config.ratio
    logits = tsmla_jax.indexer_logits(q, weights, keys, step.token_tables, visible, implementation=implementation)
    chosen = tsmla_jax.select_topk(logits, visible, min(config.index_topk, logits.shape[1]))
    chosen = tsmla_jax.positions_to_slots(chosen, step.token_tables, page_size)
    rows = tsmla_jax.build_mixed_sparse_indices(step.window_slots, chosen)
    return rows, cache._replace(indexer=keys, indexer_compressor=state)
