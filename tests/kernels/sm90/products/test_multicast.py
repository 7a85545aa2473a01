"""Products by clusters of two CTAs that have an operand in common by multicast, run on the machine of
tests/emulator/ptx. Copies arrive in several random orders, and as few CTAs as a cluster has are resident."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

import tsmla_bridge
from tests.emulator.ptx import launcher, machine
from tests.emulator.ptx.machine import Order
from tests.kernels.object_checks import all_but_slow
from tests.kernels.on_machine import forget
from tsmla_bridge.ops import products
from tsmla_kernels.sm90.products.config import ProductConfig

pytestmark = pytest.mark.skipif(machine.COMPILER is None, reason="needs g++, which builds the machine")

PAIR = ProductConfig(tokens_first=True, num_sms=4, multicast=True)
THREE = {"tokens": 192, "groups": 3, "waves": 1}
DENSE = {"128 x 256": PAIR, "128 x 128": replace(PAIR, waves=1), "192 x 128": replace(PAIR, **THREE)}
LEVEL = ProductConfig(grouped=True, x_dtype="bfloat16", tokens=136, waves=1, tail=104, level=True, num_sms=4)
COUNTS = (0, 356, 1, 0, 130, 64)
GROUPED = {
    "of 16 bits": replace(PAIR, grouped=True, x_dtype="bfloat16", plain=True, tail=64),
    "of 16 bits, gated": replace(PAIR, grouped=True, x_dtype="bfloat16", plain=True, tail=64, gated=True),
    "of e4m3 with activations of bf16, level": replace(LEVEL, gated=True),
    "gated, to e4m3": replace(PAIR, grouped=True, gated=True, out_dtype="float8_e4m3fn"),
    "of e4m3, with activations of bf16": replace(PAIR, grouped=True, tokens_first=False, x_dtype="bfloat16"),
}


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """The machine keeps nothing from before a test, and nothing behind it."""
    forget()
    yield
    forget()


def run_on_machine(monkeypatch: pytest.MonkeyPatch, config: ProductConfig, call: Any) -> list[Any]:
    """The results of `call` by this configuration, in two orders; asserts that the machine saw no hazard."""
    launcher.install(monkeypatch)
    monkeypatch.setattr(products, "product_config", lambda *_: config)
    results = []
    for order in (Order(0, 4), Order(1, 2)):
        monkeypatch.setattr(launcher.EmulatedLauncher, "order", order)
        results.append(call())
    assert launcher.EmulatedLauncher.hazards == []
    return results


def restored(result: Any) -> torch.Tensor:
    if not isinstance(result, tuple):
        return result.float()
    values, scales = result
    return values.float() * scales.repeat_interleave(128, -1)[:, : values.shape[1]]


def check(results: list[Any], want: Any, limit: float) -> None:
    for result in map(restored, results):
        assert float((result - restored(want)).norm() / restored(want).norm()) < limit


@pytest.mark.parametrize("name", all_but_slow(DENSE, ("128 x 256",)))
def test_dense_products_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An odd number of tiles of rows and of columns, none of them full at the end, over four CTAs."""
    generator = torch.Generator().manual_seed(0)
    x, x_scales = tsmla_bridge.quantize_blocks(torch.randn(700, 1040, generator=generator))
    weight, _ = tsmla_bridge.quantize_blocks(torch.randn(520, 1040, generator=generator))
    given = x, weight, x_scales, torch.rand(5, 9, generator=generator) * 0.1 + 0.01
    want = tsmla_bridge.block_scaled_matmul(*given)
    check(run_on_machine(monkeypatch, DENSE[name], lambda: tsmla_bridge.block_scaled_matmul(*given)), want, 3e-3)


@pytest.mark.parametrize("name", all_but_slow(GROUPED, ("of 16 bits, gated",)))
def test_products_of_groups_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of no row, of less than a tile, and of an odd number of tiles; three blocks of columns; rows behind the
    last group."""
    config, generator = GROUPED[name], torch.Generator().manual_seed(0)
    x = torch.randn(sum(COUNTS) + 7, 400, generator=generator)
    weight = torch.randn(len(COUNTS), 768, 400, generator=generator)
    cu_rows = torch.tensor([0, *accumulate(COUNTS)], dtype=torch.int32)
    if config.plain:
        given: Any = x.bfloat16(), (weight * 0.05).bfloat16(), None, None
    else:
        values, scales = tsmla_bridge.quantize_blocks(x)
        narrow, _ = tsmla_bridge.quantize_blocks(weight.view(-1, 400))
        given = values, narrow.view(weight.shape), scales, torch.rand(len(COUNTS), 6, 4, generator=generator) * 0.01
        given = (x.bfloat16(), given[1], None, given[3]) if config.wide else given
    form = {"gated": config.gated, "out_dtype": getattr(torch, config.out_dtype)}

    def call() -> Any:
        return tsmla_bridge.grouped_block_scaled_matmul(*given, cu_rows, **form)

    want = call()
    check(run_on_machine(monkeypatch, config, call), want, 0.04 if config.quantized else 4e-3)
