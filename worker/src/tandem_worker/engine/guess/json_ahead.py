"""What text of an answer in JSON follows for certain or probably, by its schema. Pure.

From where an answer stands `JsonWriter` writes on up to the next value that nobody knows: property names in their
order, what is between them, texts of enumerations, brackets. White space is written as this answer has written it so
far.
"""

from __future__ import annotations

from enum import IntEnum
from itertools import islice
from typing import NamedTuple

from tandem_worker.engine.guess.shapes import MOST_SHAPES, Shape, join

MOST_AHEAD = 64
"""Bytes that are foreseen at once."""
MOST_KEPT = 256
"""Bytes of a name or value that are remembered: longer ones are not told apart."""
_MOST_LOOKED_AT = 1024
"""Texts of all shapes of a value that are looked at, the first ones of more, or names of properties: a tenth of a
millisecond."""


class Grade(IntEnum):
    """How sure a piece of text is, surest first; how often each comes true is learned."""

    SURE = 0
    EDGE = 1
    """It ends where an unknown value begins: the tokenizer may join the two."""
    LITERAL = 2
    """A text goes on that is not JSON."""
    OPENING = 3
    """The answer begins."""
    SPACE = 4
    """White space at a place where this answer has had none yet."""
    MORE = 5
    """An array goes on."""
    OPTIONAL = 6
    """A property that may be left out is not."""
    CLOSE = 7
    """An object that may have more properties ends."""
    KIND = 8
    """The value is of the first of several kinds."""
    CHOICE = 9
    """The value is one of several texts."""
    NUMBER = 10
    """A number ends here."""
    AGAIN = 11
    """A text begins of which little was seen."""


class Foresight:
    """Text that is likely to follow, and from which byte on it is how sure."""

    __slots__ = ("grades", "text")

    def __init__(self) -> None:
        self.text = bytearray()
        self.grades: list[tuple[int, Grade]] = []

    def add(self, text: bytes, grade: Grade = Grade.SURE) -> None:
        """The grade is that of the first byte behind what is there already."""
        if not self.is_full:
            if grade is not Grade.SURE:
                self.grades.append((len(self.text), grade))
            self.text += text[: MOST_AHEAD - len(self.text)]

    @property
    def is_full(self) -> bool:
        """Nothing more is added."""
        return len(self.text) >= MOST_AHEAD


class Open(NamedTuple):
    """An object or array that has begun."""

    is_object: bool
    shapes: tuple[Shape, ...]
    """What it may be, by what it has so far."""
    place: int
    """Place of the property or item that is due next."""
    key: bytes
    """Text of the property whose value comes."""


class Style:
    """How an answer writes white space; what it has not written yet is as `json.dumps` has it."""

    __slots__ = ("_exact", "_indent", "_inline", "_is_broken")

    def __init__(self) -> None:
        self._exact: dict[tuple[bytes, bool, int], bytes] = {}
        """What was written last: by the mark before it, or the bracket behind it, in an object (True) or array, and by
        how deep that is."""
        self._inline: dict[bytes, bytes] = {}
        """The same by the mark alone, without breaks of lines."""
        self._is_broken: dict[bool, bool] = {}
        """Whether objects (True) and arrays have a line for each member."""
        self._indent = 2

    def learn(self, mark: bytes, space: bytes, *, is_object: bool, depth: int) -> None:
        """White space was written behind a mark, or before a closing bracket."""
        if depth <= MOST_KEPT:
            self._exact[mark, is_object, depth] = space
        if space.startswith(b"\n"):
            self._is_broken[is_object] = True
            if depth and len(space) > 1 and (len(space) - 1) % depth == 0:
                self._indent = (len(space) - 1) // depth
        else:
            self._inline[mark] = space
            if mark in b",{[":
                self._is_broken[is_object] = False

    def write(self, mark: bytes, *, is_object: bool, depth: int) -> bytes:
        """White space behind such a mark, or before a closing bracket."""
        exact = self._exact.get((mark, is_object, depth))
        if exact is None and mark == b",":
            exact = self._exact.get((b"{" if is_object else b"[", is_object, depth))
            exact = exact if exact and exact.startswith(b"\n") else None
        if exact is not None:
            return exact
        if mark != b":" and self._is_broken.get(is_object, self._is_broken.get(True, False)):
            return self.line(depth)
        if mark == b"," and mark not in self._inline:
            mark = b":"  # who leaves no space there leaves none here
        return self._inline.get(mark, b" " if mark == b":" else b"")

    def line(self, depth: int) -> bytes:
        """The beginning of a line."""
        return b"\n" + b" " * (self._indent * depth)

    def knows(self, mark: bytes, *, is_object: bool) -> bool:
        """Whether it goes by what was written."""
        return mark in self._inline or (mark != b":" and is_object in self._is_broken)


