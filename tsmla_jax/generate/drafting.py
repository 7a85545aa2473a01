"""Draft tokens for speculative decoding out of the text itself (prompt lookup).

A text that repeats itself announces its next tokens: if its last n tokens occurred in it before, the tokens that
followed them there are the draft. There is no second model, only look-ups in a dictionary. Idea: Saxena, "Prompt
Lookup Decoding" (2023).
"""

from __future__ import annotations

from collections.abc import Iterable


class NgramDrafter:
    """Remembers where each n-gram of one text last ended, and drafts the tokens after it."""

    def __init__(self, tokens: Iterable[int], *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        """
        Args:
          tokens: the text so far.
          max_ngram, min_ngram: the greatest and the least length n. The longest n-gram at the text's end that occurred
            before is taken.

        Raises:
          ValueError: not 1 <= min_ngram <= max_ngram.
        """
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram = {min_ngram}, max_ngram = {max_ngram}; legal: 1 <= min_ngram <= max_ngram")
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the text."""
        for token in tokens:
            end = len(self._tokens)
            # The n-grams that end just before `token` now have a continuation; only these may be drafted from.
            for size in self._sizes:
                if size <= end:
                    self._next[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)

    def draft(self, count: int) -> list[int]:
        """`count` tokens that may follow the text; none if no n-gram at its end occurred before."""
        if count <= 0:
            return []
        for size in self._sizes:
            if size > len(self._tokens):
                continue
            start = self._next.get(tuple(self._tokens[-size:]))
            if start is not None:
                # The continuation may reach the end of the text before it has `count` tokens; then it is repeated.
                period = len(self._tokens) - start
                return [self._tokens[start + i % period] for i in range(count)]
        return []
