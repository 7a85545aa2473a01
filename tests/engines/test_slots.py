"""The slots of an indexer's positions, without an engine."""

import numpy as np
import pytest
import torch

from tests.engines import positions, sources
from tests.engines.positions import PAGE_SIZE, STEP
from tsmla_bridge.engines.vllm import slots


@pytest.mark.parametrize("heads", [None, 3])
def test_positions_become_slots(heads: int | None) -> None:
    given, requests, pages, parts = positions.selected(100, heads)
    found = slots.selected(given, requests, pages, parts)
    table = pages.table.numpy()
    for token, request in enumerate(requests.tolist()):
        want = np.array([
            table[request, p // PAGE_SIZE] * STEP + p % PAGE_SIZE if 0 <= p < positions.HELD else -1
            for p in given[token].tolist()
        ])  # fmt: skip
        assert np.array_equal(found.slots[token].numpy(), want)
        assert found.counts[token] == max(np.flatnonzero(want >= 0) + 1, default=0)
    assert {found.slots.dtype, found.counts.dtype} == {torch.int32}
    assert (found.joined is None) == (parts is None)
    if parts is not None and found.joined is not None:
        assert torch.equal(found.joined, torch.cat(parts, -1))


def test_no_tokens() -> None:
    given, requests, pages, parts = positions.selected(100, 3)
    assert parts is not None
    found = slots.selected(given[:0], requests[:0], pages, (parts[0][:0], parts[1][:0]))
    assert [None if each is None else each.shape for each in found] == [(0, 100), (0,), (0, 3, 576)]


@pytest.mark.slow
def test_the_kernel_on_a_cpu() -> None:
    if not (sources.folder() / "packages-sglang" / "triton").is_dir():
        pytest.skip(f"needs Triton under {sources.folder()}: {sources.COMMAND}")
    sources.run_with("Triton", ["packages-sglang"], "tests/engines/vllm_slots_cases.py")
