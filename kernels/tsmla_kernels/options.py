"""Options of the command line, as text, to the spec of a call, and so to the config that such a call is given.

A call gets its config from its spec in the same way, so `tsmla compile --config` compiles the objects that calls ask
for. Options are the static fields of a spec, with shorter names for the dtypes. Every ValueError names the option.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tsmla_kernels import contract
from tsmla_kernels.contract.cache import ROPE_LAYOUTS
from tsmla_kernels.contract.compress import CompressSpec, CompressWriteSpec
from tsmla_kernels.contract.layouts import INDEXER, V4_PACKED, V32_PACKED, CacheSpec, IndexerCacheSpec
from tsmla_kernels.contract.packed import IndexerQuantizeSpec, IndexerWriteSpec, PackedWriteSpec, Rotation
from tsmla_kernels.contract.products import ProductSpec, QuantizeBlocksSpec
from tsmla_kernels.contract.rules import FP8, SLOTS
from tsmla_kernels.contract.selection import SelectionBitsSpec
from tsmla_kernels.contract.sparse import (
    SPARSE_FORMS,
    TOPK_ORDERS,
    IndexerLogitsSpec,
    IndexerTopkSpec,
    SparseMLASpec,
    TopKSpec,
)
from tsmla_kernels.option_values import Spec, defaults, filled_in, limit_of, one_of, parsed, spec_of
from tsmla_kernels.sm90.few_tokens.config import (
    ChoiceSpec,
    ExpertsSpec,
    MatmulSpec,
    QueriesSpec,
    RouterSpec,
    WindowSpec,
)
from tsmla_kernels.sm90.few_tokens.index_key_config import IndexKeySpec
from tsmla_kernels.sm90.few_tokens.latent_config import InputsSpec, OutputsSpec
from tsmla_kernels.sm90.few_tokens.streams_config import ReadStreamsSpec, WriteStreamsSpec
from tsmla_kernels.sm90.few_tokens.values_config import ValuesSpec

# The options of each kind of kernel and their defaults, "" where there is none. Options after a model's preset are for
# every kernel, so a kernel also accepts options that only the kernels before it read.
_DECODE = {
    "num_heads": "",
    "tensor_parallel": "1",
    "dtype": "bfloat16",
    "kv_dtype": "",
    "max_q_len": "1",
    "latent_dim": "512",
    "rope_dim": "64",
    "page_size": "64",
    "ragged": "false",
    "causal": "true",
    "batch_invariant": "false",
    **defaults(contract.DecodeSpec),
}
_PREFILL = {
    **_DECODE,
    "qk_head_dim": "192",
    "v_head_dim": "128",
    "shared_rope": "false",
    **defaults(contract.PrefillSpec),
}
del _PREFILL["kv_dtype"]
_CACHE = {**_DECODE, **_PREFILL, "rope_interleave": "true", "rope_layout": "interleaved", "slot_dtype": "int32"}
_MERGE = {**_CACHE, "parts": "2"}
_TOPK = {
    **_MERGE,
    "num_tokens": "64",
    "num_requests": "64",
    "num_columns": "131072",
    "k": "2048",
    "order": "position",
    "bits": "false",
    "index_n_heads": "64",
    "key_dtype": "",
}
_PACKED = {**_TOPK, "rope_offset": "0", "index_rope_layout": "halves"}
_COMPRESS = {**_PACKED, "ratio": "4", "overlap": "true", "channels": "512", "cache": "v4", "eps": "1e-6"}
_LOGITS = {**_TOPK, "num_heads": "64", "head_dim": "128", "packed": "true"}
_INDEXER_TOPK = {
    **_LOGITS,
    "index_n_heads": "",
    "ragged": "true",
    "return_slots": "true",
    "return_scores": "false",
    "return_bits": "false",
}
_PRODUCT = {
    **_TOPK,
    "in_features": "7168",
    "out_features": "7168",
    "num_groups": "256",
    "power_of_two": "false",
    "gated": "false",
    "limit": "",
    "picked": "false",
    "quantized": "false",
}
_FEW_TOKENS = {
    **_PRODUCT,
    "num_tokens": "1",
    "eps": "1e-6",
    "normed": "true",
    "residual": "false",
    "choices": "8",
    "num_experts": "256",
    "nope_dim": "128",
}
"""The options of the kernels of few tokens. `dtype` is the dtype of the weights or, in few_token_queries, of the
absorbed queries."""
_STREAMS = {**_FEW_TOKENS, **defaults(ReadStreamsSpec), **defaults(WriteStreamsSpec), "streams": "4"}
_BITS = {**_TOPK, "lengths": "false", "starts": "false"}
_SPARSE = {
    **_TOPK,
    "layout": "v32",
    "head_dim": "576",
    "num_selected": "2048",
    "page_span": "",
    "window": "",
    "compressed_page_size": "",
    "compressed_page_span": "",
    "lengths": "false",
    "sinks": "false",
    **defaults(SparseMLASpec),
}


def decode_spec(options: Mapping[str, str]) -> contract.DecodeSpec:
    """The spec of mla_decode. tensor_parallel is the number of devices that share the heads."""
    values = filled_in(options, _DECODE)
    if not values["num_heads"]:
        raise ValueError("--config: num_heads is needed, or a preset that has it")
    return spec_of(contract.DecodeSpec, values, num_heads=_heads_of_a_device(values))


def _heads_of_a_device(values: Mapping[str, str]) -> int:
    heads, devices = (parsed(values, name, int) for name in ("num_heads", "tensor_parallel"))
    if heads % devices:
        raise ValueError(f"--config: got tensor_parallel={devices}; it must divide num_heads={heads}")
    return heads // devices


def prefill_spec(options: Mapping[str, str]) -> contract.PrefillSpec:
    """The spec of mla_prefill. The kernels read the number of heads and the lengths at the launch."""
    values = filled_in(options, _PREFILL)
    return spec_of(contract.PrefillSpec, values, num_heads=1, max_q_len=1)


def rope_write_spec(options: Mapping[str, str]) -> contract.RopeWriteSpec:
    """The spec of rope_write_kv_cache. `dtype` is the dtype of the query and, without a kv_dtype, of the cache.

    The inputs have the same dtype, or bfloat16 if it is fp8.
    """
    values = filled_in(options, _CACHE)
    one_of(ROPE_LAYOUTS, values, "rope_layout")
    in_dtype = contract.attention_out_dtype(values["dtype"])
    write = spec_of(contract.CacheWriteSpec, values, page_size=1, in_dtype=in_dtype)
    return spec_of(contract.RopeWriteSpec, values, write=write, num_heads=1)


def cache_write_spec(options: Mapping[str, str]) -> contract.CacheWriteSpec:
    """The spec of write_kv_cache, with the dtypes of rope_write_spec."""
    values = filled_in(options, _CACHE)
    return dataclasses.replace(rope_write_spec(options).write, slot_dtype=one_of(SLOTS, values, "slot_dtype"))


def cache_gather_spec(options: Mapping[str, str]) -> contract.CacheGatherSpec:
    """The spec of gather_kv_cache, with the dtypes of rope_write_spec: rows come out in the dtype of the rows to
    write."""
    write = cache_write_spec(options)
    dtypes = {"kv_dtype": write.kv_dtype, "out_dtype": write.in_dtype}
    return spec_of(contract.CacheGatherSpec, {}, head_dim=write.head_dim, **dtypes)


def merge_spec(options: Mapping[str, str]) -> contract.MergeSpec:
    """The spec of merge_attention_states. `dtype` is the dtype of attention's inputs, v_head_dim the width of
    attention's results."""
    values = filled_in(options, _MERGE)
    num_parts, head_dim = (parsed(values, name, int) for name in ("parts", "v_head_dim"))
    return contract.MergeSpec(num_parts, (1,), head_dim, contract.attention_out_dtype(values["dtype"]), "float32")


