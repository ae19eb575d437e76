"""Guesses without a model: what followed the last tokens of a choice where they stood before.

Looked through are the choice's own text, its prediction where the client sent one, the texts of its grammar, and
earlier answers. A new kind of text is one more follower. Beside the history, whose size is given, and the grammars,
which belong to who compiled them, what is kept is bounded by the requests that run: 100 bytes for each token of a
prompt and 32 for each of a prediction, shared by its choices, 9 more for each choice and token of the prompt, and some
250 for each token of an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Rows
from itertools import accumulate
from operator import mul

from tandem_worker.engine.guess.contract import Guess, Source
from tandem_worker.engine.guess.follow import DocumentFollower, Follower, TextFollower
from tandem_worker.engine.guess.history import History, HistoryFollower
from tandem_worker.engine.guess.ngrams import MOST_TOKENS, CompleteIndex
from tandem_worker.engine.guess.rates import Luck, Rates
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.engine.schedule.request import Sequence

logger = logging.getLogger(__name__)

_FEW = 64
"""Tokens of an answer that are learned one by one by a choice that has said them already; more are indexed at once."""
_MOST_READ = 1 << 12
"""Tokens of an answer that was moved here, of which a schema is read anew: ten milliseconds. Longer ones are guessed
without it."""
_MOST_BEGUN = MOST_TOKENS
"""Tokens of texts that are indexed in a step, or one text of any length: ten milliseconds. Streams beside them wait no
longer, however many prompts are begun at once; the choices that are left are guessed from a later step on."""
_FED = 8
"""A token that is read one by one costs as much as so many that are indexed."""
_MOST_MISSED = 48
"""Tokens of a choice that are learned from together: as many as come in a step whose guesses were all right, and while
the choice rests and steps run ahead."""


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
            missed = 0 if reader is None else reader.count_missed(sequence.output)
            if reader is None or missed:
                if room <= 0:
                    continue
                if reader is None:
                    output = _FED * len(sequence.output)
                    room -= sequence.num_tokens + len(sequence.request.prediction) + output
                else:
                    missed = min(missed, max(1, room // _FED))
                    room -= _FED * missed
            elif reader.rests(sequence.output):
                continue
            try:
                guess = self._look_at(sequence, reader, most[sequence], missed)
            except BaseException as error:  # a panic of the tokenizer is no Exception
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                logger.exception("an answer of %s goes on without guesses, which failed", sequence.request.id)
                sequence.guessing = Reader([], len(sequence.output), [], self._rates)
                continue
            if guess is not None:
                found[sequence] = guess
        return found

    def _look_at(self, sequence: Sequence, reader: Reader | None, most: int, missed: int) -> Guess | None:
        """`missed`: as many of the tokens that nobody has looked at are to be read now."""
        if reader is None:
            reader = sequence.guessing = build_reader(sequence, self._rates, self._history)
        if missed:
            reader.read_on(sequence.output, missed)
            if reader.count_missed(sequence.output):
                return None
        reader.learn(sequence.output)
        return reader.guess(most)

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
    if request.literals is not None and known <= _MOST_READ:
        follower: Follower = request.literals()
        for place in range(known):
            follower.feed(output[place : place + 1])
        followers.append(follower)
    if history is not None:
        followers.append(HistoryFollower(history, request.cache_salt, request.prompt, from_start=not known))
    return Reader(text, known, followers, rates)


_LEAST_VALUE = 0.05
"""Least chance of a guess to be reached and right: what comes after is not worth looking at."""
_POOR = 0.06
"""Below that chance a guess is worth nothing in any company."""
_PATIENCE = 8
"""So many poor guesses in a row, and the choice is looked at once in `_REST` tokens."""
_REST = 8


class Reader:
    """One choice: its text, and where it is followed."""

    __slots__ = ("_followers", "_known", "_num_poor", "_rates", "_text")

    def __init__(self, text: list[int], known: int, followers: list[Follower], rates: Rates) -> None:
        """`known`: leading tokens of the answer that are in `text` already."""
        self._text = text
        self._known = known
        self._num_poor = 0
        """Guesses in a row that were worth nothing."""
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

    def count_missed(self, output: list[int]) -> int:
        """Tokens that came while nobody asked, as beside prompts that fill every step; 0 where they are few."""
        behind = len(output) - self._known
        return behind if behind > _MOST_MISSED else 0

    def read_on(self, output: list[int], count: int) -> None:
        """Take in so many tokens of the answer without learning of each whether it would have been guessed."""
        text = self._text
        for token in output[self._known : self._known + count]:
            text.append(token)
            for follower, _ in self._followers:
                follower.feed(text)
        self._known += count

    def rests(self, output: list[int]) -> bool:
        """Whether to leave the choice alone for some tokens, which are learned together then. A step takes the caches
        that guessing needs, so a look costs ten times what the work does, and several tokens cost as much as one."""
        return self._num_poor >= _PATIENCE and len(output) - self._known < _REST

    def guess(self, most: int) -> Guess | None:
        """As `find`, and take note of how much it is worth."""
        found = self.find(most)
        self._num_poor = 0 if found is not None and found.chances[0] >= _POOR else self._num_poor + 1
        return found

    def find(self, most: int) -> Guess | None:
        """What the follower says that promises most; None where none says anything. Where one that knows the literal
        text agrees with another, a token is as sure as the surer of them says."""
        best: tuple[Follower, Luck] | None = None
        literal: tuple[Follower, Luck] | None = None
        highest = 0.0
        for follower, luck in self._followers:
            if follower.peek() is None:
                continue
            if follower.source is Source.SCHEMA:
                literal = (follower, luck)
                continue
            chance = luck.apply(self._rates.chance(follower.source, follower.length))
            if chance > highest:
                best, highest = (follower, luck), chance
        if best is None:
            return None if literal is None else self._read(*literal, most)
        found = self._read(*best, most)
        return found if literal is None else _join(self._read(*literal, most), found)

    def _read(self, follower: Follower, luck: Luck, most: int) -> Guess:
        """Its next tokens, as far as they are worth a look."""
        source, grade, chance = follower.source, follower.grade, self._rates.chance
        tokens = follower.read(most)
        chances: list[float] = []
        value = 1.0
        for depth in range(len(tokens)):
            following = luck.apply(chance(source, grade(depth)))
            value *= following
            if value < _LEAST_VALUE and depth:
                break
            chances.append(following)
        return Guess(tuple(tokens[: len(chances)]), source, tuple(chances))


def _join(literal: Guess, other: Guess) -> Guess:
    """What two guesses of a choice say together: the better one, and where they agree both."""
    same = 0
    for one, two in zip(literal.tokens, other.tokens, strict=False):
        if one != two:
            break
        same += 1
    if same:
        surer = tuple(map(max, literal.chances[:same], other.chances[:same]))
        literal = literal._replace(chances=surer + literal.chances[same:])
        other = other._replace(chances=surer + other.chances[same:])
    return literal if _worth(literal) >= _worth(other) else other


def _worth(guess: Guess) -> float:
    """Tokens that it is likely to add."""
    return sum(accumulate(guess.chances, mul))
