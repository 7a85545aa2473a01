"""The sparse kernel's configurations: what is taken, which object serves a call, and what fits into shared memory."""

import dataclasses
import itertools
import math
from typing import Any

import pytest

from tests.kernels.sm90.sparse.specs import PLAIN, V4, V4_CALL, V32, V32_CALL
from tsmla_kernels.catalog import SPARSE_MLA
from tsmla_kernels.sm90.constants import FP8, SMEM_BYTES
from tsmla_kernels.sm90.latent.shape import INVARIANT_WORKSPACE
from tsmla_kernels.sm90.sparse.config import (
    MANY_TILES,
    MAX_STAGES,
    MIN_STAGES,
    SparseConfig,
    launches,
    sparse_config,
    sparse_reasons,
    workspace_shapes,
)
from tsmla_kernels.sm90.sparse.union_config import union_config


def test_calls_of_any_size_share_an_object() -> None:
    config = sparse_config(V32_CALL)
    for other in (
        {"num_tokens": 300},
        {"num_selected": 700, "window": 700},
        {"cache": dataclasses.replace(V32, num_pages=1)},
        {"cache": dataclasses.replace(V32, page_size=16, span=16)},
    ):
        assert sparse_config(dataclasses.replace(V32_CALL, **other)) == config
    assert sparse_config(V32_CALL, lengths=True) != config != sparse_config(V32_CALL, sinks=True)


def test_few_tokens_of_many_heads_have_narrow_tiles() -> None:
    many = dataclasses.replace(V4_CALL, num_tokens=4096)
    assert sparse_config(V4_CALL).shape.tile_rows == 32 and sparse_config(many).shape.tile_rows == 64
    assert sparse_config(V4_CALL).shape.max_tiles == 2 and sparse_config(many).shape.max_tiles == 1
    assert sparse_config(dataclasses.replace(V4_CALL, num_tokens="t")).shape.tile_rows == 64
    assert sparse_config(dataclasses.replace(V4_CALL, batch_invariant=True)).shape.tile_rows == 64
    assert sparse_config(dataclasses.replace(V4_CALL, num_heads=16)).shape.p_rows == 16


@pytest.mark.parametrize("width", [512, 576])
@pytest.mark.parametrize("heads", [33, 64, 65, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_many_heads_over_plain_rows_of_16_bits_have_q_in_registers(dtype: str, heads: int, width: int) -> None:
    """If queries have the rows' dtype. Calls of few tiles have tiles of 32 heads, and K and V^T in registers."""
    cache = dataclasses.replace(PLAIN, dtype=dtype, head_dim=width)
    few = dataclasses.replace(V32_CALL, q_dtype=dtype, num_heads=heads, head_dim=width, cache=cache)
    assert sparse_reasons(few) == []
    one, tiles = dataclasses.replace(few, num_tokens=1), math.ceil(heads / 64)
    for call, changes in itertools.product(
        (few, one), ({"num_tokens": 4096}, {"num_tokens": "t"}, {"batch_invariant": True})
    ):
        config = sparse_config(dataclasses.replace(call, **changes))
        assert (config.shape.tile_rows, config.shape.max_tiles, config.stages) == (64, tiles, MAX_STAGES)
        assert config.q_in_registers and config.stage_keys == 32 and config.keys_bytes == 32 * 2 * width
        assert config.q_bytes == 64 * 2 * (64 if width == 512 else 128)
        assert config.stages * config.stage_bytes + config.q_bytes + 4 * config.exchanged_words < SMEM_BYTES
    config = sparse_config(one)
    assert (config.tile_rows, config.q_in_registers, config.early_p) == (32, False, config.stages == MIN_STAGES)
    narrow = sparse_config(dataclasses.replace(few, num_heads=32))
    assert narrow.tile_rows == 64 and not narrow.q_in_registers
    most = dataclasses.replace(few, num_tokens=math.ceil(MANY_TILES / tiles))
    less = dataclasses.replace(most, num_tokens=most.num_tokens - 1)
    assert sparse_config(most).dealt and not sparse_config(less).dealt


@pytest.mark.parametrize("changes", [{}, {"num_tokens": 4096}, {"num_tokens": "t"}, {"batch_invariant": True}], ids=str)
def test_queries_of_another_dtype_than_rows_of_1152_bytes_have_tiles_of_32_heads(changes: dict[str, Any]) -> None:
    """64 rows of Q in shared memory leave room for two stages of narrower rows only."""
    cache = dataclasses.replace(PLAIN, dtype="float16", head_dim=576)
    wide = dataclasses.replace(V32_CALL, num_heads=64, cache=cache, **changes)
    config = sparse_config(wide)
    assert sparse_reasons(wide) == []
    assert (config.tile_rows, config.q_in_registers, config.stages) == (32, False, MIN_STAGES)
    narrow = sparse_config(dataclasses.replace(wide, head_dim=512, cache=dataclasses.replace(cache, head_dim=512)))
    assert (narrow.tile_rows, narrow.q_in_registers, narrow.stages) == (64, False, MIN_STAGES)


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({"num_tokens": 1, "num_selected": 256}, True),
        ({"num_tokens": 1, "num_selected": 257}, False),
        ({"num_tokens": 66, "num_heads": 128, "num_selected": 128}, True),
        ({"num_tokens": 67, "num_heads": 128, "num_selected": 128}, True),
        ({"num_tokens": 132, "num_heads": 128, "num_selected": 256}, True),
        ({"num_tokens": 264, "num_heads": 128, "num_selected": 256}, True),
        ({"num_tokens": 265, "num_heads": 128, "num_selected": 256}, False),
        ({"num_tokens": 200, "num_heads": 128, "num_selected": 257}, False),
        ({"num_tokens": 132, "num_heads": 16, "num_selected": 200}, True),
        ({"num_tokens": "t", "num_selected": 128}, False),
        ({"num_tokens": 1, "num_selected": "k"}, False),
        ({"num_tokens": 1, "num_selected": 128, "batch_invariant": True}, False),
    ],
    ids=str,
)
def test_ctas_have_whole_row_tiles_of_few_columns(changes: dict[str, Any], whole: bool) -> None:
    config = sparse_config(dataclasses.replace(V4_CALL, **changes))
    assert config.whole is whole and not (config.whole and config.dealt) and (config.early_q or not whole)
    assert not union_config(dataclasses.replace(V4_CALL, **(changes | {"num_heads": 16}))).alone.whole


