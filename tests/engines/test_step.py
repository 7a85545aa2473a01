"""What layers share in a step, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tsmla_bridge
from tsmla_bridge.engines.vllm import step
from tsmla_bridge.engines.vllm.step import LayerScales, OncePerStep
from tsmla_bridge.runtime.scales import Premultiplied

CPU = torch.device("cpu")
SCALE = 192**-0.5


def layers(**quantised: bool) -> dict[str, Any]:
    return {
        name: SimpleNamespace(
            _q_scale=torch.tensor(1.0), _k_scale=torch.tensor([1.0]),
            impl=SimpleNamespace(scale=SCALE, supports_quant_query_input=is_so),
        )
        for name, is_so in quantised.items()
    }  # fmt: skip


def test_a_value_is_made_once_in_a_step_and_in_each_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    shared, capture = OncePerStep(), 7
    monkeypatch.setattr(step, "_capture_on", lambda device: capture)

    def take(key: str) -> int:
        return shared.take(key, CPU, lambda: (made.append(key), len(made))[1])

    assert [take("a"), take("a"), take("b"), take("a")] == [1, 1, 2, 1]
    capture = 8
    assert [take("a"), take("a")] == [3, 3]
    capture = None
    assert take("a") == 4


def test_one_product_serves_the_layers_of_a_step() -> None:
    known = layers(first=True, second=False)
    scales = LayerScales(known, CPU, lambda softmax, q, k: (softmax * q * k, k))
    before = OncePerStep()
    rows = {name: scales.of(name, before).factors for name in known}
    for place, layer in enumerate(known.values(), 2):
        layer._q_scale.fill_(10.0)
        layer._k_scale.data.copy_(torch.tensor([float(place)]))
    assert torch.equal(scales.of("second", before).factors, rows["second"])  # made in this step already
    for name, factors in (("first", [SCALE * 20, 2.0]), ("second", [SCALE * 3, 3.0])):
        row = scales.of(name, after := OncePerStep()).factors
        torch.testing.assert_close(row, torch.tensor(factors))
        assert row.data_ptr() == rows[name].data_ptr() and scales.of(name, after).factors.data_ptr() == row.data_ptr()


def test_memory_that_was_taken_in_between_is_written_anew() -> None:
    """As a sleeping engine's."""
    known = layers(first=True, second=True)
    known["second"].impl.scale = 0.5
    scales = LayerScales(known, CPU, lambda softmax, q, k: (softmax * q * k, k, torch.ones_like(k)))
    for value in vars(scales).values():
        if isinstance(value, torch.Tensor):
            value.fill_(torch.nan)
    for name, scale in (("first", SCALE), ("second", 0.5)):
        torch.testing.assert_close(scales.of(name, OncePerStep()).factors, torch.tensor([scale, 1.0, 1.0]))


def test_they_may_be_written_in_either_of_torchs_modes() -> None:
    with torch.inference_mode():
        scales = LayerScales(layers(one=True), CPU, lambda softmax, q, k: (softmax, k, torch.ones_like(k)))
        scales.of("one", OncePerStep())
    assert len(scales.of("one", OncePerStep()).factors) == 3


def test_without_such_layers_there_are_none() -> None:
    LayerScales({}, CPU, lambda softmax, q, k: (softmax * q * k, k))


def test_operations_take_products_that_were_made() -> None:
    q, cache = torch.randn(2, 1, 4, 576), torch.randn(3, 64, 576)
    tables, lens = torch.tensor([[0], [2]], dtype=torch.int32), torch.tensor([64, 30], dtype=torch.int32)
    pair: Any = Premultiplied(torch.tensor([SCALE * 0.5 * 0.25, 0.25]))
    want = tsmla_bridge.mla_decode(q, cache, tables, lens, softmax_scale=SCALE, q_scale=0.5, kv_scale=0.25)
    for others in ({}, {"q_scale": torch.tensor(9.0), "kv_scale": torch.tensor(9.0)}):  # not multiplied again
        got = tsmla_bridge.mla_decode(q, cache, tables, lens, softmax_scale=pair, **others)
        torch.testing.assert_close(got, want)
    indices = torch.arange(8, dtype=torch.int32).view(2, 4)
    factors: Any = Premultiplied(torch.tensor([SCALE * 0.25, 0.25, 1.0]))
    want = tsmla_bridge.sparse_mla(q[:, 0], cache, indices, softmax_scale=SCALE * 0.25, kv_scale=0.25)
    torch.testing.assert_close(tsmla_bridge.sparse_mla(q[:, 0], cache, indices, softmax_scale=factors), want)
