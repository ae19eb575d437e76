"""Carries one request through the engine and back to its client.

A `Plan` says which engine requests make up the HTTP request and how their choices are read and written. The response
begins when the first delta is here: until then every failure has its own HTTP status, and the headers can name the
pod that prefilled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.types import Receive, Send
from tandem_api import names
from tandem_api.journal import COMMIT, MOVED, USAGE

from tandem_worker.engine.contract import Engine
from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.schedule.params import FinishReason, GenerationRequest, TokenDelta
from tandem_worker.server.answer.deltas import DeltaHub
from tandem_worker.server.answer.flight import Flight
from tandem_worker.server.answer.journal import Journal
from tandem_worker.server.dialects.contract import Encoder
from tandem_worker.server.dialects.openai.chunks import is_long
from tandem_worker.server.text.choice import Choice
from tandem_worker.server.text.output import Update, Usage
from tandem_worker.server.wire.http import ServiceError, describe_error, send_parts, send_start
from tandem_worker.server.wire.pacing import pace


@dataclass(slots=True, kw_only=True)
class Plan:
    """`choices` has all choices in the order of their index: those of the first request, of the second, ..."""

    requests: Sequence[GenerationRequest]
    choices: Sequence[Choice]
    encoder: Encoder
    stream: bool
    include_usage: bool
    continuous_usage: bool = False
    """Every event tells the usage so far."""
    ignored: Sequence[str] = ()
    """Options that were left out of account: a header says so."""
    first_delta: Callable[[int, TokenDelta], None] | None = None
    """Told the first delta of each request (with its position) before any event of its choices is encoded."""
    score_only: bool = False
    """Nothing is generated: the answer is complete with the first delta."""
    journal: Journal | None = None
    """For a stream: tells in marks between its events how another worker can go on."""
    begun: Mapping[int, int] = field(default_factory=dict[int, int])
    """Cached tokens of the requests (by position) whose events began elsewhere."""


@dataclass(slots=True)
class AnswerProgress:
    """What has come back of a plan so far."""

    plan: Plan
    prefill_worker: str | None = None
    cached_tokens: dict[str, int] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position, request in enumerate(self.plan.requests):
            self.positions[request.request_id] = position
            if position in self.plan.begun:
                self.cached_tokens[request.request_id] = self.plan.begun[position]

    def feed(self, deltas: Sequence[TokenDelta]) -> tuple[list[int], list[Choice]]:
        """Give the deltas to their choices. Returns the requests that began and the choices that have news.

        Raises ServiceError when the engine gave up a choice that goes on, RequestError where that is its request's
        fault.
        """
        begun: list[int] = []
        touched: dict[int, Choice] = {}
        for delta in deltas:
            position = self.positions[delta.request_id]
            choice = self.choices_of(position)[delta.choice]
            if choice.finish is not None:
                continue  # also a failure: the engine was behind the end that its stop string has set
            raise_failure(delta)
            if delta.request_id not in self.cached_tokens:
                begun.append(position)
                if self.plan.first_delta is not None:
                    self.plan.first_delta(position, delta)
                self.cached_tokens[delta.request_id] = delta.num_cached_tokens
            self.prefill_worker = self.prefill_worker or delta.prefill_worker
            if self.plan.score_only:
                choice.close_empty()
            else:
                choice.feed(delta)
            touched[choice.index] = choice
        return begun, list(touched.values())

    def choices_of(self, position: int) -> Sequence[Choice]:
        """The `n` choices of the prompt at `position`; choices are ordered by prompt."""
        n = self.plan.requests[position].n
        return self.plan.choices[position * n : (position + 1) * n]

    def identify(self, choice: Choice) -> tuple[str, int]:
        """Request id and number of a choice, as the engine knows it. All requests have the same `n`."""
        position, number = divmod(choice.index, self.plan.requests[0].n)
        return self.plan.requests[position].request_id, number

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason."""
        return all(choice.finish is not None for choice in self.plan.choices)

    def usage(self, opening: Sequence[int] = ()) -> Usage:
        """Tokens so far, summed over all prompts and choices; a prompt counts once for its choices.

        The answers to the prompts at `opening` begin with what is sent next: their tokens come after it.
        """
        unsent = [choice for position in opening for choice in self.choices_of(position)]
        accepted = sum(choice.accepted_prediction_tokens for choice in self.plan.choices) - sum(
            choice.accepted_prediction_tokens for choice in unsent
        )
        return Usage(
            prompt_tokens=sum(len(request.prompt_token_ids) for request in self.plan.requests),
            cached_tokens=sum(self.cached_tokens.values()),
            completion_tokens=sum(choice.completion_tokens for choice in self.plan.choices)
            - sum(choice.completion_tokens for choice in unsent),
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self.plan.choices)
            - sum(choice.reasoning_tokens for choice in unsent),
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=sum(choice.num_predicted for choice in self.plan.choices) - accepted,
        )


