"""Grammars over tokens, by llguidance: implementations of `Grammar` and `GrammarFactory`.

Invariants: a mask allows at least one token (at the end of a grammar, the end tokens), and a choice that follows its
masks is accepted token by token. `fill_mask` costs tens of microseconds and releases the GIL; what a hostile grammar
makes it cost is bounded for each step by the library's fuel (`proving.parser_limits`), and over an answer by a
`MaskBudget`: what the engine thread spends at most, where all streams of the worker wait for it.

The library counts what a step may compute, the same on every machine. The seconds of a budget are ten times what that
comes to: they end what the library counts wrongly, and decide over no grammar that works on a faster machine. They are
of the thread's own computing, so that a busy machine ends nobody's request.
"""

from __future__ import annotations

import itertools
import re
import time
from typing import Any

import numpy as np
from llguidance import LLMatcher

from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.guess.literals import LiteralText
from tandem_worker.engine.schedule.params import Grammar, GrammarFactory
from tandem_worker.host.errors import WorkerError
from tandem_worker.server.structured.contract import GrammarError

TOKEN_SECONDS = 0.05
"""Masks and tokens of one request, on average over its answer; all choices together."""
CREDIT_SECONDS = 1.5
"""More than the average that a request may take: the first masks of a grammar find most of its states."""
STEP_SECONDS = 1.0
"""One mask or token of one choice."""

_LIMIT = re.compile(r"too (many|complex|large)|; max is \d")
"""In the library's words where a grammar takes more than `proving.parser_limits`: its reasons to stop do not tell that
from a token that is forbidden."""


class MaskBudget:
    """The time that masks of one request may take; its choices share it. Used on the engine thread."""

    __slots__ = ("_num_tokens", "_spent")

    def __init__(self) -> None:
        self._spent = 0.0
        self._num_tokens = 0

    def spend(self, num_tokens: int, seconds: float) -> str | None:
        """Note the cost at a choice's token `num_tokens`. A sentence when the request must end."""
        self._spent += seconds
        self._num_tokens = max(self._num_tokens, num_tokens)
        if seconds > STEP_SECONDS:
            return f"one token took {seconds * 1e3:.0f} ms, and at most {STEP_SECONDS * 1e3:.0f} ms are allowed"
        if self._spent > CREDIT_SECONDS + TOKEN_SECONDS * self._num_tokens:
            return (
                f"{self._num_tokens + 1} tokens took {self._spent * 1e3:.0f} ms, and "
                f"{CREDIT_SECONDS * 1e3:.0f} ms and {TOKEN_SECONDS * 1e3:.0f} ms per token are allowed"
            )
        return None