def test_pages_with_gaps_and_v4_pages_are_compiled_in() -> None:
    gaps = sparse_config(dataclasses.replace(V32_CALL, cache=dataclasses.replace(V32, span=72)))
    assert (gaps.page_size, gaps.page_span) == (64, 72)
    config = sparse_config(V4_CALL)
    assert (config.page_size, config.page_span, config.window) == (64, 64, 128)
    assert (config.compressed_page_size, config.compressed_page_span) == (2, 2)


@pytest.mark.parametrize(
    ("tokens", "heads", "dealt"), [(200, 64, False), (400, 64, True), (200, 128, True), ("t", 64, False)]
)
def test_many_row_tiles_are_dealt_out(tokens: int | str, heads: int, dealt: bool) -> None:
    spec = dataclasses.replace(V32_CALL, num_tokens=tokens, num_heads=heads)
    assert sparse_config(spec).dealt is dealt
    assert not sparse_config(dataclasses.replace(spec, batch_invariant=True)).dealt


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q_dtype": "float32"}, "q.dtype is float32"),
        ({"q_dtype": FP8}, "q.dtype is float8_e4m3fn and kv_cache has v4 rows of uint8"),
        ({"latent_dim": 448}, "latent_dim is 448"),
        ({"num_heads": "h"}, "num_heads is h"),
        ({"cache": dataclasses.replace(PLAIN, dtype="float32")}, "kv_cache.dtype is float32"),
        ({"cache": dataclasses.replace(PLAIN, head_dim=320)}, "kv_cache's keys are 320 wide"),
        ({"cache": dataclasses.replace(V4, num_pages=1 << 20, span=1 << 11)}, "kv_cache has 2147483648 slots"),
        ({"compressed": PLAIN}, "compressed_kv_cache has plain rows of float8_e4m3fn"),
    ],
)
def test_reasons_name_what_is_not_taken(changes: dict, said: str) -> None:
    narrow = dataclasses.replace(V4_CALL, compressed=None, cache=dataclasses.replace(PLAIN, dtype="bfloat16"))
    assert sparse_reasons(V4_CALL) == sparse_reasons(V32_CALL) == sparse_reasons(narrow) == []
    call = dataclasses.replace(V4_CALL, **({"compressed": None} | changes))
    assert sparse_reasons(call)[0].startswith(said)


