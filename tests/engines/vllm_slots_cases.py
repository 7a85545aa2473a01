"""The Triton kernel of the sparse backend's slots, interpreted. Run by test_slots.py in a process of its own."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import pytest
import torch

from tests.engines import positions
from tsmla_bridge.engines.vllm import slots


@pytest.mark.parametrize("heads", [None, 1, 16, 20], ids=str)
@pytest.mark.parametrize("columns", [2048, 130, 1])
def test_the_kernel_writes_what_torch_writes(columns: int, heads: int | None) -> None:
    given = positions.selected(columns, heads)
    want = slots.selected(*given)
    out = slots.Selected(*(None if each is None else torch.full_like(each, 7) for each in want))
    kernel = slots._kernel()
    assert kernel is not None
    kernel(*given, out)
    assert torch.equal(out.slots, want.slots) and torch.equal(out.counts, want.counts)
    assert (out.joined is None) == (heads is None)
    assert out.joined is None or torch.equal(out.joined, want.joined)
