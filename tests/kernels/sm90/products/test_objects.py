"""The kernel of block-scaled products as it is compiled, and which configurations serve which calls. Needs no GPU."""

from __future__ import annotations

import dataclasses

import pytest

from tests.kernels.object_checks import all_but_slow, check_compiled
from tsmla_kernels.catalog import BLOCK_SCALED_MATMUL, GROUPED_BLOCK_SCALED_MATMUL, KERNELS, QUANTIZE_BLOCKS
from tsmla_kernels.contract.products import ProductSpec, QuantizeBlocksSpec
from tsmla_kernels.sm90.constants import SMEM_BYTES
from tsmla_kernels.sm90.products.config import (
    PAIR_BYTES,
    ProductConfig,
    product_config,
    product_reasons,
    quantize_config,
    quantize_reasons,
)

ROWS = (1, 8, 9, 16, 32, 64, 100, 128, 129, 256, 512, 1024, 4096)
MATRICES = ((2112, 7168), (24576, 1536), (7168, 16384), (36864, 7168), (7168, 18432), (32768, 512), (2048, 10944))


def spec(rows: int, columns: int = 7168, terms: int = 16384, groups: int | None = None) -> ProductSpec:
    return ProductSpec(rows, terms, columns, groups, "bfloat16")


CONFIGS = {
    "1 row": product_config(spec(1)),
    "16 rows": product_config(spec(16)),
    "64 rows": product_config(spec(64)),
    "128 rows": product_config(spec(128)),
    "4096 rows": product_config(spec(4096)),
    "4096 rows of f32": product_config(dataclasses.replace(spec(4096), out_dtype="float32")),
    "16 rows of bf16": product_config(dataclasses.replace(spec(16), x_dtype="bfloat16")),
    "16 rows of bf16, 24576 columns": product_config(dataclasses.replace(spec(16, 24576, 1536), x_dtype="bfloat16")),
    "4096 rows of bf16": product_config(dataclasses.replace(spec(4096), x_dtype="bfloat16")),
    "128 rows of f16 a group": product_config(dataclasses.replace(spec(32768, groups=256), x_dtype="float16")),
    "1 row a group": product_config(spec(256, groups=256)),
    "16 rows a group": product_config(spec(4096, groups=256)),
    "128 rows a group": product_config(spec(32768, groups=256)),
    "128 rows a group, f16": product_config(dataclasses.replace(spec(32768, groups=256), out_dtype="float16")),
}
CONFIGS |= {
    "gated 16 rows": product_config(dataclasses.replace(spec(16), gated=True)),
    "gated 16 rows to e4m3": product_config(dataclasses.replace(spec(16), gated=True, out_dtype="float8_e4m3fn")),
    "gated 4096 rows": product_config(dataclasses.replace(spec(4096), gated=True)),
    "gated 64 rows of bf16": product_config(dataclasses.replace(spec(64), gated=True, limit=10.0, x_dtype="bfloat16")),
}
PICKED = {
    f"picked {rows} rows a group, {x_dtype} to {out_dtype}": product_config(
        dataclasses.replace(
            spec(rows * 256, 4096, 7168, 256), gated=True, x_dtype=x_dtype, out_dtype=out_dtype, num_picked=512
        )
    )
    for rows in (1, 16, 128)
    for x_dtype, out_dtype in (
        ("bfloat16", "bfloat16"),
        ("float16", "float32"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("float8_e4m3fn", "bfloat16"),
    )
}
CONFIGS |= PICKED
CONFIGS |= {
    "tail of 64 tokens, bf16": dataclasses.replace(CONFIGS["128 rows of f16 a group"], x_dtype="bfloat16", tail=64),
    "tail of 64 tokens, e4m3": dataclasses.replace(
        PICKED["picked 128 rows a group, float8_e4m3fn to float8_e4m3fn"], tail=64
    ),
}
MX = dataclasses.replace(spec(256, 4096, 7168, 256), x_dtype="bfloat16", packed=True)
CONFIGS |= {
    "packed 1 row a group": product_config(MX),
    "packed 16 rows": product_config(dataclasses.replace(MX, num_rows=16, num_groups=None)),
    "packed 128 rows a group": product_config(dataclasses.replace(MX, num_rows=32768)),
    "packed, gated and picked, to e4m3": product_config(
        dataclasses.replace(MX, num_rows=32768, num_picked=4096, gated=True, out_dtype="float8_e4m3fn")
    ),
}
WIDE = dataclasses.replace(spec(256, 4096, 7168, 256), x_dtype="bfloat16", gated=True)
CONFIGS |= {
    "gated 1 row a group of bf16, picked": product_config(dataclasses.replace(WIDE, num_picked=32)),
    "gated 128 rows a group of bf16": product_config(dataclasses.replace(WIDE, num_rows=32768)),
}
PLAIN = dataclasses.replace(spec(4096, 2816, 2048, 64), x_dtype="bfloat16", plain=True)
CONFIGS |= {
    "plain": product_config(PLAIN),
    "plain f16 to f32": product_config(dataclasses.replace(PLAIN, x_dtype="float16", out_dtype="float32")),
    "plain, gated and picked": product_config(dataclasses.replace(PLAIN, num_picked=4096, gated=True, limit=7.0)),
    "plain, gated and picked, to e4m3": product_config(
        dataclasses.replace(PLAIN, num_picked=4096, gated=True, out_dtype="float8_e4m3fn")
    ),
}
CONFIGS |= {
    "plain, gated, weights in common": product_config(dataclasses.replace(PLAIN, num_rows=64 * 384, gated=True)),
    "4096 rows, weights in common": dataclasses.replace(CONFIGS["4096 rows"], multicast=True),
}
FAST = (
    "plain, gated, weights in common",
    "plain, gated and picked",
    "16 rows",
    "128 rows a group",
    "picked 128 rows a group, float8_e4m3fn to float8_e4m3fn",
)
"""Compiled in every run of the tests. The others are slow tests."""


@pytest.mark.parametrize("name", all_but_slow(CONFIGS, FAST))
def test_everything_stays_in_registers(name: str) -> None:
    config = CONFIGS[name]
    check_compiled(GROUPED_BLOCK_SCALED_MATMUL if config.grouped else BLOCK_SCALED_MATMUL, config, kernels=1)


def fits(config: ProductConfig) -> None:
    """A CTA's memory holds at least three stages, and its threads have the registers that they ask for."""
    limit = SMEM_BYTES if config.ctas == 1 else PAIR_BYTES
    used = config.stages * (config.stage_bytes + 4 * config.scale_words) + config.threads // 32 * config.staging_bytes
    assert config.stages >= 3 and used + 1024 <= limit and config.has_room
    assert config.splits <= 8 and not (config.grouped and config.splits > 1)
    assert (config.may_multicast and not config.level) or not config.multicast
    assert config.tokens == 64 * config.groups if config.tokens_first else config.tokens % 8 == 0
    assert config.rows <= 256 and config.tokens <= 256  # of a copy
    math, others = config.registers
    at_start = 65536 // ((config.groups + 1) * 128 * config.ctas) // 8 * 8
    assert config.groups * math + others <= (config.groups + 1) * at_start
    # A scale of the result is for 128 columns, which a tile has; the other warps of three groups have few registers.
    assert config.width == 128 or not config.quantized
    assert config.groups < 3 or not config.picked
    assert config.width in (64, 128) or not config.gated
    assert config.ctas == 1 or not config.picked  # a pair of CTAs has no registers for it


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("matrix", MATRICES)
def test_a_configuration_fits(rows: int, matrix: tuple[int, int]) -> None:
    for dtype in ("float8_e4m3fn", "bfloat16"):
        for gated, out_dtype in ((False, "bfloat16"), (True, "bfloat16"), (True, "float8_e4m3fn")):
            form = {"x_dtype": dtype, "gated": gated, "out_dtype": out_dtype}
            fits(product_config(dataclasses.replace(spec(rows, *matrix), **form)))
            grouped = dataclasses.replace(spec(rows, *matrix, groups=64), **form)
            fits(product_config(grouped))
            fits(product_config(dataclasses.replace(grouped, num_picked=7)))
            if dtype == "bfloat16":
                fits(product_config(dataclasses.replace(grouped, plain=True)))
                fits(product_config(dataclasses.replace(grouped, num_rows=128 * 64)))


def test_a_split_sum_has_terms_in_each_part() -> None:
    for rows in ROWS:
        for columns, terms in (*MATRICES, (128, 128), (128, 512)):
            config = product_config(spec(rows, columns, terms))
            assert config.splits <= -(-terms // 128), (rows, columns, terms)


def test_groups_of_many_rows_with_16_bits_have_weights_in_common() -> None:
    many = dataclasses.replace(PLAIN, num_rows=64 * 384)
    assert product_config(many).multicast
    for change in (
        {"num_rows": 64 * 128},
        {"num_picked": 4096},
        {"plain": False},
        {"plain": False, "x_dtype": "float8_e4m3fn"},
    ):
        assert not product_config(dataclasses.replace(many, **change)).multicast


def test_few_rows_take_smaller_tiles_if_larger_ones_take_rounds() -> None:
    """Of V3's and V2-Lite's experts for one token and for 16."""
    form, v3, lite = {"x_dtype": "bfloat16", "gated": True, "num_picked": 16}, (4096, 7168), (2816, 2048)
    for rows, size, groups, waves in ((9, v3, 257, 1), (144, v3, 257, 1), (8, lite, 66, 2), (128, lite, 66, 1)):
        assert product_config(dataclasses.replace(spec(rows, *size, groups=groups), **form)).waves == waves


MANY_ROWS = ((66, 32768, 128, 152), (257, 28672, 128, 128), (257, 36864, 192, 152), (128, 32768, 192, 128))


@pytest.mark.parametrize(("groups", "rows", "tokens", "exact"), MANY_ROWS)
def test_groups_of_many_rows_take_the_tiles_that_were_fastest(groups: int, rows: int, tokens: int, exact: int) -> None:
    """Down products of V2-Lite's, V4's and V3's experts in prompts of 4,096 tokens, and of groups between them."""
    down = spec(rows, 7168, 2048, groups)
    assert product_config(down).tokens == tokens
    wide = dataclasses.replace(down, x_dtype="bfloat16")
    assert product_config(wide).tokens == exact
    picked = dataclasses.replace(wide, gated=True, num_picked=4096)
    assert product_config(picked).tokens == 128
    assert product_config(dataclasses.replace(wide, gated=True)).tokens == exact


def test_rows_of_unknown_number_have_a_configuration() -> None:
    for groups in (None, 64):
        fits(product_config(dataclasses.replace(spec(1), num_rows="t", num_groups=groups)))


def test_reasons_name_what_is_not_taken() -> None:
    assert product_reasons(spec(5)) == []
    for change, reason in (
        ({"x_dtype": "float32"}, "x's dtype is float32; the sm_90 kernel"),
        ({"num_terms": 100}, "K is 100; the sm_90 kernel"),
        ({"num_columns": 12}, "N is 12; the sm_90 kernel"),
        ({"num_columns": "n"}, "N is symbolic"),
        (
            {"num_columns": 384, "gated": True},
            "N is 384; the sm_90 kernel of block-scaled products takes a multiple of 256",
        ),
    ):
        assert product_reasons(dataclasses.replace(spec(5), **change))[0].startswith(reason)


@pytest.mark.parametrize("dtype", all_but_slow(("bfloat16", "float16", "float32"), ("bfloat16",)))
def test_quantising_stays_in_registers(dtype: str) -> None:
    for power_of_two in (False, True):
        check_compiled(QUANTIZE_BLOCKS, quantize_config(QuantizeBlocksSpec((5, 7168), dtype, power_of_two)), kernels=1)
    assert quantize_reasons(QuantizeBlocksSpec((5, 12), dtype, False))[0].startswith("K is 12; the kernel of")


def test_options_describe_the_calls() -> None:
    given = {"dtype": "float8_e4m3fn", "num_tokens": "16", "in_features": "16384", "out_features": "7168"}
    assert KERNELS["block_scaled_matmul"].from_options(given) == CONFIGS["16 rows"]
    given |= {"num_tokens": "32768", "num_groups": "256"}
    assert KERNELS["grouped_block_scaled_matmul"].from_options(given) == CONFIGS["128 rows a group"]
    assert KERNELS["block_scaled_matmul"].from_options({"dtype": "float16"}).x_dtype == "float16"
    gated = {"gated": "true", "picked": "true", "quantized": "true", "out_features": "4096"}
    name = "picked 128 rows a group, float8_e4m3fn to float8_e4m3fn"
    assert KERNELS["grouped_block_scaled_matmul"].from_options(given | gated | {"in_features": "7168"}) == CONFIGS[name]
    assert KERNELS["block_scaled_matmul"].from_options({"gated": "true", "limit": "10"}).limit == 10.0
    assert KERNELS["quantize_blocks"].from_options({"power_of_two": "true"}).power_of_two
    with pytest.raises(ValueError, match="N is 100"):
        KERNELS["block_scaled_matmul"].from_options(given | {"out_features": "100"})