def topk_spec(options: Mapping[str, str]) -> TopKSpec:
    """The spec of select_topk: num_tokens rows of num_columns, float32 whatever attention's dtype is."""
    values = filled_in(options, _TOPK)
    one_of(TOPK_ORDERS, values, "order")
    return spec_of(TopKSpec, values, dtype="float32", page_size=0, row_starts=False)


def selection_bits_spec(options: Mapping[str, str]) -> SelectionBitsSpec:
    """The spec of selection_bits, whose kernel reads all sizes at the launch."""
    return spec_of(SelectionBitsSpec, filled_in(options, _BITS))


def packed_write_spec(options: Mapping[str, str]) -> PackedWriteSpec:
    """The spec of write_packed_kv_cache with a rotation.

    `dtype` is the dtype of attention's inputs. The rows to write have the same dtype, or bfloat16 if it is fp8."""
    values = filled_in(options, _PACKED)
    one_of(ROPE_LAYOUTS, values, "rope_layout")
    cache = CacheSpec("v32", 1, 1, 1, V32_PACKED.latent_dim + V32_PACKED.rope_dim, "uint8")
    in_dtype = contract.attention_out_dtype(values["dtype"])
    dtypes = {"in_dtype": in_dtype, "rope_dtype": in_dtype, "slot_dtype": one_of(SLOTS, values, "slot_dtype")}
    return spec_of(PackedWriteSpec, values, cache=cache, **dtypes)


