"""The Triton kernel that makes one selection of two, interpreted. Run by test_sglang.py in a process of its own."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import pytest
import torch

from tsmla_bridge.engines.flash_mla import joining
from tsmla_bridge.engines.flash_mla.joining import Columns


@pytest.mark.parametrize("lengths", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sizes", [(3, 1, 128, 512), (2, 3, 6, 5), (4, 2, 11, 300), (1, 1, 8, 8)])
def test_the_kernel_writes_what_torch_writes(sizes: tuple[int, ...], lengths: tuple[bool, bool]) -> None:
    requests, per_request, window, count = sizes
    tokens = requests * per_request
    slots = [torch.randint(0, 1000, (tokens, n + 3), dtype=torch.int32)[:, :n] for n in (window, count)]
    counts = [
        torch.randint(0, n + 3, (requests,), dtype=torch.int32) if has else None
        for n, has in zip((window, count), lengths, strict=True)
    ]
    near, far = (Columns(*each) for each in zip(slots, counts, strict=True))
    want = joining.joined(near, far, 4)
    out = torch.full_like(want.slots, 7)
    out_lengths = None if want.lengths is None else torch.full_like(want.lengths, 7)
    kernel = joining._kernel()
    assert kernel is not None
    kernel(near, far, out, out_lengths)
    assert torch.equal(out, want.slots)
    assert out_lengths is None or torch.equal(out_lengths, want.lengths)
