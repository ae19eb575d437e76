"""Earlier answers, so that later ones can be guessed from them: those with the same cache salt, and no others.

Two generations of equal size bound the memory: what is new goes into the younger one, and when that is full the older
one is dropped whole. Whoever follows an answer that is dropped keeps it until the match breaks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tandem_worker.engine.guess.contract import Source
from tandem_worker.engine.guess.follow import go_on, match_length
from tandem_worker.engine.guess.ngrams import LONG, long_key, long_keys, short_keys
from tandem_worker.engine.guess.rates import MOST_LENGTH

BYTES_PER_TOKEN = 160
"""The token, and its run with the place behind it. Measured: 102 to 126, more while a table grows."""
_BYTES_PER_ANSWER = 400
_LEAST_TOKENS = 8
"""Fewest tokens of an answer that is kept."""
_END = -1
"""Stands behind each answer."""


class Shelf:
    """Answers with one salt, one after another."""

    __slots__ = ("places", "starts", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self.places: dict[int, int] = {}
        """Place behind the last occurrence of a run of `LONG` tokens, by the run's key."""
        self.starts: dict[int, int] = {}
        """Place at which the last answer to a prompt begins, by the prompt's hash."""

    def add(self, prompt: tuple[int, ...], answer: Sequence[int]) -> None:
        """Keep an answer. The last tokens of its prompt are part of its runs, not of its text."""
        tokens, start = self.tokens, len(self.tokens)
        self.starts[hash(prompt)] = start
        lead = prompt[-LONG:]
        keys = long_keys(short_keys([*lead, *answer]))[:-1]  # nothing stands behind the last one
        first = start + LONG - len(lead)
        self.places.update(zip(keys.tolist(), range(first, first + len(keys)), strict=True))
        tokens.extend(answer)
        tokens.append(_END)


class History:
    """Earlier answers to all requests of an engine, as far as there is room for them."""

    def __init__(self, max_bytes: int) -> None:
        self._most = max_bytes // 2
        """Bytes of a generation at most."""
        self._young: dict[str, Shelf] = {}
        self._old: dict[str, Shelf] = {}
        self._size = self._old_size = 0
        """Bytes of either generation."""

    @property
    def num_bytes(self) -> int:
        """What is kept takes about so much, `max_bytes` at the most."""
        return self._size + self._old_size

    def add(self, salt: str, prompt: tuple[int, ...], answer: Sequence[int]) -> None:
        """Keep an answer, if it is long enough to be of use and there may be room for it."""
        size = _BYTES_PER_ANSWER + BYTES_PER_TOKEN * len(answer)
        if len(answer) < _LEAST_TOKENS or size > self._most:
            return
        if self._size + size > self._most:
            self._old, self._young = self._young, {}
            self._old_size, self._size = self._size, 0
        shelf = self._young.get(salt)
        if shelf is None:
            shelf = self._young[salt] = Shelf()
        shelf.add(prompt, answer)
        self._size += size

    def shelves(self, salt: str) -> list[Shelf]:
        """Those with this salt, newer answers first."""
        return [shelf for shelf in (self._young.get(salt), self._old.get(salt)) if shelf is not None]


class HistoryFollower:
    """Follows a choice through the earlier answers with its salt: a `follow.Follower`."""

    source = Source.HISTORY

    def __init__(self, history: History, salt: str, prompt: tuple[int, ...], *, from_start: bool) -> None:
        """`from_start`: the choice has said nothing yet; it may say what was said to the same prompt before."""
        self.length = 0
        self._history = history
        self._salt = salt
        self._tokens: Sequence[int] = ()
        self._at: int | None = None
        if from_start:
            name = hash(prompt)
            for shelf in history.shelves(salt):
                start = shelf.starts.get(name)
                if start is not None:
                    self._tokens, self._at, self.length = shelf.tokens, start, MOST_LENGTH // 2
                    break

    def peek(self) -> int | None:
        at = self._at
        if at is None or at >= len(self._tokens):
            return None
        token = self._tokens[at]
        return None if token == _END else token

    def read(self, count: int) -> list[int]:
        if self._at is None:
            return []
        tokens = list(self._tokens[self._at : self._at + count])
        return tokens[: tokens.index(_END)] if _END in tokens else tokens

    def grade(self, depth: int) -> int:
        return self.length + depth

    def feed(self, text: list[int]) -> None:
        if self._at is not None:
            self._at, self.length = go_on(self._at, self.length, hit=self.peek() == text[-1])
            if self._at is None:
                self._tokens = ()
        if self.length or len(text) < LONG:
            return
        key = long_key(text)
        for shelf in self._history.shelves(self._salt):
            at = shelf.places.get(key)
            if at is not None:
                self._tokens, self._at = shelf.tokens, at
                # A run that began in a prompt is longer than what is kept of it.
                self.length = max(LONG, match_length(shelf.tokens, at, text))
                return
