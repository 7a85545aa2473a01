"""Times on more GPUs from those on one and two: exact where the measured parts are."""

from typing import Any

import pytest

from examples.whole_models import scaling
from examples.whole_models.scaling import Attention, Link, Prompt, Reading, Step, Wires

LINK = Link(12.0, 200e3)
WIRES = Wires(LINK, Link(30.0, 50e3))


def attention_us(at: Attention, floor: float) -> float:
    """A kernel that takes 9 us and 1.1 times the floor, and an exchange."""
    return 9 + 1.1 * floor + (LINK.exchange((at.gpus - 1) * at.partial_bytes) if at.gpus > 1 else 0)


def test_attention_on_four_gpus() -> None:
    rows: list[dict[str, Any]] = []
    for heads, texts, gpus in ((h, t, n) for h in (16, 128) for t in (1, 4) for n in (1, 2)):
        at, floor = Attention(texts, heads, 131072, 0, gpus), 40.0 * texts / gpus
        rows.append({"b": texts, "heads": heads, "keys": 131072, "values": 0, "context_parallel": gpus})
        rows[-1] |= {"us": attention_us(at, floor), "floor_us": floor}
    times = scaling.attention_times(rows)
    link = scaling.attention_link(times)
    assert (link.latency, link.rate) == pytest.approx((LINK.latency, LINK.rate))
    four = Attention(4, 128, 131072, 0, 4)
    assert four.partial_bytes == 4 * 128 * (1024 + 4) and four._replace(values=128).partial_bytes == 4 * 128 * 260
    assert scaling.attention(times, link, four) == pytest.approx(attention_us(four, 40.0))


def test_steps_of_split_experts() -> None:
    def us(step: Step) -> float:
        return 300 + 1.2 * step.floor + step.exchanges(WIRES)

    one, two = Step(12000, 64, 7168, 5, 1), Step(6500, 32, 7168, 5, 2)
    reading = Reading.of([(step, us(step)) for step in (one, two)], WIRES)
    four = Step(3700, 16, 7168, 5, 4)
    assert reading.step(four, WIRES) == pytest.approx(us(four))
    # Eleven exchanges of the others' activations, two of a few bytes.
    assert four.exchanges(WIRES) == pytest.approx(13 * 12 + 11 * 3 * 16 * 7168 * 2 / 200e3)
    assert one.exchanges(WIRES) == 0


def test_exchanges_with_other_hosts() -> None:
    """Seven GPUs of the same host by NVLink, the others by the network."""
    assert WIRES.exchange(8, 1e6) == pytest.approx(12 + 7e6 / 200e3)
    assert WIRES.exchange(16, 1e6) == pytest.approx(30 + 8e6 / 50e3 + 7e6 / 200e3)


def test_prompts() -> None:
    def us(gpus: int) -> float:
        return 4e6 / gpus + 0.5e6 + exchanges(gpus)

    def exchanges(gpus: int) -> float:
        sizes = {"steps": 32, "layers": 27, "tokens": 4096, "heads": 16, "values": 128, "width": 2048}
        return scaling.prompt_exchanges(LINK, gpus, **sizes)

    assert exchanges(1) == 0 < exchanges(2) < exchanges(4)
    prompt = Prompt.of(us(1), us(2), exchanges(2))
    assert (prompt.shared, prompt.own) == pytest.approx((4e6, 0.5e6))
    assert prompt.on(4, exchanges(4)) == pytest.approx(us(4))
