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
      text_id: the id of the text.
      tokens: the ids of the new tokens.
      finished: whether the last of them ends the text.
    """

    text_id: int
    tokens: list[int]
    finished: bool


class ContextPasses(NamedTuple):
    """How a step passes over cached tokens: the `context_chunk` and `context_passes` of `StepOptions`."""

    chunk: int
    number: int


class StepKind(NamedTuple):
    """A step's phase, its rows (texts of a replica, with padding), how it passes over the context, and the most cached
    tokens of a text. passes and most_cached are None if they don't change the step.
    """

    phase: Phase
    rows: int
    passes: ContextPasses | None = None
    most_cached: int | None = None


class Started(NamedTuple):
    """A step that was started: the name of the figure that its seconds are added to; its tokens on the device, [N] of a
    prefill step or [N, K + 1] of a decode step with up to K drafts a text; and the texts that get tokens, by their rows
    in these arrays.
    """

    seconds: str
    tokens: jax.Array
    texts: dict[int, Text]


@dataclass
class Session:
    """The caches, and the texts that are not finished.

    found: tokens that no call of `step` has returned yet.
    broken: the exception that interrupted a change. The host and the device may then differ, so no further step is run.
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
        """A context around changes that must be made as a whole: an exception in it (Ctrl-C, a device out of memory, a
        failing `on_compile`) breaks the session.
        """
        try:
            yield
        except BaseException as error:
            self.broken = f"{type(error).__name__}: {error}".rstrip(": ")
            raise
