"""The clusters of compress_write_kv_cache: a CTA writes into another one's shared memory once that one runs, and reads
what others wrote once all have written."""

import types
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.emulator.numeric_cute import numeric

pytest.importorskip("cutlass")

from tsmla_kernels.sparse_cache.compress import CompressWriteKvCache
from tsmla_kernels.sparse_cache.compress_config import CompressWriteConfig

CLUSTER = CompressWriteConfig(128, 1, 512, "v4", "bfloat16", 64, 1e-6, 64, cluster=4, parts=2)
ONE_CTA = CompressWriteConfig(4, 2, 512, "v4", "bfloat16", 64, 1e-6, 64, cluster=1, parts=2)


def steps_of(config: CompressWriteConfig, rank: int, length: int) -> list[str]:
    """What a thread of the first CTA or cluster of a request of `length` new tokens does, in order."""
    steps: list[str] = []

    def noted(name: str, value: Any = None) -> Any:
        return lambda *_: (steps.append(name), value)[1]

    arch = types.SimpleNamespace(thread_idx=lambda: (0, 0, 0), block_idx=lambda: (rank, 0, 0))
    steps_of_arch = ("cluster_arrive", "cluster_arrive_relaxed", "cluster_wait", "sync_threads", "sync_warp")
    for name in (*steps_of_arch, "mbarrier_init", "mbarrier_init_fence", "mbarrier_wait"):
        setattr(arch, name, noted(name))
    request = types.SimpleNamespace(index=0, token=0, start=0, length=length, state=0)
    kernel = MagicMock(config=config, owner=lambda *_: (request, 0))
    for name in ("pool", "hand_over", "combined", "write", "keep"):
        setattr(kernel, name, noted(name, MagicMock()))
    arrays = types.SimpleNamespace(new_state=MagicMock(shape=(1,)))
    compress = numeric(CompressWriteKvCache.compress, utils=MagicMock())
    loop = types.SimpleNamespace(range=lambda count, unroll: range(count), range_constexpr=range, min=min)
    scope = {"cute": MagicMock(arch=arch), "cutlass": loop}
    compress.__globals__.update(scope)  # type: ignore[attr-defined]
    compress(kernel, arrays)
    return steps


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_sums_go_to_the_first_cta_when_all_have_read_their_rows(rank: int) -> None:
    steps = steps_of(CLUSTER, rank, 128)
    assert steps[:2] == ["mbarrier_init", "mbarrier_init_fence"]  # of the mbarrier that the others' sums complete
    pooled = steps.index("pool")
    assert steps[pooled + 1 : pooled + 4] == ["sync_threads", "cluster_arrive_relaxed", "hand_over"]
    between = steps[pooled + 4 : steps.index("keep")]
    assert ("mbarrier_wait" in between) == ("write" in between) == (rank == 0)


@pytest.mark.parametrize("length", [0, 5, 127])
def test_a_request_that_completes_no_entry_does_not_meet_its_cluster(length: int) -> None:
    assert steps_of(CLUSTER, 1, length) == ["mbarrier_init", "mbarrier_init_fence", "sync_warp", "keep"]


def test_one_cta_needs_no_cluster() -> None:
    steps = steps_of(ONE_CTA, 0, 11)
    assert steps.count("write") == steps.count("pool") == 2 and not any(step.startswith("cluster") for step in steps)
