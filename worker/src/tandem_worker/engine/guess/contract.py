"""What a guesser is to the engine: guesses by text and by draft heads, and later by block drafters, come through here.

Who guesses never changes an answer: a guess counts when it equals the token that would have been chosen anyway. So a
guesser may be wrong, late or absent, and need not be the same on the worker that takes a stream over.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from enum import StrEnum
from typing import NamedTuple, Protocol

from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.engine.schedule.request import Sequence


class Source(StrEnum):
    """What a guess was read from."""

    TEXT = "text"
    """The request's own prompt, and the choice's own answer."""
    PREDICTION = "prediction"
    """What the client said the answer will be."""
    SCHEMA = "schema"
    """The literal text of what holds the answer: a schema, the functions that it may call, a regex, a grammar."""
    HISTORY = "history"
    """Earlier answers to requests with the same cache salt."""
    HEAD = "head"
    """What a draft head makes of the model's inner states."""


class Guess(NamedTuple):
    """The next tokens of a choice, as somebody thinks."""

    tokens: tuple[int, ...]
    source: Source
    chances: tuple[float, ...]
    """Chance of each token to be right where all before it are."""


class Guesser(Protocol):
    """Guesses for many choices at a time: a head computes them in one pass."""

    def propose(self, sequences: Rows[Sequence], most: Mapping[Sequence, int], plan: StepPlan) -> dict[Sequence, Guess]:
        """Guesses behind the newest token of each, no more than `most` of it, which is at least 1. Those of which
        nothing is known have no entry. Learns on the way what the choices have said since it was asked last.

        `plan` has been decided but for its guesses, and nothing of it has been done: blocks that it copies or moves in
        are not filled yet."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The choice has ended: nothing more is asked about it."""
        ...
