"""Regexes that end an answer, searched for in a text that comes piece by piece. Pure.

The syntax is that of Python's `re`, read by its own parser; the search is another one. It follows all ways through the
patterns at once, so that a character costs at most one look at each of their steps, whatever patterns and text are
(K. Thompson, "Regular expression search algorithm", 1968). What has no such search is refused: backreferences,
look-around, atomic groups. A pattern is never compiled by `re`, whose search can take exponential time.

The match that is complete first wins, and of those that are complete at the same character the one that began first.
`^` and `\\A` are the beginning of the text, `$` and `\\Z` its end so far, and `\\b` waits for the character after it.
"""

from __future__ import annotations

import importlib
import re
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, IntEnum, auto
from functools import lru_cache
from typing import Any

MAX_STEPS = 256
"""Of all patterns of a request, with counted repetitions written out: what a character may cost."""
MAX_DEPTH = 50
"""Of groups within groups."""
_MAX_KNOWN = 256
"""Characters for which a class keeps what it answered."""

# Its grammar is documented, where its parser lives is not; the versions of Python that this package runs on agree.
_parser: Any = importlib.import_module("re._parser")

Test = Callable[[str], bool]
Match = tuple[int, int, int, int]
"""Characters of the text after which it was certain; where it begins; where it ends; the number of the pattern."""


class PatternError(ValueError):
    """A pattern cannot be searched for; a sentence without its subject and full stop."""

    number = 0
    """Which it is."""


class _Do(IntEnum):
    TAKE = auto()
    """One character, for which the argument is true."""
    SPLIT = auto()
    """Go on at both of the argument."""
    JUMP = auto()
    CHECK = auto()
    """Go on where the argument holds between the character before and that after."""
    MATCH = auto()
    """The pattern with this number is complete."""


TAKE, SPLIT, MATCH = int(_Do.TAKE), int(_Do.SPLIT), int(_Do.MATCH)


class _At(Enum):
    BEGINNING = auto()
    LINE_BEGINNING = auto()
    END = auto()
    LINE_END = auto()
    BOUNDARY = auto()
    NO_BOUNDARY = auto()


_ANCHORS = {
    "AT_BEGINNING": (_At.BEGINNING, _At.LINE_BEGINNING),
    "AT_BEGINNING_STRING": (_At.BEGINNING, _At.BEGINNING),
    "AT_END": (_At.END, _At.LINE_END),
    "AT_END_STRING": (_At.END, _At.END),
    "AT_BOUNDARY": (_At.BOUNDARY, _At.BOUNDARY),
    "AT_NON_BOUNDARY": (_At.NO_BOUNDARY, _At.NO_BOUNDARY),
}
"""What they mean, and what with the flag MULTILINE."""
_REFUSED = {
    "GROUPREF": "backreferences",
    "GROUPREF_EXISTS": "conditions on groups",
    "ASSERT": "look-ahead and look-behind",
    "ASSERT_NOT": "look-ahead and look-behind",
    "ATOMIC_GROUP": "atomic groups",
    "POSSESSIVE_REPEAT": "possessive repetitions",
}


