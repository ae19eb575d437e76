"""Decides where a request is prepared, so that no request holds up the streams of others.

A small body is parsed and rendered on the event loop, one per round of it, and tokenized there too if its texts are
short; long texts go to a thread, because the tokenizer works without the interpreter's lock. A larger body goes to a
process of its own, where all of that happens. A request that brings its chat template goes there whatever its size,
because a template is a program, and to a lane that only such requests wait for: whoever wrote it decides how long it
takes.

Python's threads would not do for large bodies: the event loop and the engine's thread would wait five milliseconds for
the interpreter's lock each time they come back to it, some hundred times per decode step, and parsing JSON gives it
back only at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.types import Receive, Scope
from tandem_api.names import HEADER_LENIENT, RETRY_REQUEST

from tandem_worker.engine.errors import RequestError
from tandem_worker.host.isolation.confined import Confined
from tandem_worker.host.isolation.contract import FunctionError, LimitError, Limits, QueueFullError, UnavailableError
from tandem_worker.host.memory import trim_memory
from tandem_worker.server.prepare.counts import PreparationCounts
from tandem_worker.server.prepare.draft import Prepared
from tandem_worker.server.prepare.job import SETUP, job_name, unpack
from tandem_worker.server.prepare.preparer import NotHereError, Preparer
from tandem_worker.server.wire.http import (
    MAX_BODY_BYTES,
    TOO_MANY_LARGE_REQUESTS,
    ClientGoneError,
    ServiceError,
    header,
)
from tandem_worker.server.wire.intake import SMALL_BODY_BYTES, BodyIntake

logger = logging.getLogger(__name__)

INLINE_CHARACTERS = 4096
"""Longer texts are tokenized on a thread."""
LARGE_BODY_BYTES = 1024 * 1024
"""Larger ones have a lane of their own: they take many seconds, and others must not wait for them."""
MAX_WAITING = 256
"""Requests that may wait for a process."""
MAX_TEMPLATES = 32
"""Beside them, those with a chat template: they keep no others out."""
NUM_MEDIUM, NUM_LARGE, NUM_TEMPLATES = 2, 1, 1
"""Processes at a time: for large bodies, larger ones, and any with a chat template."""
NUM_JOBS = NUM_MEDIUM + NUM_LARGE + NUM_TEMPLATES
TRIM_BYTES = 16 * 1024 * 1024
"""After large bodies of so many bytes, what they left behind is given back to the system."""
JOB_SECONDS = 120.0
TEMPLATE_SECONDS = 10.0
"""With a chat template; as much again for each MiB of the body."""
_TRIM_DELAY_SECONDS = 0.5
JOB_LIMITS = Limits(
    # 8 MiB of digits are as many tokens, of which the tokenizer keeps some 140 bytes each.
    memory_bytes=2048 * 1024 * 1024,
    stack_bytes=8 * 1024 * 1024,
    cpu_seconds=60.0,
    answer_bytes=8 * MAX_BODY_BYTES,
)


class Preparation:
    """One per process. `start` readies the process for large requests; without it the first of them does."""

    def __init__(self, preparer: Preparer, pack: Callable[[], bytes], counts: PreparationCounts | None = None) -> None:
        """`pack` makes what the process is set up with. `counts` is counted in."""
        self.intake = BodyIntake()
        self.counts = PreparationCounts() if counts is None else counts
        self._preparer = preparer
        self._pack = pack
        self._confined: Confined | None = None
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._turn = asyncio.Lock()
        self._used = False
        """This round of the event loop has prepared a request: the next one waits until tokens have gone out."""
        self._medium = asyncio.Semaphore(NUM_MEDIUM)
        self._large = asyncio.Semaphore(NUM_LARGE)
        self._templates = asyncio.Semaphore(NUM_TEMPLATES)
        self._num_templates = 0
        self._untrimmed_bytes = 0
        self._running: set[asyncio.Task[Prepared]] = set()

    def start(self) -> Confined:
        """Takes a second or two of another process; any thread, but only one at a time."""
        if self._confined is None:
            self._confined = Confined(
                SETUP,
                self._pack(),
                limits=JOB_LIMITS,
                name="large requests",
                parallel=NUM_JOBS,
                queue=4,
                niceness=10,
            )
            self._confined.start()
        return self._confined

    def close(self) -> None:
        """End the threads and the isolated process. Does not wait for threads."""
        self._threads.shutdown(wait=False)
        if self._confined is not None:
            self._confined.close()

    async def prepare(self, kind: str, scope: Scope, receive: Receive) -> Any:
        """What `Preparer` makes of the request. Raises RequestError, ServiceError, ClientGoneError."""
        try:
            body = await self.intake.read(scope, receive)
        except RequestError as error:
            self.counts.refused_total += error.status == 429
            raise
        lenient = header(scope, HEADER_LENIENT) == "true"
        if len(body) <= SMALL_BODY_BYTES:
            try:
                return await self._prepare_here(kind, body, lenient=lenient)
            except NotHereError:
                pass
        return await self._prepare_apart(kind, body, receive, lenient=lenient)

    async def _prepare_here(self, kind: str, body: bytes, *, lenient: bool) -> Prepared:
        if self._used:
            async with self._turn:
                while self._used:  # noqa: ASYNC110 - at most until the round is over
                    await asyncio.sleep(0)
        self._used = True
        loop = asyncio.get_running_loop()
        loop.call_soon(self._end_round)
        draft = self._preparer.draft(kind, body, lenient=lenient)
        if draft.num_characters <= INLINE_CHARACTERS:
            return draft.finish(self._preparer.encode(draft))
        return draft.finish(await loop.run_in_executor(self._threads, self._preparer.encode, draft))

    def _end_round(self) -> None:
        self._used = False

    async def _prepare_apart(self, kind: str, body: bytes, receive: Receive, *, lenient: bool) -> Prepared:
        work = asyncio.create_task(self._run_jobs(kind, body, lenient=lenient))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        gone = asyncio.create_task(_until_gone(receive))
        heard = False
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGoneError
            heard = True
            return work.result()
        finally:
            gone.cancel()
            if not heard:
                work.cancel()  # its process ends too: nobody else has a part in it
                work.add_done_callback(_note_unheard)
            # An exception of the task holds this frame, which would hold the task, and the body with it, in a cycle.
            del work

    async def _run_jobs(self, kind: str, body: bytes, *, lenient: bool) -> Prepared:
        try:
            if len(body) > SMALL_BODY_BYTES:
                lane = self._large if len(body) > LARGE_BODY_BYTES else self._medium
                with contextlib.suppress(NotHereError):
                    return unpack(await self._run_job(job_name(kind, lenient=lenient), body, lane, JOB_SECONDS))
            if self._num_templates >= MAX_TEMPLATES:
                raise self._refuse_crowd("requests with a chat template of their own")
            job = job_name(kind, lenient=lenient, template=True)
            seconds = TEMPLATE_SECONDS * (1 + len(body) / LARGE_BODY_BYTES)
            self._num_templates += 1
            try:
                return unpack(await self._run_job(job, body, self._templates, seconds))
            finally:
                self._num_templates -= 1
        finally:
            self.intake.release(body)
            self._note_end(len(body))

    async def _run_job(self, job: str, body: bytes, lane: asyncio.Semaphore, seconds: float) -> bytes:
        if self.counts.isolated >= MAX_WAITING + NUM_MEDIUM + NUM_LARGE + self._num_templates:
            raise self._refuse_crowd("large requests")
        self.counts.isolated += 1
        try:
            async with lane:
                self.counts.isolated_total += 1
                return await self._call(job, body, seconds)
        finally:
            self.counts.isolated -= 1

    def _note_end(self, num_bytes: int) -> None:
        """The pieces in which bodies arrive lie between what stays, so that the allocator keeps all of it by itself."""
        self._untrimmed_bytes += num_bytes
        if self._untrimmed_bytes >= TRIM_BYTES and not self.counts.isolated:
            self._untrimmed_bytes = 0
            # A moment later: this request's body is still being held by those who wait for it.
            asyncio.get_running_loop().call_later(_TRIM_DELAY_SECONDS, self._trim)

    def _trim(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed in the meantime
            self._threads.submit(trim_memory)

    async def _call(self, job: str, body: bytes, seconds: float) -> bytes:
        try:
            return await self.start().call(job, body, seconds=seconds)
        except LimitError as error:
            self.counts.refused_total += 1
            raise RequestError(
                f"The request is too complex: preparing its {len(body)} bytes {error}.", code="request_too_complex"
            ) from error
        except QueueFullError as error:
            raise self._refuse_crowd("large requests") from error
        except UnavailableError as error:
            raise ServiceError(
                f"This worker cannot prepare large requests at the moment: {error}.", status=503, retry=RETRY_REQUEST
            ) from error
        except FunctionError as error:
            logger.error("preparing a request failed: %s", error)  # noqa: TRY400 - the trace that matters is not here
            raise ServiceError("The server had an internal error.") from error

    def _refuse_crowd(self, what: str) -> RequestError:
        self.counts.refused_total += 1
        return RequestError(
            f"This worker has as many {what} waiting as it takes; try again later.",
            code=TOO_MANY_LARGE_REQUESTS,
            status=429,
        )


def _note_unheard(work: asyncio.Task[Prepared]) -> None:
    """What became of a request whose client has left. A refusal is nobody's any more, a defect is ours."""
    error = None if work.cancelled() else work.exception()
    if error is not None and not isinstance(error, RequestError | ServiceError):
        logger.error("preparing a request whose client has left failed", exc_info=error)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
