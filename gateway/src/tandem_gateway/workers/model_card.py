"""What workers know of their model and the gateway tells: its longest context, and where it comes from.

Asked of one worker when the first is there, and again whenever there is a worker of another revision. Until one has
answered, and where none of them is reachable, `/v1/models` goes without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, cast

import orjson
from tandem_api.names import Role

from tandem_gateway.http.response import ResponseHead
from tandem_gateway.paths import MODELS
from tandem_gateway.scheduling import Worker
from tandem_gateway.upstream.base import Failure
from tandem_gateway.upstream.http1 import Http1Link

ASK_SECONDS = 5.0
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 1.0, 60.0
"""After a round in which no worker told, twice as long after each more."""
_FIELDS = ("max_model_len", "root")
_MAX_BYTES = 64 * 1024


class ModelCard:
    """Owned by one event loop. `facts` are added to the model's description."""

    def __init__(self, *, token_line: Callable[[], bytes], connect_seconds: float) -> None:
        self.facts: dict[str, object] = {}
        self._token_line = token_line
        self._connect_seconds = connect_seconds
        self._workers: list[Worker] = []
        self._known: str | None = None
        """Revision of the worker that told."""
        self._changed = asyncio.Event()

    def take(self, workers: Iterable[Worker]) -> None:
        """The model's workers are now these."""
        self._workers = [worker for worker in workers if worker.role is not Role.PREFILL]
        self._changed.set()

    async def run(self) -> None:
        """Ask whenever there is something new to learn. Never returns."""
        pause = RETRY_SECONDS
        while True:
            self._changed.clear()
            asked = [worker for worker in self._workers if worker.revision != self._known]
            if any(worker.revision == self._known for worker in self._workers) or not asked:
                await self._changed.wait()
                continue
            for worker in asked:
                facts = await self._ask(worker)
                if facts is not None:
                    self.facts, self._known = facts, worker.revision
                    pause = RETRY_SECONDS
                    break
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_RETRY_SECONDS)

    async def _ask(self, worker: Worker) -> dict[str, object] | None:
        line = f"GET {MODELS} HTTP/1.1\r\nhost: {worker.address}\r\ncontent-length: 0\r\n".encode()
        link = Http1Link(worker.address, connect_seconds=self._connect_seconds, on_stale=lambda: None)
        answer = _Answer()
        token = self._token_line() if worker.engine == "Tandem" else b""
        call = link.start(answer, line + token + b"\r\n", b"")
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await answer.ended.wait()
        except TimeoutError:
            call.cancel()
        finally:
            link.close()
        return read_card(bytes(answer.body)) if answer.status == 200 else None


def read_card(body: bytes) -> dict[str, object] | None:
    """The fields of a worker's answer that the gateway tells; None where it is no list of models."""
    try:
        cards: Any = orjson.loads(body)["data"]
        card = cast(dict[str, Any], dict(cards[0]))
    except (ValueError, TypeError, KeyError, IndexError):
        return None
    return {name: card[name] for name in _FIELDS if isinstance(card.get(name), int | str)}


class _Answer:
    """Satisfies `upstream.base.Sink`."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.ended = asyncio.Event()

    def on_upstream_head(self, head: ResponseHead) -> None:
        self.status = head.status

    def on_upstream_body(self, data: bytes, *, final: bool) -> None:
        if len(self.body) < _MAX_BYTES:
            self.body += data

    def on_upstream_end(self) -> None:
        self.ended.set()

    def on_upstream_failure(self, failure: Failure, detail: str) -> None:
        self.status = 0
        self.ended.set()
