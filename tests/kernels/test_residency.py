"""A grid may have more blocks than a GPU runs at a time: those of a program that was planned for another GPU, or beside
other work. On the machine of tests/emulator/ptx a block starts when an earlier one has ended, and every kernel ends."""

from __future__ import annotations

import pytest
import torch

from tests.emulator.ptx import launcher, machine
from tests.emulator.ptx.machine import Order
from tests.gpu.small_grid import CALLS, Call, apart, int32
from tests.kernels.on_machine import MASKED_KEYS, forget
from tsmla_bridge.runtime import devices

pytestmark = pytest.mark.skipif(machine.COMPILER is None, reason="needs g++, which builds the machine")

COUNTS = ((9, 1), (9, 2), (1, 1))
"""Of multiprocessors that a call is planned for, and of blocks, or clusters, that run at a time."""

DETERMINISTIC = "torch.bfloat16 [130, 1] over [131, 64] causal deterministic"
"""Heads have two tiles of keys for the first request, whose second adds to dq behind the first."""

OTHERS = {
    "mla_decode": "",
    "mla_prefill": "torch.bfloat16 [130, 1]",
    "mla_prefill_selection": "torch.bfloat16 [130, 1]",
    "selection_bits": "",
    "mla_prefill_gradient": "torch.float16 [130, 1] over [131, 64]",
    "merge_attention_states": "",
    "kv_cache": "gather",
    "select_topk": "",
    "indexer_topk": "",
    "packed_caches": "",
    "compress_write_kv_cache": "",
    "sparse_mla": "",
}
"""The beginning of the name of a call of each operation."""


def call_of(op: str, name: str) -> Call:
    return next(call for call in CALLS[op](torch.Generator().manual_seed(0)) if call.name.startswith(name))


def results(call: Call, planned: int, resident: int, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, ...]:
    """The results of a call that is planned for so many multiprocessors, where `resident` blocks run at a time."""
    forget()
    monkeypatch.setattr(devices, "num_sms", lambda index: planned)
    monkeypatch.setattr(launcher.EmulatedLauncher, "order", Order(planned + resident, resident))
    return call.on(torch.device("cpu"))


@pytest.mark.parametrize(
    "op",
    [
        "mla_prefill_gradient",
        *(pytest.param(f"mla_prefill_{x}_gradient", marks=pytest.mark.slow) for x in ("kv", "wide")),
    ],
)
def test_a_deterministic_gradient_waits_only_for_blocks_that_run(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same bits come out, however many blocks there are and run."""
    call = call_of(op, DETERMINISTIC)
    forget()
    want = call.on(torch.device("cpu"))
    launcher.install(monkeypatch)
    found = [results(call, *counts, monkeypatch) for counts in ((9, 9), (3, 2), (9, 1), (1, 1))]
    assert max(apart(a, b) for a, b in zip(found[0], want, strict=True)) < 0.01
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(others, found[0], strict=True))
    forget()


def test_a_deterministic_gradient_of_wrong_offsets_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third request begins within the first one: both add to the same rows, whose turns they count together."""
    call = call_of("mla_prefill_gradient", DETERMINISTIC)
    sizes = {"q": (320, 192), "k": (256, 192), "v": (256, 128), "dout": (320, 128)}
    tensors = {name: torch.ones(rows, 1, width, dtype=torch.bfloat16) for name, (rows, width) in sizes.items()}
    offsets = {"cu_seqlens_q": int32([0, 320, 64, 320]), "cu_seqlens_kv": int32([0, 256, 0, 256])}
    tensors |= {"dlse": torch.zeros(320, 1), **offsets}
    launcher.install(monkeypatch)
    monkeypatch.setattr(devices, "num_sms", lambda index: 4)
    found = call._replace(tensors=tensors, options=call.options | {"max_q_len": 320, "max_kv_len": 256})
    assert [len(x) for x in found.on(torch.device("cpu"))] == [320, 256, 256]
    forget()


@pytest.mark.slow
@pytest.mark.parametrize("op", OTHERS)
def test_no_kernel_needs_all_of_its_blocks_at_once(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(op, OTHERS[op])
    forget()
    want = call.on(torch.device("cpu"))
    launcher.install(monkeypatch)
    for counts in COUNTS:
        got = results(call, *counts, monkeypatch)
        assert max(apart(a, b) for a, b in zip(got, want, strict=True)) < 0.04
    assert [hazard for hazard in launcher.EmulatedLauncher.hazards if not MASKED_KEYS.match(hazard)] == []
    forget()
