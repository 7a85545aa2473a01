"""Options of the command line, as text, to the spec of a call, and so to the config that such a call is given.

A call gets its config from its spec in the same way, so `tsmla compile --config` compiles the objects that calls ask
for. Options are the static fields of a spec, with shorter names for the dtypes. Every ValueError names the option.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from tsmla_kernels import contract
from tsmla_kernels.contract.cache import ROPE_LAYOUTS
from tsmla_kernels.contract.compress import CompressSpec, CompressWriteSpec
from tsmla_kernels.contract.layouts import INDEXER, V4_PACKED, V32_PACKED, CacheSpec, IndexerCacheSpec
from tsmla_kernels.contract.packed import IndexerQuantizeSpec, IndexerWriteSpec, PackedWriteSpec, Rotation
from tsmla_kernels.contract.products import ProductSpec, QuantizeBlocksSpec
from tsmla_kernels.contract.rules import FP8, SLOTS
from tsmla_kernels.contract.selection import SelectionBitsSpec
from tsmla_kernels.contract.sparse import (
    TOPK_ORDERS,
    IndexerLogitsSpec,
    IndexerTopkSpec,
    SparseMLASpec,
    TopKSpec,
)
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

Spec = TypeVar("Spec")


def _defaults(kind: type) -> dict[str, str]:
    """The options for a spec's fields that have a default: so a new such field needs nothing here."""
    fields = dataclasses.fields(kind)
    return {field.name: str(field.default).lower() for field in fields if field.default is not dataclasses.MISSING}


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
    **_defaults(contract.DecodeSpec),
}
_PREFILL = {
    **_DECODE,
    "qk_head_dim": "192",
    "v_head_dim": "128",
    "shared_rope": "false",
    **_defaults(contract.PrefillSpec),
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
_PACKED = {**_TOPK, "rope_offset": "0"}
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
_STREAMS = {**_FEW_TOKENS, **_defaults(ReadStreamsSpec), **_defaults(WriteStreamsSpec), "streams": "4"}
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
    **_defaults(SparseMLASpec),
}


def decode_spec(options: Mapping[str, str]) -> contract.DecodeSpec:
    """The spec of mla_decode. tensor_parallel is the number of devices that share the heads."""
    values = _filled_in(options, _DECODE)
    if not values["num_heads"]:
        raise ValueError("--config: num_heads is needed, or a preset that has it")
    return _spec(contract.DecodeSpec, values, num_heads=_heads_of_a_device(values))


def _heads_of_a_device(values: Mapping[str, str]) -> int:
    heads, devices = (_parsed(values, name, int) for name in ("num_heads", "tensor_parallel"))
    if heads % devices:
        raise ValueError(f"--config: got tensor_parallel={devices}; it must divide num_heads={heads}")
    return heads // devices


def prefill_spec(options: Mapping[str, str]) -> contract.PrefillSpec:
    """The spec of mla_prefill. The kernels read the number of heads and the lengths at the launch."""
    values = _filled_in(options, _PREFILL)
    return _spec(contract.PrefillSpec, values, num_heads=1, max_q_len=1)


def rope_write_spec(options: Mapping[str, str]) -> contract.RopeWriteSpec:
    """The spec of rope_write_kv_cache. `dtype` is the dtype of the query and, without a kv_dtype, of the cache.

    The inputs have the same dtype, or bfloat16 if it is fp8.
    """
    values = _filled_in(options, _CACHE)
    if values["rope_layout"] not in ROPE_LAYOUTS:
        raise ValueError(f"--config: got rope_layout={values['rope_layout']}; legal: {' or '.join(ROPE_LAYOUTS)}")
    in_dtype = contract.attention_out_dtype(values["dtype"])
    write = _spec(contract.CacheWriteSpec, values, page_size=1, in_dtype=in_dtype)
    return _spec(contract.RopeWriteSpec, values, write=write, num_heads=1)


def cache_write_spec(options: Mapping[str, str]) -> contract.CacheWriteSpec:
    """The spec of write_kv_cache, with the dtypes of rope_write_spec."""
    values = _filled_in(options, _CACHE)
    return dataclasses.replace(rope_write_spec(options).write, slot_dtype=_slot_dtype(values))


def cache_gather_spec(options: Mapping[str, str]) -> contract.CacheGatherSpec:
    """The spec of gather_kv_cache, with the dtypes of rope_write_spec: rows come out in the dtype of the rows to
    write."""
    write = cache_write_spec(options)
    dtypes = {"kv_dtype": write.kv_dtype, "out_dtype": write.in_dtype}
    return _spec(contract.CacheGatherSpec, {}, head_dim=write.head_dim, **dtypes)


