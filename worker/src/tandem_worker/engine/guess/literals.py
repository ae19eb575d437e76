"""Guesses from the literal text of what holds an answer: a schema, the functions that it may call, a regex, a grammar.

A grammar forces almost no token, because a tokenizer joins its texts with what stands beside them and white space is
free. But its texts are what the answer will say, so they are guessed as this tokenizer writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tandem_worker.engine.guess.contract import Source
from tandem_worker.engine.guess.json_ahead import Foresight, Grade, Style
from tandem_worker.engine.guess.json_text import At, JsonReader
from tandem_worker.engine.guess.shapes import Shapes, join

_RUN = 3
"""Bytes by which a text is found that is not due."""
MOST_WORDS_BYTES = 4 << 10
"""Bytes of words that are found so."""
_BYTES_PER_RUN = 250
_TAIL = 24
"""Last bytes of an answer that are compared with the beginning of what is due."""
_SPELLINGS = 4096
"""Texts whose tokens are kept; when there are more all are forgotten. Some 400 bytes each."""
_FEW = 8
"""With fewer tokens left of a text that was cut, it is foreseen anew."""


class Word(NamedTuple):
    """A literal text of a grammar."""

    text: bytes
    values: tuple[Shapes, ...] = ()
    """JSON of one of these follows it; of none: something unknown does."""

    def begin(self, style: Style) -> JsonReader:
        """A reader of the JSON that follows."""
        return JsonReader(join(value.of(value.root) for value in self.values), style)


class Spelling:
    """How a tokenizer writes texts. Shared by all requests."""

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        token_bytes: Callable[[int], bytes],
        vocab_size: int | None = None,
    ) -> None:
        """`encode` adds no special tokens. `token_bytes`: the text of a token, empty for one that does not exist.
        `vocab_size`: tokens that the model knows, where its tokenizer may have more; None: all."""
        self.token_bytes = token_bytes
        self._encode = encode
        self._vocab_size = vocab_size
        self._known: dict[tuple[int, bytes], list[int]] = {}

    def write(self, last: int, text: bytes) -> list[int]:
        """Tokens of a text that comes behind a byte; empty where the tokenizer changes it."""
        key = (last, text)
        tokens = self._known.get(key)
        if tokens is None:
            if len(self._known) >= _SPELLINGS:
                self._known.clear()
            tokens = self._known[key] = self._write(last, text.decode(errors="ignore"))
        return tokens

    def _write(self, last: int, text: str) -> list[int]:
        """Behind a token that has ended, which a tokenizer that sees both may not know: then the text alone."""
        for before in (chr(last) if 0x20 < last < 0x7F else "\n", ""):
            tokens = list(self._encode(before + text))
            if b"".join(map(self.token_bytes, tokens)) != (before + text).encode():
                continue
            if self._vocab_size is not None and max(tokens, default=0) >= self._vocab_size:
                continue
            if not before:
                return tokens
            size = 0
            for place, token in enumerate(tokens):
                size += len(self.token_bytes(token))
                if size == len(before):
                    return tokens[place + 1 :]
                if size > len(before):
                    break
        return []


class LiteralText:
    """The words of a grammar. Shared by all that are held to it: it keeps nothing of any of them."""

    def __init__(self, words: Sequence[Word]) -> None:
        """Takes a fraction of a millisecond: to be made where no step waits for it."""
        self.words = tuple(words)
        self.bare = next((number for number, word in enumerate(words) if word.values and not word.text), None)
        """Number of the first word that is JSON alone; None: there is none."""
        self._runs: dict[bytes, tuple[int, int]] = {}
        room = MOST_WORDS_BYTES
        for number, word in enumerate(self.words):
            for end in range(_RUN, min(len(word.text), room) + 1):
                self._runs.setdefault(word.text[end - _RUN : end], (number, end))
            room -= len(word.text)
            if room <= 0:
                break

    @property
    def num_bytes(self) -> int:
        """Memory by which words are found, about."""
        return _BYTES_PER_RUN * len(self._runs)

    def find(self, tail: bytes) -> tuple[int, int] | None:
        """A word that has the last bytes of a text, and the place behind them in it."""
        return self._runs.get(tail[-_RUN:])


class LiteralFollower:
    """Follows a choice through the text of its grammar: a `follow.Follower`."""

    source = Source.SCHEMA

    def __init__(self, literals: LiteralText, spelling: Spelling) -> None:
        self._literals = literals
        self._spelling = spelling
        self._words = literals.words
        self._word = 0
        """Number of the word that is being written, or is due."""
        self._done = 0
        """Bytes of it that are written."""
        self._is_certain = True
        """They were written where it was due, and not found in its middle."""
        self._is_due = False
        """It begins here, and not behind something unknown."""
        self._is_begun = False
        self._reader: JsonReader | None = None
        """Reads the JSON that follows the word, which is complete then."""
        self._style = Style()
        self._tail = b""
        """The answer's last bytes, while they are none of the above."""
        self._last = 0
        """The answer's last byte."""
        self._tokens: list[int] = []
        self._grades: list[Grade] = []
        self._at = 0
        """Place in both of what comes next."""
        self._was_cut = False
        self._is_stale = True
        self._begin_word(0, is_due=bool(self._words and self._words[0].text))

    # -- what is asked -------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """The next token's grade."""
        return self.grade(0)

    def peek(self) -> int | None:
        if self._is_stale:
            self._foresee()
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def read(self, count: int) -> list[int]:
        if self._is_stale:
            self._foresee()
        return self._tokens[self._at : self._at + count]

    def grade(self, depth: int) -> int:
        place = self._at + depth
        return self._grades[place] if place < len(self._grades) else Grade.EDGE

    def feed(self, text: list[int]) -> None:
        token = text[-1]
        hit = not self._is_stale and self._at < len(self._tokens) and self._tokens[self._at] == token
        data = self._spelling.token_bytes(token)
        if data:
            self._is_begun = True
            self._last = data[-1]
            self._advance(data)
        self._at += 1
        left = len(self._tokens) - self._at
        self._is_stale = not hit or left <= 0 or (self._was_cut and left < _FEW)

    # -- where the answer is -------------------------------------------------------------------------------------------

    def _begin_word(self, number: int, *, is_due: bool = False) -> None:
        """This word comes next: it may be empty, and the JSON behind it come."""
        self._reader = None
        self._word, self._done, self._is_certain, self._tail = number, 0, True, b""
        self._is_due = is_due
        if number < len(self._words) and not self._words[number].text and self._words[number].values:
            self._end_word()

    def _end_word(self) -> None:
        word = self._words[self._word]
        if word.values:
            self._reader = word.begin(self._style)
        else:
            self._begin_word(self._word + 1)

    def _advance(self, data: bytes) -> None:
        while data:
            if self._reader is not None:
                data = self._advance_value(self._reader, data)
            elif self._done or self._is_due:
                data = self._advance_word(data)
            else:
                data = self._search(data)

    def _advance_value(self, reader: JsonReader, data: bytes) -> bytes:
        """Returns what is left of the data."""
        used = reader.feed(data)
        if reader.at is At.END:
            self._begin_word(self._word + 1, is_due=self._word + 1 < len(self._words))
        elif reader.at is At.LOST:
            self._reader = None
            self._word, self._done = 0, 0
            self._tail = b""
        return data[max(used, 1) if reader.at is At.LOST else used :]

    def _advance_word(self, data: bytes) -> bytes:
        rest = self._words[self._word].text[self._done :]
        size = min(len(rest), len(data))
        self._is_due = False
        if data[:size] != rest[:size]:
            self._done = 0
            return self._search(data)
        self._done += size
        self._tail = (self._tail + data[:size])[-_TAIL:]
        if size == len(rest):
            self._end_word()
        return data[size:]

    def _search(self, data: bytes) -> bytes:
        """Look for the word that is due, for the JSON that begins an answer, or else for any word."""
        words = self._words
        due = words[self._word] if self._word < len(words) else None
        bare = self._literals.bare
        if bare is not None and (due is None or not due.text):
            start = min((at for mark in (b"{", b"[") if (at := data.find(mark)) >= 0), default=-1)
            if start >= 0:
                self._word = self._word if due is not None and due.values else bare
                self._end_word()
                return data[start:]
        if due is not None and due.text:
            text = self._tail + data
            at = text.find(due.text, max(0, len(self._tail) - len(due.text) + 1))
            if at >= 0:
                self._end_word()
                return text[at + len(due.text) :]
            self._done = _overlap(text, due.text)
            self._is_certain = self._done >= _RUN
            if self._done:
                self._tail = text[-_TAIL:]
                return b""
        self._tail = (self._tail + data)[-_TAIL:]
        found = self._literals.find(self._tail) if len(self._tail) >= _RUN else None
        if found is not None:
            self._word, self._done = found
            self._is_certain = False
            if self._done == len(words[self._word].text):
                self._end_word()
        return b""

    # -- what follows --------------------------------------------------------------------------------------------------

    def _foresee(self) -> None:
        found = Foresight()
        number, reader, words = self._word, self._reader, self._words
        if reader is not None:
            if reader.foresee(found) and number + 1 < len(words):
                number += 1
                self._foresee_word(found, number, 0, Grade.LITERAL)
        elif number < len(words) and (self._done or self._is_due):
            grade = Grade.OPENING if not self._is_begun else Grade.LITERAL if self._is_certain else Grade.AGAIN
            self._foresee_word(found, number, self._done, grade)
        self._set(found)

    def _foresee_word(self, found: Foresight, number: int, done: int, grade: Grade) -> None:
        word = self._words[number]
        found.add(word.text[done:], grade)
        if word.values:
            word.begin(self._style).foresee(found)

    def _set(self, found: Foresight) -> None:
        """Take tokens of what is foreseen, each as sure as the least sure of its bytes."""
        self._at, self._is_stale, self._was_cut = 0, False, found.is_full
        text = bytes(found.text)
        if not text:
            self._tokens, self._grades = [], []
            return
        spelling = self._spelling
        tokens = spelling.write(self._last, text)
        if self._was_cut:
            tokens = tokens[:-1]
        grades: list[Grade] = []
        marks, mark, end = found.grades, 0, 0
        for token in tokens:
            end += len(spelling.token_bytes(token))
            grade = Grade.SURE
            while mark < len(marks) and marks[mark][0] < end:
                grade = max(grade, marks[mark][1])
                mark += 1
            grades.append(grade)
        if grades and not self._was_cut and grades[-1] is Grade.SURE:
            grades[-1] = Grade.EDGE
        if grades and not self._is_begun:
            grades[0] = Grade.OPENING
        self._tokens, self._grades = tokens, grades


def _overlap(text: bytes, word: bytes) -> int:
    """How many bytes of a word are the last ones of a text."""
    for size in range(min(len(text), len(word)), 0, -1):
        if text.endswith(word[:size]):
            return size
    return 0
