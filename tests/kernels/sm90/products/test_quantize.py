"""quantize_blocks of more blocks than its CTAs take at once, on the machine of tests/emulator/ptx."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tsmla_bridge
from tests.emulator.ptx import launcher, machine
from tests.kernels.on_machine import forget
from tsmla_bridge.ops import products
from tsmla_kernels.sm90.products.config import QuantizeConfig

pytestmark = pytest.mark.skipif(machine.COMPILER is None, reason="needs g++, which builds the machine")


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Before a test, and behind it: what the emulated machine was given serves no other test."""
    forget()
    yield
    forget()


@pytest.mark.parametrize("power_of_two", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [1, 3, 5, 7])
def test_every_block_is_quantised(rows: int, power_of_two: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """11 to 77 blocks by one CTA, which takes 32 at a time. The last block of a row is a part."""
    generator = torch.Generator().manual_seed(rows)
    x = (torch.randn(rows, 1384, generator=generator) * torch.logspace(-9, 4, rows)[:, None]).bfloat16()
    x[0, 200:300] = 0
    want, scales = tsmla_bridge.quantize_blocks(x, power_of_two=power_of_two)
    launcher.install(monkeypatch)
    config = QuantizeConfig("bfloat16", power_of_two, 1)
    monkeypatch.setattr(products, "quantize_config", lambda spec, num_sms: config)
    values, factors = tsmla_bridge.quantize_blocks(x, power_of_two=power_of_two)
    assert torch.equal(factors, scales)
    assert torch.equal(values.view(torch.uint8), want.view(torch.uint8))
    assert launcher.EmulatedLauncher.hazards == []