def narrow(opened: list[Open], text: bytes) -> None:
    """A value is complete: where it is named by some of the shapes of its object alone, the object is one of these."""
    if not opened or len(opened[-1].shapes) < 2 or not opened[-1].is_object:
        return
    top, room = opened[-1], _MOST_LOOKED_AT
    fitting: list[Shape] = []
    known: dict[int, bool] = {}
    """Whether the text is one of those of a group of values, which several shapes may share."""
    for place, shape in enumerate(top.shapes):
        if room <= 0:  # the others may be it
            fitting.extend(top.shapes[place:])
            break
        values = shape.value(top.key)
        fits = known.get(id(values))
        if fits is None:
            room -= max(1, sum(value.num_texts for value in values))
            fits = known[id(values)] = any(text in value.texts for value in values)
        if fits:
            fitting.append(shape)
    if fitting:
        opened[-1] = top._replace(shapes=tuple(fitting))


class JsonWriter:
    """Writes on until a value comes that is not known, or enough is written."""

    __slots__ = ("_found", "_open", "_recent", "_style", "is_complete")

    def __init__(self, found: Foresight, opened: list[Open], style: Style, recent: dict[Shape, bytes]) -> None:
        self._found = found
        self._open = opened.copy()
        self._style = style
        self._recent = recent
        self.is_complete = False

    def space(self, behind: bytes, written: bytes) -> None:
        """The rest of the white space behind a character, of which some is written."""
        if not behind:
            return
        is_object = bool(self._open) and self._open[-1].is_object
        whole = self._style.write(behind, is_object=is_object, depth=len(self._open))
        if written.startswith(b"\n") and not whole.startswith(b"\n"):
            whole = self._style.line(len(self._open))
        known = self._style.knows(behind, is_object=is_object) and whole.startswith(written)
        rest = whole[len(written) :] if whole.startswith(written) else b""
        self._found.add(rest, Grade.SURE if known else Grade.SPACE)

    def value(self, shapes: tuple[Shape, ...]) -> None:
        """A value of the first of these shapes, as far as it is known."""
        if not shapes or self._found.is_full:
            return
        shape = shapes[0]
        grade = Grade.KIND if len(shapes) > 1 else Grade.SURE
        if shape.texts:
            self.rest_of_value(shapes, b"", is_text=shape.texts[0].startswith(b'"'))
        elif shape.begins in (b"{", b"["):
            self._found.add(shape.begins, grade)
            is_object = shape.begins == b"{"
            self._open.append(Open(is_object, shapes if len(shapes) > 1 else (shape,), 0, b""))
            if is_object:
                self.name(b"{", b"")
            elif items := shape.item(0):
                self.space(b"[", b"")
                self.value(items)
        elif shape.begins:
            self._found.add(shape.begins, grade)

    def rest_of_value(self, shapes: tuple[Shape, ...], written: bytes, *, is_text: bool) -> None:
        """The rest of a value that has begun: one of its texts, or the end of a number."""
        every = islice(((text, shape) for shape in shapes for text in shape.texts), _MOST_LOOKED_AT)
        fitting = list(islice(((text, shape) for text, shape in every if text.startswith(written)), MOST_SHAPES))
        if fitting:
            text, shape = fitting[0]
            recent = self._recent.get(shape)
            if recent is not None and recent.startswith(written):
                text = recent
            common = max(len(written), _common([each for each, _ in fitting]))
            self._found.add(text[len(written) : common])
            self._found.add(text[common:], Grade.SURE if len(fitting) == 1 == len(shapes) else Grade.CHOICE)
            narrow(self._open, text)
            self.go_on()
            return
        if not is_text:
            self.go_on(grade=Grade.NUMBER)

    def rest_of_name(self, written: bytes) -> None:
        """The rest of a property's name that has begun, and what follows."""
        shapes = self._open[-1].shapes
        for shape in shapes:
            place = shape.complete(written, self._open[-1].place, _MOST_LOOKED_AT // len(shapes))
            if place is not None:
                self._name_of(shape, place, len(written), Grade.OPTIONAL)
                return

    def name(self, behind: bytes, written: bytes) -> None:
        """The property that is due, where there is one."""
        top = self._open[-1]
        if not top.shapes:
            return
        shape = top.shapes[0]
        if shape.name(top.place) is None:
            return
        self.space(behind, written)
        self._name_of(shape, top.place, 0, self._sureness(shape, top))

    @staticmethod
    def _sureness(shape: Shape, top: Open) -> Grade:
        if len(top.shapes) > 1:
            return Grade.KIND
        return Grade.SURE if shape.is_required(top.place) else Grade.OPTIONAL

    def _name_of(self, shape: Shape, place: int, written: int, grade: Grade) -> None:
        """The rest of a property's name, and what follows."""
        name = shape.name(place)
        assert name is not None
        self._found.add(name[written:], grade)
        top = self._open[-1]
        fitting = top.shapes if top.shapes[0] is shape else (shape,)
        self._open[-1] = Open(True, fitting, place + 1, name)
        self.colon()

    def colon(self) -> None:
        """What stands behind a property's name, and its value."""
        top = self._open[-1]
        self._found.add(b":")
        self.space(b":", b"")
        self.value(join(shape.value(top.key) for shape in top.shapes))

    def go_on(self, written: bytes = b"", grade: Grade = Grade.SURE) -> None:
        """A value is complete: the next member of what is open, or its end."""
        found = self._found
        while not found.is_full:
            if not self._open:
                self.is_complete = True
                return
            top = self._open[-1]
            if not top.shapes:
                return
            shape = top.shapes[0]
            if top.is_object:
                if shape.name(top.place) is not None:
                    found.add(b",", max(grade, self._sureness(shape, top)))
                    self.name(b",", b"")
                    return
                grade = max(grade, Grade.SURE if shape.closed else Grade.CLOSE)
            elif not shape.is_full(top.place + 1):
                found.add(b",", max(grade, Grade.MORE))
                self._open[-1] = top._replace(place=top.place + 1)
                self.space(b",", b"")
                self.value(join(each.item(top.place + 1) for each in top.shapes))
                return
            self._end(top, written, grade)
            written, grade = b"", Grade.SURE

    def _end(self, top: Open, written: bytes, grade: Grade) -> None:
        """Close what is open."""
        self._open.pop()
        mark = b"}" if top.is_object else b"]"
        space = self._style.write(mark, is_object=top.is_object, depth=len(self._open))
        self._found.add(space[len(written) :] if space.startswith(written) else b"", grade)
        self._found.add(mark, grade)


def _common(texts: list[bytes]) -> int:
    """Bytes that all of them begin with."""
    first, last = min(texts), max(texts)
    size = 0
    while size < min(len(first), len(last)) and first[size] == last[size]:
        size += 1
    return size
