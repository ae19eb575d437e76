"""Guesses without a model: what followed the last tokens of a choice where they stood before.

Looked through are the choice's own text, its prediction where the client sent one, and earlier answers. A new kind of
text is one more follower. Beside the history, whose size is given, what is kept is bounded by the requests that run:
100 bytes for each token of a prompt and 32 for each of a prediction, shared by its choices, 9 more for each choice and
token of the prompt, and some 250 for each token of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows

from tandem_worker.engine.guess.contract import Guess, Source
from tandem_worker.engine.guess.follow import DocumentFollower, Follower, TextFollower
from tandem_worker.engine.guess.history import History, HistoryFollower
from tandem_worker.engine.guess.ngrams import MOST_TOKENS, CompleteIndex
from tandem_worker.engine.guess.rates import Luck, Rates
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.engine.schedule.request import Sequence

_FEW = 64
"""Tokens of an answer that are learned one by one by a choice that has said them already; more are indexed at once."""
_MOST_BEGUN = MOST_TOKENS
"""Tokens of texts that are indexed in a step, or one text of any length: ten milliseconds. Streams beside them wait no
longer, however many prompts are begun at once; the choices that are left are guessed from a later step on."""


class LookupGuesser:
    """Implements `guess.contract.Guesser`. A choice's part is in its `guessing`."""

    def __init__(self, history: History | None = None) -> None:
        """`history` None: earlier answers are forgotten."""
        self._rates = Rates()
        self._history = history

    def propose(self, sequences: Rows[Sequence], most: Mapping[Sequence, int], plan: StepPlan) -> dict[Sequence, Guess]:
        del plan  # texts are known whatever happens to blocks
        found: dict[Sequence, Guess] = {}
        room = _MOST_BEGUN
        for sequence in sequences:
            reader: Reader | None = sequence.guessing
            if reader is None:
                if room <= 0:
                    continue
                room -= sequence.num_tokens + len(sequence.request.prediction)
                reader = sequence.guessing = build_reader(sequence, self._rates, self._history)
            reader.learn(sequence.output)
            guess = reader.guess(most[sequence])
            if guess is not None:
                found[sequence] = guess
        return found

    def forget(self, sequence: Sequence) -> None:
        sequence.guessing = None
        if self._history is not None:
            self._history.add(sequence.request.cache_salt, sequence.prompt, sequence.output)


def index_prediction(token_ids: Rows[int]) -> CompleteIndex:
    """Index of a prediction, which is followed from its beginning: of its first tokens, where it is too long."""
    return CompleteIndex(token_ids[:MOST_TOKENS])


def build_reader(sequence: Sequence, rates: Rates, history: History | None) -> Reader:
    """For a choice, wherever it stands. The choices of a request share the index of their prompt."""
    request, output = sequence.request, sequence.output
    shared = len(output) <= _FEW
    if shared and request.prompt_index is None:
        request.prompt_index = CompleteIndex(sequence.prompt[:-1])
    known = 0 if shared else len(output)
    index = request.prompt_index if shared else CompleteIndex([*sequence.prompt, *output][:-1])
    last = output[-1] if known else sequence.prompt[-1]
    text = [*index.tokens, last]
    followers: list[Follower] = [TextFollower(text, index)]
    if request.prediction:
        if request.prediction_index is None:
            request.prediction_index = index_prediction(request.prediction)
        followers.append(DocumentFollower(Source.PREDICTION, request.prediction_index, from_start=not known))
    if history is not None:
        followers.append(HistoryFollower(history, request.cache_salt, request.prompt, from_start=not known))
    return Reader(text, known, followers, rates)


_LEAST_VALUE = 0.05
"""Least chance of a guess to be reached and right: what comes after is not worth looking at."""


class Reader:
    """One choice: its text, and where it is followed."""

    __slots__ = ("_followers", "_known", "_rates", "_text")

    def __init__(self, text: list[int], known: int, followers: list[Follower], rates: Rates) -> None:
        """`known`: leading tokens of the answer that are in `text` already."""
        self._text = text
        self._known = known
        self._followers = [(follower, Luck()) for follower in followers]
        self._rates = rates

    def learn(self, output: list[int]) -> None:
        """Take in what is new in the answer, and whether it is what would have been guessed."""
        text, rates = self._text, self._rates
        for token in output[self._known :]:
            for follower, luck in self._followers:
                expected = follower.peek()
                if expected is not None:
                    hit, length = expected == token, follower.length
                    luck.record(rates.chance(follower.source, length), hit=hit)
                    rates.record(follower.source, length, hit=hit)
            text.append(token)
            for follower, _ in self._followers:
                follower.feed(text)
        self._known = len(output)

    def guess(self, most: int) -> Guess | None:
        """What the follower says that is likeliest to be right; None where none says anything."""
        best: tuple[Follower, Luck] | None = None
        highest = 0.0
        for follower, luck in self._followers:
            if follower.peek() is None:
                continue
            chance = luck.apply(self._rates.chance(follower.source, follower.length))
            if chance > highest:
                best, highest = (follower, luck), chance
        if best is None:
            return None
        follower, luck = best
        source, length, chance = follower.source, follower.length, self._rates.chance
        chances, value = [highest], highest
        while len(chances) < most:
            following = luck.apply(chance(source, length + len(chances)))
            value *= following
            if value < _LEAST_VALUE:
                break
            chances.append(following)
        tokens = follower.read(len(chances))
        return Guess(tuple(tokens), source, tuple(chances[: len(tokens)]))