def tell_usage(usage: Usage) -> bytes:
    """The last line of a journal."""
    return b"%b%d %d %d\n" % (USAGE, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def raise_failure(delta: TokenDelta) -> None:
    """Raises ServiceError when the engine gave up, RequestError where that is the request's fault."""
    if isinstance(delta.error, RequestError):
        raise delta.error
    if delta.finish_reason is FinishReason.ERROR:
        raise ServiceError(delta.error or "The engine failed to answer this request.")
    if delta.finish_reason is FinishReason.ABORT:
        message = delta.error or "The worker stopped before the answer was complete."
        raise ServiceError(message, status=503, retry=names.RETRY_WORKER)


class Answerer:
    """Runs plans. One per process."""

    def __init__(self, engine: Engine, hub: DeltaHub, pod_name: str) -> None:
        self._engine = engine
        self._hub = hub
        self._pod_name = pod_name

    async def run(self, plan: Plan, receive: Receive, send: Send, headers: Mapping[str, str]) -> Usage:
        """Answer the request. Raises, before the response began, RequestError, EngineStoppedError, ServiceError;
        at any time ClientGoneError.
        """
        progress = AnswerProgress(plan)
        async with Flight(self._engine, self._hub, plan.requests, receive) as flight:
            # Headers wait for the first delta: it names the pod that prefilled, or carries the failure.
            begun, touched = ([], []) if progress.finished else await _advance(progress, flight)
            all_headers = {
                **headers,
                names.HEADER_DECODE_WORKER: self._pod_name,
                names.HEADER_PREFILL_WORKER: progress.prefill_worker or self._pod_name,
            }
            if plan.ignored:
                all_headers[names.HEADER_IGNORED] = ", ".join(plan.ignored)
            if plan.stream:
                await self._stream(progress, flight, send, all_headers, begun, touched)
            else:
                await self._whole(progress, flight, send, all_headers)
            return progress.usage()

    async def _whole(self, progress: AnswerProgress, flight: Flight, send: Send, headers: Mapping[str, str]) -> None:
        plan = progress.plan
        while not progress.finished:
            await _advance(progress, flight)
        updates: list[Update] = [choice.take() for choice in plan.choices]
        prompts = [request.prompt_token_ids for request in plan.requests for _ in range(request.n)]
        await send_parts(send, await pace(plan.encoder.response(updates, prompts, progress.usage())), headers=headers)

    async def _stream(
        self,
        progress: AnswerProgress,
        flight: Flight,
        send: Send,
        headers: Mapping[str, str],
        begun: list[int],
        touched: list[Choice],
    ) -> None:
        plan = progress.plan
        sse = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        journal = plan.journal
        if journal is not None:
            sse[names.HEADER_RESUME] = journal.head.to_json()
        await send_start(send, 200, {**headers, **sse})
        while True:
            events = await _events(progress, begun, touched)
            if progress.finished:
                break
            if events:
                # Everything that came since the last write goes out in one.
                await send({"type": "http.response.body", "body": events, "more_body": True})
            try:
                begun, touched = await _advance(progress, flight)
            except (RequestError, ServiceError) as error:
                # The status line is out: the error travels as an event, and nothing follows.
                last = plan.encoder.failure(describe_error(error)[1])
                if journal is not None:
                    moves = isinstance(error, ServiceError) and error.retry is not None
                    last = MOVED if moves else last + COMMIT
                await send({"type": "http.response.body", "body": last})
                return
        if plan.include_usage:
            events += plan.encoder.usage(progress.usage())
        events += plan.encoder.done if journal is None else plan.encoder.done + tell_usage(progress.usage())
        await send({"type": "http.response.body", "body": events})


async def _advance(progress: AnswerProgress, flight: Flight) -> tuple[list[int], list[Choice]]:
    """Take in what has come. A choice that ended here (a stop string) ends in the engine too, alone and at once."""
    begun, touched = progress.feed(await flight.receive())
    for choice in touched:
        if choice.finish is not None:
            flight.abort(*progress.identify(choice))
    return begun, touched


async def _events(progress: AnswerProgress, begun: Sequence[int], touched: Sequence[Choice]) -> bytes:
    encoder, journal = progress.plan.encoder, progress.plan.journal
    continuous = progress.plan.continuous_usage
    if continuous:
        encoder.tell_usage(progress.usage(opening=begun))
    parts: list[bytes] = []
    for position in begun:
        request = progress.plan.requests[position]
        events = [
            await pace(encoder.opening(choice.index, request.prompt_token_ids))
            for choice in progress.choices_of(position)
        ]
        parts += events
        if journal is not None:
            parts.append(journal.begin(position, progress.cached_tokens[request.request_id], b"".join(events)))
    if continuous and begun:
        encoder.tell_usage(progress.usage())
    for choice in touched:
        update = choice.take()
        # A client that reads slowly finds much waiting for it.
        long = is_long(update)
        events = await pace(encoder.long_update(choice.index, update)) if long else encoder.update(choice.index, update)
        parts.append(events)
        if journal is not None:
            parts.append(journal.update(choice, update, events))
    return parts[0] if len(parts) == 1 else b"".join(parts)
