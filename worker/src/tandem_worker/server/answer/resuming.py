"""A plan that goes on where another worker stopped: its choices stand where they stood, and nothing is told twice.

Everything is rebuilt from the tokens, by what handled them the first time: detokenizer, stop strings, parsers of tools
and reasoning here, grammars and penalties in the engine. Draws go by seed, choice and position.
"""

from __future__ import annotations

import dataclasses
import secrets

from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.schedule.params import GenerationRequest, TokenDelta
from tandem_worker.server.answer.answerer import Plan
from tandem_worker.server.answer.journal import ChoiceRecord, Journal, Resume, StreamHead, digest_requests
from tandem_worker.server.dialects.openai.logprobs import SLICE_TOKENS
from tandem_worker.server.text.choice import REPLAY_TOKENS, Choice
from tandem_worker.server.wire.pacing import Steps, pace

_SLICE_LINES = 128
"""Lines of events that are written once more, without their tokens and logprobs."""


def open_journal(plan: Plan) -> Journal:
    """For a stream that may have to go on elsewhere."""
    head = plan.encoder.head
    start = StreamHead(
        id=head.id,
        created=head.created,
        fingerprint=head.fingerprint,
        seed=plan.requests[0].sampling.seed,
        digest=digest_requests(plan.requests),
    )
    return Journal(start, plan.encoder)


async def take_up(plan: Plan, resume: Resume, *, vocab_size: int) -> None:
    """Bring a plan that was made with `resume.head` to where the stream stood. Raises RequestError (409)."""
    _check(plan, resume, vocab_size)
    n = plan.requests[0].n
    requests: list[GenerationRequest] = []
    for position, request in enumerate(plan.requests):
        begun = position in resume.cached
        if begun:
            await _repeat_opening(plan, position, resume.check)
        requests.append(
            dataclasses.replace(
                request,
                # Of its own: the first worker may still be at it, and a prefill worker at the first one's order.
                request_id=f"{request.request_id}~{secrets.token_hex(4)}",
                resumed=resume.find_resumed(position, n),
                prompt_logprobs=None if begun else request.prompt_logprobs,
            )
        )
    for choice in plan.choices:
        record = resume.get(choice.index)
        if record.ended is not None:
            choice.close_ended(*record.ended)
            continue
        if plan.encoder.has_state:
            await pace(_repeat_events(plan, choice, record))
        else:
            await pace(choice.replay(record.token_ids, record.waiting))
        if choice.finish is not None:
            raise _cannot_resume(f"choice {choice.index} is complete")
    plan.requests = requests
    plan.begun = resume.cached


def _check(plan: Plan, resume: Resume, vocab_size: int) -> None:
    head, ours = resume.head, plan.encoder.head
    if not plan.stream:
        raise _cannot_resume("it is no stream")
    if head.fingerprint != ours.fingerprint:
        raise _cannot_resume(f"it began at a worker of revision {head.fingerprint}, and this one is {ours.fingerprint}")
    if head.digest != digest_requests(plan.requests):
        raise _cannot_resume("its prompt, or the room after it, is another one here")
    if not all(0 <= index < len(plan.choices) for index in resume.choices):
        raise _cannot_resume("it has other choices")
    for index, record in resume.choices.items():
        has_state = plan.encoder.has_state
        if has_state != bool(record.told) or (has_state and record.ended is not None):
            raise _cannot_resume("its events are those of another API")
        if record.token_ids and not 0 <= min(record.token_ids) <= max(record.token_ids) < vocab_size:
            raise _cannot_resume(f"choice {index} has tokens that are none of this model's")


async def _repeat_opening(plan: Plan, position: int, check: int | None) -> None:
    """Only for what it leaves behind: where the text of an echoed prompt ends, or the encoder's state."""
    request = plan.requests[position]
    if plan.first_delta is not None:
        plan.first_delta(position, TokenDelta(request_id=request.request_id, choice=0))
    elif not plan.encoder.has_state:
        return
    prompt = request.prompt_token_ids if plan.encoder.has_state else ()
    for index in range(position * request.n, (position + 1) * request.n):
        events = await pace(plan.encoder.opening(index, prompt))
        if plan.encoder.has_state:
            _compare(plan, events, check)


def _repeat_events(plan: Plan, choice: Choice, record: ChoiceRecord) -> Steps[None]:
    """Have the encoder write what the client has, for its state alone."""
    start, work = 0, 0.0  # of a slice
    for told in record.told:
        update = yield from choice.replay(record.token_ids[start : told.end], told.waiting)
        update.logprobs = list(told.logprobs)
        events = yield from plan.encoder.long_update(choice.index, update)
        if told.check is not None:
            _compare(plan, events, told.check)
        # A line is a token, or everything that came while a client read nothing.
        work += (told.end - start) / REPLAY_TOKENS + len(told.logprobs) / SLICE_TOKENS + 1 / _SLICE_LINES
        start = told.end
        if work >= 1:
            yield
            work = 0.0


def _compare(plan: Plan, events: bytes, check: int | None) -> None:
    assert plan.journal is not None
    if plan.journal.check(events) != check:
        raise _cannot_resume("what its client has seen comes out differently here: another release wrote it")


def _cannot_resume(why: str) -> RequestError:
    return RequestError(f"The stream cannot be resumed: {why}.", code="cannot_resume", status=409)