@pytest.mark.parametrize("heads", [1, 16, 17, 32, 33, 64, 65, 128])
@pytest.mark.parametrize("layout", ["v32", "v4", "plain 512", "plain 576"])
def test_shared_memory_holds_the_stages(heads: int, layout: str) -> None:
    """A row's pitch is an odd multiple of 16 bytes, so that eight rows meet each bank once; P begins where WGMMA's
    swizzle does; and gathered rows are copied in units of 16 bytes."""
    layout, _, width = layout.partition(" ")
    kv_dtype = FP8 if layout == "plain" else "uint8"
    config = SparseConfig("bfloat16", heads, layout, kv_dtype, int(width or (576 if layout == "v32" else 512)))
    assert MIN_STAGES <= config.stages <= MAX_STAGES
    assert config.pitch // 16 % 2 == 1 and config.pitch % 16 == 0 and config.row_bytes % 16 == 0
    assert config.keys_bytes % 1024 == 0 and config.stage_bytes % 1024 == 0
    assert config.stages * config.stage_bytes + config.q_bytes + 4 * config.exchanged_words < SMEM_BYTES
    assert config.rope_offset + 2 * (config.head_dim - config.e4m3_columns) == config.row_bytes


@pytest.mark.parametrize("heads", [1, 16, 32, 64, 128])
def test_queries_of_e4m3(heads: int) -> None:
    """They take half of the place, and their rope columns once more in bf16 over packed rows; out is bfloat16."""
    call = dataclasses.replace(V32_CALL, q_dtype=FP8, num_heads=heads)
    assert sparse_reasons(call) == []
    config, wide = sparse_config(call), sparse_config(dataclasses.replace(V32_CALL, num_heads=heads))
    assert config.q_bytes == config.shape.p_rows * (576 + 2 * 64) and config.q_bytes % 1024 == 0
    assert config.stages >= wide.stages and config.shape.p_rows == wide.shape.p_rows
    operands = {operand.name: operand for operand in SPARSE_MLA.operands(config)}
    assert (operands["q"].dtype, operands["out"].dtype) == (FP8, "bfloat16")
    plain = dataclasses.replace(call, cache=dataclasses.replace(PLAIN, head_dim=576))
    assert sparse_config(plain).q_bytes == config.shape.p_rows * 576


def test_operands_are_those_of_the_call() -> None:
    names = [operand.name for operand in SPARSE_MLA.operands(sparse_config(V32_CALL))]
    assert names == ["q", "kv_cache", "indices", "scales", "out", "lse", "partial_out", "partial_lse", "split_info"]
    config = sparse_config(V4_CALL, lengths=True, sinks=True)
    operands = {operand.name: operand for operand in SPARSE_MLA.operands(config)}
    assert list(operands)[:6] == ["q", "kv_cache", "compressed_kv_cache", "indices", "lengths", "sinks"]
    assert operands["kv_cache"].shape == (None, None) and operands["sinks"].shape == (64,)
    for name, (shape, dtype) in workspace_shapes(config, 132, 3, 640).items():
        operands[name].check(shape, dtype)


def test_tokens_that_do_not_split_need_no_workspace_of_their_own() -> None:
    """A prompt's partial results are those of two tiles a CTA, whatever its tokens; batch_invariant, where every tile
    has slots of its own, bounds them by launches."""
    prompt = dataclasses.replace(V32_CALL, num_tokens=32768, num_heads=128)
    few = dataclasses.replace(prompt, num_tokens=200)
    shapes = [workspace_shapes(sparse_config(call), 132, call.num_tokens, 2048) for call in (few, prompt)]
    assert shapes[0] == shapes[1] and shapes[0]["partial_out"] == ((264, 64, 512), "float16")
    assert launches(sparse_config(prompt), 32768, 2048) == [(0, 32768)]

    config = sparse_config(dataclasses.replace(prompt, batch_invariant=True))
    parts = launches(config, 32768, 2048)
    assert parts[0][0] == 0 and parts[-1][1] == 32768 and len(parts) > 1
    assert all(stop == first for (_, stop), (first, _) in itertools.pairwise(parts))
    for first, stop in parts:
        partial_out, _ = workspace_shapes(config, 132, stop - first, 2048)["partial_out"]
        assert 2 * math.prod(partial_out) <= INVARIANT_WORKSPACE
    assert launches(config, "t", 2048) == [(0, "t")]


def test_options_name_the_object_of_a_call() -> None:
    options = {"num_heads": "64", "layout": "v4", "window": "128", "compressed_page_size": "2", "sinks": "true"}
    options["num_tokens"] = "3"
    assert SPARSE_MLA.from_options(options) == sparse_config(V4_CALL, sinks=True)
    assert SPARSE_MLA.from_options({"num_heads": "16", "lengths": "true"}) == sparse_config(V32_CALL, lengths=True)
    for wrong, said in (
        ({"num_heads": "16", "layout": "v5"}, "layout=v5"),
        ({"layout": "v4"}, "num_heads is needed"),
        ({"num_heads": "64", "layout": "plain", "head_dim": "448"}, "keys are 448 wide"),
    ):
        with pytest.raises(ValueError, match=said):
            SPARSE_MLA.from_options(wrong)
