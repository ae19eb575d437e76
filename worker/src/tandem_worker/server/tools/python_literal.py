"""Python keyword arguments, `city="Paris", days=[1, 2]`, to JSON while they are being written. Pure."""

from __future__ import annotations

import json
from enum import Enum, auto
from typing import Any

_SPACE = " \t\r\n"
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\\": "\\", "'": "'",
    '"': '"', "/": "/", "\n": "",
}  # fmt: skip
_HEX = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


class _At(Enum):
    KEY = auto()
    EQUALS = auto()
    VALUE = auto()
    STRING = auto()
    ESCAPE = auto()
    WORD = auto()
    AFTER = auto()
    DONE = auto()
    BROKEN = auto()


class KeywordArguments:
    """Feed characters behind the opening parenthesis until `done` or `broken`; `take` returns JSON that may be sent.

    Values are literals; `true`, `false` and `null` are read as JSON means them.
    """

    def __init__(self) -> None:
        self._at = _At.KEY
        self._json: list[str] = ["{"]
        self._text = ""  # of a key, a word or an escape that is not complete
        self._quote = ""
        self._stack: list[str] = []  # closing brackets
        self._comma = ""  # to be written before the next element: a trailing one is not JSON
        self._expects_key = False  # of a dictionary

    @property
    def done(self) -> bool:
        """Whether the closing parenthesis was read."""
        return self._at is _At.DONE

    @property
    def broken(self) -> bool:
        """Whether what was read cannot become keyword arguments."""
        return self._at is _At.BROKEN

    def take(self) -> str:
        """JSON text that is new since the last call of this method."""
        text = "".join(self._json)
        self._json.clear()
        return text

    def feed(self, text: str) -> int:
        """How many characters were taken: all, or those up to the end. One that breaks the arguments is not taken."""
        for index, char in enumerate(text):
            if self.done:
                return index
            self._step(char)
            if self.broken:
                return index
        return len(text)

    def _step(self, char: str) -> None:
        match self._at:
            case _At.STRING:
                self._string_step(char)
            case _At.ESCAPE:
                self._escape_step(char)
            case _At.WORD:
                self._word_step(char)
            case _At.KEY if char.isidentifier() or (self._text and char.isalnum()):
                self._text += char
            case _ if char in _SPACE:
                if self._at is _At.KEY and self._text:
                    self._at = _At.EQUALS
            case _:
                self._between(char)

    def _between(self, char: str) -> None:
        match self._at, char:
            case ((_At.KEY | _At.EQUALS), "=") if self._text:
                self._json.append(f"{self._comma}{json.dumps(self._text)}: ")
                self._comma, self._text, self._at = "", "", _At.VALUE
            case (_At.KEY, ")") if not self._text:
                self._json.append("}")
                self._at = _At.DONE
            case _At.VALUE, _:
                self._begin_value(char)
            case _At.AFTER, _:
                self._after_value(char)
            case _:
                self._at = _At.BROKEN

    def _begin_value(self, char: str) -> None:
        if self._stack and char == self._stack[-1]:
            self._close()
        elif char in "\"'":
            self._write('"')
            self._quote, self._at = char, _At.STRING
        elif char in _CLOSING and not self._expects_key:
            self._write("{" if char == "{" else "[")
            self._stack.append(_CLOSING[char])
            self._expects_key = char == "{"
        elif char.isalnum() or char in "+-._":
            self._text, self._at = char, _At.WORD
        else:
            self._at = _At.BROKEN

    def _after_value(self, char: str) -> None:
        if not self._stack:
            if char not in ",)":
                self._at = _At.BROKEN
                return
            self._at, self._comma = _At.KEY, ", " if char == "," else ""
            if char == ")":
                self._between(char)
        elif char == ":" and self._expects_key:
            self._json.append(": ")
            self._expects_key, self._at = False, _At.VALUE
        elif char == "," and not (self._stack[-1] == "}" and self._expects_key):
            self._comma, self._at = ", ", _At.VALUE
            self._expects_key = self._stack[-1] == "}"
        elif char == self._stack[-1] and not self._expects_key:
            self._close()
        else:
            self._at = _At.BROKEN

    def _close(self) -> None:
        self._json.append("}" if self._stack.pop() == "}" else "]")
        self._comma, self._expects_key, self._at = "", False, _At.AFTER

    def _write(self, text: str) -> None:
        self._json.append(self._comma + text)
        self._comma = ""

    def _string_step(self, char: str) -> None:
        if char == "\\":
            self._text, self._at = "", _At.ESCAPE
        elif char == self._quote:
            self._json.append('"')
            self._at = _At.AFTER
        else:
            self._json.append(_quoted(char))

    def _escape_step(self, char: str) -> None:
        self._text += char
        kind = self._text[0]
        if kind not in _HEX:
            self._json.append(_quoted(_ESCAPES.get(kind, "\\" + kind)))
        elif len(self._text) > 1 and char not in "0123456789abcdefABCDEF":
            self._at = _At.BROKEN
            return
        elif len(self._text) <= _HEX[kind]:
            return
        else:
            code = int(self._text[1:], 16)
            if code > 0x10FFFF:
                self._at = _At.BROKEN
                return
            self._json.append(_quoted(chr(code)))
        self._text, self._at = "", _At.STRING

    def _word_step(self, char: str) -> None:
        if char.isalnum() or char in "+-._":
            self._text += char
            return
        word, self._text = self._text, ""
        try:
            written = _WORDS.get(word) or json.dumps(_parse_number(word), allow_nan=False)
        except ValueError:
            self._at = _At.BROKEN
            return
        self._write(json.dumps(written) if self._expects_key else written)
        self._at = _At.AFTER
        if char not in _SPACE:
            self._after_value(char)


def _parse_number(word: str) -> int | float:
    """Raises ValueError."""
    try:
        return int(word)
    except ValueError:
        return float(word)


def read_literal(text: str) -> Any:
    """One Python literal as the JSON value it stands for. Raises ValueError."""
    arguments = KeywordArguments()
    source = f"value={text})"
    if arguments.feed(source) < len(source) or not arguments.done:
        raise ValueError("not a literal")
    return json.loads(arguments.take())["value"]


def _quoted(text: str) -> str:
    """As inside a JSON string. Half a surrogate pair stays an escape: the other half follows."""
    return json.dumps(text, ensure_ascii=any(0xD800 <= ord(char) < 0xE000 for char in text))[1:-1]
