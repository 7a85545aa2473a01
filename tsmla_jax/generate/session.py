"""The state of an engine's unfinished texts: the caches, the steps that were started, and the tokens that they gave."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from tsmla_jax.generate.model import Phase
from tsmla_jax.generate.plan import Plan
from tsmla_jax.generate.programs import Programs
from tsmla_jax.generate.replica import Replica, Text
from tsmla_jax.generate.step import Constants, State


class Tokens(NamedTuple):
    """New tokens of one text.

    Attributes:
      text_id: its number.
      tokens: their ids.
      finished: whether the last of them ends the text.
    """

    text_id: int
    tokens: list[int]
    finished: bool


class ContextPasses(NamedTuple):
    """As `context_chunk` and `context_passes` of `StepOptions`."""

    chunk: int
    number: int


class StepKind(NamedTuple):
    """A step's phase, its rows (texts of a replica, with padding), how it passes over the context, and the most cached
    tokens of a text; None where the step is the same whatever their number."""

    phase: Phase
    rows: int
    passes: ContextPasses | None = None
    most_cached: int | None = None


class Started(NamedTuple):
    """A step that runs: the figure its seconds count for, its tokens [N, K] on the device, and the text of each row."""

    seconds: str
    tokens: jax.Array
    texts: dict[int, Text]


@dataclass
class Session:
    """The caches, and the texts on their way through them.

    found: tokens that no call of `step` has returned yet.
    broken: the exception that broke a change off, so that the host and the device may differ; nothing goes on then.
    """

    plan: Plan
    programs: Programs
    replicas: list[Replica]
    caches: list[Any]
    state: State
    constants: Constants
    texts: dict[int, Text] = field(default_factory=dict)
    started: deque[Started] = field(default_factory=deque)
    found: list[Tokens] = field(default_factory=list)
    broken: str | None = None

    @contextlib.contextmanager
    def changes(self) -> Iterator[None]:
        """Around what must be done as a whole: Ctrl-C, a device without memory or a failing `on_compile` break it."""
        try:
            yield
        except BaseException as error:
            self.broken = f"{type(error).__name__}: {error}".rstrip(": ")
            raise
