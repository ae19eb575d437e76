"""Follows a choice through texts in which its last tokens stood before: what comes next there may come next here.

A follower stands at the place behind the longest match it knows of, and goes on with it while the choice says what
stands there. Where it says another token, that may stand for the one there: the follower goes on behind it with a match
of length 0, and gives the place up when the next token is another one too. A new place is looked for while the
match is short; a single token is better than none. The work is bounded per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tandem_worker.engine.guess.contract import Source
from tandem_worker.engine.guess.ngrams import LONG, SHORT, CompleteIndex, GrowingIndex, long_key, short_key
from tandem_worker.engine.guess.rates import MOST_LENGTH

_EXPECTED = 8
"""Length of the match at the beginning of a text that the choice is expected to repeat."""


def match_length(tokens: Sequence[int], end: int, text: list[int], most: int = MOST_LENGTH) -> int:
    """How many tokens before `tokens[end]` equal the last ones of `text`, `most` at the most."""
    length, most = 0, min(most, end, len(text))
    while length < most and tokens[end - 1 - length] == text[-1 - length]:
        length += 1
    return length


def go_on(at: int, length: int, *, hit: bool) -> tuple[int | None, int]:
    """Place and length of the match after one token more, which was the one at `at`, or was not."""
    if hit:
        return at + 1, min(length + 1, MOST_LENGTH)
    return (at + 1, 0) if length >= SHORT else (None, 0)


class Follower(Protocol):
    source: Source
    length: int
    """Tokens of the match; what they are followed by is the guess."""

    def peek(self) -> int | None:
        """The next token, if it goes on as it does there; None: nothing was found."""
        ...

    def read(self, count: int) -> list[int]:
        """The next tokens, `count` at the most."""
        ...

    def grade(self, depth: int) -> int:
        """What the chance of the token at this depth goes by, the next one's being `length`: where a text was found
        by its last tokens, the length of the match if those before it are right."""
        ...

    def feed(self, text: list[int]) -> None:
        """The choice has got a token: the last one of `text`."""
        ...


class TextFollower:
    """In the choice's own text: its prompt and its answer so far, which is `text` of each call."""

    source = Source.TEXT

    def __init__(self, text: list[int], prompt: CompleteIndex) -> None:
        """`text` begins with `prompt.tokens`, and grows."""
        self.length = 0
        self._text = text
        self._prompt = prompt
        self._answer = GrowingIndex()
        self._singles: dict[int, int] = {}
        """Place behind the last occurrence of a token in the answer."""
        self._at: int | None = None
        self._search(text)

    def peek(self) -> int | None:
        return None if self._at is None else self._text[self._at]

    def read(self, count: int) -> list[int]:
        """A text that repeats itself is read beyond its end."""
        if self._at is None:
            return []
        tokens = self._text[self._at : self._at + count]
        period = len(self._text) - self._at
        while len(tokens) < count:
            tokens.append(tokens[-period])
        return tokens

    def grade(self, depth: int) -> int:
        return self.length + depth

    def feed(self, text: list[int]) -> None:
        if self._at is not None:
            self._at, self.length = go_on(self._at, self.length, hit=text[self._at] == text[-1])
        self._search(text)

    def _search(self, text: list[int]) -> None:
        """Look for a longer match than the one at hand, and take note of the text's last runs."""
        end = len(text)
        if end >= LONG:
            self._look(long_key(text), text, long=True, least=LONG)
        if end >= SHORT:
            self._look(short_key(text), text, long=False, least=SHORT)
        last = text[-1]
        if self._at is None:
            at = self._singles.get(last) or self._prompt.find_single(last)
            if at is not None:
                self._at, self.length = at, 1
        self._singles[last] = end

    def _look(self, key: int, text: list[int], *, long: bool, least: int) -> None:
        if self.length < least:
            at = self._answer.find_last(key, long=long) or self._prompt.find_last(key, long=long)
            if at is not None and at < len(text):
                length = match_length(text, at, text)
                if length >= least:
                    self._at, self.length = at, length
        self._answer.add(key, len(text), long=long)


class DocumentFollower:
    """In a text that is complete: a prediction."""

    def __init__(self, source: Source, document: CompleteIndex, *, from_start: bool) -> None:
        """`from_start`: the choice is expected to begin as the document does."""
        self.source = source
        self.length = _EXPECTED if from_start else 0
        self._document = document
        self._at: int | None = 0 if from_start and document.tokens else None
        self._next = 0
        """Behind where it stood last: there it is looked for first."""

    def peek(self) -> int | None:
        tokens = self._document.tokens
        return tokens[self._at] if self._at is not None and self._at < len(tokens) else None

    def read(self, count: int) -> list[int]:
        return [] if self._at is None else self._document.tokens[self._at : self._at + count]

    def grade(self, depth: int) -> int:
        return self.length + depth

    def feed(self, text: list[int]) -> None:
        if self._at is not None:
            hit = self.peek() == text[-1]
            if not hit:
                self._next = self._at + 1
            self._at, self.length = go_on(self._at, self.length, hit=hit)
        if len(text) >= LONG:
            self._look(long_key(text), text, long=True, least=LONG)
        if len(text) >= SHORT:
            self._look(short_key(text), text, long=False, least=SHORT)

    def _look(self, key: int, text: list[int], *, long: bool, least: int) -> None:
        if self.length >= least or (self._at is not None and self.length > 0):
            return
        at = self._document.find_after(key, self._next, long=long)
        if at is not None and at < len(self._document.tokens):
            length = match_length(self._document.tokens, at, text)
            if length >= least:
                self._at, self.length = at, length
