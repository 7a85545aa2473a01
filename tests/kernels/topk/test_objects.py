"""The top-k kernel as it is compiled: nothing spilled, and shared memory that fits. Needs no GPU."""

import dataclasses

import pytest

from tests.kernels.object_checks import all_but_slow, check_compiled, check_object
from tsmla_kernels import object_cache
from tsmla_kernels.catalog import SELECT_TOPK
from tsmla_kernels.contract.sparse import TopKSpec
from tsmla_kernels.topk.config import MAX_COLUMNS, TopkConfig, topk_config, topk_reasons
from tsmla_kernels.topk.memory import storage_of


def slots_of_requests(rows: int, columns: int) -> TopkConfig:
    """Of indexer_topk with several query tokens a request."""
    config = topk_config(TopKSpec(rows, columns, 2048, "position", page_size=64))
    return dataclasses.replace(config, row_requests=True, scores=True, follows=True)


CONFIGS = {
    "few short rows": topk_config(TopKSpec(1, 8192, 2048, "position")),
    "few long rows": topk_config(TopKSpec(8, 131072, 2048, "position")),
    "many short rows": topk_config(TopKSpec(4096, 8192, 2048, "position")),
    "long rows": topk_config(TopKSpec(64, 131072, 2048, "position")),
    "bits of short rows": topk_config(TopKSpec(4096, 8192, 2048, bits=True)),
    "bits of long rows": topk_config(TopKSpec(4096, 131072, 2048, row_starts=True, bits=True)),
    "by value": topk_config(TopKSpec(64, 32768, 4096)),
    "by value in a cluster": topk_config(TopKSpec(8, 32768, 2048)),
    "slots, row starts": topk_config(TopKSpec(64, 32768, 1, "position", page_size=64, row_starts=True)),
    "slots of a chunk of rows": topk_config(TopKSpec(256, 131072, 2048, "position", page_size=64)),
    "slots of pages of 48 in a cluster": topk_config(TopKSpec(8, 131072, 512, "position", page_size=48)),
    "slots of requests, scores": slots_of_requests(128, 8192),
    "slots of requests, scores, long rows": slots_of_requests(256, 131072),
    "slots of requests, scores, in a cluster": slots_of_requests(8, 131072),
}
FAST = ("few short rows", "slots, row starts")
"""Compiled in every run of the tests. The others are slow tests."""


@pytest.mark.parametrize("name", all_but_slow(CONFIGS, FAST))
def test_everything_stays_in_registers(name: str) -> None:
    check_compiled(SELECT_TOPK, CONFIGS[name], kernels=1)


@pytest.mark.parametrize("name", all_but_slow(CONFIGS, FAST[:1]))
@pytest.mark.parametrize("arch", ["sm_100a", pytest.param("sm_103a", marks=pytest.mark.slow)])
def test_everything_stays_in_registers_on_blackwells(name: str, arch: str) -> None:
    check_object(object_cache.load_or_compile(SELECT_TOPK, CONFIGS[name], arch), kernels=1)


@pytest.mark.parametrize("rows", [1, 8, 64, 128, 4096])
@pytest.mark.parametrize("columns", [1, 8192, 8193, 32768, 131072, 1 << 24])
@pytest.mark.parametrize("order", ["value", "position"])
def test_a_configuration_fits(rows: int, columns: int, order: str) -> None:
    config = topk_config(TopKSpec(rows, columns, 4096, order))
    storage_of(config)  # raises ValueError if it is larger than a CTA may have
    assert config.threads <= 1024 and config.listed <= config.threads
    for size in (config.cluster, config.warps, config.stages):
        assert size & (size - 1) == 0


def test_a_configuration_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"held=32, .* takes 29\d{4} bytes of shared memory of 232448"):
        storage_of(TopkConfig(k=4096, held=32))


def test_reasons_name_what_is_not_taken() -> None:
    assert topk_reasons(TopKSpec(1, 8192, 2048)) == []
    assert "k is 4097" in topk_reasons(TopKSpec(1, 8192, 4097))[0]
    assert "num_columns (N) is" in topk_reasons(TopKSpec(1, MAX_COLUMNS + 1, 1))[0]
    assert "dtype is float64" in topk_reasons(TopKSpec(1, 8, 1, dtype="float64"))[0]
    assert "slots" in topk_reasons(TopKSpec(1, 8, 1, page_size=64))[0]
    assert "writes bits of at most 131072 columns" in topk_reasons(TopKSpec(1, 131073, 1, bits=True))[0]
