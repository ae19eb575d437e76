"""Rank 0's end of the control channel.

Life: *gathering*, while followers come, go and come again; *formed*, from the moment everybody is there and is told so;
*over*, when it was stopped or a member is gone. A formed group loses no member and takes none: what ends one of its
processes ends all of them, and new processes gather anew. Nobody of an earlier group can slip into a later one, because
a group's ranks find each other only in the table of its own leader process.

Who knocks has proven the group's key at the door. Even so nobody takes the place of a rank that is alive: whoever comes
for it is refused as long as the process that has it is heard, so that it takes a death to end a group.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tandem_api.keys import KeyRing

from tandem_worker.engine.errors import GroupLostError
from tandem_worker.group.control.link import (
    HEARTBEAT_SECONDS,
    SILENCE_SECONDS,
    ControlLink,
    LinkClosedError,
    Loss,
    MessageKind,
    encode_object,
    parse_beat,
    parse_object,
)
from tandem_worker.group.control.table import Operation, Table, TableError, decode_call, encode_result
from tandem_worker.host.errors import ThreadStartError
from tandem_worker.host.nvml import GpuSample
from tandem_worker.host.peers.door import Door
from tandem_worker.host.peers.handshake import Purpose
from tandem_worker.host.vitals import Vitals
from tandem_worker.transfer.errors import TransferError

logger = logging.getLogger(__name__)

_HELLO_SECONDS = 10.0
_FAREWELL_SECONDS = 1.0
_BLAME_SECONDS = 2.0
_EXIT_SECONDS = 0.5
"""A connection that closes may be explained by its process's exit status, or by its pod's first process."""
_REMINDER_SECONDS = 30.0
_SIGN_OF_LIFE_SECONDS = 3.5 * HEARTBEAT_SECONDS
"""A rank that is not heard for so long gives way to who comes for its place."""
_SPOKEN_BY_MEMBERS = frozenset(
    {MessageKind.REPORT, MessageKind.ANSWER, MessageKind.LEAVING, MessageKind.FAILED, MessageKind.CALL}
)


@dataclass(slots=True, eq=False)
class _Member:
    rank: int
    pod: str
    link: ControlLink
    has_reported: bool = False

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
        ring: Callable[[], KeyRing],
        vitals: Vitals,
    ) -> None:
        """`size` ranks in all. `on_lost` gets the cause, once. `ring` has the group's keys."""
        self.size = size
        self._identity = identity
        self._on_lost = on_lost
        self._on_leaving = on_leaving
        self.on_answer: Callable[[bytes], None] | None = None
        """Takes what followers say about transfers, on threads of the group."""
        self.gpus: dict[int, GpuSample] = {}
        """What the followers' GPUs told last."""
        self._members: dict[int, _Member] = {}
        self._changed = threading.Condition()
        self._formed = self._over = False
        self._cause: Loss | None = None
        self._reports: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._ring, self._vitals = ring, vitals
        self._table = Table()
        self._num_knocking = 0
        self._door: Door | None = None

    # -- gathering -----------------------------------------------------------------------------------------------

    def listen(self, host: str, port: int) -> int:
        """Begin to gather; returns the port. Raises OSError, ThreadStartError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
        port = listener.getsockname()[1]
        self._door = Door(listener, ring=self._ring, purpose=Purpose.GROUP, admit=self._admit, vitals=self._vitals)
        self._door.start()
        return port

    @property
    def refusals(self) -> Counter[str]:
        """Connections that were not let through, by reason."""
        return Counter() if self._door is None else self._door.refusals

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
        self._broadcast(MessageKind.WELCOME, encode_object(welcome))

    def _admit(self, connection: socket.socket, name: str) -> None:
        """On the door's thread. Raises ThreadStartError."""
        with self._changed:
            if self._num_knocking >= 2 * self.size:  # each of them has a thread
                logger.warning("%d processes knock at once: the one at %s is sent away", self._num_knocking, name)
                connection.close()
                return
            self._num_knocking += 1
        try:
            self._vitals.start_thread("group-member", self._meet, ControlLink(connection))
        except BaseException:
            with self._changed:
                self._num_knocking -= 1
            raise

    def _meet(self, link: ControlLink) -> None:
        try:
            link.hurry(_HELLO_SECONDS)
            link.start_heartbeat(self._vitals)
            member = self._identify(link)
        except (LinkClosedError, ThreadStartError) as error:
            with contextlib.suppress(LinkClosedError):
                link.send_object(MessageKind.REFUSED, {"message": str(error)})
            link.close()
            logger.warning("a process that knocked was refused: %s", error)
            return
        finally:
            with self._changed:
                self._num_knocking -= 1
        link.hurry(SILENCE_SECONDS)
        self._listen_to(member)

    def _identify(self, link: ControlLink) -> _Member:
        """The new member. Raises LinkClosedError with what the other side is to be told."""
        _, payload = link.receive(lambda kind: kind is MessageKind.HELLO)
        hello = parse_object(payload)
        rank, pod, identity = (hello.get(key) for key in ("rank", "pod", "identity"))
        if not isinstance(rank, int) or not 1 <= rank < self.size:
            raise LinkClosedError(f"no hello of ranks 1 to {self.size - 1}: {hello}")
        if identity != self._identity:
            raise LinkClosedError(f"this group serves {self._identity}; you come for {identity}")
        member = _Member(rank, str(pod), link)
        known = self._members.get(rank)
        if known is not None and self._is_alive(known):
            raise LinkClosedError(f"{known} is here and alive; two processes cannot have one place")
        with self._changed:
            if not self._formed and not self._over:
                replaced = self._members.get(rank)
                if replaced is not known and replaced is not None:
                    raise LinkClosedError(f"{replaced} came first")
                self._members[rank] = member
                self._changed.notify_all()
                if replaced is not None:
                    replaced.link.close()
                return member
        self.lose(Loss(f"{member} started anew: its predecessor in this group is gone"))
        raise LinkClosedError("the group that you belonged to ends; come again when it has restarted")

    def _is_alive(self, member: _Member) -> bool:
        """Whether it is heard from now on, before its silence has lasted too long."""
        asked = time.monotonic()
        while not member.link.ended and time.monotonic() < asked + _SIGN_OF_LIFE_SECONDS:
            if member.link.heard_at > asked:
                return True
            time.sleep(0.05)
        return False

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
        self._broadcast(MessageKind.PLAN, plan)

    def send_steps(self, frames: Mapping[int, bytes]) -> None:
        """Tell each follower what to compute next, by rank. Raises GroupLostError."""
        for rank, frame in frames.items():
            self._send(self._members[rank], MessageKind.STEP, frame)

    def send_head_order(self, ranks: Sequence[int], order: bytes) -> None:
        """Tell these followers about their draft head. Raises GroupLostError."""
        for rank in ranks:
            self._send(self._members[rank], MessageKind.HEAD, order)

    def send_moves(self, ranks: Iterable[int], frame: bytes) -> None:
        """Have some followers copy blocks to host memory and back. Raises GroupLostError."""
        for rank in ranks:
            self._send(self._members[rank], MessageKind.MOVES, frame)

    @property
    def num_followers(self) -> int:
        return self.size - 1

    def post(self, message: bytes) -> None:
        """Satisfies `transfer.contract.GroupChannel`."""
        with contextlib.suppress(GroupLostError):  # the process ends, and whoever waits for an answer with it
            self._broadcast(MessageKind.TRANSFER, message)

    def _broadcast(self, kind: MessageKind, payload: bytes) -> None:
        if self._over:
            raise GroupLostError(self.cause)
        for member in list(self._members.values()):
            self._send(member, kind, payload)

    def _send(self, member: _Member, kind: MessageKind, payload: bytes) -> None:
        try:
            member.link.send(kind, payload)
        except LinkClosedError as error:
            self._lose_member(member, error)
            raise GroupLostError(self.cause) from error

    def _listen_to(self, member: _Member) -> None:
        source = f"{member}"
        member.link.on_heartbeat = lambda payload: self._note_beat(member.rank, source, payload)
        try:
            while True:
                self._heed(member, *member.link.receive(lambda kind: self._formed and kind in _SPOKEN_BY_MEMBERS))
        except LinkClosedError as error:
            self._lose_member(member, error)
        except (TransferError, TableError) as error:
            self.lose(Loss(f"{member} is not understood: {error}"))
        except Exception as error:  # without this thread nothing of that rank is heard any more
            logger.exception("%s is not listened to any more", member)
            self.lose(Loss(f"{member} is not listened to any more: {type(error).__name__}: {error}"))
        finally:
            member.link.close()
            self._vitals.clear(source)

    def _heed(self, member: _Member, kind: MessageKind, payload: bytes) -> None:
        """What a member of a formed group says. Raises LinkClosedError, TableError, TransferError."""
        if kind is MessageKind.REPORT:
            if member.has_reported:
                raise LinkClosedError("it reported twice")
            member.has_reported = True
            self._reports.put((member.rank, payload))
        elif kind is MessageKind.CALL:
            self._execute_for(member, payload)
        elif kind is MessageKind.ANSWER:
            if self.on_answer is not None:
                self.on_answer(payload)
        elif kind is MessageKind.LEAVING:
            logger.info("%s is asked to end", member)
            self._on_leaving()
        else:
            assert kind is MessageKind.FAILED
            loss = Loss.parse(payload)
            self.lose(loss._replace(message=f"{member} failed: {loss.message}"))

    def _note_beat(self, rank: int, source: str, payload: bytes) -> None:
        """What is wrong with a process that has no probes of its own shows in this one's, as its GPU does."""
        problems, self.gpus[rank] = parse_beat(payload)
        if problems:
            self._vitals.set(source, "; ".join(problems))
        else:
            self._vitals.clear(source)

    def call(self, operation: Operation, fields: Sequence[bytes], *, seconds: float) -> bytes:
        """Rank 0's own operations on the group's table. Raises TimeoutError, GroupLostError."""
        found: Future[bytes | None] = Future()
        self._table.execute(operation, fields, found.set_result)
        answer = found.result(seconds)
        if answer is None:
            raise GroupLostError(self.cause)
        return answer

    def _execute_for(self, member: _Member, payload: bytes) -> None:
        """Raises TableError."""
        number, operation, fields = decode_call(payload)

        def done(answer: bytes | None) -> None:
            if answer is not None:
                with contextlib.suppress(LinkClosedError):  # whoever listens notices the end
                    member.link.send(MessageKind.RESULT, encode_result(number, answer))

        self._table.execute(operation, fields, done)

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
                member.link.send(MessageKind.FAILED, cause.encode())
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
        for member in list(self._members.values()):
            with contextlib.suppress(LinkClosedError):
                member.link.send(MessageKind.STOP)
        for member in list(self._members.values()):
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
        self._table.close()
        return True

    def _close(self) -> None:
        if self._door is not None:
            self._door.close()
        for member in list(self._members.values()):
            member.link.close()
