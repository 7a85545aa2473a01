"""The kernels of the packed caches as they are compiled, and their configurations. Needs no GPU."""

import dataclasses
import json

import pytest

from tests.kernels.object_checks import check_compiled
from tsmla_kernels.catalog import COMPRESS_WRITE_KV_CACHE
from tsmla_kernels.contract.compress import CompressSpec, CompressWriteSpec
from tsmla_kernels.contract.layouts import IndexerCacheSpec
from tsmla_kernels.contract.packed import IndexerWriteSpec, Rotation
from tsmla_kernels.sm90.constants import SMEM_BYTES
from tsmla_kernels.sparse_cache.compress_config import (
    MAX_THREADS,
    CompressWriteConfig,
    compress_write_config,
    compress_write_reasons,
)
from tsmla_kernels.sparse_cache.config import indexer_write_reasons

BF16, F32 = "bfloat16", "float32"


def compressing(ratio: int, series: int, channels: int, cache: str, weight_dtype: str = BF16) -> CompressWriteConfig:
    """The configuration of a compressor."""
    compress = CompressSpec(1, 1, ratio, series, channels, 1, ratio * series)
    spec = CompressWriteSpec(compress, cache, 1, 64, weight_dtype, 64, 1e-6)
    assert compress_write_reasons(spec) == []
    return compress_write_config(spec)


def test_everything_stays_in_registers() -> None:
    """As do the objects of test_on_machine.py."""
    kernel, config = COMPRESS_WRITE_KV_CACHE, compressing(128, 1, 512, "float8_e4m3fn", F32)
    check_compiled(kernel, config, kernels=1)
    assert CompressWriteConfig(**json.loads(kernel.config_json(config))) == config
    inputs = [operand.name for operand in kernel.operands(config) if not operand.output]
    assert all(operand.alias in inputs for operand in kernel.operands(config) if operand.alias)


@pytest.mark.parametrize("channels", [128, 256, 512, 1024])
@pytest.mark.parametrize(("ratio", "series"), [(1, 1), (2, 1), (4, 2), (8, 1), (64, 2), (128, 1)])
def test_a_window_is_shared_out_evenly(ratio: int, series: int, channels: int) -> None:
    config = compressing(ratio, series, channels, BF16)
    assert config.window % (config.cluster * config.parts) == 0 and config.threads <= max(MAX_THREADS, config.lanes)
    assert config.lanes % 32 == 0 and 12 * config.parts * channels <= SMEM_BYTES


def test_reasons_name_what_is_not_taken() -> None:
    spec = CompressWriteSpec(CompressSpec(1, 1, 4, 2, 512, 1, 8), "v4", 1, 64, BF16, 64, 1e-6)
    for change, reason in (
        ({"compress": CompressSpec(1, 1, 3, 1, 512, 1, 8)}, "an entry pools 3 tokens"),
        ({"compress": CompressSpec(1, 1, 4, 1, 96, 1, 8)}, "C is 96"),
        ({"weight_dtype": "float64"}, "norm_weight.dtype is float64"),
        ({"rope_dim": 6}, "rope_dim (R) is 6"),
        ({"cache": "float64"}, "cache.dtype is float64"),
    ):
        assert reason in compress_write_reasons(dataclasses.replace(spec, **change))[0]
    plain, packed = (IndexerCacheSpec(1, 64, 128, is_packed) for is_packed in (False, True))
    assert "k_cache holds floats" in indexer_write_reasons(IndexerWriteSpec(1, plain, BF16, None))[0]
    # A lane stores eight bytes: pages of Z * 132 bytes must begin at multiples of eight.
    assert indexer_write_reasons(IndexerWriteSpec(1, packed, BF16, None)) == []
    for page_size in (1, 5):
        page = dataclasses.replace(packed, page_size=page_size)
        assert f"page_size (Z) is {page_size}" in indexer_write_reasons(IndexerWriteSpec(1, page, BF16, None))[0]
    odd = IndexerWriteSpec(1, packed, "float64", Rotation(12, 2, "halves"))
    assert [reason.split(";")[0] for reason in indexer_write_reasons(odd)] == [
        "k.dtype is float64",
        "rope_dim (R) is 12",
        "rope_offset is 2",
    ]
