"""How attention, steps and prompts grow with the GPUs: times on N of them from parts that were measured on one and two.

docs/guides/scaling.md has the formulae in words. Times are microseconds, N counts GPUs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import benchmarks.table as tb

LATENT, HOST = 512, 8
"""Columns of a head's result in the absorbed form; GPUs of a host, which NVLink connects."""


@dataclass(frozen=True)
class Link:
    """The cost of an exchange between GPUs: a time for each exchange, and one for each byte that a GPU receives.

    Attributes:
      latency: microseconds of an exchange of no bytes.
      rate: bytes a microsecond.
    """

    latency: float
    rate: float

    def exchange(self, received: float) -> float:
        """Microseconds of one exchange in which a GPU receives so many bytes."""
        return self.latency + received / self.rate


@dataclass(frozen=True)
class Wires:
    """The links between the GPUs of one host, and between hosts."""

    near: Link
    far: Link

    def exchange(self, gpus: int, each: float) -> float:
        """Microseconds of one exchange in which a GPU receives `each` bytes from each of the others of `gpus`."""
        if gpus <= HOST:
            return self.near.exchange((gpus - 1) * each)
        return self.far.exchange((gpus - HOST) * each) + (HOST - 1) * each / self.near.rate


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The least-squares line through points (x, y): y at x = 0, and the slope."""
    line = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return line.intercept, line.slope


# ---- attention over keys that GPUs share


class Attention(NamedTuple):
    """A row of `context_parallel.json`: texts, heads, keys of a text, columns that the heads' results are projected to
    (0 for no projection), and the GPUs that share the keys."""

    texts: int
    heads: int
    keys: int
    values: int
    gpus: int

    @property
    def partial_bytes(self) -> int:
        """The bytes of a GPU's partial result: out in 16 bits, and lse."""
        return self.texts * self.heads * (2 * (self.values or LATENT) + 4)


Times = dict[Attention, tuple[float, float]]
"""Microseconds and floor of each row."""


def attention_times(rows: Iterable[tb.Row]) -> Times:
    """The rows of `context_parallel.json`."""
    return {
        Attention(row["b"], row["heads"], row["keys"], row.get("values", 0), row["context_parallel"]): (
            row["us"],
            row["floor_us"],
        )
        for row in rows
    }


def per_floor(times: Times, heads: int, values: int) -> float:
    """The time of a microsecond of floor on one GPU: the slope between few texts and many, of the greatest length."""
    ones = [(at, found) for at, found in times.items() if (at.heads, at.values, at.gpus) == (heads, values, 1)]
    longest = max(at.keys for at, _ in ones)
    return fit([(floor, us) for at, (us, floor) in ones if at.keys == longest])[1]


def of_part(times: Times, at: Attention) -> float:
    """Microseconds of the attention to the keys of one of `at.gpus` GPUs: the time on a single GPU, less that of the
    other GPUs' keys."""
    us, floor = times[at._replace(gpus=1)]
    return us - per_floor(times, at.heads, at.values) * floor * (1 - 1 / at.gpus)


def attention_link(times: Times) -> Link:
    """The cost of the exchange and the merge, beside the attention itself, on two GPUs, by the bytes received."""
    beside = [(at.partial_bytes, times[at][0] - of_part(times, at)) for at in times if at.gpus == 2]
    latency, slope = fit(beside)
    return Link(latency, 1 / slope)


def attention(times: Times, link: Link, at: Attention) -> float:
    """Microseconds of the attention to keys that `at.gpus` GPUs share."""
    return of_part(times, at) + link.exchange((at.gpus - 1) * at.partial_bytes)


# ---- steps with experts on several GPUs


class Step(NamedTuple):
    """A decode step of split experts.

    Attributes:
      floor: microseconds that a GPU takes for the bytes that it must read.
      texts: the texts of a GPU.
      width: columns of the activations.
      layers: how many layers have experts.
      gpus: how many GPUs share the experts.
    """

    floor: float
    texts: float
    width: int
    layers: int
    gpus: int

    def exchanges(self, wires: Wires) -> float:
        """Microseconds of a step's exchanges. In each layer the activations of all texts go to each GPU, and the sums
        of the experts back: two exchanges of 16 bits. One more is for the output projection, and two have few bytes."""
        if self.gpus == 1:
            return 0.0
        large = wires.exchange(self.gpus, self.texts * self.width * 2)
        return (2 * self.layers + 1) * large + 2 * wires.exchange(self.gpus, 0)


@dataclass(frozen=True)
class Reading:
    """The time of a step beside its exchanges: `fixed` microseconds, and `factor` for a microsecond of floor."""

    fixed: float
    factor: float

    @classmethod
    def of(cls, measured: Sequence[tuple[Step, float]], wires: Wires) -> Reading:
        """Fit a reading to steps and their times: on one GPU and on two, with the same texts."""
        return cls(*fit([(step.floor, us - step.exchanges(wires)) for step, us in measured]))

    def step(self, step: Step, wires: Wires) -> float:
        """Microseconds of a step."""
        return self.fixed + self.factor * step.floor + step.exchanges(wires)


# ---- prompts whose keys GPUs share


@dataclass(frozen=True)
class Prompt:
    """A prompt's time: a part that GPUs share, one that each of them has, and exchanges.

    Attributes:
      shared, own: microseconds on one GPU.
    """

    shared: float
    own: float

    @classmethod
    def of(cls, one: float, two: float, exchanges: float) -> Prompt:
        """The prompt that takes these times on one GPU and on two, where the exchanges of two take `exchanges`."""
        shared = 2 * (one - two + exchanges)
        return cls(shared, one - shared)

    def on(self, gpus: int, exchanges: float) -> float:
        """Microseconds on so many GPUs, whose exchanges take that long."""
        return self.shared / gpus + self.own + exchanges


def prompt_exchanges(
    link: Link, gpus: int, *, steps: int, layers: int, tokens: int, heads: int, values: int, width: int
) -> float:
    """Microseconds of the exchanges of a prompt in steps of `tokens` tokens. In each layer the partial results of the
    attention go to the GPU that merges a token's, and its projected rows to all; so do the experts' sums."""
    rows = tokens * (gpus - 1) / gpus
    received = rows * (heads * (2 * values + 4) + 3 * 2 * width)
    return steps * layers * (4 * link.latency + received / link.rate) if gpus > 1 else 0.0
