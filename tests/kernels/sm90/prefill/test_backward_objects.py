"""The gradient of prefill as it is compiled: nothing spilled, nothing in local memory, no serialised WGMMA. Needs no
GPU."""

import math

import pytest

from tests.kernels.object_checks import all_but_slow, check_compiled
from tsmla_kernels.catalog import MLA_PREFILL_BACKWARD
from tsmla_kernels.sm90.prefill.backward.config import backward_workspaces
from tsmla_kernels.sm90.prefill.backward.sums import sum_position, wide_sum_position

CONFIGS = {
    "causal": {},
    "causal, deterministic": {"deterministic": "true"},
    "not causal, f16": {"causal": "false", "dtype": "float16"},
    "selected keys": {"selection": "true"},
    "selected keys, shared rope columns, deterministic": {
        "selection": "true",
        "shared_rope": "true",
        "deterministic": "true",
    },
    "256 and 256": {"qk_head_dim": "256", "v_head_dim": "256"},
    "256 and 256, selected keys, f16, not causal": {
        "qk_head_dim": "256",
        "v_head_dim": "256",
        "selection": "true",
        "dtype": "float16",
        "causal": "false",
    },
    "256 and 256, shared rope columns, deterministic": {
        "qk_head_dim": "256",
        "v_head_dim": "256",
        "shared_rope": "true",
        "deterministic": "true",
    },
    "256 and 256, selected keys, sinks, shared rope columns, deterministic": {
        "qk_head_dim": "256",
        "v_head_dim": "256",
        "selection": "true",
        "sinks": "true",
        "shared_rope": "true",
        "deterministic": "true",
    },
    "shared rope columns": {"shared_rope": "true"},
    "shared rope columns, deterministic": {"shared_rope": "true", "deterministic": "true"},
    "sinks, shared rope columns": {"sinks": "true", "shared_rope": "true"},
    "sinks, selected keys": {"sinks": "true", "selection": "true"},
}
FAST = ("causal",)


@pytest.mark.parametrize("name", all_but_slow(CONFIGS, FAST))
def test_everything_stays_in_registers(name: str) -> None:
    config = MLA_PREFILL_BACKWARD.from_options(CONFIGS[name])
    check_compiled(MLA_PREFILL_BACKWARD, config, kernels=3)  # the rows' terms and the plan, the gradients, dq


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_operands_take_the_workspaces(options: dict[str, str]) -> None:
    config = MLA_PREFILL_BACKWARD.from_options(options)
    operands = MLA_PREFILL_BACKWARD.operands(config)
    workspaces = backward_workspaces(config, 3, 1000, 2000, 16)
    first = 13 + 2 * config.selection + 2 * config.sinks
    assert [operand.name for operand in operands[first:]] == list(workspaces)
    for operand in operands[first:]:
        operand.check(*workspaces[operand.name])


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_workspaces_are_dq_in_float32_and_some_numbers_a_row(options: dict[str, str]) -> None:
    """The numbers of docs/guides/derivatives.md."""
    config, batch, tokens, keys = MLA_PREFILL_BACKWARD.from_options(options), 3, 10_000, 20_000
    sizes = {}
    for heads in (16, 128):
        shapes = backward_workspaces(config, batch, tokens, keys, heads)
        sizes[heads] = {name: 4 * math.prod(shape) for name, (shape, _) in shapes.items()}
        assert sizes[heads].pop("dq_sum") <= 4 * config.qk_head_dim * heads * (tokens + 8 * batch)
        assert sizes[heads].pop("row_terms") <= 8 * heads * (tokens + 64 * batch)
        turns = 8 * heads * (tokens // 64 + batch) if config.deterministic else 8
        assert sizes[heads].pop("turns") == turns
        of_sinks = 16 * heads * (tokens // 64 + batch) if config.sinks else 0
        assert sizes[heads].pop("sink_terms", 0) == of_sinks
        partials = 16 if config.deterministic else 1
        assert sizes[heads].pop("rope_sum", 0) == (4 * 64 * keys * partials if config.rope_dim else 0)
        assert sizes[heads].pop("rope_turns", 0) <= partials * 8 * (keys // config.key_rows + batch)
        assert sum(sizes[heads].values()) < 1000
    assert sizes[16] == sizes[128]


def test_wide_sum_positions_are_a_permutation_of_a_block() -> None:
    positions = [wide_sum_position(row, column) for row in range(8) for column in range(128)]
    assert sorted(positions) == list(range(8 * 128))
    # What the lanes of a warp add together, lane 4 r + q of row r: four numbers each, side by side.
    lanes = [(row, (2 * q, 2 * q + 1, 2 * q + 8, 2 * q + 9)) for row in range(8) for q in range(4)]
    assert [wide_sum_position(row, column) for row, columns in lanes for column in columns] == list(range(128))


@pytest.mark.parametrize("columns", [96, 64])
def test_sum_positions_are_a_permutation_of_a_block(columns: int) -> None:
    positions = [sum_position(row, column, columns) for row in range(8) for column in range(columns)]
    assert sorted(positions) == list(range(8 * columns))
    # Lane 1 of a row's four has columns 2, 3, 10 and 11 of an accumulator's first sixteen.
    assert [sum_position(0, column, columns) for column in (2, 3, 10, 11)] == [4, 5, 6, 7]
    # The eight lanes that store together have two rows: their 128 bytes use every bank once.
    assert {sum_position(row, column, columns) % 32 for row in (0, 1) for column in range(16)} == set(range(32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8_e4m3fn"}, "q.dtype is float8_e4m3fn; the sm_90 prefill gradient takes bfloat16 or float16"),
        ({"qk_head_dim": "64", "v_head_dim": "64"}, "64 and 64; the sm_90 prefill gradient takes 192 and 128, 256 and"),
        ({"deterministic": "maybe"}, "got deterministic=maybe; legal: true or false"),
    ],
)
def test_options_that_are_not_legal(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MLA_PREFILL_BACKWARD.from_options(options)