class Patterns:
    """Several regexes as one program. Shared by all choices of a request; its state is only what makes it faster."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Raises PatternError."""
        self.texts = tuple(patterns)
        self._do: list[int] = []
        self._argument: list[Any] = []
        self._tests: dict[tuple[str, int, int], Test] = {}
        starts: list[int] = []
        for number, pattern in enumerate(patterns):
            starts.append(len(self._do))
            try:
                self._add(pattern, number)
            except PatternError as error:
                error.number = number
                raise
        self._starts = tuple(map(self._land, starts))
        self._next = [self._land(at + 1) for at in range(len(self._do))]
        self._argument = [
            tuple(map(self._land, argument)) if do == _Do.SPLIT else argument
            for do, argument in zip(self._do, self._argument, strict=True)
        ]
        checks = {argument for do, argument in zip(self._do, self._argument, strict=True) if do == _Do.CHECK}
        self.looks_ahead = not checks <= {_At.BEGINNING, _At.LINE_BEGINNING}
        """Whether the way on may depend on the next character before it is taken."""
        self._from_anywhere = not checks
        self._first: dict[str, bool] = {}

    def may_begin_with(self, character: str) -> bool:
        """Whether a match may: what decides it for nearly all characters of a text."""
        if not self._from_anywhere:
            return True
        known = self._first.get(character)
        if known is None:
            if len(self._first) >= _MAX_KNOWN:
                self._first.clear()
            waiting, _ = self.close((), 0, "", "")
            known = self._first[character] = any(self._argument[at](character) for at, _ in waiting)
        return known

    def close(
        self, ways: Iterable[tuple[int, int]], position: int, before: str, after: str | None
    ) -> tuple[list[tuple[int, int]], tuple[int, int] | None]:
        """Follow `ways` (step, beginning of the match), and one that begins here, up to the next character.

        Returns those that wait for one, in the order of their beginnings, and the first complete match as (beginning,
        number). `before` is the character before, "" at the beginning; `after` that after, "" where the text ends and
        None where it is not known: then nothing passes that must know it.
        """
        # Every character of an answer may come through here, with every step: so there is no call and no enum in it.
        do, argument = self._do, self._argument
        seen = bytearray(len(do))
        waiting: list[tuple[int, int]] = []
        found: tuple[int, int] | None = None
        for first, beginning in (*ways, *((start, position) for start in self._starts)):
            if do[first] == TAKE:  # most of them
                if not seen[first]:
                    seen[first] = 1
                    waiting.append((first, beginning))
                continue
            stack = [first]
            while stack:
                at = stack.pop()
                if seen[at]:
                    continue
                seen[at] = 1
                kind = do[at]
                if kind == TAKE:
                    waiting.append((at, beginning))
                elif kind == SPLIT:
                    stack += argument[at]
                elif kind == MATCH:
                    match = (beginning, argument[at])
                    found = match if found is None else min(found, match)
                elif _holds(argument[at], before, after):
                    stack.append(self._next[at])
        return waiting, found

    def take(self, waiting: Iterable[tuple[int, int]], character: str) -> list[tuple[int, int]]:
        """The ways that go on with `character`."""
        argument, after = self._argument, self._next
        return [(after[at], beginning) for at, beginning in waiting if argument[at](character)]

    def _land(self, at: int) -> int:
        """Where a way goes on that comes to `at`."""
        while at < len(self._do) and self._do[at] == _Do.JUMP:
            at = self._argument[at]
        return at

    # -- from a pattern to steps -----------------------------------------------------------------------------------

    def _add(self, pattern: str, number: int) -> None:
        start = len(self._do)
        try:
            tree = _parse(pattern)
            self._sequence(tree, tree.state.flags, 0)
            self._tests.clear()  # their names are addresses in the tree
        except (re.error, OverflowError, RecursionError) as error:
            reason = f"more than {MAX_DEPTH} levels of groups" if isinstance(error, RecursionError) else str(error)
            raise PatternError(f"is no regex that can be read: {reason}") from error
        self._emit(_Do.MATCH, number)
        if self._admits_nothing(start):
            raise PatternError("matches the empty text, and so would end every answer at its beginning")

    def _emit(self, do: _Do, argument: Any = None) -> int:
        if len(self._do) >= MAX_STEPS:
            raise PatternError(
                f"is too large: all together may have {MAX_STEPS} steps, with counted repetitions written out"
            )
        self._do.append(int(do))
        self._argument.append(argument)
        return len(self._do) - 1

    def _admits_nothing(self, start: int) -> bool:
        """Whether the way from `start` to the end may take no character, whatever stands around."""
        seen, stack = set[int](), [start]
        while stack:
            at = stack.pop()
            if at in seen:
                continue
            seen.add(at)
            match _Do(self._do[at]):
                case _Do.MATCH:
                    return True
                case _Do.SPLIT:
                    stack += self._argument[at]
                case _Do.JUMP:
                    stack.append(self._argument[at])
                case _Do.CHECK:
                    stack.append(at + 1)
                case _Do.TAKE:
                    pass
        return False

    def _sequence(self, items: Any, flags: int, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise PatternError(f"has more than {MAX_DEPTH} levels of groups")
        for op, value in items:
            self._item(op.name, value, flags, depth)

    def _item(self, name: str, value: Any, flags: int, depth: int) -> None:
        match name:
            case "SUBPATTERN":
                _, add, remove, inner = value
                # Of the three kinds of text a group has one: a new one takes the old one's place.
                kept = flags & ~(re.ASCII | re.UNICODE | re.LOCALE) if add & (re.ASCII | re.UNICODE) else flags
                self._sequence(inner, (kept | add) & ~remove, depth + 1)
            case "BRANCH":
                self._branch(value[1], flags, depth)
            case "MAX_REPEAT" | "MIN_REPEAT":
                # Where a match ends first does not depend on which way is tried first.
                least, most, inner = value
                self._repeat(least, most, inner, flags, depth)
            case "AT":
                plain, multiline = _ANCHORS[value.name]
                self._emit(_Do.CHECK, multiline if flags & re.MULTILINE else plain)
            case _ if name in _REFUSED:
                raise PatternError(f"has {_REFUSED[name]}, which are not supported")
            case _:
                self._emit(_Do.TAKE, self._shared_test(name, value, flags))

    def _shared_test(self, name: str, value: Any, flags: int) -> Test:
        """One for all steps that ask the same, as a repetition's do: what one finds out the others know."""
        key = (name, id(value), flags & (re.IGNORECASE | re.ASCII | re.DOTALL))
        test = self._tests.get(key)
        if test is None:
            test = self._tests[key] = _test(name, value, flags)
        return test

    def _branch(self, branches: Sequence[Any], flags: int, depth: int) -> None:
        ends: list[int] = []
        for branch in branches[:-1]:
            split = self._emit(_Do.SPLIT)
            self._sequence(branch, flags, depth + 1)
            ends.append(self._emit(_Do.JUMP))
            self._argument[split] = (split + 1, len(self._do))
        self._sequence(branches[-1], flags, depth + 1)
        for end in ends:
            self._argument[end] = len(self._do)

    def _repeat(self, least: int, most: int, inner: Any, flags: int, depth: int) -> None:
        endless = most == _parser.MAXREPEAT
        for _ in range(least):
            before = len(self._do)
            self._sequence(inner, flags, depth + 1)
            if len(self._do) == before:
                return  # it takes nothing, however often
        if endless:
            split = self._emit(_Do.SPLIT)
            self._sequence(inner, flags, depth + 1)
            self._emit(_Do.JUMP, split)
            self._argument[split] = (split + 1, len(self._do))
            return
        splits: list[int] = []
        for _ in range(most - least):
            splits.append(self._emit(_Do.SPLIT))
            self._sequence(inner, flags, depth + 1)
        for split in splits:
            self._argument[split] = (split + 1, len(self._do))


@lru_cache(maxsize=16)
def compile_patterns(patterns: tuple[str, ...]) -> Patterns:
    """Raises PatternError."""
    return Patterns(patterns)


def _parse(pattern: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what a later Python may read otherwise
        return _parser.parse(pattern)


def _holds(at: _At, before: str, after: str | None) -> bool:
    match at:
        case _At.BEGINNING:
            return not before
        case _At.LINE_BEGINNING:
            return before in ("", "\n")
        case _At.END:
            return not after
        case _At.LINE_END:
            return not after or after == "\n"
        case _At.BOUNDARY:
            return after is not None and _is_word(before) != _is_word(after)
        case _At.NO_BOUNDARY:
            return after is not None and _is_word(before) == _is_word(after)


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


# -- characters --------------------------------------------------------------------------------------------------------


class _Known(dict[str, bool]):
    """Remembers what a class answered for the last characters."""

    def __init__(self, test: Test) -> None:
        super().__init__()
        self._test = test

    def __missing__(self, character: str) -> bool:
        if len(self) >= _MAX_KNOWN:
            self.clear()
        answer = self[character] = self._test(character)
        return answer


def _test(name: str, value: Any, flags: int) -> Test:
    match name:
        case "LITERAL" if not flags & re.IGNORECASE:
            return chr(value).__eq__
        case "ANY":
            return (lambda character: True) if flags & re.DOTALL else "\n".__ne__
        case "LITERAL" | "NOT_LITERAL":
            return _class([("LITERAL", value)], flags, negated=name == "NOT_LITERAL")
        case "IN":
            named = [(op.name, each) for op, each in value]
            negated = named[0][0] == "NEGATE"
            return _class(named[1:] if negated else named, flags, negated=negated)
        case _:
            raise PatternError(f"has an element of the kind {name}, which is not supported")


def _class(items: Sequence[tuple[str, Any]], flags: int, *, negated: bool) -> Test:
    """What a look at it costs does not grow with its items, but for the logarithm of its ranges."""
    folds, ascii_only = bool(flags & re.IGNORECASE), bool(flags & re.ASCII)
    literals: set[str] = set()
    ranges: list[tuple[int, int]] = []
    categories: dict[str, None] = {}
    for kind, value in items:
        match kind:
            case "LITERAL":
                literals |= {chr(value)} | (_variants(chr(value), ascii_only) if folds else set())
            case "RANGE":
                ranges.append(value)
            case "CATEGORY":
                categories[value.name] = None
            case _:
                raise PatternError(f"has an element of the kind {kind}, which is not supported")
    lows, highs = _joined(ranges)

    def in_range(character: str) -> bool:
        code = ord(character)
        at = bisect_right(lows, code)
        return at > 0 and code <= highs[at - 1]

    def test(character: str) -> bool:
        equal = _variants(character, ascii_only) if folds else (character,)
        found = (
            not literals.isdisjoint(equal)
            or (bool(lows) and any(map(in_range, equal)))
            or any(_in_category(each, character, ascii_only) for each in categories)
        )
        return found != negated

    return _Known(test).__getitem__


def _joined(ranges: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The lows and highs of the same ranges, in order and apart from each other."""
    lows, highs = list[int](), list[int]()
    for low, high in sorted(ranges):
        if highs and low <= highs[-1]:
            highs[-1] = max(highs[-1], high)
        else:
            lows.append(low)
            highs.append(high)
    return lows, highs


@lru_cache(maxsize=_MAX_KNOWN)
def _variants(character: str, ascii_only: bool) -> frozenset[str]:
    """The characters that differ from it by case. All classes of a program ask for the same one."""
    if ascii_only and not character.isascii():
        return frozenset((character,))
    lower, upper = character.lower(), character.upper()
    every = {character, lower, upper, lower.upper(), upper.lower()}
    return frozenset(each for each in every if len(each) == 1 and (each.isascii() or not ascii_only))


@lru_cache(maxsize=_MAX_KNOWN)
def _in_category(name: str, character: str, ascii_only: bool) -> bool:
    kind = name.removeprefix("CATEGORY_").removeprefix("UNI_")
    negated = kind.startswith("NOT_")
    kind = kind.removeprefix("NOT_")
    foreign = ascii_only and not character.isascii()
    match kind:
        case "DIGIT":
            answer = character.isdecimal()
        case "SPACE":
            # The separators between files are space to Unicode, and not to ASCII.
            answer = character in " \t\n\r\f\v" if ascii_only else character.isspace()
        case _:
            answer = _is_word(character)
    return (answer and not foreign) != negated


# -- the search --------------------------------------------------------------------------------------------------------


class PatternSearch:
    """One text."""

    __slots__ = ("_before", "_waiting", "_ways", "patterns", "position")

    def __init__(self, patterns: Patterns) -> None:
        self.patterns = patterns
        """What is searched for."""
        self.position = 0
        """Characters that have come."""
        self._before = ""
        self._ways: list[tuple[int, int]] = []
        self._waiting: list[tuple[int, int]] = []

    @property
    def begun(self) -> int:
        """Characters at the end of the text that may be the beginning of a match."""
        return self.position - self._ways[0][1] if self._ways else 0

    def skip(self, text: str) -> None:
        """Text in which nothing is searched for."""
        if text:
            self._ways.clear()
            self.position += len(text)
            self._before = text[-1]

    def feed(self, text: str) -> Match | None:
        """The first match. After one nothing more may be fed."""
        patterns, ahead = self.patterns, self.patterns.looks_ahead
        for character in text:
            if not self._ways:
                if not patterns.may_begin_with(character):
                    self.position += 1
                    self._before = character
                    continue
                self._waiting, _ = patterns.close((), self.position, self._before, character)
            elif ahead:
                self._waiting, found = patterns.close(self._ways, self.position, self._before, character)
                if found is not None:
                    return self.position + 1, found[0], self.position, found[1]
            self._ways = patterns.take(self._waiting, character)
            self.position += 1
            self._before = character
            if self._ways:
                self._waiting, found = patterns.close(self._ways, self.position, character, None)
                if found is not None:
                    return self.position, found[0], self.position, found[1]
        return None

    def finish(self) -> Match | None:
        """The text ends here: a match that waited for the next character."""
        if not self._ways:
            return None
        _, found = self.patterns.close(self._ways, self.position, self._before, "")
        return None if found is None else (self.position, found[0], self.position, found[1])
