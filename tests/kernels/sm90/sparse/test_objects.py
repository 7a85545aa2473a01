"""The sparse kernel as it is compiled: nothing spilled, nothing in local memory, no serialised WGMMA. Needs no GPU."""

import dataclasses

import pytest

from tests.kernels.object_checks import all_but_slow, check_compiled
from tsmla_kernels.catalog import SPARSE_MLA

WHOLE = {
    "V4, two caches, 128 heads, few tokens of few columns": {
        "num_heads": "128",
        "num_tokens": "1",
        "num_selected": "256",
        "layout": "v4",
        "window": "128",
        "lengths": "true",
        "sinks": "true",
    },
    "V4, one cache, 64 heads, a hundred tokens of few columns": {
        "num_heads": "64",
        "num_tokens": "100",
        "num_selected": "128",
        "layout": "v4",
        "lengths": "true",
        "sinks": "true",
    },
    "V4, two caches, 128 heads, two row tiles of few columns for each CTA": {
        "num_heads": "128",
        "num_tokens": "128",
        "num_selected": "256",
        "layout": "v4",
        "window": "128",
        "lengths": "true",
        "sinks": "true",
    },
    "16 heads, few tokens of few columns": {"num_heads": "16", "num_tokens": "8", "num_selected": "256"},
    "bf16, D 576, 128 heads, few tokens of few columns": {
        "num_heads": "128",
        "num_tokens": "8",
        "num_selected": "256",
        "layout": "plain",
        "lengths": "true",
        "max_logits": "true",
    },
}
"""Calls whose CTAs have whole row tiles."""
CONFIGS = {
    "16 heads": {"num_heads": "16"},
    "128 heads, lengths": {"num_heads": "128", "lengths": "true"},
    "64 heads, many tokens": {"num_heads": "64", "num_tokens": "4096"},
    "128 heads, lengths, many tokens": {"num_heads": "128", "lengths": "true", "num_tokens": "4096"},
    "V4, two caches, sinks, 64 heads, many tokens": {
        "num_heads": "64",
        "layout": "v4",
        "window": "128",
        "sinks": "true",
        "num_tokens": "4096",
    },
    "64 heads, greatest logits, many tokens": {"num_heads": "64", "max_logits": "true", "num_tokens": "4096"},
    "64 heads, lengths, greatest logits, many tokens": {
        "num_heads": "64",
        "lengths": "true",
        "max_logits": "true",
        "num_tokens": "4096",
    },
    "V4, two caches, sinks, 64 heads, greatest logits, batch invariant": {
        "num_heads": "64",
        "layout": "v4",
        "window": "128",
        "lengths": "true",
        "sinks": "true",
        "max_logits": "true",
        "batch_invariant": "true",
    },
    "bf16, D 576, 128 heads, greatest logits, many tokens": {
        "num_heads": "128",
        "layout": "plain",
        "max_logits": "true",
        "num_tokens": "4096",
    },
    "f16, D 512, two caches, 64 heads, greatest logits, many tokens": {
        "num_heads": "64",
        "layout": "plain",
        "dtype": "float16",
        "head_dim": "512",
        "window": "128",
        "lengths": "true",
        "sinks": "true",
        "max_logits": "true",
        "num_tokens": "4096",
    },
    "32 heads, f16, lengths": {"num_heads": "32", "dtype": "float16", "lengths": "true"},
    "9 heads, gaps between pages, batch invariant": {
        "num_heads": "9",
        "page_span": "72",
        "lengths": "true",
        "batch_invariant": "true",
    },
    "V4, two caches, sinks, 64 heads": {
        "num_heads": "64",
        "layout": "v4",
        "window": "128",
        "compressed_page_size": "32",
        "lengths": "true",
        "sinks": "true",
    },
    "V4, one cache, 16 heads": {"num_heads": "16", "layout": "v4"},
    **WHOLE,
    "V4, two caches, 128 heads, batch invariant": {
        "num_heads": "128",
        "layout": "v4",
        "window": "100",
        "sinks": "true",
        "batch_invariant": "true",
    },
    "e4m3, D 576, 16 heads": {"num_heads": "16", "layout": "plain", "kv_dtype": "float8_e4m3fn"},
    "64 heads, few tokens": {"num_heads": "64", "num_tokens": "1"},
    "V4, two caches, 128 heads, few tokens": {
        "num_heads": "128",
        "num_tokens": "1",
        "layout": "v4",
        "window": "128",
        "sinks": "true",
    },
    "bf16, D 576, 32 heads": {"num_heads": "32", "layout": "plain"},
    "bf16, D 512, two caches, 64 heads": {"num_heads": "64", "layout": "plain", "head_dim": "512", "window": "128"},
    "bf16, D 576, 128 heads": {"num_heads": "128", "layout": "plain", "lengths": "true", "sinks": "true"},
    "bf16, D 576, two caches, 128 heads, many tokens": {
        "num_heads": "128",
        "layout": "plain",
        "window": "128",
        "lengths": "true",
        "sinks": "true",
        "num_tokens": "4096",
    },
    "f16, D 576, 33 heads, batch invariant": {
        "num_heads": "33",
        "layout": "plain",
        "dtype": "float16",
        "lengths": "true",
        "batch_invariant": "true",
    },
    "f16, D 576, 64 heads, many tokens": {
        "num_heads": "64",
        "layout": "plain",
        "dtype": "float16",
        "lengths": "true",
        "num_tokens": "4096",
    },
    "f16, D 512, two caches, 128 heads, many tokens": {
        "num_heads": "128",
        "layout": "plain",
        "dtype": "float16",
        "head_dim": "512",
        "window": "128",
        "sinks": "true",
        "num_tokens": "4096",
    },
    "f16, D 512, 48 heads, batch invariant": {
        "num_heads": "48",
        "layout": "plain",
        "dtype": "float16",
        "head_dim": "512",
        "lengths": "true",
        "batch_invariant": "true",
    },
    "f16, D 576, 8 heads": {"num_heads": "8", "layout": "plain", "dtype": "float16"},
    "e4m3, D 512, 64 heads": {
        "num_heads": "64",
        "layout": "plain",
        "kv_dtype": "float8_e4m3fn",
        "head_dim": "512",
        "sinks": "true",
    },
    "queries of e4m3, 64 heads": {"num_heads": "64", "dtype": "float8_e4m3fn", "lengths": "true"},
    "queries of e4m3, 16 heads, batch invariant": {
        "num_heads": "16",
        "dtype": "float8_e4m3fn",
        "batch_invariant": "true",
    },
    "queries and rows of e4m3, D 576, 128 heads": {
        "num_heads": "128",
        "dtype": "float8_e4m3fn",
        "layout": "plain",
        "kv_dtype": "float8_e4m3fn",
    },
}
FAST = ("V4, two caches, sinks, 64 heads",)
"""Compiled in every run of the tests, in ten to twenty seconds, as are 16 heads in test_on_machine.py. The others are
slow tests."""


@pytest.mark.parametrize("name", all_but_slow(CONFIGS, FAST))
def test_everything_stays_in_registers(name: str) -> None:
    config = SPARSE_MLA.from_options(CONFIGS[name])
    assert config.whole == (name in WHOLE)
    check_compiled(SPARSE_MLA, config, kernels=1 if config.whole else 2)  # attention and combine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "heads_first"),
    [
        ("bf16, D 576, 128 heads", True),
        ("f16, D 576, 33 heads, batch invariant", False),
        ("f16, D 576, 64 heads, many tokens", True),
        ("bf16, D 576, 128 heads, few tokens of few columns", True),
        ("bf16, D 576, two caches, 128 heads, many tokens", False),
    ],
)
def test_queries_in_two_arrays_stay_in_registers(name: str, heads_first: bool) -> None:
    config = SPARSE_MLA.from_options(CONFIGS[name])
    assert config.takes_split_q
    split = dataclasses.replace(config, split_q=True, heads_first=heads_first)
    check_compiled(SPARSE_MLA, split, kernels=1 if config.whole else 2)
