"""`allowed_token_ids` and `bad_words`: what may follow is known token by token, without a grammar of text.

A bad word forbids a token where it would complete one of its sequences of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tandem_worker.engine.errors import RequestError

Words = np.ndarray[Any, np.dtype[np.uint32]]


class AllowedTokens:
    """Both the factory and the grammar of every choice: there is no state. Never ends an answer by itself."""

    __slots__ = ("_row",)
    seconds = 0.0
    terminated = False
    failed = False

    def __init__(self, token_ids: Iterable[int], vocab_size: int) -> None:
        allowed = np.zeros((vocab_size + 31) // 32 * 32, dtype=np.uint8)
        allowed[list(token_ids)] = 1
        self._row = np.packbits(allowed, bitorder="little").view(np.int32)

    def new(self) -> AllowedTokens:
        return self

    def fill_mask(self, mask: Any) -> None:
        """`mask`: one contiguous row of int32 words; words beyond the vocabulary become 0."""
        row = np.asarray(mask).reshape(-1)
        row[: len(self._row)] = self._row
        row[len(self._row) :] = 0

    def accept(self, token_id: int) -> None:
        """Every token of the mask leaves things as they are."""

    def give_up(self, reason: RequestError) -> None:
        """It costs nothing that others could want back."""


class BadWords:
    """The factory. Ends no answer: there are more tokens than words."""

    __slots__ = ("longest", "row", "within")

    def __init__(self, sequences: Iterable[tuple[int, ...]], vocab_size: int) -> None:
        """`sequences`: of at least one token each."""
        every = frozenset(sequences)
        allowed = np.ones((vocab_size + 31) // 32 * 32, dtype=np.uint8)
        allowed[[sequence[0] for sequence in every if len(sequence) == 1]] = 0
        self.row: Words = np.packbits(allowed, bitorder="little").view(np.uint32)
        """The mask without words of one token."""
        self.within: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        """Longer words by their last token but one: all tokens but the last, and that."""
        for sequence in sorted(every):
            if len(sequence) > 1:
                self.within.setdefault(sequence[-2], []).append((sequence[:-1], sequence[-1]))
        self.longest = max(map(len, every))

    def new(self) -> BadWordsState:
        return BadWordsState(self)


class BadWordsState:
    """One choice: the tokens that a word may have begun with."""

    __slots__ = ("_last", "_words")
    seconds = 0.0
    terminated = False
    failed = False

    def __init__(self, words: BadWords) -> None:
        self._words = words
        self._last: tuple[int, ...] = ()

    def fill_mask(self, mask: Any) -> None:
        """`mask`: one contiguous row of int32 words; words beyond the vocabulary become 0."""
        row = np.asarray(mask).reshape(-1).view(np.uint32)
        base, last = self._words.row, self._last
        row[: len(base)] = base
        row[len(base) :] = 0
        for before, token in self._words.within.get(last[-1], ()) if last else ():
            if last[-len(before) :] == before:
                row[token // 32] &= ~np.uint32(1 << token % 32)

    def accept(self, token_id: int) -> None:
        kept = self._words.longest - 1
        self._last = (*self._last, token_id)[-kept:] if kept else ()

    def give_up(self, reason: RequestError) -> None:
        """It costs nothing that others could want back."""
