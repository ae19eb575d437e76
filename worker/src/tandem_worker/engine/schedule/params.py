"""What is asked of the engine and what it answers: plain data, no torch.

One `GenerationRequest` has `n` choices that share the prompt. The engine answers with `TokenDelta`s, all deltas of one
engine step in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.trace import RequestTrace
from tandem_worker.model.pooling import Pooling


class Grammar(Protocol):
    """Constrains one choice's tokens (structured output). One instance per choice; rebuilt from tokens on resume."""

    def fill_mask(self, mask: object) -> None:
        """Write the allowed-token bitmask (int32 words, bit i of word w is token 32*w + i) for the next token."""
        ...

    def accept(self, token_id: int) -> None:
        """The choice has got this token: the next mask comes after it.

        Raises RequestError where the grammar takes more than it may, anything else where it forbids the token.
        """
        ...

    @property
    def terminated(self) -> bool:
        """The text is complete: nothing but its end may follow."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds of computing, for all masks and tokens so far."""
        ...

    @property
    def failed(self) -> bool:
        """Nothing can follow, though the answer is not complete: masks mean nothing any more, and `accept` raises."""
        ...

    def give_up(self, reason: RequestError) -> None:
        """Fail, unless it has failed already."""
        ...


class GrammarFactory(Protocol):
    """Compiled grammar, shared by the choices of a request."""

    def new(self) -> Grammar:
        """A grammar at the beginning of its text, for one choice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen. Draws are keyed by (seed, choice, position), so they survive resuming."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 considers all tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    num_logprobs: int | None = None
    """None: no logprobs; 0: of the sampled token; k: of the k likeliest too."""
    stop_token_ids: frozenset[int] = frozenset()
    """End of sequence and other stopping tokens; they end a choice and are not part of its text."""
    ignore_eos: bool = False
    grammar: GrammarFactory | None = None

    @property
    def greedy(self) -> bool:
        """The likeliest token is taken, of equals the one with the lowest id: no draw can change the choice."""
        return self.temperature == 0.0 or self.top_k == 1 or self.top_p == 0.0 or self.min_p >= 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    priority: int = 0
    """Lower runs first."""
    cache_salt: str = ""
    """Separates tenants in the prefix cache."""
    prefill_endpoints: tuple[str, ...] = ()
    """`host:port` of prefill workers' KV ports, best first; empty: prefill here."""
    kv_source: str = ""
    """`host:port` of the KV port of a worker that has computed a part of the prompt; empty: none is known."""
    kv_source_tokens: int = 0
    """How much of it, about; 0: nobody knows."""
    prompt_logprobs: int | None = None
    """Wanted logprobs of prompt tokens (`echo`); such a prompt bypasses prefix cache hits."""
    pooling: Pooling | None = None
    """The prompt's embedding is wanted and nothing is generated (`max_tokens` 0, `n` 1). For embedding models alone."""
    resumed: tuple[tuple[int, ...] | None, ...] | None = None
    """The request began elsewhere: of each choice the tokens that it has, None where it has ended. Some choice is open.
    What is delivered begins after these tokens and is what would have followed them there."""
    step_seconds: float | None = None
    """A step with a part of the prompt takes at most about so long, however long the prompt then takes; None: as long
    as steps of this engine may."""
    trace: RequestTrace | None = None
    """Takes its times; None: it is not traced."""
    prediction: tuple[int, ...] = ()
    """What the client expects the answer to be. It changes no token, and where it is right answers come sooner."""
    literals: Callable[[], object] | None = None
    """Makes, for a choice, what follows it through the literal text of its grammar: belongs to `engine.guess`."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with their logprobs, best first."""
    rank: int = 0
    """Rank of the token among all, from 1; 0 where nobody needs it. Of equally likely tokens the lowest ids rank
    first."""


@dataclass(slots=True, kw_only=True)
class TokenDelta:
    """New tokens of one choice. The last delta of a choice has `finish_reason` and may have no token.

    Nobody changes one. It is not frozen because one is made per token, and that would make it three times as dear.
    """

    request_id: str
    choice: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """On the first delta, when asked for: one entry per prompt token, None for the first."""
    embedding: bytes | None = None
    """The answer to a request with `pooling`: float32 in native byte order, `hidden_size` of them, not normalized."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended the choice."""
    stop_logprob: TokenLogprob | None = None
    """Its own, when logprobs were asked for."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed for this request, here or on the prefill worker. On every delta."""
    prefill_worker: str | None = None
    """Pod that prefilled when it was another one."""
    error: str | RequestError | None = None
    """With FinishReason.ERROR: the sentence for the client, or the error where it is not the engine's."""
