"""The declared records: what files of `benchmarks/results` are shown as, and a summary of some of them."""

import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path

from benchmarks.records import attention, operations
from benchmarks.table import OURS, Point, Record, between_markers, load, mean_and_worst, table_of

RECORDS: tuple[Record, ...] = (*attention.RECORDS, *operations.RECORDS)


def beside(*peers: object) -> Callable[[Point], float | None]:
    return lambda point: point.ratio(OURS, *peers)


SUMMARY: tuple[tuple[str, str, str, Callable[[Point], float | None]], ...] = (
    ("decode, bf16", "decode_bf16", "FlashMLA, FA3, FA4", beside(*attention.DENSE)),
    ("decode, fp8 queries and cache", "decode_fp8", "FlashMLA", beside("flashmla")),
    ("sparse decode, packed caches", "sparse_mla", "FlashMLA, SGLang", beside(*attention.PACKED)),
    ("a sparse layer's decode step", "sparse_layer", "the engines' kernels",
     lambda point: point.ratio((OURS, operations.STEP), (operations.ENGINES, operations.STEP))),
    ("sparse prefill", "sparse_mla_prefill", "FlashMLA", beside("flashmla")),
    ("prefill", "prefill", "FA3, cuDNN", beside("fa3", "cudnn")),
    ("the gradient of prefill", "prefill_backward", "FA4, cuDNN", beside("fa4", "cudnn")),
    ("packed rows, with the gradient", "segment_attention", "cuDNN", beside("cudnn")),
    ("the indexer's logits", "indexer_logits", "DeepGEMM", beside("deep_gemm")),
    ("top-k", "select_topk", "vLLM, SGLang", beside(*operations.TOPK)),
    ("the indexer's selection", "indexer_topk", "DeepGEMM and a top-k", operations.over_sum),
)  # fmt: skip
"""Lines of the summary: what is compared, the record, the other projects, and our time over the fastest other's at a
point."""


def write_summary(results: Path, page: Path) -> str:
    """Write a line for each record of SUMMARY that is there, with our time over the fastest other's, between the page's
    comments, if it has them. Return how many lines there are, as text."""
    known = {record.name: record for record in RECORDS if record.folder == results.name}
    lines = []
    for what, name, others_, ratio in SUMMARY:
        if (path := results / f"{name}.json").exists():
            ratios = [ratio(point) for point in load(path, known[name]).points]
            lines.append([what, others_, mean_and_worst(ratios)])
    if lines and "<!-- summary -->" in (text := page.read_text()):
        heads = ["", "the fastest of", "tsmla's time over it"]
        page.write_text(between_markers(text, "summary", table_of(heads, lines).replace("---:", "---")))
    return f"{len(lines)} comparisons"


HEADLINE = (
    "- **Faster**: a decode call takes {decode_bf16} times as long as with the fastest of FlashMLA, FA3 and FA4 (bf16,"
    " {points} shapes), over an fp8 cache {decode_fp8} times; sparse decode {sparse_mla} times, exact top-k"
    " {select_topk} times, a prompt {prefill} times. Geometric means on one H200; [every point](docs/performance.md)"
    " has its record."
)
"""The README's sentence of results: our times over the fastest others', by record."""
WIDTH = 108
"""Columns of the README's lines."""


def write_headline(results: Path, readme: Path) -> str:
    """Write the README's sentence of results between its comments, and return it, or "no headline" if the README lacks
    them. An OSError if a record of the sentence is missing."""
    if "<!-- headline -->" not in (text := readme.read_text()):
        return "no headline"
    known = {record.name: record for record in RECORDS if record.folder == results.name}
    found = {name: [*filter(None, map(ratio, load(results / f"{name}.json", known[name]).points))]
             for _, name, _, ratio in SUMMARY if f"{{{name}}}" in HEADLINE}  # fmt: skip
    said = {name: f"{statistics.geometric_mean(ratios):.2f}" for name, ratios in found.items()}
    sentence = HEADLINE.format(**said, points=len(found["decode_bf16"]))
    body = textwrap.fill(sentence, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    readme.write_text(between_markers(text, "headline", body))
    return sentence
