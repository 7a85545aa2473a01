"""Pages, slots, lengths and offsets that are not legal: the compiled Hopper kernels give rows without meaning, but
touch nothing outside of the arrays. The machine of tests/emulator/ptx raises where a kernel does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tsmla_bridge
from tests.emulator.ptx import launcher, machine
from tests.gpu.small_grid import CALLS, PAGE, Call
from tests.kernels.on_machine import forget

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(machine.COMPILER is None, reason="needs g++, which builds the machine"),
]

LEAST, GREATEST = -(2**31), 2**31 - 1
CALLED = {
    "mla_decode": (
        "torch.bfloat16 torch.bfloat16 H 16 S 1 [300, 0, 65]",
        "torch.bfloat16 torch.float8_e4m3fn H 16 S 4 [130, 2]",
        "torch.bfloat16 visible_lens",
        "short requests ragged",
    ),
    "mla_prefill": (
        "torch.bfloat16 [70, 0, 5] over [70, 30, 200] causal",
        "torch.float8_e4m3fn [130, 1] over [131, 64]",
    ),
    "mla_prefill_gradient": ("torch.bfloat16 [3, 1] over [0, 2] causal deterministic",),
    "mla_prefill_selection": (
        "torch.bfloat16 [70, 0, 5] over [70, 30, 200]",
        "torch.float8_e4m3fn [130, 1] over [300, 64] causal",
    ),
    "mla_prefill_selection_gradient": ("torch.bfloat16 [70, 0, 5] over [70, 30, 200] causal",),
    "selection_bits": ("3001 lengths starts",),
    "kv_cache": ("write torch.bfloat16", "write torch.float8_e4m3fn int64 slots", "gather torch.bfloat16"),
    "select_topk": ("3001 value from their starts", "77 slots"),
    "indexer_logits": ("flat", "ragged"),
    "indexer_topk": ("ragged slots",),
    "packed_caches": ("rows 33 torch.bfloat16", "keys 33 torch.bfloat16 rotated"),
    "compress_write_kv_cache": ("v4 4 overlapping", "indexer 128", "plain 128 overlapping"),
    "sparse_mla": (
        "{'layout': 'v32', 'heads': 16, 'selected': 300, 'tokens': 5}",
        "{'layout': 'v4', 'heads': 16, 'selected': 12, 'gap': 1}",
        "{'layout': 'plain', 'heads': 16, 'selected': 68, 'window': 4, 'width': 512, 'sinks': True}",
    ),
}
"""Calls of small_grid.py, by operation; those of indexer_logits are indexer_topk's."""


def called() -> list[Any]:
    found = []
    for op, names in CALLED.items():
        calls = CALLS["indexer_topk" if op == "indexer_logits" else op](torch.Generator().manual_seed(0))
        for call in calls:
            if call.name in names:
                if op == "indexer_logits":
                    call = call._replace(function=tsmla_bridge.indexer_logits, options={})
                found.append(pytest.param(call, id=f"{op} {call.name}"))
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Drawing the inputs takes seconds: only where slow tests may be wanted."""
    metafunc.parametrize("call", [] if metafunc.config.option.markexpr == "not slow" else called())


def spoiled(array: torch.Tensor, values: tuple[int, ...]) -> torch.Tensor:
    """The array with these values in every second place."""
    spoiled = array.clone()
    places = spoiled.view(-1)[::2]
    places.copy_(torch.tensor(values).repeat(len(places))[: len(places)])
    return spoiled


def unsound(call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    """The call's arrays of integers, one after the other, with what is not legal in them."""
    cache = next((call.tensors[name] for name in ("kv_cache", "k_cache", "cache") if name in call.tensors), None)
    pages = 900 if cache is None else len(cache)
    for name, array in call.tensors.items():
        if array.dtype not in (torch.int32, torch.int64):
            continue
        if name.startswith("cu_seqlens"):
            last = torch.arange(len(array)) == len(array) - 1
            yield name, array + 1000 * last.to(array.dtype)
            yield from ((name, array + shift) for shift in (1000, -50))
            yield name, array.flip(0)
        elif "lens" in name or name in ("lengths", "starts", "row_starts"):
            yield name, spoiled(array, (5000, -5))
            yield name, torch.full_like(array, 1 << 20)
        else:
            end = pages if "table" in name else pages * PAGE
            yield name, spoiled(array, (-1, end))
        yield name, spoiled(array, (LEAST, GREATEST, -1))
        yield name, spoiled(array.flip(0), (GREATEST, LEAST)).flip(0)


def test_unsound_integers_reach_nothing_outside(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    gpu = launcher.install(monkeypatch)
    try:
        for name, array in unsound(call):
            before = len(gpu.launches)
            call._replace(tensors=call.tensors | {name: array}).on(torch.device("cpu"))
            assert len(gpu.launches) > before
    finally:
        forget()
