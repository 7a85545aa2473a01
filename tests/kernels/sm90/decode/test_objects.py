"""The decode kernel as it is compiled: nothing spilled, nothing in local memory, no serialised WGMMA. Needs no GPU."""

import dataclasses

import pytest

from tests.kernels.object_checks import all_but_slow, check_compiled
from tsmla_kernels.catalog import MLA_DECODE
from tsmla_kernels.sm90.constants import FP8
from tsmla_kernels.sm90.latent.shape import ROWS

CONFIGS = {
    "16 heads": {"num_heads": "16"},
    "128 heads in a cluster": {"num_heads": "128"},
    "ragged, batch invariant": {"num_heads": "16", "max_q_len": "4", "ragged": "true", "batch_invariant": "true"},
    "L 256 without rope, pages of 16, f16": {
        "num_heads": "9",
        "latent_dim": "256",
        "rope_dim": "0",
        "page_size": "16",
        "dtype": "float16",
    },
    "fp8 cache and queries": {"num_heads": "16", "dtype": "float8_e4m3fn"},
    "fp8 cache, 128 heads in a cluster": {"num_heads": "128", "max_q_len": "2", "kv_dtype": "float8_e4m3fn"},
    "fp8 cache, ragged, batch invariant, pages of 16": {
        "num_heads": "16",
        "max_q_len": "4",
        "page_size": "16",
        "ragged": "true",
        "batch_invariant": "true",
        "dtype": "float16",
        "kv_dtype": "float8_e4m3fn",
    },
    "fp8 cache, 16 heads": {"num_heads": "16", "kv_dtype": "float8_e4m3fn"},
    "fp8 cache, few rows, not causal": {
        "num_heads": "9",
        "max_q_len": "3",
        "kv_dtype": "float8_e4m3fn",
        "causal": "false",
    },
    "fp8 queries, 128 heads in a cluster": {"num_heads": "128", "max_q_len": "2", "dtype": "float8_e4m3fn"},
    "fp8 queries, L 256 without rope, pages of 128, batch invariant": {
        "num_heads": "9",
        "latent_dim": "256",
        "rope_dim": "0",
        "page_size": "128",
        "batch_invariant": "true",
        "dtype": "float8_e4m3fn",
    },
    "visible keys, 16 heads": {"num_heads": "16", "max_q_len": "4", "visible_lens": "true"},
    "visible keys, fp8 queries, ragged": {
        "num_heads": "16",
        "max_q_len": "4",
        "ragged": "true",
        "dtype": "float8_e4m3fn",
        "visible_lens": "true",
    },
    "visible keys, fp8 cache, 128 heads in a cluster": {
        "num_heads": "128",
        "max_q_len": "2",
        "kv_dtype": "float8_e4m3fn",
        "visible_lens": "true",
    },
    "fp8 probabilities, 128 heads in a cluster": {
        "num_heads": "128",
        "max_q_len": "4",
        "dtype": "float8_e4m3fn",
        "fp8_probabilities": "true",
    },
    "fp8 probabilities, 48 heads, L 256 without rope, batch invariant": {
        "num_heads": "48",
        "latent_dim": "256",
        "rope_dim": "0",
        "batch_invariant": "true",
        "dtype": "float8_e4m3fn",
        "fp8_probabilities": "true",
    },
    "pages of 128, not causal": {"num_heads": "64", "max_q_len": "2", "page_size": "128", "causal": "false"},
}
SPLIT = {
    "16 heads, rope apart": {"num_heads": "16"},
    "128 heads in a cluster, rope apart": {"num_heads": "128"},
    "fp8 cache, rope apart": {"num_heads": "16", "kv_dtype": "float8_e4m3fn"},
    "fp8 cache and queries, rope apart": {"num_heads": "16", "dtype": "float8_e4m3fn"},
}
"""Queries in two arrays."""

HEADS_FIRST = {
    "16 heads, in front of tokens": {"num_heads": "16"},
    "128 heads in a cluster, in front of tokens": {"num_heads": "128"},
    "fp8 cache, heads in front of tokens": {"num_heads": "16", "kv_dtype": "float8_e4m3fn"},
}

FAST = (
    "16 heads",
    "fp8 cache and queries",
)
"""Compiled in every run of the tests; each takes ten to twenty seconds. The others are slow tests."""


@pytest.mark.parametrize("name", all_but_slow((*CONFIGS, *SPLIT, *HEADS_FIRST), FAST))
def test_everything_stays_in_registers(name: str) -> None:
    config = MLA_DECODE.from_options((CONFIGS | SPLIT | HEADS_FIRST)[name])
    heads_first = name in HEADS_FIRST
    config = dataclasses.replace(config, split_q=heads_first or name in SPLIT, heads_first=heads_first)
    assert config.fp8_p == ("fp8 probabilities" in name)
    check_compiled(MLA_DECODE, config, kernels=2)  # attention and combine


@pytest.mark.parametrize(
    ("options", "fp8_p"),
    [
        ({}, True),
        ({"fp8_probabilities": "false"}, False),
        ({"dtype": "bfloat16"}, False),
        ({"num_heads": "32"}, False),
        ({"num_heads": "33"}, True),
    ],
)
def test_probabilities_are_rounded_where_that_saves_time(options: dict[str, str], fp8_p: bool) -> None:
    given = {"num_heads": "128", "dtype": FP8, "fp8_probabilities": "true", **options}
    assert MLA_DECODE.from_options(given).fp8_p is fp8_p


@pytest.mark.parametrize("heads", [1, 16, 32, 33, 128])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "bfloat16"), ("bfloat16", FP8), (FP8, FP8)])
@pytest.mark.parametrize("rope_dim", [0, 64])
def test_a_stage_holds_the_p_that_the_scores_store(heads: int, dtype: str, kv_dtype: str, rope_dim: int) -> None:
    """All 64 rows of WGMMA, where those are query rows; and stages begin where swizzled rows may."""
    options = {"num_heads": str(heads), "dtype": dtype, "kv_dtype": kv_dtype, "rope_dim": str(rope_dim)}
    config = MLA_DECODE.from_options(options)
    mixed, itemsize = dtype != kv_dtype, 1 if kv_dtype == FP8 else 2
    stored = (min(heads, ROWS) if mixed else ROWS) * config.block * 2
    read_before = config.block * rope_dim * itemsize if itemsize == 2 else 0  # the rope columns, when S is there
    assert config.stage_bytes - config.block * config.head_dim * itemsize + read_before >= stored
    assert config.stage_bytes % 1024 == 0
