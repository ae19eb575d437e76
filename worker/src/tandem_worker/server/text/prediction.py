"""How much of what a client predicted an answer has said: what `usage` counts. Pure.

It is counted from the tokens alone, whether anybody guessed by the prediction or not, so it is the same on every worker
and after every move.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tandem_worker.engine.guess.contract import Source
from tandem_worker.engine.guess.follow import DocumentFollower
from tandem_worker.engine.guess.lookup import index_prediction
from tandem_worker.engine.guess.ngrams import CompleteIndex


class Prediction:
    """What was predicted, for all choices of a request."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.num_tokens = len(token_ids)
        self._token_ids = token_ids

    @cached_property
    def index(self) -> CompleteIndex:
        """Places of its runs. Made for the first answer that comes: a request that waits in the queue has none."""
        return index_prediction(self._token_ids)

    def begin(self) -> PredictionTally:
        """For a choice that has said nothing yet."""
        return PredictionTally(self)


class PredictionTally:
    """Tally of how much of the prediction one choice has said."""

    __slots__ = ("_accepted", "_follower", "_prediction", "_text", "num_tokens")

    def __init__(self, prediction: Prediction) -> None:
        self.num_tokens = prediction.num_tokens
        self._prediction = prediction
        self._follower: DocumentFollower | None = None
        self._text: list[int] = []
        self._accepted = 0

    @property
    def accepted(self) -> int:
        """Tokens of the answer that were the next ones of the prediction, from its beginning or from where the two met
        again; never more than it has."""
        return min(self._accepted, self.num_tokens)

    def feed(self, token_id: int) -> None:
        """The choice has this token more."""
        if self._follower is None:
            self._follower = DocumentFollower(Source.PREDICTION, self._prediction.index, from_start=True)
        self._accepted += self._follower.peek() == token_id
        self._text.append(token_id)
        self._follower.feed(self._text)