class TokenGrammar:
    """State of one choice. Not thread-safe; used on the engine thread.

    `accept` raises GrammarError for a token that the mask forbade, RequestError when the grammar's limits were reached.
    """

    __slots__ = ("_budget", "_eos_token_ids", "_failure", "_matcher", "_num_tokens", "_refused", "_words", "seconds")

    def __init__(
        self, matcher: LLMatcher, words: int, eos_token_ids: frozenset[int], budget: MaskBudget | None = None
    ) -> None:
        self._matcher = matcher
        self._budget = budget or MaskBudget()
        self._failure: RequestError | None = None
        self.seconds = 0.0
        self._num_tokens = 0
        self._words = words
        self._eos_token_ids = eos_token_ids
        self._refused = next(token for token in itertools.count() if token not in eos_token_ids)

    def fill_mask(self, mask: object) -> None:
        """`mask`: one contiguous row of int32 words (a CPU tensor or array); words beyond the vocabulary become 0.

        Never raises. When the grammar has hit a resource limit the mask leaves one token, which `accept` refuses: so
        the choice ends with an error, and neither as a valid answer nor with the step loop of all others.
        """
        row = _row(mask)
        if self._failure is None:
            began = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, self._words * 4)
            row[self._words :] = 0
            self._note_cost(began)
        if self._failure is not None:
            row[:] = 0
            row[self._refused // 32] = _bit(self._refused)

    def accept(self, token_id: int) -> None:
        if self._failure is not None:
            raise self._failure
        if self._matcher.is_stopped() and token_id in self._eos_token_ids:
            return
        self._num_tokens += 1
        began = time.thread_time()
        if not self._matcher.consume_token(token_id):
            raise describe_refusal(token_id, self._first_line())
        self._note_cost(began)

    def _note_cost(self, began: float) -> None:
        seconds = time.thread_time() - began
        self.seconds += seconds
        if self._matcher.is_error():
            self._failure = _too_complex(self._first_line())
        else:
            excess = self._budget.spend(self._num_tokens, seconds)
            self._failure = None if excess is None else _too_complex(excess)

    def _first_line(self) -> str:
        return self._matcher.get_error().strip().partition("\n")[0]

    @property
    def terminated(self) -> bool:
        """Nothing but an end token can follow."""
        return self._matcher.is_stopped()

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def give_up(self, reason: RequestError) -> None:
        self._failure = self._failure or reason


class TokenGrammarFactory:
    """A compiled grammar. `new` copies its start state: cheap, and safe from any thread."""

    def __init__(
        self,
        matcher: LLMatcher,
        words: int,
        eos_token_ids: frozenset[int],
        budget: MaskBudget | None = None,
        *,
        literals: LiteralText | None = None,
    ) -> None:
        self.literals = literals
        """The texts that answers are guessed from; None: nothing is known of them."""
        self._matcher = matcher
        self._words = words
        self._eos_token_ids = eos_token_ids
        self._budget = budget

    def for_request(self) -> TokenGrammarFactory:
        """The same, with one budget for all choices of a request."""
        return TokenGrammarFactory(
            self._matcher, self._words, self._eos_token_ids, MaskBudget(), literals=self.literals
        )

    def new(self) -> Grammar:
        return TokenGrammar(self._matcher.deep_copy(), self._words, self._eos_token_ids, self._budget)


class AfterReasoning:
    """Lets a model think first: the grammar begins after the closing mark.

    `inside`: the prompt ends in the opening mark. Otherwise the first token may be the opening mark, or already obey
    the grammar.
    """

    __slots__ = ("_begin", "_end", "_grammar", "_started", "_thinking")

    def __init__(self, grammar: Grammar, begin: int, end: int, *, inside: bool) -> None:
        self._grammar = grammar
        self._begin = begin
        self._end = end
        self._thinking = inside
        self._started = inside

    def fill_mask(self, mask: object) -> None:
        if self._thinking:
            _row(mask)[:] = -1
            return
        self._grammar.fill_mask(mask)
        if not self._started:
            row = _row(mask)
            row[self._begin // 32] |= _bit(self._begin)

    def accept(self, token_id: int) -> None:
        if self._thinking:
            self._thinking = token_id != self._end
        elif not self._started and token_id == self._begin:
            self._thinking = True
        else:
            self._grammar.accept(token_id)
        self._started = True

    @property
    def terminated(self) -> bool:
        return not self._thinking and self._grammar.terminated

    @property
    def seconds(self) -> float:
        return self._grammar.seconds

    @property
    def failed(self) -> bool:
        return not self._thinking and self._grammar.failed

    def give_up(self, reason: RequestError) -> None:
        if not self._thinking:
            self._grammar.give_up(reason)


class AfterReasoningFactory:
    def __init__(self, factory: GrammarFactory, begin: int, end: int, *, inside: bool) -> None:
        self._factory = factory
        self._begin = begin
        self._end = end
        self._inside = inside

    def new(self) -> Grammar:
        return AfterReasoning(self._factory.new(), self._begin, self._end, inside=self._inside)


def describe_refusal(token_id: int, error: str) -> WorkerError:
    """Why the library did not take a token, with the first line of its error: at its limits the request is at fault."""
    if _LIMIT.search(error):
        return _too_complex(error)
    return GrammarError(f"token {token_id} is not allowed here: {error}")


def _too_complex(why: str) -> RequestError:
    return RequestError(f"The answer cannot go on: the grammar is too complex: {why}", code="grammar_too_complex")


def _row(mask: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The mask as an array that shares its memory (numpy arrays and CPU tensors alike)."""
    row = np.asarray(mask).reshape(-1)
    assert row.dtype == np.int32
    return row


def _bit(token_id: int) -> np.int32:
    return np.uint32(1 << (token_id % 32)).view(np.int32)
