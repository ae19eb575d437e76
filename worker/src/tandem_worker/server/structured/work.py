"""What a JSON schema makes the grammar library compute that none of the library's own limits counts.

It is counted here, from the schema alone, so that the same schemas are refused on every machine. A step of `multipleOf`
becomes as many states as its digits have value (0.25 as many as 25), four to ten microseconds each; each pattern of
`patternProperties` is compared with each other pattern and property of its object. Both grow where schemas are combined
(`allOf`, or an applicator beside other keywords): steps to their least common multiple, objects to those with the
patterns of all. What is combined with what is not worked out: it may be anything of the schema.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from tandem_worker.server.structured.contract import GrammarError

MOST_STATES = 20_000
"""States of all steps of `multipleOf`: a tenth of a second."""
MOST_PAIRS = 20_000
"""Pairs of patterns with patterns and properties: a tenth of a second."""
MOST_COMBINED_PATTERNS = 10
"""They are compared again for every combination."""

_APPLICATORS = ("anyOf", "oneOf", "$ref")
_SILENT = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    "$schema", "$id", "$anchor", "$comment", "$defs", "definitions",
})  # fmt: skip
"""Keywords that restrict nothing."""


class SchemaWork:
    """Sees every object of a schema once, in any order, then says whether all of it is within the limits."""

    __slots__ = ("_combines", "_num_names", "_pairs", "_patterns", "_steps")

    def __init__(self) -> None:
        self._steps: set[tuple[int, int]] = set()
        self._patterns: set[str] = set()
        self._num_names = 0
        self._pairs = 0
        self._combines = False

    def see(self, schema: Mapping[str, Any]) -> None:
        """Note what one object asks for; it may be no schema at all, as the values of an `enum`."""
        step = schema.get("multipleOf")
        if step and isinstance(step, int | float) and (isinstance(step, int) or math.isfinite(step)):
            self._steps.add(_read_step(step))
        names, patterns = schema.get("properties"), schema.get("patternProperties")
        num_names = len(names) if isinstance(names, Mapping) else 0
        self._num_names += num_names
        if isinstance(patterns, Mapping):
            self._patterns.update(patterns)
            self._pairs += len(patterns) * (len(patterns) + num_names)
        if "allOf" in schema or (not self._combines and _combines(schema)):
            self._combines = True

    def check(self) -> None:
        """Raises GrammarError."""
        self._check_steps()
        if self._pairs > MOST_PAIRS:
            raise GrammarError(
                "it has too many 'patternProperties': the patterns of an object with its patterns and properties are "
                f"{self._pairs} pairs, and at most {MOST_PAIRS} are allowed"
            )
        if not self._combines or len(self._patterns) <= 1:
            return
        if len(self._patterns) > MOST_COMBINED_PATTERNS:
            raise GrammarError(
                f"it has {len(self._patterns)} different 'patternProperties' and combines schemas: at most "
                f"{MOST_COMBINED_PATTERNS} are allowed beside 'allOf', or beside '$ref' and 'anyOf' that have keywords "
                "beside them"
            )
        pairs = len(self._patterns) * (len(self._patterns) + self._num_names)
        if pairs > MOST_PAIRS:
            raise GrammarError(
                "it combines schemas with too many 'patternProperties': all patterns with all patterns and properties "
                f"are {pairs} pairs, and at most {MOST_PAIRS} are allowed"
            )

    def _check_steps(self) -> None:
        if sum(coefficient for coefficient, _ in self._steps) > MOST_STATES:
            raise GrammarError(
                f"its steps of 'multipleOf' are too large: without their points they may add up to {MOST_STATES}"
            )
        if not self._combines or len(self._steps) < 2:
            return
        places = max(places for _, places in self._steps)
        multiple = math.lcm(*(coefficient * 10 ** (places - own) for coefficient, own in self._steps))
        if _without_zeros(multiple, places)[0] > MOST_STATES:
            raise GrammarError(
                "its steps of 'multipleOf' are too large: it combines schemas, and the least common multiple of all "
                f"steps may, without its point, be {MOST_STATES}"
            )


def _read_step(step: int | float) -> tuple[int, int]:
    """Its digits as a whole number, and how many of them stand behind the point: 0.25 is (25, 2), 1e3 is (1000, 0)."""
    if isinstance(step, int):
        return abs(step), 0
    _, digits, exponent = Decimal(str(step)).as_tuple()
    coefficient = int("".join(map(str, digits)))
    assert isinstance(exponent, int)  # it is finite
    return (coefficient * 10**exponent, 0) if exponent > 0 else _without_zeros(coefficient, -exponent)


def _without_zeros(coefficient: int, places: int) -> tuple[int, int]:
    while places and coefficient % 10 == 0:
        coefficient, places = coefficient // 10, places - 1
    return coefficient, places


def _combines(schema: Mapping[str, Any]) -> bool:
    applied = [key for key in _APPLICATORS if key in schema]
    return len(applied) > 1 or (len(applied) == 1 and not _SILENT.issuperset(schema.keys() - {applied[0]}))
