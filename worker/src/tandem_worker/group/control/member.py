"""A follower's end of the control channel."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tandem_api.keys import KeyRing

from tandem_worker.engine.errors import GroupLostError
from tandem_worker.group.control.link import ControlLink, LinkClosedError, Loss, MessageKind, parse_object
from tandem_worker.group.control.table import Operation, decode_result, encode_call
from tandem_worker.host.errors import AuthenticationError, ThreadStartError
from tandem_worker.host.peers.dial import dial
from tandem_worker.host.peers.handshake import Purpose
from tandem_worker.host.vitals import Vitals

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.5
_BLAME_SECONDS = 2.0
_SPOKEN_BY_LEADERS = frozenset(
    {
        MessageKind.PLAN,
        MessageKind.STEP,
        MessageKind.HEAD,
        MessageKind.MOVES,
        MessageKind.TRANSFER,
        MessageKind.FAILED,
        MessageKind.STOP,
        MessageKind.RESULT,
    }
)


class GroupMember:
    """Methods are for one thread, except `leave`, `blame`, `call` and `formed`."""

    def __init__(
        self,
        rank: int,
        *,
        pod: str,
        identity: str,
        on_lost: Callable[[Loss], None],
        ring: Callable[[], KeyRing],
        vitals: Vitals,
    ) -> None:
        """`on_lost` gets the cause, once, when a formed group ends in another way than by a stop.

        It is called on a thread of its own.
        """
        self.rank = rank
        self.formed = False
        self._ring, self._vitals = ring, vitals
        self._numbers = itertools.count()
        self._calls: dict[int, Future[bytes]] = {}
        self._hello = {"rank": rank, "pod": pod, "identity": identity}
        self._on_lost = on_lost
        self._link: ControlLink | None = None
        self._inbox: queue.SimpleQueue[tuple[MessageKind, bytes] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._cause: Loss | None = None

    def meet(self, host: str, port: int) -> dict[str, Any]:
        """Knock at the leader's until its group is complete, as long as it takes; returns its welcome.

        Leaders that are not there yet, that restart or that refuse are tried again: pods start in any order.
        """
        told = ""
        while True:
            try:
                return self._knock(host, port)
            except (OSError, LinkClosedError, AuthenticationError, ThreadStartError) as error:
                message = str(error)
                if message != told:
                    logger.info("the leader at %s:%d does not take rank %d: %s", host, port, self.rank, message)
                    told = message
            time.sleep(_RETRY_SECONDS)

    def _knock(self, host: str, port: int) -> dict[str, Any]:
        link = ControlLink(dial(host, port, self._ring(), Purpose.GROUP, seconds=_CONNECT_SECONDS))
        try:
            link.send_object(MessageKind.HELLO, self._hello)
            link.start_heartbeat(self._vitals)
            kind, payload = link.receive(lambda kind: kind in {MessageKind.WELCOME, MessageKind.REFUSED})
            content = parse_object(payload)
            if kind is not MessageKind.WELCOME:
                raise LinkClosedError(f"it refuses: {content.get('message')}")  # noqa: TRY301
            self._link = link
            self._vitals.start_thread("group", self._listen, link, is_over=self._over.is_set)
        except (LinkClosedError, ThreadStartError):
            link.close()
            raise
        self.formed = True
        return content

    def report(self, content: bytes) -> None:
        """Raises GroupLostError."""
        assert self._link is not None
        try:
            self._link.send(MessageKind.REPORT, content)
        except LinkClosedError as error:
            self._lose(Loss(f"the leader is gone: {error}"))
            raise GroupLostError(self.cause) from error

    def answer(self, message: bytes) -> None:
        """To the leader's transfers; from any thread."""
        if self._link is not None:
            with contextlib.suppress(LinkClosedError):  # whoever listens notices the end
                self._link.send(MessageKind.ANSWER, message)

    def call(self, operation: Operation, fields: Sequence[bytes], *, seconds: float) -> bytes:
        """An operation on the group's table, which the leader has. Raises TimeoutError, GroupLostError."""
        assert self._link is not None
        number = next(self._numbers)
        found = self._calls[number] = Future()
        try:
            if self._over.is_set():
                raise GroupLostError(self.cause)
            self._link.send(MessageKind.CALL, encode_call(number, operation, fields))
            return found.result(seconds)
        except LinkClosedError as error:
            raise GroupLostError(f"the leader is gone: {error}") from error
        finally:
            del self._calls[number]

    def receive(self) -> tuple[MessageKind, bytes]:
        """The leader's next message; STOP is the last one. Raises GroupLostError."""
        entry = self._inbox.get()
        if entry is None:
            raise GroupLostError(self.cause)
        return entry

    @property
    def cause(self) -> str:
        """Why the group is over, in the leader's words if it could tell."""
        return "the group was stopped" if self._cause is None else self._cause.message

    def leave(self) -> None:
        """This pod is asked to end: let the leader finish what runs, and stop everybody."""
        if self._link is not None:
            with contextlib.suppress(LinkClosedError):
                self._link.send(MessageKind.LEAVING)

    def blame(self, cause: Loss, *, patience: float = _BLAME_SECONDS) -> None:
        """This process cannot go on: tell the leader, unless its own word comes first.

        That is waited for because an error may be the echo of another rank's end.
        """
        if self._over.wait(patience):
            return
        self._over.set()
        if self._link is not None:
            with contextlib.suppress(LinkClosedError):
                self._link.send(MessageKind.FAILED, cause.encode())

    def _listen(self, link: ControlLink) -> None:
        try:
            while True:
                kind, payload = link.receive(lambda kind: kind in _SPOKEN_BY_LEADERS)
                if kind is MessageKind.RESULT:
                    self._settle(payload)
                    continue
                if kind is MessageKind.FAILED:
                    self._lose(Loss.parse(payload))
                    return
                self._inbox.put((kind, payload))
                if kind is MessageKind.STOP:
                    self._over.set()
                    return
        except LinkClosedError as error:
            self._lose(Loss(f"the leader is gone: {error}"))
        except Exception as error:  # without this thread the leader is not heard any more
            logger.exception("the leader is not listened to any more")
            self._lose(Loss(f"the leader is not listened to any more: {type(error).__name__}: {error}"))
        finally:
            link.close()

    def _settle(self, payload: bytes) -> None:
        """Raises TableError."""
        number, answer = decode_result(payload)
        found = self._calls.get(number)
        if found is not None and not found.done():  # else it was given up
            found.set_result(answer)

    def _lose(self, cause: Loss) -> None:
        if self._over.is_set():
            return
        self._cause = cause
        self._over.set()
        self._inbox.put(None)
        for found in list(self._calls.values()):
            if not found.done():
                found.set_exception(GroupLostError(cause.message))
        self._on_lost(cause)
