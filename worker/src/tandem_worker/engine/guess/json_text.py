"""The place where an answer in JSON stands within its schema. Pure.

`JsonReader` takes in the bytes of an answer and keeps a stack of its open objects and arrays with their shapes. What is
likely to follow from there a `json_ahead.JsonWriter` says.
"""

from __future__ import annotations

from enum import IntEnum

from tandem_worker.engine.guess.json_ahead import MOST_KEPT, Foresight, JsonWriter, Open, Style, narrow
from tandem_worker.engine.guess.shapes import Shape, join

_SPACE = b" \t\r\n"


class At(IntEnum):
    """What comes next."""

    VALUE = 0
    NAME = 1
    """A property, or the end of its object."""
    IN_NAME = 2
    COLON = 3
    IN_TEXT = 4
    IN_ATOM = 5
    """In a number, a truth value or null."""
    COMMA = 6
    """Or the end of what is open."""
    END = 7
    """The value is complete."""
    LOST = 8
    """This is not the JSON that was expected."""


class JsonReader:
    """Reads one value and foresees the rest of it."""

    __slots__ = ("_behind", "_escaped", "_kept", "_open", "_recent", "_shapes", "_space", "_style", "at")

    def __init__(self, shapes: tuple[Shape, ...], style: Style | None = None) -> None:
        self.at = At.VALUE
        self._shapes = shapes
        """The shape of the value that comes or is being written."""
        self._open: list[Open] = []
        self._kept = bytearray()
        """The name or value that is being written."""
        self._escaped = False
        self._space = bytearray()
        """White space since the last character that is none."""
        self._behind = b""
        """The last character, where white space may follow it."""
        self._style = style or Style()
        self._recent: dict[Shape, bytes] = {}
        """The text that a value with several had last."""

    # -- reading -------------------------------------------------------------------------------------------------------

    def feed(self, text: bytes) -> int:
        """Take in some text. Returns how many bytes of it belong to the value."""
        place, size = 0, len(text)
        while place < size:
            at = self.at
            if at is At.IN_TEXT or at is At.IN_NAME:
                place = self._read_string(text, place)
                continue
            if at is At.END or at is At.LOST:
                return place
            if at is At.IN_ATOM:
                place = self._read_atom(text, place)
                continue
            code = text[place]
            place += 1
            if code in _SPACE:
                if len(self._space) < MOST_KEPT:
                    self._space.append(code)
            else:
                self._read_mark(code)
        return place

    def _read_string(self, text: bytes, place: int) -> int:
        """Up to the end of the string or of the text."""
        start = place
        while place < len(text):
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            quote, slash = text.find(b'"', place), text.find(b"\\", place)
            if slash >= 0 and (slash < quote or quote < 0):
                self._escaped = True
                place = slash + 1
            elif quote >= 0:
                self._keep(text[start : quote + 1])
                self._end_string()
                return quote + 1
            else:
                place = len(text)
        self._keep(text[start:place])
        return place

    def _keep(self, text: bytes) -> None:
        room = MOST_KEPT - len(self._kept)
        self._kept += text[:room]

    def _end_string(self) -> None:
        if self.at is At.IN_TEXT:
            self._end_value()
            return
        text = bytes(self._kept)
        top = self._open[-1]
        fitting = [(shape, place) for shape in top.shapes if (place := shape.find(text, top.place)) is not None]
        if fitting:
            self._open[-1] = Open(True, tuple(shape for shape, _ in fitting), fitting[0][1] + 1, text)
        elif top.shapes and all(shape.closed for shape in top.shapes):
            self.at = At.LOST
            return
        else:
            self._open[-1] = top._replace(key=text)
        self.at = At.COLON

    def _read_atom(self, text: bytes, place: int) -> int:
        start = place
        while place < len(text) and text[place] not in b" \t\r\n,]}":
            place += 1
        self._keep(text[start:place])
        if place < len(text):
            self._end_value()
        return place

    def _end_value(self) -> None:
        """The value that was kept is complete: it may tell what its object is."""
        text = bytes(self._kept)
        for shape in self._shapes:
            if shape.num_texts > 1:
                self._recent[shape] = text
        narrow(self._open, text)
        self._close_value()

    def _close_value(self) -> None:
        self._behind = b""
        self._space.clear()
        self.at = At.COMMA if self._open else At.END

    def _read_mark(self, code: int) -> None:
        """A character that is no white space, outside strings and atoms."""
        mark = bytes((code,))
        self._learn_space(mark)
        match self.at:
            case At.VALUE:
                self._begin_value(mark)
            case At.NAME:
                if mark == b'"':
                    self._kept[:] = mark
                    self.at = At.IN_NAME
                else:
                    self._close(mark)
            case At.COLON:
                self._behind = mark
                top = self._open[-1]
                self._shapes = join(shape.value(top.key) for shape in top.shapes)
                self.at = At.VALUE if mark == b":" else At.LOST
            case _:
                if mark == b",":
                    self._behind = mark
                    self._go_on()
                else:
                    self._close(mark)

    def _learn_space(self, mark: bytes) -> None:
        is_object = bool(self._open) and self._open[-1].is_object
        if mark in b"}]":
            self._style.learn(mark, bytes(self._space), is_object=is_object, depth=len(self._open) - 1)
        elif self._behind:
            self._style.learn(self._behind, bytes(self._space), is_object=is_object, depth=len(self._open))
        self._behind = b""
        self._space.clear()

    def _begin_value(self, mark: bytes) -> None:
        if mark in b"{[":
            shapes = tuple(shape for shape in self._shapes if shape.begins == mark)
            self._open.append(Open(mark == b"{", shapes, 0, b""))
            self._behind = mark
            if mark == b"{":
                self.at = At.NAME
            else:
                self._shapes = join(shape.item(0) for shape in shapes)
        elif mark == b"]" and self._open and not self._open[-1].is_object:
            self._close(mark)
        else:
            self._kept[:] = mark
            self.at = At.IN_TEXT if mark == b'"' else At.IN_ATOM if mark in b"-0123456789tfn" else At.LOST

    def _go_on(self) -> None:
        """A comma: the next member comes."""
        top = self._open[-1]
        if top.is_object:
            self.at = At.NAME
        else:
            place = top.place + 1
            self._open[-1] = top._replace(place=place)
            self._shapes = join(shape.item(place) for shape in top.shapes)
            self.at = At.VALUE

    def _close(self, mark: bytes) -> None:
        if not self._open or mark != (b"}" if self._open[-1].is_object else b"]"):
            self.at = At.LOST
            return
        self._open.pop()
        self._close_value()

    # -- foreseeing ----------------------------------------------------------------------------------------------------

    def foresee(self, found: Foresight) -> bool:
        """Add what is likely to follow. Returns whether the value is complete with it."""
        writer = JsonWriter(found, self._open, self._style, self._recent)
        match self.at:
            case At.VALUE:
                writer.space(self._behind, bytes(self._space))
                writer.value(self._shapes)
            case At.NAME:
                writer.name(self._behind, bytes(self._space))
            case At.IN_NAME:
                writer.rest_of_name(bytes(self._kept))
            case At.COLON:
                writer.colon()
            case At.IN_TEXT | At.IN_ATOM:
                writer.rest_of_value(self._shapes, bytes(self._kept), is_text=self.at is At.IN_TEXT)
            case At.COMMA:
                writer.go_on(bytes(self._space))
            case _:
                return self.at is At.END
        return writer.is_complete
