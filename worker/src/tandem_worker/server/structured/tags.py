"""Structural tags as a grammar in llguidance's dialect of Lark.

Free text that ends at a mark is a lazy lexeme: it takes what comes up to the first mark, and the mark. Free text at the
end of an answer is a lexeme that has no trigger anywhere. So a trigger is never free text, and each begins a tag.
Source: llguidance, docs/syntax.md, "Lazy lexemes" and "Tool calling".
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable

from llguidance import regex_to_lark

from tandem_worker.server.openai.structural_tags import (
    AnyText,
    ConstString,
    Format,
    JsonSchema,
    Or,
    Regex,
    Sequence,
    Tag,
    TagsWithSeparator,
    TriggeredTags,
)
from tandem_worker.server.structured.compiler import HEADER, embed_json_schema
from tandem_worker.server.structured.errors import GrammarError
from tandem_worker.server.structured.limits import GrammarLimits

_ANY = r"/(.|\n)*/"
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~\-/]")

Ends = tuple[str, ...] | None
"""What comes right after: one of these texts, which belongs to what is written; or (None) the answer's end. Without
any: something that is not known here."""


def write_structural_tag(answer: Format, limits: GrammarLimits, special: Collection[str]) -> str:
    """Answers are texts of this format. `special`: texts of tokens that no text consists of. Raises GrammarError."""
    writer = _Writer(limits)
    start = writer.write(answer, None)
    writer.check_texts(special)
    return HEADER + "\n".join([f"start: {start or _literal('')}", *writer.rules]) + "\n"


class _Writer:
    """What is needed in several places is written once and has a name: so the grammar grows with the request alone, and
    not with its square."""

    def __init__(self, limits: GrammarLimits) -> None:
        self.rules: list[str] = []
        self._limits = limits
        self._names: dict[tuple[str, str], str] = {}
        self._literals: dict[str, str] = {}
        self._size = 0

    def write(self, node: Format, ends: Ends) -> str:
        """An expression for `node` with what comes right after it."""
        match node:
            case AnyText():
                return self._last(node, (), node.excludes, ends)
            case TriggeredTags():
                return self._triggered(node, ends)
            case Sequence():
                return self._sequence(node, ends)
            case Or():
                return "(" + " | ".join(self.write(each, ends) or _literal("") for each in node.elements) + ")"
            case Tag():
                return f"{self._fixed(node.begin)} {self._after_text(node, ends)}"
            case TagsWithSeparator():
                return f"{self._separated(node)} {self._close(ends)}"
            case ConstString():
                return f"{self._fixed(node.value)} {self._after_text(node, ends)}"
            case JsonSchema():
                return f"{self._rule(embed_json_schema(node.schema))} {self._close(ends)}"
            case Regex():
                return self._regex(node, ends)
            case _:
                raise AssertionError(f"unknown: {node}")

    def _regex(self, node: Regex, ends: Ends) -> str:
        """A lexeme takes as much as it can: it would take the text after it too. So it takes that with it, lazily."""
        self._limits.check_regex(node.pattern)
        pattern = f"/{regex_to_lark(node.pattern, '')}/"
        if ends in (None, (), ("",)):
            return self._lexeme(pattern)
        assert ends is not None
        return self._rule(" | ".join(self._lexeme(f"{pattern} {self._fixed(end)}", lazy=True) for end in ends))

    def _sequence(self, node: Sequence, ends: Ends) -> str:
        parts: list[str] = []
        begun = False  # whether the text that an element begins with is written, with the regex before it
        for index, each in enumerate(node.elements):
            after = node.elements[index + 1] if index + 1 < len(node.elements) else None
            right: Ends = ends if after is None else ()
            if isinstance(each, Regex) and isinstance(after, ConstString | Tag):
                right = (after.value if isinstance(after, ConstString) else after.begin,)
            if begun and isinstance(each, ConstString | Tag):
                parts.append(self._after_text(each, right))
            else:
                parts.append(self.write(each, right))
            begun = isinstance(each, Regex) and isinstance(after, ConstString | Tag)
        return " ".join(parts)

    def _after_text(self, node: ConstString | Tag, ends: Ends) -> str:
        """What of it comes after the text that it begins with, and what comes right after it."""
        close = self._close(ends)
        return f"{self._inside(node)} {close}" if isinstance(node, Tag) else close

    def _inside(self, tag: Tag) -> str:
        """From behind the beginning of a tag to its end."""
        return self._rule(self.write(tag.content, tag.ends))

    def _triggered(self, node: TriggeredTags, ends: Ends) -> str:
        options: list[str] = []
        for trigger in node.triggers:
            # The text before a trigger has no other one: it would have ended there.
            before = self._text(trigger, (), node.excludes)
            tags = [tag for tag in node.tags if tag.begin.startswith(trigger)]
            rest = " | ".join(f"{self._fixed(tag.begin[len(trigger) :])} {self._inside(tag)}" for tag in tags)
            options.append(f"{before} ({rest})")
        piece = self._rule(" | ".join(options))
        if node.stop_after_first:
            alone = f"{piece} {self._close(ends)}"
            return alone if node.at_least_one else f"({alone} | {self._last(node, node.triggers, node.excludes, ends)})"
        return f"{piece}{'+' if node.at_least_one else '*'} {self._last(node, node.triggers, node.excludes, ends)}"

    def _separated(self, node: TagsWithSeparator) -> str:
        tag = self._rule(" | ".join(f"{self._fixed(tag.begin)} {self._inside(tag)}" for tag in node.tags))
        more = "" if node.stop_after_first else f" ({self._fixed(node.separator)} {tag})*"
        return f"({tag}{more}){'' if node.at_least_one else '?'}"

    def _last(self, node: Format, without: Iterable[str], excludes: Iterable[str], ends: Ends) -> str:
        """Free text to the end of whatever it stands in."""
        if ends is None:
            return self._free([*without, *excludes])
        if ends in ((), ("",)):
            raise GrammarError(
                f"{node.path}: free text must be the last part of an answer, or of a tag whose end is not empty"
            )
        for end in ends:
            if any(end in trigger or trigger in end for trigger in without):
                raise GrammarError(f"{node.path}: the end {end!r} and a trigger are part of each other")
        return self._rule(" | ".join(self._text(end, without, excludes) for end in ends))

    def _text(self, mark: str, without: Iterable[str], excludes: Iterable[str]) -> str:
        """Free text up to the first `mark`, which is its end."""
        return self._lexeme(f"{self._free([*without, *excludes])} {self._fixed(mark)}", lazy=True)

    def _free(self, marks: Collection[str]) -> str:
        """Text in which none of these is."""
        if not marks:
            return self._lexeme(_ANY)
        listed = "|".join(_META.sub(r"\\\g<0>", mark).replace("\n", r"\n") for mark in marks)
        return self._lexeme(rf"{_ANY} & ~/(.|\n)*({listed})(.|\n)*/")

    def _close(self, ends: Ends) -> str:
        if not ends:
            return ""
        return self._fixed(ends[0]) if len(ends) == 1 else self._rule(" | ".join(map(self._fixed, ends)))

    def _fixed(self, text: str) -> str:
        literal = self._literals.get(text)
        if literal is None:
            self._size += len(text)
            self._limits.check_fixed_texts(len(self._literals) + 1, self._size)
            literal = self._literals[text] = _literal(text) if text else ""
        return literal

    def check_texts(self, special: Collection[str]) -> None:
        """Raises GrammarError where a text has one of `special`."""
        every = "\0".join(self._literals)
        for each in special:
            if each and each in every:
                text = next((text for text in self._literals if each in text), each)
                raise GrammarError(f"{text[:80]!r} has {each!r}, a special token of this model, which is no text")

    def _rule(self, body: str) -> str:
        return self._add("r", "", body)

    def _lexeme(self, body: str, *, lazy: bool = False) -> str:
        return self._add("l", "[lazy]", body) if lazy else self._add("L", "", body)

    def _add(self, kind: str, attributes: str, body: str) -> str:
        name = self._names.get((kind, body))
        if name is None:
            name = self._names[kind, body] = f"{kind}{len(self.rules)}"
            self.rules.append(f"{name}{attributes}: {body.strip() or _literal('')}")
        return name


def _literal(text: str) -> str:
    """A string of Lark; DEL is the one character that JSON leaves as it is and Lark does not take."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
