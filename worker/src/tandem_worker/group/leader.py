"""Rank 0's end of the control channel.

Life: *gathering*, while followers come, go and come again; *formed*, from the moment everybody is there and is told so;
*over*, when it was stopped or a member is gone. A formed group loses no member and takes none: whatever befalls one of
its processes ends all of them, and new processes gather anew. Nobody of an earlier group can slip into a later one,
because a group's ranks find each other only through the welcome of its own leader process.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem_worker.errors import GroupLostError, TransferError
from tandem_worker.group.link import SILENCE_SECONDS, Kind, Link, LinkClosedError, Loss, encode_object, parse_object

logger = logging.getLogger(__name__)

_HELLO_SECONDS = 10.0
_FAREWELL_SECONDS = 1.0
_BLAME_SECONDS = 2.0
_EXIT_SECONDS = 0.5
"""A connection that closes may be explained by its process's exit status, or by its pod's first process."""
_REMINDER_SECONDS = 30.0


@dataclass(slots=True, eq=False)
class _Member:
    rank: int
    pod: str
    link: Link

    def __str__(self) -> str:
        return f"rank {self.rank} in pod {self.pod}"


class GroupLeader:
    """Methods may be called from any thread. `on_lost` and `on_leaving` are called on threads of the group."""

    def __init__(
        self,
        size: int,
        identity: str,
        *,
        on_lost: Callable[[Loss], None],
        on_leaving: Callable[[], None] = lambda: None,
    ) -> None:
        """`size` ranks in all. `on_lost` gets the cause, once."""
        self.size = size
        self._identity = identity
        self._on_lost = on_lost
        self._on_leaving = on_leaving
        self.on_answer: Callable[[bytes], None] | None = None
        """Takes what followers say about transfers, on threads of the group."""
        self._members: dict[int, _Member] = {}
        self._changed = threading.Condition()
        self._formed = self._over = False
        self._cause: Loss | None = None
        self._reports: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._listener: socket.socket | None = None

    # -- gathering -----------------------------------------------------------------------------------------------

    def listen(self, host: str, port: int) -> int:
        """Begin to gather; returns the port. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        threading.Thread(target=self._accept, args=(self._listener,), name="group", daemon=True).start()
        return self._listener.getsockname()[1]

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come yet."""
        return [rank for rank in range(1, self.size) if rank not in self._members]

    def gather(self, welcome: Mapping[str, Any]) -> None:
        """Wait, as long as it takes, for every follower; then tell all of them `welcome`. Raises GroupLostError."""
        reminder = time.monotonic()
        with self._changed:
            while len(self._members) < self.size - 1 and not self._over:
                if time.monotonic() >= reminder:
                    logger.info("waiting for ranks %s of %d", self.missing, self.size)
                    reminder = time.monotonic() + _REMINDER_SECONDS
                self._changed.wait(_REMINDER_SECONDS)
            self._formed = True
        self._broadcast(Kind.WELCOME, encode_object(welcome))

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed: the group is over
                return
            threading.Thread(target=self._meet, args=(connection,), name="group-member", daemon=True).start()

    def _meet(self, connection: socket.socket) -> None:
        link = Link(connection)
        link.hurry(_HELLO_SECONDS)
        try:
            member = self._identify(link)
        except LinkClosedError as error:
            with contextlib.suppress(LinkClosedError):
                link.send_object(Kind.REFUSED, {"message": str(error)})
            link.close()
            logger.warning("a process that knocked was refused: %s", error)
            return
        link.hurry(SILENCE_SECONDS)
        link.start_heartbeat()
        self._listen_to(member)

    def _identify(self, link: Link) -> _Member:
        """The new member. Raises LinkClosedError with what the other side is to be told."""
        kind, payload = link.receive()
        hello = parse_object(payload)
        rank, pod, identity = (hello.get(key) for key in ("rank", "pod", "identity"))
        if kind is not Kind.HELLO or not isinstance(rank, int) or not 1 <= rank < self.size:
            raise LinkClosedError(f"no hello of ranks 1 to {self.size - 1}: {hello}")
        if identity != self._identity:
            raise LinkClosedError(f"this group serves {self._identity}; you come for {identity}")
        member = _Member(rank, str(pod), link)
        with self._changed:
            if not self._formed and not self._over:
                replaced = self._members.get(rank)
                self._members[rank] = member
                self._changed.notify_all()
                if replaced is not None:
                    replaced.link.close()
                return member
        self.lose(Loss(f"{member} started anew: its predecessor in this group is gone"))
        raise LinkClosedError("the group that you belonged to ends; come again when it has restarted")

    # -- formed --------------------------------------------------------------------------------------------------

    def collect(self) -> list[bytes]:
        """One report of every follower, by rank. Raises GroupLostError."""
        found: dict[int, bytes] = {}
        while len(found) < self.size - 1:
            entry = self._reports.get()
            if entry is None:
                raise GroupLostError(self.cause)
            found[entry[0]] = entry[1]
        return [found[rank] for rank in sorted(found)]

    def announce(self, plan: bytes) -> None:
        """Raises GroupLostError."""
        self._broadcast(Kind.PLAN, plan)

    def send_steps(self, frames: Mapping[int, bytes]) -> None:
        """Tell each follower what to compute next, by rank. Raises GroupLostError."""
        for rank, frame in frames.items():
            self._send(self._members[rank], Kind.STEP, frame)

    @property
    def num_followers(self) -> int:
        return self.size - 1

    def post(self, message: bytes) -> None:
        """Satisfies `transfer.base.GroupChannel`."""
        with contextlib.suppress(GroupLostError):  # the process ends, and whoever waits for an answer with it
            self._broadcast(Kind.TRANSFER, message)

    def _broadcast(self, kind: Kind, payload: bytes) -> None:
        if self._over:
            raise GroupLostError(self.cause)
        for member in list(self._members.values()):
            self._send(member, kind, payload)

    def _send(self, member: _Member, kind: Kind, payload: bytes) -> None:
        try:
            member.link.send(kind, payload)
        except LinkClosedError as error:
            self._lose_member(member, error)
            raise GroupLostError(self.cause) from error

    def _listen_to(self, member: _Member) -> None:
        try:
            while True:
                kind, payload = member.link.receive()
                if kind is Kind.REPORT:
                    self._reports.put((member.rank, payload))
                elif kind is Kind.ANSWER and self.on_answer is not None:
                    self.on_answer(payload)
                elif kind is Kind.LEAVING:
                    logger.info("%s is asked to end", member)
                    self._on_leaving()
                elif kind is Kind.FAILED and self._formed:
                    loss = Loss.parse(payload)
                    self.lose(loss._replace(message=f"{member} failed: {loss.message}"))
        except LinkClosedError as error:
            self._lose_member(member, error)
        except TransferError as error:
            self.lose(Loss(f"{member} is not understood: {error}"))
        finally:
            member.link.close()

    def _lose_member(self, member: _Member, error: LinkClosedError) -> None:
        with self._changed:
            if not self._formed:
                if self._members.get(member.rank) is member:
                    del self._members[member.rank]
                    logger.warning("%s went away before the group was complete: %s", member, error)
                return
        self.blame(Loss(f"{member} is gone: {error}"), patience=_EXIT_SECONDS)

    # -- the end -------------------------------------------------------------------------------------------------

    def lose(self, cause: Loss) -> None:
        """The group is lost: tell every process in it, then `on_lost`. Only the first cause counts."""
        if not self._finish(cause):
            return
        for member in list(self._members.values()):
            member.link.hurry(_FAREWELL_SECONDS)
            with contextlib.suppress(LinkClosedError):
                member.link.send(Kind.FAILED, cause.encode())
        self._close()
        self._on_lost(cause)

    def blame(self, cause: Loss, *, patience: float = _BLAME_SECONDS) -> None:
        """As `lose`, for what may be only the echo of something that is about to be noticed: wait for that first."""
        with self._changed:
            self._changed.wait_for(lambda: self._over, patience)
        self.lose(cause)

    @property
    def cause(self) -> str:
        """Why the group is over."""
        return "the group was stopped" if self._cause is None else self._cause.message

    def stop(self, timeout: float = 5.0) -> None:
        """The orderly end: every follower stops, and has closed its connection when this returns."""
        if not self._finish(None):
            return
        deadline = time.monotonic() + timeout
        for member in self._members.values():
            with contextlib.suppress(LinkClosedError):
                member.link.send(Kind.STOP)
        for member in self._members.values():
            member.link.await_end(max(0.0, deadline - time.monotonic()))
        self._close()

    def _finish(self, cause: Loss | None) -> bool:
        """Whether it is this call that ends the group."""
        with self._changed:
            if self._over:
                return False
            self._over, self._cause = True, cause
            self._changed.notify_all()
        self._reports.put(None)
        return True

    def _close(self) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # closing alone would not wake who accepts
            self._listener.close()
        for member in self._members.values():
            member.link.close()