def indexer_write_spec(options: Mapping[str, str]) -> IndexerWriteSpec:
    """The spec of write_indexer_cache. `key_dtype` is the dtype of the keys to write, by default that of the rows of
    packed_write_spec."""
    values = filled_in(options, _PACKED)
    cache = IndexerCacheSpec(1, parsed(values, "page_size", int), INDEXER.head_dim, True)
    in_dtype = contract.attention_out_dtype(values["key_dtype"] or values["dtype"])
    return IndexerWriteSpec(1, cache, in_dtype, _indexer_rotation(values), one_of(SLOTS, values, "slot_dtype"))


def indexer_quantize_spec(options: Mapping[str, str]) -> IndexerQuantizeSpec:
    """The spec of indexer_quantize, with the dtype of packed_write_spec for the queries and the weights."""
    values = filled_in(options, _PACKED)
    in_dtype = contract.attention_out_dtype(values["dtype"])
    tokens, heads = (parsed(values, name, int) for name in ("num_tokens", "index_n_heads"))
    return IndexerQuantizeSpec(tokens, heads, INDEXER.head_dim, in_dtype, in_dtype, _indexer_rotation(values))


def compress_write_spec(options: Mapping[str, str]) -> CompressWriteSpec:
    """The spec of compress_write_kv_cache, with the dtype of packed_write_spec for the norm's weights. `cache` is v4,
    indexer, or a plain cache's dtype."""
    values = filled_in(options, _COMPRESS)
    series = 2 if parsed(values, "overlap", bool) else 1
    ratio, channels, rope_dim = (parsed(values, name, int) for name in ("ratio", "channels", "rope_dim"))
    page_size = V4_PACKED.page_size if "page_size" not in options else parsed(values, "page_size", int)
    compress = CompressSpec(
        num_tokens=1, num_requests=1, ratio=ratio, overlap=series, channels=channels, num_states=1,
        ring=ratio * series,
    )  # fmt: skip
    weight_dtype = contract.attention_out_dtype(values["dtype"])
    return CompressWriteSpec(
        compress=compress, cache=values["cache"], num_pages=1, page_size=page_size, weight_dtype=weight_dtype,
        rope_dim=rope_dim, eps=parsed(values, "eps", float),
    )  # fmt: skip


def _indexer_rotation(values: Mapping[str, str]) -> Rotation | None:
    """Rope on rope_dim columns from rope_offset on, in index_rope_layout; None if rope_dim is 0."""
    width, offset = (parsed(values, name, int) for name in ("rope_dim", "rope_offset"))
    if offset + width > INDEXER.head_dim:
        raise ValueError(
            f"--config: got rope_offset={offset}, rope_dim={width}; legal: at most {INDEXER.head_dim} in all"
        )
    layout = one_of(ROPE_LAYOUTS, values, "index_rope_layout")
    return Rotation(width, offset, layout) if width else None


def indexer_logits_spec(options: Mapping[str, str]) -> IndexerLogitsSpec:
    """The spec of indexer_logits: num_heads indexer heads, e4m3 queries and keys whatever attention's dtype is."""
    return _logits_spec(filled_in(options, _LOGITS))


