"""Structural tags as a grammar: the library's own way to write them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llguidance import StructTag

from tandem_worker.server.structured.compiler import HEADER, bound_whitespace
from tandem_worker.server.structured.contract import GrammarError, StructuralTag


def write_structural_tags(tags: Sequence[StructuralTag], special: Collection[str]) -> str:
    """Answers are free text with these tags in it. `special`: texts of tokens that no text consists of.

    Raises:
        GrammarError: a text of a tag has one of `special`, so no answer could have it.
    """
    for tag in tags:
        for text in (tag.begin, tag.end):
            found = next((each for each in special if each and each in text), None)
            if found is not None:
                raise GrammarError(f"{text[:80]!r} has {found!r}, a special token of this model, which is no text")
    grammar = StructTag.to_grammar(
        [StructTag(trigger=t.trigger, begin=t.begin, grammar=bound_whitespace(t.schema), end=t.end) for t in tags],
        assume_special=False,
    )
    # DEL is the one character that JSON leaves as it is and Lark does not take.
    return HEADER + grammar.removeprefix("%llguidance {}\n").replace("\x7f", "\\u007f")
