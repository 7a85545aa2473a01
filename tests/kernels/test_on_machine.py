"""The compiled Hopper kernels run on the machine of tests/emulator/ptx: the bridge's calls, their host code and PTX,
against the reference on the CPU. Warps run and copies arrive in several random orders."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.emulator.ptx import launcher, machine
from tests.emulator.ptx.machine import Order
from tests.gpu.small_grid import CALLS, Call, apart
from tsmla_bridge.ops import plans
from tsmla_bridge.runtime import loaded_kernels, scales

pytestmark = pytest.mark.skipif(machine.COMPILER is None, reason="needs g++, which builds the machine")

ORDERS = tuple(Order(seed, resident) for seed, resident in enumerate((4, 1, 2)))
TOLERANCE = 0.04
"""Of tests/gpu/small_grid.py, for fp8; other dtypes are far below."""

FAST = {
    "kv_cache": ("write torch.bfloat16", "gather torch.float8_e4m3fn"),
    "merge_attention_states": ("torch.bfloat16",),
    "packed_caches": ("rows 1 torch.bfloat16 rotated", "keys 1 torch.bfloat16", "queries 1 torch.bfloat16"),
    "sparse_mla": ("{'layout': 'v32', 'heads': 16, 'selected': 200, 'tokens': 5}",),
}
"""Calls of every run of the tests, by the beginning of their names: compiling takes a second, or ten for attention."""


MASKED_KEYS = re.compile(r"mla_prefill_backward: (no barrier orders a WGMMA|WGMMA reads) .* a store ")
"""The gradient's scores of rows behind the last key may see them before or after the other warpgroup's zeros: they are
masked (sm90/prefill/backward_products.py, `zero_keys`)."""


def calls() -> list[Any]:
    found = []
    for op, make in CALLS.items():
        for call in make(torch.Generator().manual_seed(0)):
            fast = call.name.startswith(FAST.get(op, ())) and "invariant" not in call.name
            found.append(pytest.param(call, id=f"{op} {call.name}", marks=() if fast else pytest.mark.slow))
    return found


def forget() -> None:
    """No plan, kernel or scale of an earlier call."""
    for kept in (plans._plans, plans.latest_plans, loaded_kernels._loaded, scales._of_stream, scales._of_capture):
        kept.clear()


@pytest.mark.parametrize("call", calls())
def test_compiled_kernels_agree_with_the_reference(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    forget()
    want = call.on(cpu)
    forget()
    gpu = launcher.install(monkeypatch)
    for order in ORDERS:
        monkeypatch.setattr(launcher.EmulatedLauncher, "order", order)
        got = call.on(cpu)
        assert max(apart(a, b) for a, b in zip(got, want, strict=True)) < TOLERANCE
    assert len(gpu.launches) >= len(ORDERS)
    assert [hazard for hazard in launcher.EmulatedLauncher.hazards if not MASKED_KEYS.match(hazard)] == []