def merge_spec(options: Mapping[str, str]) -> contract.MergeSpec:
    """The spec of merge_attention_states. `dtype` is the dtype of attention's inputs, v_head_dim the width of
    attention's results."""
    values = _filled_in(options, _MERGE)
    num_parts, head_dim = (_parsed(values, name, int) for name in ("parts", "v_head_dim"))
    return contract.MergeSpec(num_parts, (1,), head_dim, contract.attention_out_dtype(values["dtype"]), "float32")


def topk_spec(options: Mapping[str, str]) -> TopKSpec:
    """The spec of select_topk: num_tokens rows of num_columns, float32 whatever attention's dtype is."""
    values = _filled_in(options, _TOPK)
    if values["order"] not in TOPK_ORDERS:
        raise ValueError(f"--config: got order={values['order']}; legal: {' or '.join(TOPK_ORDERS)}")
    return _spec(TopKSpec, values, dtype="float32", page_size=0, row_starts=False)


def selection_bits_spec(options: Mapping[str, str]) -> SelectionBitsSpec:
    """The spec of selection_bits, whose kernel reads all sizes at the launch."""
    return _spec(SelectionBitsSpec, _filled_in(options, _BITS))


def packed_write_spec(options: Mapping[str, str]) -> PackedWriteSpec:
    """The spec of write_packed_kv_cache with a rotation.

    `dtype` is the dtype of attention's inputs. The rows to write have the same dtype, or bfloat16 if it is fp8."""
    values = _filled_in(options, _PACKED)
    cache = CacheSpec("v32", 1, 1, 1, V32_PACKED.latent_dim + V32_PACKED.rope_dim, "uint8")
    in_dtype = contract.attention_out_dtype(values["dtype"])
    dtypes = {"in_dtype": in_dtype, "rope_dtype": in_dtype, "slot_dtype": _slot_dtype(values)}
    return _spec(PackedWriteSpec, values, cache=cache, **dtypes)


def indexer_write_spec(options: Mapping[str, str]) -> IndexerWriteSpec:
    """The spec of write_indexer_cache. `key_dtype` is the dtype of the keys to write, by default that of the rows of
    packed_write_spec."""
    values = _filled_in(options, _PACKED)
    cache = IndexerCacheSpec(1, _parsed(values, "page_size", int), INDEXER.head_dim, True)
    in_dtype = contract.attention_out_dtype(values["key_dtype"] or values["dtype"])
    return IndexerWriteSpec(1, cache, in_dtype, _indexer_rotation(values), _slot_dtype(values))


def _slot_dtype(values: Mapping[str, str]) -> str:
    if values["slot_dtype"] not in SLOTS:
        raise ValueError(f"--config: got slot_dtype={values['slot_dtype']}; legal: {' or '.join(SLOTS)}")
    return values["slot_dtype"]


def indexer_quantize_spec(options: Mapping[str, str]) -> IndexerQuantizeSpec:
    """The spec of indexer_quantize, with the dtype of packed_write_spec for the queries and the weights."""
    values = _filled_in(options, _PACKED)
    in_dtype = contract.attention_out_dtype(values["dtype"])
    tokens, heads = (_parsed(values, name, int) for name in ("num_tokens", "index_n_heads"))
    return IndexerQuantizeSpec(tokens, heads, INDEXER.head_dim, in_dtype, in_dtype, _indexer_rotation(values))


def compress_write_spec(options: Mapping[str, str]) -> CompressWriteSpec:
    """The spec of compress_write_kv_cache, with the dtype of packed_write_spec for the norm's weights. `cache` is v4,
    indexer, or a plain cache's dtype."""
    values = _filled_in(options, _COMPRESS)
    series = 2 if _parsed(values, "overlap", bool) else 1
    ratio, channels, rope_dim = (_parsed(values, name, int) for name in ("ratio", "channels", "rope_dim"))
    page_size = V4_PACKED.page_size if "page_size" not in options else _parsed(values, "page_size", int)
    compress = CompressSpec(
        num_tokens=1, num_requests=1, ratio=ratio, overlap=series, channels=channels, num_states=1,
        ring=ratio * series,
    )  # fmt: skip
    weight_dtype = contract.attention_out_dtype(values["dtype"])
    return CompressWriteSpec(
        compress=compress, cache=values["cache"], num_pages=1, page_size=page_size, weight_dtype=weight_dtype,
        rope_dim=rope_dim, eps=_parsed(values, "eps", float),
    )  # fmt: skip


