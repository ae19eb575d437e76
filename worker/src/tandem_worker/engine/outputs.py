"""What becomes of a chosen token: does the choice go on, and what is the client told."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.sample.state import SamplingState
from tandem_worker.engine.schedule.params import FinishReason, TokenDelta, TokenLogprob
from tandem_worker.engine.schedule.request import Sequence


@dataclass(frozen=True, slots=True)
class Outcome:
    """`keep`: the token is part of the answer (a stop token is not)."""

    keep: bool
    finish_reason: FinishReason | None = None


_GO_ON = Outcome(True)
_LENGTH = Outcome(True, FinishReason.LENGTH)
_STOP_TOKEN = Outcome(False, FinishReason.STOP)
_GRAMMAR_END = Outcome(True, FinishReason.STOP)


def decide_outcome(token_id: int, num_output: int, state: SamplingState) -> Outcome:
    """`num_output` counts the tokens before this one; `state` has not accepted it yet.

    Raises what the grammar raises when the token breaks it.
    """
    failed = state.grammar is not None and state.grammar.failed  # the token was chosen for want of any other
    if token_id in state.stop_token_ids and num_output >= state.params.min_tokens and not failed:
        return _STOP_TOKEN
    if not state.plain:
        state.accept(token_id)
        if state.grammar is not None and state.grammar.terminated:
            return _GRAMMAR_END
    return _LENGTH if num_output + 1 >= state.params.max_tokens else _GO_ON


def build_token_delta(
    sequence: Sequence,
    token_id: int,
    outcome: Outcome,
    logprob: TokenLogprob | None,
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None,
) -> TokenDelta:
    """What one new token tells the client; an end token that is not shown ends the choice without text."""
    request = sequence.request
    return TokenDelta(
        request_id=request.id,
        choice=sequence.choice,
        token_ids=(token_id,) if outcome.keep else (),
        logprobs=(logprob,) if outcome.keep and logprob is not None else None,
        prompt_logprobs=prompt_logprobs,
        finish_reason=outcome.finish_reason,
        stop_token_id=None if outcome.keep else token_id,
        stop_logprob=None if outcome.keep else logprob,
        num_cached_tokens=request.num_cached_tokens,
        prefill_worker=request.prefill_worker,
    )


def build_final_delta(
    sequence: Sequence,
    reason: FinishReason,
    error: str | RequestError | None = None,
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None,
    embedding: bytes | None = None,
) -> TokenDelta:
    """A choice ends without a token."""
    request = sequence.request
    return TokenDelta(
        request_id=request.id,
        choice=sequence.choice,
        prompt_logprobs=prompt_logprobs,
        embedding=embedding,
        finish_reason=reason,
        num_cached_tokens=request.num_cached_tokens,
        prefill_worker=request.prefill_worker,
        error=error,
    )


def join_deltas(deltas: Items[TokenDelta]) -> list[TokenDelta]:
    """One delta for each choice that went on by several tokens in a step; an error stays a delta of its own."""
    joined: dict[tuple[str, int], TokenDelta] = {}
    others: list[TokenDelta] = []
    for delta in deltas:
        key = (delta.request_id, delta.choice)
        before = joined.get(key)
        if delta.finish_reason is FinishReason.ERROR:
            others.append(delta)
        else:
            joined[key] = delta if before is None else _join(before, delta)
    return [*joined.values(), *others]


def _join(before: TokenDelta, after: TokenDelta) -> TokenDelta:
    logprobs = (*(before.logprobs or ()), *(after.logprobs or ()))
    return replace(
        after,
        token_ids=before.token_ids + after.token_ids,
        logprobs=logprobs if before.logprobs is not None or after.logprobs is not None else None,
        prompt_logprobs=before.prompt_logprobs,
    )
