"""Reads one tool call written as a JSON object, `{"name": ..., "arguments": {...}}`, while it is being written. Pure.

The arguments are handed on as the model writes them, so a client can follow along. Two names of the arguments are
known: `arguments` and `parameters`.
"""

from __future__ import annotations

import json
from enum import Enum, auto

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")


class _At(Enum):
    START = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()
    DONE = auto()
    BROKEN = auto()


class JsonCall:
    """Feed characters until `done` or `broken`.

    `name` is set once it is known; `take_arguments` returns argument text that may be sent (only once the name is).
    """

    __slots__ = (
        "_arguments",
        "_at",
        "_depth",
        "_escaped",
        "_in_string",
        "_key",
        "_seen_arguments",
        "_value",
        "name",
        "raw",
    )

    def __init__(self) -> None:
        self.name: str | None = None
        self.raw: list[str] = []
        """Everything that was read: what is shown when it turns out to be no call."""
        self._at = _At.START
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._arguments: list[str] = []
        self._seen_arguments = False

    @property
    def done(self) -> bool:
        """Whether the call's object has been read to its end."""
        return self._at is _At.DONE

    @property
    def broken(self) -> bool:
        """Whether what was read cannot become a call; `raw` has the text."""
        return self._at is _At.BROKEN

    def feed(self, text: str) -> int:
        """Read up to the end of the object; returns how many characters were taken."""
        for index, char in enumerate(text):
            if self._at in (_At.DONE, _At.BROKEN):
                return index
            self._step(char)
            # A character that breaks the call belongs to whatever stands there instead.
            if self._at is not _At.BROKEN:
                self.raw.append(char)
            else:
                return index
        return len(text)

    def take_arguments(self) -> str:
        """Argument text that is new since the last call; `{}` once for a finished call without any."""
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        if self.done and not self._seen_arguments:
            self._seen_arguments = True
            return "{}"
        return text

    def _step(self, char: str) -> None:
        if self._at is _At.VALUE:
            self._value_step(char)
        elif self._at is _At.KEY and (self._in_string or char == '"'):
            self._key_step(char)
        elif char not in _SPACE:
            self._between(char)

    def _between(self, char: str) -> None:
        match self._at, char:
            case _At.START, "{":
                self._at = _At.KEY
            case _At.COLON, ":":
                self._begin_value()
            case _At.COMMA, ",":
                self._at = _At.KEY
            case ((_At.KEY | _At.COMMA), "}"):
                self._at = _At.DONE if self.name is not None else _At.BROKEN
            case _:
                self._at = _At.BROKEN

    def _key_step(self, char: str) -> None:
        if not self._in_string:
            self._in_string = True
            self._value = [char]
            return
        self._value.append(char)
        if self._end_of_string(char):
            self._key = str(_loads("".join(self._value), ""))
            self._at = _At.COLON

    def _begin_value(self) -> None:
        self._at = _At.VALUE
        self._value = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def _value_step(self, char: str) -> None:
        if not self._value and not self._in_string and char in _SPACE:
            return
        if self._in_string:
            self._keep(char)
            if self._end_of_string(char) and self._depth == 0:
                self._end_value()
            return
        if self._depth == 0 and self._value and char in ",}":  # the end of a number or literal
            self._end_value()
            self._between(char)
            return
        self._keep(char)
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth <= 0:
                self._end_value()

    def _end_of_string(self, char: str) -> bool:
        """Track escapes inside a string; true at its closing quote."""
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            return True
        return False

    def _keep(self, char: str) -> None:
        streams = self._key in _ARGUMENT_KEYS and (self._value[0] if self._value else char) == "{"
        if streams:
            self._arguments.append(char)
            self._seen_arguments = True
        if not streams or not self._value:
            self._value.append(char)

    def _end_value(self) -> None:
        self._at = _At.COMMA
        if self._key == "name":
            name = _loads("".join(self._value), None)
            if isinstance(name, str) and name:
                self.name = name
            else:
                self._at = _At.BROKEN
        elif self._key in _ARGUMENT_KEYS and not self._seen_arguments:
            # Some models write the arguments as a JSON string, or null for none.
            value = _loads("".join(self._value), None)
            self._arguments.append(value if isinstance(value, str) else "{}")
            self._seen_arguments = True


def _loads(text: str, default: object) -> object:
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return default
