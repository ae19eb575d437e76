"""What workers that are not ready wait for, read now and then from their metrics ports: the operator tells people."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from tandem_api.fleet import LONGEST_TEXT, StartingReport

from tandem_gateway.upstream.asking import Asker
from tandem_gateway.upstream.base import Failure
from tandem_gateway.workers.waker import Sleeper

PERIOD_SECONDS = 2.0
"""Between two reads of a worker, each given up by the next."""
MOST = 32
"""Workers that are read; of more the first by name."""


class StartWatch:
    """Owned by one event loop. `take` is discovery's."""

    def __init__(self, *, connect_seconds: float) -> None:
        self._connect_seconds = connect_seconds
        self._questions: dict[Sleeper, _Question] = {}
        self._some = asyncio.Event()

    def take(self, sleepers: Iterable[Sleeper]) -> None:
        """These are there and not ready."""
        before, self._questions = self._questions, {}
        told = sorted((one for one in sleepers if one.worker.status_address), key=lambda one: one.worker.name)
        for sleeper in told[:MOST]:
            self._questions[sleeper] = before.pop(sleeper, None) or _Question(sleeper, self._connect_seconds)
        for question in before.values():
            question.stop()
        if self._questions:
            self._some.set()
        else:
            self._some.clear()

    def reports(self) -> list[StartingReport]:
        """What was read last of those that tell."""
        return [
            StartingReport(name=one.worker.name, address=one.worker.address, waits_for=question.said)
            for one, question in self._questions.items()
            if question.said
        ]

    async def run(self) -> None:
        """Never returns."""
        try:
            while True:
                await self._some.wait()
                for question in self._questions.values():
                    question.ask()
                await asyncio.sleep(PERIOD_SECONDS)
        finally:
            self.take(())


class _Question(Asker):
    """To one worker."""

    def __init__(self, sleeper: Sleeper, connect_seconds: float) -> None:
        address = sleeper.worker.status_address
        super().__init__(address, connect_seconds=connect_seconds, most_bytes=LONGEST_TEXT)
        self.said = ""
        self._head = f"GET /readyz HTTP/1.1\r\nhost: {address}\r\n\r\n".encode()

    def ask(self) -> None:
        self.send(self._head)

    def on_answer(self, status: int, body: bytes) -> None:
        line = body.decode("utf-8", "replace").partition("\n")[0]
        self.said = line if status == 503 and line.isprintable() else ""

    def on_too_large(self) -> None: ...

    def on_failure(self, failure: Failure) -> None:
        self.said = ""
