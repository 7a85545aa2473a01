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
    for name in ("cluster_arrive", "cluster_arrive_relaxed", "cluster_wait", "sync_threads"):
        setattr(arch, name, noted(name))
    kernel = MagicMock(config=config, owner=lambda *_: (0, 0))
    for name in ("pool", "hand_over", "merged_sums", "write", "keep"):
        setattr(kernel, name, noted(name, MagicMock()))
    arrays = types.SimpleNamespace(
        cu_seqlens_q=[0, length], seq_lens=MagicMock(shape=(1,)), state_slots=[0], new_state=MagicMock(shape=(1,)),
        kv_score=MagicMock(shape=(length, 1024)),
    )  # fmt: skip
    arrays.seq_lens.__getitem__.return_value = length
    compress = numeric(CompressWriteKvCache.compress, utils=MagicMock())
    loop = types.SimpleNamespace(range=lambda count, unroll: range(count), min=min, max=max)
    scope = {"cute": MagicMock(arch=arch), "cutlass": loop}
    compress.__globals__.update(scope)  # type: ignore[attr-defined]
    compress(kernel, arrays)
    return steps


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_the_first_cta_runs_before_others_write_into_it(rank: int) -> None:
    steps = steps_of(CLUSTER, rank, 128)
    assert steps.count("hand_over") == 1 and steps.index("cluster_wait") < steps.index("hand_over")
    barriers = [step for step in steps if step.startswith("cluster")]
    assert all(step.startswith("cluster_arrive") for step in barriers[::2])
    assert barriers[1::2] == ["cluster_wait"] * (len(barriers) // 2) and len(barriers) % 2 == 0
    between = steps[steps.index("hand_over") + 1 : steps.index("keep")]
    assert between[:2] == ["cluster_arrive", "cluster_wait"]
    assert ("merged_sums" in between) and ("write" in between) == (rank == 0)


@pytest.mark.parametrize("length", [0, 5, 127])
def test_a_request_that_completes_no_entry_meets_its_cluster_once(length: int) -> None:
    assert steps_of(CLUSTER, 1, length) == ["cluster_arrive_relaxed", "cluster_wait", "keep"]


def test_one_cta_needs_no_cluster() -> None:
    steps = steps_of(ONE_CTA, 0, 11)
    assert steps.count("write") == steps.count("pool") == 2 and not any(step.startswith("cluster") for step in steps)
