"""The texts of one replica: its rows and pages, and the prompts on their way into its cache. Host-side bookkeeping."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tsmla_jax.generate.drafting import NgramDrafter
from tsmla_jax.generate.pages import PageAllocator, PageTable
from tsmla_jax.generate.step import Prompts


@dataclass
class Text:
    """One prompt and the tokens generated after it.

    replica, row: the replica's index, and the text's row in that replica.
    cached: how many tokens of the prompt the steps started so far bring into the cache.
    scheduled: how many tokens the steps started so far generate at least, if none of these tokens ends the text.
    """

    text_id: int
    prompt: list[int]
    limit: int
    table: PageTable
    replica: int
    row: int
    drafter: NgramDrafter | None
    generated: list[int] = field(default_factory=list)
    cached: int = 0
    scheduled: int = 0
    done: bool = False


Part = tuple[Text, list[int]]
"""A text, and the tokens of its prompt that a step brings into the cache."""


class Replica:
    """The texts of one cache, which is on one device or on the devices that share the keys of these texts."""

    def __init__(self, index: int, rows: int, num_pages: int, span: int) -> None:
        """
        Args:
          index: the replica's index among all replicas.
          rows: how many unfinished texts it can have.
          num_pages: how many entries of block tables its cache has room for.
          span: how many tokens an entry stands for.
        """
        self.index = index
        self.allocator = PageAllocator(num_pages)
        self.arrived: deque[Text] = deque()
        self._free_rows = list(range(rows))
        self._span = span
        self._rows = rows

    @property
    def num_texts(self) -> int:
        """How many unfinished texts there are."""
        return self._rows - len(self._free_rows)

    def has_room(self, need: int) -> bool:
        """Whether a text that needs `need` entries can be admitted now."""
        return bool(self._free_rows) and need <= self.allocator.available

    def admit(self, text_id: int, tokens: Sequence[int], limit: int, need: int, drafter: NgramDrafter | None) -> Text:
        """A new text, with a row and all pages taken and its prompt queued; ValueError without enough free pages."""
        if not self.allocator.reserve(need):
            raise ValueError(f"need = {need}; legal: at most the {self.allocator.available} pages that are free")
        table = PageTable(self.allocator, self._span, need)
        table.grow(need * self._span)
        # The lowest free row is taken next: a decode step has all rows up to the last one in use.
        self._free_rows.sort(reverse=True)
        text = Text(text_id, list(tokens), limit, table, self.index, self._free_rows.pop(), drafter)
        self.arrived.append(text)
        return text

    def release(self, text: Text) -> None:
        """Frees the row and the pages of a text, and drops its prompt if that still waits."""
        if text in self.arrived:
            self.arrived.remove(text)
        text.table.release()
        self._free_rows.append(text.row)

    def next_prompts(self, most: int, room: int) -> list[Part]:
        """Takes the next tokens of the prompts that arrived: at most `room` tokens, of at most `most` texts."""
        parts: list[Part] = []
        while self.arrived and room and len(parts) < most:
            text = self.arrived[0]
            part = text.prompt[text.cached : text.cached + room]
            parts.append((text, part))
            text.cached += len(part)
            room -= len(part)
            if text.cached < len(text.prompt):
                break
            self.arrived.popleft()
        return parts


def fill_prompts(prompts: Prompts, parts: Sequence[Part]) -> dict[int, Text]:
    """Writes parts of prompts into one replica's arrays (`step.no_prompts`). Returns the texts whose prompts end in
    this step, by their index in the step; the step makes the first token of each.
    """
    whole: dict[int, Text] = {}
    end = 0
    for index, (text, part) in enumerate(parts):
        begin, end = end, end + len(part)
        prompts.tokens[begin:end] = part
        prompts.cu_seqlens[index + 1 :] = end
        prompts.seq_lens[index], prompts.rows[index] = text.cached, text.row
        prompts.requests[index] = text.text_id
        prompts.block_tables[index, : len(text.table.pages)] = text.table.pages
        if text.cached == len(text.prompt):
            prompts.limits[index], text.scheduled, whole[index] = text.limit, 1, text
    return whole
