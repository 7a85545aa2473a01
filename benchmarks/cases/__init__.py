"""The benchmarks that `benchmarks.run` runs. A key of `CASES` is a benchmark's name and that of its record; the value
is "module:class", and the module is one of this package unless it has a dot."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.harness import Case

CASES = {
    "decode_bf16": "decode:DecodeBf16", "decode_fp8": "decode:DecodeFp8", "sparse_mla": "sparse_mla:SparseDecode",
    "sparse_mla_prefill": "sparse_mla_prefill:SparsePrefill", "sparse_mla_plain": "sparse_mla_plain:SparsePlain",
    "prefill": "prefill:Prefill",
    "prefill_backward": "prefill_backward:PrefillBackward", "sparse_backward": "sparse_backward:SparseBackward",
    "segment_attention": "segment_attention:SegmentAttention",
    "select_topk": "select_topk:SelectTopk", "indexer_logits": "indexer_logits:Logits",
    "indexer_topk": "indexer_topk:Selection", "cache": "cache:Cache", "merge": "cache:Merge",
    "compress": "compress:Compress", "bridge_overhead": "bridge_overhead:Overhead", "sglang": "sglang:SGLang",
    "fp8_products": "fp8_products:Products", "sparse_layer": "examples.whole_models.sparse_layer:SparseLayer",
}  # fmt: skip


def case(name: str) -> "type[Case]":
    """The case of that name."""
    module, _, found = CASES[name].partition(":")
    place = module if "." in module else f"benchmarks.cases.{module}"
    return getattr(importlib.import_module(place), found)
