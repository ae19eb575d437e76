"""A follower's end of the control channel."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from tandem_worker.errors import GroupLostError
from tandem_worker.group.link import Kind, Link, LinkClosedError, Loss, parse_object

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.5
_BLAME_SECONDS = 2.0


class GroupMember:
    """Methods are for one thread, except `leave`, `blame` and `formed`. `on_lost` is called on a thread of its own."""

    def __init__(self, rank: int, *, pod: str, identity: str, on_lost: Callable[[Loss], None]) -> None:
        """`on_lost` gets the cause, once, when a formed group ends in another way than by a stop."""
        self.rank = rank
        self.formed = False
        self.leader_address = ""
        """IP address of the leader that took this rank in."""
        self._hello = {"rank": rank, "pod": pod, "identity": identity}
        self._on_lost = on_lost
        self._link: Link | None = None
        self._inbox: queue.SimpleQueue[tuple[Kind, bytes] | None] = queue.SimpleQueue()
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
            except (OSError, LinkClosedError) as error:
                message = str(error)
                if message != told:
                    logger.info("the leader at %s:%d does not take rank %d: %s", host, port, self.rank, message)
                    told = message
            time.sleep(_RETRY_SECONDS)

    def _knock(self, host: str, port: int) -> dict[str, Any]:
        link = Link(socket.create_connection((host, port), _CONNECT_SECONDS))
        try:
            link.send_object(Kind.HELLO, self._hello)
            link.start_heartbeat()
            kind, payload = link.receive()
            content = parse_object(payload)
            if kind is not Kind.WELCOME:
                raise LinkClosedError(f"it refuses: {content.get('message')}")  # noqa: TRY301
        except LinkClosedError:
            link.close()
            raise
        self._link = link
        self.leader_address = link.peer_address
        self.formed = True
        threading.Thread(target=self._listen, args=(link,), name="group", daemon=True).start()
        return content

    def report(self, content: bytes) -> None:
        """Raises GroupLostError."""
        assert self._link is not None
        try:
            self._link.send(Kind.REPORT, content)
        except LinkClosedError as error:
            self._lose(Loss(f"the leader is gone: {error}"))
            raise GroupLostError(self.cause) from error

    def answer(self, message: bytes) -> None:
        """To the leader's transfers; from any thread."""
        if self._link is not None:
            with contextlib.suppress(LinkClosedError):  # whoever listens notices the end
                self._link.send(Kind.ANSWER, message)

    def receive(self) -> tuple[Kind, bytes]:
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
                self._link.send(Kind.LEAVING)

    def blame(self, cause: Loss, *, patience: float = _BLAME_SECONDS) -> None:
        """This process cannot go on: tell the leader, unless its own word comes first.

        That is waited for because an error may be the echo of another rank's end.
        """
        if self._over.wait(patience):
            return
        self._over.set()
        if self._link is not None:
            with contextlib.suppress(LinkClosedError):
                self._link.send(Kind.FAILED, cause.encode())

    def _listen(self, link: Link) -> None:
        try:
            while True:
                kind, payload = link.receive()
                if kind is Kind.FAILED:
                    self._lose(Loss.parse(payload))
                    return
                self._inbox.put((kind, payload))
                if kind is Kind.STOP:
                    self._over.set()
                    return
        except LinkClosedError as error:
            self._lose(Loss(f"the leader is gone: {error}"))
        finally:
            link.close()

    def _lose(self, cause: Loss) -> None:
        if self._over.is_set():
            return
        self._cause = cause
        self._over.set()
        self._inbox.put(None)
        self._on_lost(cause)
