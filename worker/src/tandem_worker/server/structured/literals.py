"""The literal texts of a grammar, in the order in which answers have them: what can be guessed of answers to it. Pure.

Read is llguidance's dialect of Lark, in which every schema, regex and set of functions is written here. Texts that
stand beside each other become one; what lies between them is JSON of a schema, or unknown. Of alternatives all are
taken, one after another. What is not understood is unknown: a guess that is missing costs nothing but its time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any, NamedTuple

from tandem_worker.engine.guess.literals import Word
from tandem_worker.engine.guess.shapes import MOST_SHAPES, Shapes

MOST_BYTES = 64 << 10
"""Bytes of the words of a grammar; there are no more words than a sixteenth of that. Later ones are left out."""
_MOST_ITEMS = 20_000
"""Items that are looked at, each time that a rule is named."""
_MOST_DEPTH = 40
"""Rules within each other."""
_BYTES_PER_CHARACTER = 50
"""Memory of a schema for each character of its text, as it is when answers have come everywhere in it: measured are 5
to 40, and 90 of alternatives without a word."""
_RULE = re.compile(r"^[ \t]*[?!]*([A-Za-z_][A-Za-z0-9_]*)(?:\.-?[0-9]+)?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)
_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"(i?)')
_REGEX = re.compile(r"/((?:[^/\\\n]|\\.)+)/[a-z]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOKEN = re.compile(r"<\[([0-9]{1,9})\]>")
_SPECIAL = re.compile(r"<[^>\n]{0,80}>")
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_REPEATED = re.compile(r"[*+]|\{[^}\n]{0,40}\}")
_JSON = json.JSONDecoder()
_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}


class _Kind(Enum):
    TEXT = auto()
    JSON = auto()
    RULE = auto()
    UNKNOWN = auto()
    CUT = auto()
    """What stands behind it does not follow what stands before it."""


class _Item(NamedTuple):
    kind: _Kind
    value: Any = None


_UNKNOWN, _CUT = _Item(_Kind.UNKNOWN), _Item(_Kind.CUT)


def read_words(grammar: str, token_text: Callable[[int], str | None]) -> tuple[list[Word], int]:
    """The words of a grammar, and the bytes of memory that are reckoned for them. `token_text`: as the vocabulary
    writes a token that the grammar names by its id."""
    rules = {name: list(_scan(body, token_text)) for name, body in _split(grammar)}
    joiner = _Joiner()
    room = _MOST_ITEMS

    def expand(name: str, path: tuple[str, ...]) -> None:
        nonlocal room
        for item in rules.get(name, ()):
            room -= 1
            if room <= 0 or joiner.is_full:
                return
            if item.kind is not _Kind.RULE:
                joiner.take(item)
            elif item.value in path or len(path) >= _MOST_DEPTH or item.value not in rules:
                joiner.take(_UNKNOWN)
            else:
                expand(item.value, (*path, item.value))

    expand("start", ("start",))
    joiner.take(_CUT)
    return joiner.words, _BYTES_PER_CHARACTER * len(grammar)


class _Joiner:
    """Makes words of items."""

    def __init__(self) -> None:
        self.words: list[Word] = []
        self._text = ""
        self._room = MOST_BYTES
        self._before = _Kind.TEXT

    @property
    def is_full(self) -> bool:
        return self._room <= len(self._text)

    def take(self, item: _Item) -> None:
        match item.kind:
            case _Kind.TEXT:
                self._text += item.value[: self._room - len(self._text)]
            case _Kind.JSON:
                self._take_value(item.value)
            case _:
                if self._text:
                    self._add(())
                elif not self.words and item.kind is _Kind.UNKNOWN:
                    self.words.append(Word(b""))  # answers begin with what is unknown
        if item.kind is not _Kind.CUT or self._before is not _Kind.JSON:
            self._before = item.kind

    def _take_value(self, value: Shapes) -> None:
        """Alternatives that are nothing but JSON are one value of several kinds."""
        if self._before is _Kind.JSON and not self._text and self.words:
            last = self.words[-1]
            if value not in last.values and len(last.values) < MOST_SHAPES:
                self.words[-1] = last._replace(values=(*last.values, value))
        else:
            self._add((value,))

    def _add(self, values: tuple[Shapes, ...]) -> None:
        text = self._text.encode(errors="replace")
        self.words.append(Word(text, values))
        self._text = ""
        self._room -= len(text) + 16


def _split(grammar: str) -> Iterator[tuple[str, str]]:
    """Names and bodies of the rules."""
    found = list(_RULE.finditer(grammar))
    for rule, following in zip(found, [*found[1:], None], strict=True):
        yield rule[1], grammar[rule.end() : None if following is None else following.start()]


def _scan(body: str, token_text: Callable[[int], str | None]) -> Iterator[_Item]:
    place, size = 0, len(body)
    while place < size:
        char = body[place]
        if char == "#" or body.startswith("//", place):
            place = _end_of_line(body, place)
        elif char == '"' and (found := _STRING.match(body, place)):
            place = found.end()
            yield _Item(_Kind.TEXT, _unquote(found[1])) if not found[2] else _UNKNOWN
        elif char == "/" and (found := _REGEX.match(body, place)):
            place = found.end()
            # What says which characters a text must not have is the frame of one that is unknown.
            yield from [_UNKNOWN] if "[^" in found[1] else scan_regex(found[1])
        elif char in '"/':  # it does not end in this line, and nor does any behind it
            place = _end_of_line(body, place)
            yield _UNKNOWN
        elif char == "%" and (found := _EMBEDDED.match(body, place)):
            try:
                schema, place = _JSON.raw_decode(body, found.end())
            except (ValueError, RecursionError):
                return
            yield _Item(_Kind.JSON, Shapes(schema))
        elif char == "<" and (found := _TOKEN.match(body, place) or _SPECIAL.match(body, place)):
            place = found.end()
            text = token_text(int(found[1])) if found.re is _TOKEN else None
            yield _UNKNOWN if text is None else _Item(_Kind.TEXT, text)
        elif found := _NAME.match(body, place):
            place = found.end()
            yield _Item(_Kind.RULE, found[0])
        elif char == "|":
            place += 1
            yield _CUT
        elif found := _REPEATED.match(body, place):
            place = found.end()
            yield _CUT
        else:
            place += 1


def _end_of_line(text: str, place: int) -> int:
    end = text.find("\n", place)
    return len(text) if end < 0 else end


def _unquote(text: str) -> str:
    if "\\" not in text:
        return text
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return re.sub(r"\\(.)", lambda found: _PLAIN.get(found[1], found[1]), text)


def scan_regex(regex: str) -> list[_Item]:
    """Characters of a regex that stand for themselves, and what lies between them. What may come any number of times is
    unknown."""
    items: list[_Item] = []
    groups: list[int] = []
    """Places in `items` at which open groups begin."""
    place, size = 0, len(regex)
    while place < size:
        item, after = _read_regex(regex, place)
        char, repetition = regex[place], regex[after : after + 1]
        if char == "(":
            groups.append(len(items))
        elif char == ")":
            start = groups.pop() if groups else 0
            if repetition and repetition in "*+{":
                del items[start:]
        place = after
        if char not in "(|" and repetition and repetition in "*+?{":
            place = _end_of_repetition(regex, after)
            item = _CUT if char == ")" and repetition == "?" else _UNKNOWN
        items.append(item)
    return items


def _read_regex(regex: str, place: int) -> tuple[_Item, int]:
    """What begins at a place, without its repetition, and the place behind it."""
    char = regex[place]
    place += 1
    if char == "(" and regex.startswith("?", place):
        return _CUT, max(place, regex.find(":", place) + 1)
    if char in "(|)":
        return _CUT, place
    text: str | None = None if char in ".^$[" else char
    if char == "\\":
        text, place = _read_escape(regex, place)
    elif char == "[":
        place = _end_of_class(regex, place)
    return _UNKNOWN if text is None else _Item(_Kind.TEXT, text), place


def _read_escape(regex: str, place: int) -> tuple[str | None, int]:
    """What the character behind a backslash stands for, and the place behind it."""
    char = regex[place : place + 1]
    if char in "xuUpP":
        end = regex.find("}", place) + 1 if regex.startswith("{", place + 1) else place + {"x": 3, "u": 5}.get(char, 2)
        digits = regex[place + 1 : end].strip("{}")
        try:
            return (chr(int(digits, 16)) if char in "xuU" else None), max(end, place + 1)
        except (ValueError, OverflowError):
            return None, max(end, place + 1)
    if char in _PLAIN:
        return _PLAIN[char], place + 1
    return (None if char.isalnum() else char), place + 1


def _end_of_class(regex: str, place: int) -> int:
    if regex.startswith("^", place):
        place += 1
    if regex.startswith("]", place):
        place += 1
    while place < len(regex) and regex[place] != "]":
        place += 2 if regex[place] == "\\" else 1
    return place + 1


def _end_of_repetition(regex: str, place: int) -> int:
    if regex[place] == "{":
        place = regex.find("}", place)
        if place < 0:
            return len(regex)
    place += 1
    return place + 1 if regex.startswith("?", place) else place