def _indexer_rotation(values: Mapping[str, str]) -> Rotation | None:
    """Rope on rope_dim columns from rope_offset on, as halves; None if rope_dim is 0."""
    width, offset = (_parsed(values, name, int) for name in ("rope_dim", "rope_offset"))
    return Rotation(width, offset, "halves") if width else None


def indexer_logits_spec(options: Mapping[str, str]) -> IndexerLogitsSpec:
    """The spec of indexer_logits: num_heads indexer heads, e4m3 queries and keys whatever attention's dtype is."""
    return _logits_spec(_filled_in(options, _LOGITS))


def indexer_topk_spec(options: Mapping[str, str]) -> IndexerTopkSpec:
    """The spec of indexer_topk as V3.2's layer calls it: num_tokens query tokens of num_requests requests, whose block
    tables' rows are num_columns keys long. The indexer has index_n_heads heads, or num_heads if index_n_heads isn't
    given."""
    values = _filled_in(options, _INDEXER_TOPK)
    values["num_heads"] = values["index_n_heads"] or values["num_heads"]
    columns, page_size = (_parsed(values, name, int) for name in ("num_columns", "page_size"))
    if columns % page_size:
        raise ValueError(f"--config: got num_columns={columns}; legal: a multiple of page_size={page_size}")
    logits = dataclasses.replace(_logits_spec(values), max_pages=columns // page_size)
    return _spec(IndexerTopkSpec, values, logits=logits)


def _logits_spec(values: Mapping[str, str]) -> IndexerLogitsSpec:
    page_size, head_dim = (_parsed(values, name, int) for name in ("page_size", "head_dim"))
    cache = IndexerCacheSpec(1, page_size, head_dim, _parsed(values, "packed", bool))
    cache_dtype = "uint8" if cache.packed else FP8
    return _spec(IndexerLogitsSpec, values, cache=cache, q_dtype=FP8, weights_dtype="float32", cache_dtype=cache_dtype)


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
    values = _filled_in(options, _PRODUCT)
    names = ("num_tokens", "in_features", "out_features", "num_groups")
    rows, terms, columns, groups = (_parsed(values, name, int) for name in names)
    gated, picked, quantized = (_parsed(values, name, bool) for name in ("gated", "picked", "quantized"))
    return ProductSpec(
        rows,
        terms,
        columns,
        num_groups=groups if grouped else None,
        out_dtype=FP8 if quantized else contract.attention_out_dtype(values["dtype"]),
        x_dtype=values["dtype"],
        gated=gated,
        limit=_parsed(values, "limit", float) if values["limit"] else None,
        num_picked=rows if picked else None,
    )


def quantize_blocks_spec(options: Mapping[str, str]) -> QuantizeBlocksSpec:
    """The spec of quantize_blocks: num_tokens rows of in_features, of `dtype`, or bfloat16 if `dtype` is fp8."""
    values = _filled_in(options, _PRODUCT)
    shape = tuple(_parsed(values, name, int) for name in ("num_tokens", "in_features"))
    in_dtype = contract.attention_out_dtype(values["dtype"])
    return QuantizeBlocksSpec(shape, in_dtype, _parsed(values, "power_of_two", bool))


def few_token_matmul_spec(options: Mapping[str, str]) -> MatmulSpec:
    """The spec of few_token_matmul: num_tokens tokens times a weight [out_features, in_features] of `dtype`. If
    `normed`, a norm with eps comes first."""
    values = _filled_in(options, _FEW_TOKENS)
    return MatmulSpec(
        _parsed(values, "num_tokens", int),
        _parsed(values, "in_features", int),
        _parsed(values, "out_features", int),
        values["dtype"],
        eps=_norm_eps(values),
        gated=_parsed(values, "gated", bool),
        limit=_parsed(values, "limit", float) if values["limit"] else None,
        residual=_parsed(values, "residual", bool),
    )


def few_token_experts_up_spec(options: Mapping[str, str]) -> ExpertsSpec:
    """The spec of few_token_experts_up: num_tokens tokens of in_features columns with `choices` experts each, whose
    gate and up together have out_features rows of `dtype`."""
    values = _filled_in(options, _FEW_TOKENS)
    return ExpertsSpec(
        _parsed(values, "num_tokens", int),
        _parsed(values, "choices", int),
        _parsed(values, "in_features", int),
        _parsed(values, "out_features", int) // 2,
        values["dtype"],
        eps=_norm_eps(values),
        limit=_parsed(values, "limit", float) if values["limit"] else None,
    )


def few_token_experts_down_spec(options: Mapping[str, str]) -> ExpertsSpec:
    """The spec of few_token_experts_down, with the options of few_token_experts_up for the same experts."""
    return dataclasses.replace(few_token_experts_up_spec(options), eps=None, limit=None)


def few_token_choose_up_spec(options: Mapping[str, str]) -> ChoiceSpec:
    """The spec of few_token_choose_up, with few_token_experts_up's options: `choices` of num_experts experts are
    chosen, and none is shared."""
    values, experts = _filled_in(options, _FEW_TOKENS), few_token_experts_up_spec(options)
    return ChoiceSpec(
        experts.hidden,
        experts.width,
        experts.weight_dtype,
        _parsed(values, "num_experts", int),
        top_k=experts.choices,
        eps=experts.eps,
        limit=experts.limit,
    )


def few_token_queries_spec(options: Mapping[str, str]) -> QueriesSpec:
    """The spec of few_token_queries: num_tokens tokens of num_heads heads. `dtype` is that of the absorbed queries and,
    without a kv_dtype, of the cache."""
    values = _filled_in(options, _FEW_TOKENS)
    return _spec(QueriesSpec, values, tokens=_parsed(values, "num_tokens", int), heads=1)


def few_token_index_key_spec(options: Mapping[str, str]) -> IndexKeySpec:
    """The spec of few_token_index_key: num_tokens keys, of which rope_dim columns are rotated. `dtype` is that of their
    norm."""
    values = _filled_in(options, _FEW_TOKENS)
    return _spec(IndexKeySpec, values, tokens=_parsed(values, "num_tokens", int), norm_dtype=values["dtype"])


def few_token_window_spec(options: Mapping[str, str]) -> WindowSpec:
    """The spec of few_token_window: num_tokens rows, into pages of page_size, beside queries of `rank` columns."""
    values = _filled_in(options, {**_FEW_TOKENS, "rank": "1024"})
    tokens, page_size, rank = (_parsed(values, name, int) for name in ("num_tokens", "page_size", "rank"))
    eps = _parsed(values, "eps", float)
    return WindowSpec(tokens, page_size, rank, eps, eps)


def few_token_inputs_spec(options: Mapping[str, str]) -> InputsSpec:
    """The spec of few_token_inputs: a token of in_features columns, with `pooled` weights of compressors;
    tail: whether the first weight's last rows have a result of their own."""
    values = _filled_in(options, {**_FEW_TOKENS, "tail": "false", "pooled": "1"})
    tokens, terms, pooled = (_parsed(values, name, int) for name in ("num_tokens", "in_features", "pooled"))
    return InputsSpec(tokens, terms, 1600, 64 * _parsed(values, "tail", bool), (1024,) * pooled)


def few_token_outputs_spec(options: Mapping[str, str]) -> OutputsSpec:
    """The spec of few_token_outputs: a token's heads."""
    values = _filled_in(options, _FEW_TOKENS)
    return OutputsSpec(_parsed(values, "num_tokens", int), groups=8, terms=4096, rows=1024)


def few_token_values_spec(options: Mapping[str, str]) -> ValuesSpec:
    """The spec of few_token_values: a token of num_heads heads, and v_dim rows of W_UV for each; partial_dtype and
    lane_order are those of the decode call before it."""
    more = {"num_heads": "16", "v_dim": "128", "partial_dtype": "float32", "lane_order": "false"}
    values = _filled_in(options, {**_FEW_TOKENS, **more})
    heads, rows = (_parsed(values, name, int) for name in ("num_heads", "v_dim"))
    lane_order = _parsed(values, "lane_order", bool)
    return ValuesSpec(1, heads, 512, rows, max(64, heads), values["partial_dtype"], lane_order)


def few_token_write_streams_spec(options: Mapping[str, str]) -> WriteStreamsSpec:
    """The spec of few_token_write_streams: num_tokens tokens with `streams` streams of in_features columns each."""
    return _of_streams(WriteStreamsSpec, options)


def few_token_read_streams_spec(options: Mapping[str, str]) -> ReadStreamsSpec:
    """The spec of few_token_read_streams, with the sizes of few_token_write_streams."""
    return _of_streams(ReadStreamsSpec, options)


def _of_streams(kind: type[Spec], options: Mapping[str, str]) -> Spec:
    values = _filled_in(options, _STREAMS)
    tokens, count, columns = (_parsed(values, name, int) for name in ("num_tokens", "streams", "in_features"))
    return _spec(kind, values, tokens=tokens, count=count, columns=columns)


def few_token_router_spec(options: Mapping[str, str]) -> RouterSpec:
    """The spec of few_token_router: num_tokens tokens of in_features columns, and num_experts experts."""
    values = _filled_in(options, _FEW_TOKENS)
    sizes = [_parsed(values, name, int) for name in ("num_tokens", "in_features", "num_experts")]
    return RouterSpec(sizes[0], sizes[1], sizes[2], _norm_eps(values))


def _norm_eps(values: Mapping[str, str]) -> float | None:
    return float(_parsed(values, "eps", float)) if _parsed(values, "normed", bool) else None


def sparse_mla_spec(options: Mapping[str, str]) -> SparseMLASpec:
    """The spec of sparse_mla: caches of one layout, "v32", "v4" or "plain"; `window` is given if there are two.

    tensor_parallel is the number of devices that share the heads. head_dim is the width of a plain cache's keys,
    kv_dtype their dtype. A page_span that is not given is the page size. num_selected is K: a call of few tokens with
    few columns has a kernel of its own.
    """
    values = _filled_in(options, _SPARSE)
    if not values["num_heads"]:
        raise ValueError("--config: num_heads is needed")
    if values["layout"] not in _ROWS:
        raise ValueError(f"--config: got layout={values['layout']}; legal: {', '.join(_ROWS)}")
    cache, compressed = _sparse_cache(values, ""), None
    window = 1
    if values["window"]:
        compressed, window = _sparse_cache(values, "compressed_"), _parsed(values, "window", int)
    widths = {"num_heads": _heads_of_a_device(values), "head_dim": cache.head_dim}
    return _spec(SparseMLASpec, values, cache=cache, compressed=compressed, window=window, **widths)


def sparse_gradient_spec(options: Mapping[str, str]) -> SparseMLASpec:
    """The spec of sparse_mla whose gradient is meant: as sparse_mla_spec, but plain caches unless `layout` is given."""
    return sparse_mla_spec({"layout": "plain", **options})


_ROWS = {"v32": V32_PACKED.latent_dim + V32_PACKED.rope_dim, "v4": V4_PACKED.head_dim, "plain": None}
"""Width of a key by a sparse cache's layout; a plain cache may have any."""


def _sparse_cache(values: Mapping[str, str], which: str) -> CacheSpec:
    """The cache of these options, whose pages' options begin with `which`."""
    layout = values["layout"]
    page_size = _parsed(values, f"{which}page_size" if values[f"{which}page_size"] else "page_size", int)
    span = _parsed(values, f"{which}page_span", int) if values[f"{which}page_span"] else page_size
    width = _ROWS[layout] or _parsed(values, "head_dim", int)
    return CacheSpec(layout, 1, page_size, span, width, values["kv_dtype"] if layout == "plain" else "uint8")


def flag(options: Mapping[str, str], name: str) -> bool:
    """An option that is true or false, and false if it isn't given."""
    return bool(_parsed({name: "false", **options}, name, bool))


def unserved(reasons: list[str]) -> ValueError:
    """The error for options that no config of a kernel serves, with the reasons."""
    return ValueError(f"--config: no kernel for it: {'; '.join(reasons)}")


def _filled_in(options: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    if unknown := sorted(options.keys() - defaults.keys()):
        raise ValueError(f"--config: got option {unknown[0]!r}; legal: {', '.join(sorted(defaults))}")
    values = {**defaults, **options}
    return {**values, "q_dtype": values["dtype"], "kv_dtype": values.get("kv_dtype") or values["dtype"]}


def _spec(kind: type[Spec], values: Mapping[str, str], **settled: Any) -> Spec:
    """A spec with the `settled` fields; the others are read from the options of the same name. A field without an
    option is 1: a size, which kernels read at the launch, or a flag, which is then true."""
    types = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        name, of_field = field.name, types[field.name]
        if name not in settled:
            settled[name] = _parsed(values, name, of_field) if name in values else 1
    return kind(**settled)


def _parsed(values: Mapping[str, str], name: str, kind: Any) -> Any:
    """The value of an option for a field of this type: bool, str, float, or else a size."""
    value = values[name]
    if kind is str:
        return value
    if kind is bool:
        if value not in ("true", "false"):
            raise ValueError(f"--config: got {name}={value}; legal: true or false")
        return value == "true"
    if kind is float:
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"--config: got {name}={value}; legal: a float") from None
    minimum = 0 if name in ("rope_dim", "rope_offset", "tokens_per_request") else 1
    if not value.isdecimal() or int(value) < minimum:
        raise ValueError(f"--config: got {name}={value}; legal: an int >= {minimum}")
    return int(value)
