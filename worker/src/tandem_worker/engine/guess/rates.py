"""How often guesses are right: by where they come from and by how much of the text before them was found there too, or
how sure they are otherwise.

Everything is learned from every token, whether its guess was checked or not: a guess that nobody checks costs nothing
and is right or wrong all the same. So what was once useless is tried again as soon as it would have been right.
"""

from __future__ import annotations

from tandem_worker.engine.guess.contract import Source

MOST_LENGTH = 32
"""Longer matches are taken for this long."""
_PRIOR = (0.25, 0.12, 0.35, 0.50, 0.60, 0.66, 0.71, 0.75, 0.78, 0.80, 0.82, 0.84, 0.85, 0.86, 0.87, 0.88)
"""Chance that a guess is right before any was tried, by the length of the match; of longer ones the last. Measured on
SmolLM2's answers to chats, edits and tool calls."""
_LITERAL_PRIOR = (0.97, 0.9, 0.9, 0.75, 0.7, 0.7, 0.7, 0.6, 0.5, 0.5, 0.5, 0.4)
"""The same of the text of a schema, by its grade."""
_PRIOR_WEIGHT = 8.0
_MEMORY = 400.0
"""Trials of a kind after which older ones count half."""
_OWN_DECAY = 0.9
_OWN_WEIGHT = 2.0
_HIGHEST = 0.995


class Rates:
    """How often the guesses of all choices of an engine are right, by source and length of the match."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = {
            source: [
                [_PRIOR_WEIGHT * prior[min(length, len(prior) - 1)], _PRIOR_WEIGHT] for length in range(MOST_LENGTH + 1)
            ]
            for source in Source
            for prior in (_LITERAL_PRIOR if source is Source.SCHEMA else _PRIOR,)
        }

    def chance(self, source: Source, length: int) -> float:
        """Chance that the token behind a match of `length` tokens is the next one, 0 to 1."""
        hits, trials = self._counts[source][length if length < MOST_LENGTH else MOST_LENGTH]
        return hits / trials

    def record(self, source: Source, length: int, *, hit: bool) -> None:
        """Such a guess was right, or was not."""
        counts = self._counts[source][length if length < MOST_LENGTH else MOST_LENGTH]
        counts[0] += hit
        counts[1] += 1.0
        if counts[1] > _MEMORY:
            counts[0] /= 2
            counts[1] /= 2


class Luck:
    """How much better or worse the guesses of one choice do than those of others; older ones fade."""

    __slots__ = ("_expected", "_hits")

    def __init__(self) -> None:
        self._expected = self._hits = _OWN_WEIGHT

    def record(self, chance: float, *, hit: bool) -> None:
        """A guess with this chance was right, or was not."""
        self._expected = _OWN_WEIGHT + _OWN_DECAY * (self._expected - _OWN_WEIGHT) + chance
        self._hits = _OWN_WEIGHT + _OWN_DECAY * (self._hits - _OWN_WEIGHT) + hit

    def apply(self, chance: float) -> float:
        """The chance of this choice's guess."""
        return min(_HIGHEST, chance * self._hits / self._expected)
