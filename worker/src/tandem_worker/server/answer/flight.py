"""The engine requests of one HTTP request: submitted together, and never outliving it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType

from starlette.types import Receive

from tandem_worker.engine.contract import Engine
from tandem_worker.engine.schedule.params import GenerationRequest, TokenDelta
from tandem_worker.server.answer.deltas import DeltaHub, Inbox
from tandem_worker.server.answer.tracing import current_trace


class Flight:
    """A context manager: on its end, whatever the engine still works on is aborted.

    Blocks are freed the moment the client goes, even while a write to it is stuck.
    """

    def __init__(self, engine: Engine, hub: DeltaHub, requests: Sequence[GenerationRequest], receive: Receive) -> None:
        self._engine = engine
        self._hub = hub
        trace = current_trace.get()
        self._requests = requests if trace is None else trace.follow(requests)
        self._receive = receive
        self._inside: dict[str, set[int]] = {}
        """Choices that the engine still works on, by request."""
        self._inbox: Inbox
        self._watcher: asyncio.Task[None]

    async def __aenter__(self) -> Flight:
        """Raises RequestError, EngineStoppedError."""
        self._inbox = self._hub.open(request.request_id for request in self._requests)
        self._watcher = asyncio.create_task(self._watch())
        try:
            for request in self._requests:
                open_choices = _open_choices(request)
                if request.resumed is None:
                    self._engine.submit(request)
                elif open_choices:
                    await asyncio.to_thread(self._engine.submit, request)  # its grammars read its tokens again
                self._inside[request.request_id] = open_choices
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    async def receive(self) -> list[TokenDelta]:
        """Everything that has come since the last call, at least one delta. Raises ClientGoneError."""
        while True:
            deltas = [delta for delta in await self._inbox.get() if self._is_wanted(delta)]
            if deltas:
                return deltas

    def abort(self, request_id: str, choice: int) -> None:
        """Nothing more is wanted of this choice: the engine ends it, if it has not done so itself."""
        inside = self._inside[request_id]
        if choice in inside:
            inside.discard(choice)
            self._engine.abort(request_id, choice)

    def _is_wanted(self, delta: TokenDelta) -> bool:
        inside = self._inside[delta.request_id]
        wanted = delta.choice in inside or delta.error is not None
        if delta.finish_reason is not None:
            inside.discard(delta.choice)
        return wanted

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._abort_all()
        self._inbox.disconnect()

    def _close(self) -> None:
        self._watcher.cancel()
        self._hub.close(self._inbox)
        self._abort_all()

    def _abort_all(self) -> None:
        for request_id, choices in self._inside.items():
            if choices:
                choices.clear()
                self._engine.abort(request_id)


def _open_choices(request: GenerationRequest) -> set[int]:
    if request.resumed is None:
        return set(range(request.n))
    return {choice for choice, tokens in enumerate(request.resumed) if tokens is not None}