def indexer_topk_spec(options: Mapping[str, str]) -> IndexerTopkSpec:
    """The spec of indexer_topk as V3.2's layer calls it: num_tokens query tokens of num_requests requests, whose block
    tables' rows are num_columns keys long. The indexer has index_n_heads heads, or num_heads if index_n_heads isn't
    given."""
    values = filled_in(options, _INDEXER_TOPK)
    values["num_heads"] = values["index_n_heads"] or values["num_heads"]
    columns, page_size = (parsed(values, name, int) for name in ("num_columns", "page_size"))
    if columns % page_size:
        raise ValueError(f"--config: got num_columns={columns}; legal: a multiple of page_size={page_size}")
    logits = dataclasses.replace(_logits_spec(values), max_pages=columns // page_size)
    spec = spec_of(IndexerTopkSpec, values, logits=logits)
    if spec.return_bits and (spec.return_slots or spec.return_scores):
        raise ValueError("--config: got return_bits=true; legal: with return_slots=false and return_scores=false")
    return spec


def _logits_spec(values: Mapping[str, str]) -> IndexerLogitsSpec:
    page_size, head_dim = (parsed(values, name, int) for name in ("page_size", "head_dim"))
    cache = IndexerCacheSpec(1, page_size, head_dim, parsed(values, "packed", bool))
    cache_dtype = "uint8" if cache.packed else FP8
    return spec_of(
        IndexerLogitsSpec, values, cache=cache, q_dtype=FP8, weights_dtype="float32", cache_dtype=cache_dtype
    )


def product_spec(options: Mapping[str, str]) -> ProductSpec:
    """The spec of block_scaled_matmul: num_tokens rows times a weight [out_features, in_features]. `dtype` is that of
    the rows, and of the result; the result is bfloat16 if `dtype` is fp8, or e4m3 if `quantized`. gated and limit are
    arguments of the call; if `picked`, an index picks the rows."""
    return _product_spec(options, grouped=False)


def grouped_product_spec(options: Mapping[str, str]) -> ProductSpec:
    """The spec of grouped_block_scaled_matmul, with block_scaled_matmul's options: num_tokens rows in all, of
    num_groups groups."""
    return _product_spec(options, grouped=True)


def _product_spec(options: Mapping[str, str], *, grouped: bool) -> ProductSpec:
    values = filled_in(options, _PRODUCT)
    names = ("num_tokens", "in_features", "out_features", "num_groups")
    rows, terms, columns, groups = (parsed(values, name, int) for name in names)
    gated, picked, quantized = (parsed(values, name, bool) for name in ("gated", "picked", "quantized"))
    if quantized and not gated:
        raise ValueError("--config: got quantized=true; legal: with gated=true")
    return ProductSpec(
        rows,
        terms,
        columns,
        num_groups=groups if grouped else None,
        out_dtype=FP8 if quantized else contract.attention_out_dtype(values["dtype"]),
        x_dtype=values["dtype"],
        gated=gated,
        limit=limit_of(values),
        num_picked=rows if picked else None,
    )


def quantize_blocks_spec(options: Mapping[str, str]) -> QuantizeBlocksSpec:
    """The spec of quantize_blocks: num_tokens rows of in_features, of `dtype`, or bfloat16 if `dtype` is fp8."""
    values = filled_in(options, _PRODUCT)
    shape = tuple(parsed(values, name, int) for name in ("num_tokens", "in_features"))
    in_dtype = contract.attention_out_dtype(values["dtype"])
    return QuantizeBlocksSpec(shape, in_dtype, parsed(values, "power_of_two", bool))


def few_token_matmul_spec(options: Mapping[str, str]) -> MatmulSpec:
    """The spec of few_token_matmul: num_tokens tokens times a weight [out_features, in_features] of `dtype`. If
    `normed`, a norm with eps comes first."""
    values = filled_in(options, _FEW_TOKENS)
    return MatmulSpec(
        parsed(values, "num_tokens", int),
        parsed(values, "in_features", int),
        parsed(values, "out_features", int),
        values["dtype"],
        eps=_norm_eps(values),
        gated=parsed(values, "gated", bool),
        limit=limit_of(values),
        residual=parsed(values, "residual", bool),
    )


def few_token_experts_up_spec(options: Mapping[str, str]) -> ExpertsSpec:
    """The spec of few_token_experts_up: num_tokens tokens of in_features columns with `choices` experts each, whose
    gate and up together have out_features rows of `dtype`."""
    values = filled_in(options, _FEW_TOKENS)
    return ExpertsSpec(
        parsed(values, "num_tokens", int),
        parsed(values, "choices", int),
        parsed(values, "in_features", int),
        parsed(values, "out_features", int) // 2,
        values["dtype"],
        eps=_norm_eps(values),
        limit=parsed(values, "limit", float) if values["limit"] else None,
    )


def few_token_experts_down_spec(options: Mapping[str, str]) -> ExpertsSpec:
    """The spec of few_token_experts_down, with the options of few_token_experts_up for the same experts."""
    return dataclasses.replace(few_token_experts_up_spec(options), eps=None, limit=None)


def few_token_choose_up_spec(options: Mapping[str, str]) -> ChoiceSpec:
    """The spec of few_token_choose_up, with few_token_experts_up's options: `choices` of num_experts experts are
    chosen, and none is shared."""
    values, experts = filled_in(options, _FEW_TOKENS), few_token_experts_up_spec(options)
    return ChoiceSpec(
        experts.hidden,
        experts.width,
        experts.weight_dtype,
        parsed(values, "num_experts", int),
        top_k=experts.choices,
        eps=experts.eps,
        limit=experts.limit,
    )


def few_token_queries_spec(options: Mapping[str, str]) -> QueriesSpec:
    """The spec of few_token_queries: num_tokens tokens of num_heads heads. `dtype` is that of the absorbed queries and,
    without a kv_dtype, of the cache."""
    values = filled_in(options, _FEW_TOKENS)
    return spec_of(QueriesSpec, values, tokens=parsed(values, "num_tokens", int), heads=1)


def few_token_index_key_spec(options: Mapping[str, str]) -> IndexKeySpec:
    """The spec of few_token_index_key: num_tokens keys, of which rope_dim columns are rotated. `dtype` is that of their
    norm."""
    values = filled_in(options, _FEW_TOKENS)
    return spec_of(IndexKeySpec, values, tokens=parsed(values, "num_tokens", int), norm_dtype=values["dtype"])


def few_token_window_spec(options: Mapping[str, str]) -> WindowSpec:
    """The spec of few_token_window: num_tokens rows, into pages of page_size, beside queries of `rank` columns."""
    values = filled_in(options, {**_FEW_TOKENS, "rank": "1024"})
    tokens, page_size, rank = (parsed(values, name, int) for name in ("num_tokens", "page_size", "rank"))
    eps = parsed(values, "eps", float)
    return WindowSpec(tokens, page_size, rank, eps, eps)


def few_token_inputs_spec(options: Mapping[str, str]) -> InputsSpec:
    """The spec of few_token_inputs: a token of in_features columns, with `pooled` weights of compressors;
    tail: whether the first weight's last rows have a result of their own."""
    values = filled_in(options, {**_FEW_TOKENS, "tail": "false", "pooled": "1"})
    tokens, terms, pooled = (parsed(values, name, int) for name in ("num_tokens", "in_features", "pooled"))
    return InputsSpec(tokens, terms, 1600, 64 * parsed(values, "tail", bool), (1024,) * pooled)


def few_token_outputs_spec(options: Mapping[str, str]) -> OutputsSpec:
    """The spec of few_token_outputs: a token's heads."""
    values = filled_in(options, _FEW_TOKENS)
    return OutputsSpec(parsed(values, "num_tokens", int), groups=8, terms=4096, rows=1024)


def few_token_values_spec(options: Mapping[str, str]) -> ValuesSpec:
    """The spec of few_token_values: a token of num_heads heads, and v_dim rows of W_UV for each; partial_dtype and
    lane_order are those of the decode call before it."""
    more = {"num_heads": "16", "v_dim": "128", "partial_dtype": "float32", "lane_order": "false"}
    values = filled_in(options, {**_FEW_TOKENS, **more})
    heads, rows = (parsed(values, name, int) for name in ("num_heads", "v_dim"))
    lane_order = parsed(values, "lane_order", bool)
    return ValuesSpec(
        tokens=1, heads=heads, latent_dim=512, rows=rows, tile_rows=max(64, heads),
        partial_dtype=values["partial_dtype"], lane_order=lane_order,
    )  # fmt: skip


def few_token_write_streams_spec(options: Mapping[str, str]) -> WriteStreamsSpec:
    """The spec of few_token_write_streams: num_tokens tokens with `streams` streams of in_features columns each."""
    return _of_streams(WriteStreamsSpec, options)


def few_token_read_streams_spec(options: Mapping[str, str]) -> ReadStreamsSpec:
    """The spec of few_token_read_streams, with the sizes of few_token_write_streams."""
    return _of_streams(ReadStreamsSpec, options)


def _of_streams(kind: type[Spec], options: Mapping[str, str]) -> Spec:
    values = filled_in(options, _STREAMS)
    tokens, count, columns = (parsed(values, name, int) for name in ("num_tokens", "streams", "in_features"))
    return spec_of(kind, values, tokens=tokens, count=count, columns=columns)


def few_token_router_spec(options: Mapping[str, str]) -> RouterSpec:
    """The spec of few_token_router: num_tokens tokens of in_features columns, and num_experts experts."""
    values = filled_in(options, _FEW_TOKENS)
    sizes = [parsed(values, name, int) for name in ("num_tokens", "in_features", "num_experts")]
    return RouterSpec(sizes[0], sizes[1], sizes[2], _norm_eps(values))


def _norm_eps(values: Mapping[str, str]) -> float | None:
    return float(parsed(values, "eps", float)) if parsed(values, "normed", bool) else None


def sparse_mla_spec(options: Mapping[str, str]) -> SparseMLASpec:
    """The spec of sparse_mla: caches of one layout, "v32", "v4" or "plain"; `window` is given if there are two.

    tensor_parallel is the number of devices that share the heads. head_dim is the width of a plain cache's keys,
    kv_dtype their dtype. A page_span that is not given is the page size. num_selected is K: a call of few tokens with
    few columns has a kernel of its own.
    """
    values = filled_in(options, _SPARSE)
    if not values["num_heads"]:
        raise ValueError("--config: num_heads is needed")
    one_of(tuple(_ROWS), values, "layout")
    one_of(SPARSE_FORMS, values, "form")
    cache, compressed = _sparse_cache(values, ""), None
    window = 1
    if values["window"]:
        compressed, window = _sparse_cache(values, "compressed_"), parsed(values, "window", int)
        if window > parsed(values, "num_selected", int):
            raise ValueError(f"--config: got window={window}; legal: at most num_selected={values['num_selected']}")
    widths = {"num_heads": _heads_of_a_device(values), "head_dim": cache.head_dim}
    return spec_of(SparseMLASpec, values, cache=cache, compressed=compressed, window=window, **widths)


def sparse_gradient_spec(options: Mapping[str, str]) -> SparseMLASpec:
    """The spec of sparse_mla whose gradient is meant: as sparse_mla_spec, but plain caches unless `layout` is given."""
    return sparse_mla_spec({"layout": "plain", **options})


_ROWS = {"v32": V32_PACKED.latent_dim + V32_PACKED.rope_dim, "v4": V4_PACKED.head_dim, "plain": None}
"""Width of a key by a sparse cache's layout; a plain cache may have any."""


def _sparse_cache(values: Mapping[str, str], which: str) -> CacheSpec:
    """The cache of these options, whose pages' options begin with `which`."""
    layout = values["layout"]
    page_size = parsed(values, f"{which}page_size" if values[f"{which}page_size"] else "page_size", int)
    span = parsed(values, f"{which}page_span", int) if values[f"{which}page_span"] else page_size
    if span < page_size:
        raise ValueError(f"--config: got {which}page_span={span}; legal: at least the page size {page_size}")
    width = _ROWS[layout] or parsed(values, "head_dim", int)
    return CacheSpec(layout, 1, page_size, span, width, values["kv_dtype"] if layout == "plain" else "uint8")
