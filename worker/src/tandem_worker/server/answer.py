"""Carries one request through the engine and back to its client.

A `Plan` says which engine requests make up the HTTP request and how their choices are read and written. The response
begins when the first delta is here: until then every failure has its own HTTP status, and the headers can name the
pod that prefilled. Whatever happens, no engine request outlives its HTTP request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.types import Receive, Send
from tandem_api import names

from tandem_worker.control.params import FinishReason, GenerationRequest, TokenDelta
from tandem_worker.engine.base import Engine
from tandem_worker.server.choice import Choice
from tandem_worker.server.chunks import DONE, Encoder, event
from tandem_worker.server.http import ServiceError, describe_error, send_json, send_start
from tandem_worker.server.hub import DeltaHub, Inbox
from tandem_worker.server.output import Update, Usage


@dataclass(slots=True, kw_only=True)
class Plan:
    """`choices` has all choices in the order of their index: those of the first request, of the second, ..."""

    requests: Sequence[GenerationRequest]
    choices: Sequence[Choice]
    encoder: Encoder
    stream: bool
    include_usage: bool
    first_delta: Callable[[int, TokenDelta], None] | None = None
    """Told the first delta of each request (with its position) before any event of its choices is encoded."""
    score_only: bool = False
    """Nothing is generated: the answer is complete with the first delta."""


@dataclass(slots=True)
class Progress:
    """What has come back of a plan so far."""

    plan: Plan
    prefill_worker: str | None = None
    cached_tokens: dict[str, int] = field(default_factory=dict)
    in_engine: dict[str, set[int]] = field(default_factory=dict)
    """Choices that the engine still works on, by request."""
    positions: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for position, request in enumerate(self.plan.requests):
            self.positions[request.request_id] = position
            self.in_engine[request.request_id] = set(range(request.n))

    def feed(self, deltas: Sequence[TokenDelta]) -> tuple[list[int], list[Choice]]:
        """Give the deltas to their choices. Returns the requests that began and the choices that have news.

        Raises ServiceError when the engine gave up a request.
        """
        begun: list[int] = []
        touched: dict[int, Choice] = {}
        for delta in deltas:
            position = self.positions[delta.request_id]
            _raise_failure(delta)
            if delta.request_id not in self.cached_tokens:
                begun.append(position)
                if self.plan.first_delta is not None:
                    self.plan.first_delta(position, delta)
            self.cached_tokens[delta.request_id] = delta.num_cached_tokens
            self.prefill_worker = self.prefill_worker or delta.prefill_worker
            if delta.finish_reason is not None:
                self.in_engine[delta.request_id].discard(delta.choice)
            choice = self.plan.choices[position * self.plan.requests[position].n + delta.choice]
            if self.plan.score_only:
                choice.close_empty()
            elif choice.finish is None:
                choice.feed(delta)
            touched[choice.index] = choice
        return begun, list(touched.values())

    def choices_of(self, position: int) -> Sequence[Choice]:
        n = self.plan.requests[position].n
        return self.plan.choices[position * n : (position + 1) * n]

    @property
    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self.plan.choices)

    def idle_requests(self) -> list[str]:
        """Requests whose choices all have their end while the engine still works on them (stop strings)."""
        return [
            request_id
            for request_id, choices in self.in_engine.items()
            if choices and all(choice.finish is not None for choice in self.choices_of(self.positions[request_id]))
        ]

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(len(request.prompt_token_ids) for request in self.plan.requests),
            cached_tokens=sum(self.cached_tokens.values()),
            completion_tokens=sum(choice.completion_tokens for choice in self.plan.choices),
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self.plan.choices),
        )


def _raise_failure(delta: TokenDelta) -> None:
    if delta.finish_reason is FinishReason.ERROR:
        raise ServiceError(delta.error or "The engine failed to answer this request.")
    if delta.finish_reason is FinishReason.ABORT:
        raise ServiceError("The worker stopped before the answer was complete.", status=503, retry=True)


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
        inbox = self._hub.open(request.request_id for request in plan.requests)
        progress = Progress(plan)
        watcher = asyncio.create_task(self._watch(receive, inbox))
        try:
            for request in plan.requests:
                self._engine.submit(request)
            # Headers wait for the first delta: it names the pod that prefilled, or carries the failure.
            begun, touched = progress.feed(await inbox.get())
            all_headers = {
                **headers,
                names.HEADER_DECODE_WORKER: self._pod_name,
                names.HEADER_PREFILL_WORKER: progress.prefill_worker or self._pod_name,
            }
            if plan.stream:
                await self._stream(progress, inbox, send, all_headers, begun, touched)
            else:
                await self._whole(progress, inbox, send, all_headers)
            return progress.usage()
        finally:
            watcher.cancel()
            self._hub.close(inbox)
            for request_id, choices in progress.in_engine.items():
                if choices:
                    self._engine.abort(request_id)

    async def _watch(self, receive: Receive, inbox: Inbox) -> None:
        """Frees the blocks the moment the client goes, even while a write to it is stuck."""
        while (await receive())["type"] != "http.disconnect":
            pass
        for request_id in inbox.request_ids:
            self._engine.abort(request_id)
        inbox.disconnect()

    def _abort_idle(self, progress: Progress) -> None:
        for request_id in progress.idle_requests():
            self._engine.abort(request_id)
            progress.in_engine[request_id].clear()

    async def _whole(self, progress: Progress, inbox: Inbox, send: Send, headers: Mapping[str, str]) -> None:
        plan = progress.plan
        while not progress.finished:
            self._abort_idle(progress)
            progress.feed(await inbox.get())
        self._abort_idle(progress)
        updates: list[Update] = [choice.take() for choice in plan.choices]
        prompts = [request.prompt_token_ids for request in plan.requests for _ in range(request.n)]
        await send_json(send, plan.encoder.response(updates, prompts, progress.usage()), headers=headers)

    async def _stream(
        self,
        progress: Progress,
        inbox: Inbox,
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
        await send_start(send, 200, {**headers, **sse})
        while True:
            events = _events(progress, begun, touched)
            if progress.finished:
                break
            self._abort_idle(progress)
            if events:
                # Everything that came since the last write goes out in one.
                await send({"type": "http.response.body", "body": events, "more_body": True})
            try:
                begun, touched = progress.feed(await inbox.get())
            except ServiceError as error:
                # The status line is out: the error travels as an event, and no [DONE] follows.
                await send({"type": "http.response.body", "body": event(describe_error(error)[1])})
                return
        self._abort_idle(progress)
        if plan.include_usage:
            events += plan.encoder.usage(progress.usage())
        await send({"type": "http.response.body", "body": events + DONE})


def _events(progress: Progress, begun: Sequence[int], touched: Sequence[Choice]) -> bytes:
    encoder = progress.plan.encoder
    parts = [
        encoder.opening(choice.index, progress.plan.requests[position].prompt_token_ids)
        for position in begun
        for choice in progress.choices_of(position)
    ]
    parts += [encoder.update(choice.index, choice.take()) for choice in touched]
    return parts[0] if len(parts) == 1 else b"".join(parts)
