"""Decode side: what one connection is to bring of one order, and whom it reports to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem_worker.engine.contract import RemotePrefill
from tandem_worker.transfer.decode.reception import Reception
from tandem_worker.transfer.layout import RankAddress
from tandem_worker.transfer.protocol import Done

_ZEROS = bytes(1 << 20)


@dataclass(slots=True, eq=False)
class Attempt:
    """What one connection is to bring of one order."""

    transfer: int
    request_id: str
    block_ids: tuple[int, ...]
    """Reserved for the prompt, in order."""
    first: int
    """Blocks of the prompt before this index are here."""
    order: RemotePrefill | None
    """To be given to the peer; None where this connection attaches to an order that goes to another rank."""
    reception: Reception | None = None
    """From the moment the peer is told."""
    landing: threading.Lock = field(default_factory=threading.Lock)
    is_open: bool = True
    """False once withdrawn or ended: what still arrives is thrown away. Written under `landing`."""
    unverified: Sequence[memoryview] = ()
    """Memory in which bytes stand, or may stand, that nobody has checked. Written under `landing`."""
    arrived: bool = False
    """The peer has sent everything; an order's blocks stay allocated there until `PrefillLink.release`."""
    resends: int = 0
    ordered_at: float = 0.0
    started_at: float | None = None
    """When the peer began with the prompt."""
    overdue: bool = False
    """Whether it has been told that it did not begin."""
    last_progress: float = 0.0

    def close(self) -> bool:
        """End it; when this returns no byte of it will be written any more, and none stays that was not checked.

        False when it had ended before.
        """
        with self.landing:
            was_open, self.is_open = self.is_open, False
            wipe(self.unverified)
            self.unverified = ()
        return was_open


def wipe(spans: Sequence[memoryview]) -> None:
    """Write zeros: unverified bytes of a peer must not stay in the cache."""
    for span in spans:
        for start in range(0, len(span), len(_ZEROS)):
            part = span[start : start + len(_ZEROS)]
            part[:] = _ZEROS[: len(part)]


class Connection(Protocol):
    """As much of a link as its listener looks at when it ends."""

    endpoint: str

    @property
    def established(self) -> bool:
        """Whether the peer was ever reached and agreed with."""
        ...


class LinkListener:
    """What a link reports, on its own thread and without holding a lock.

    An attempt that brought everything may still fail until it is released: only then were its blocks surely kept.
    """

    def attempt_ordered(self, attempt: Attempt, ranks: Sequence[RankAddress], mine: int) -> None:
        """An order is on its way to a worker of these ranks; the connection leads to number `mine` of them."""
        raise NotImplementedError

    def attempt_started(self, attempt: Attempt) -> None:
        """The peer computes the prompt."""
        raise NotImplementedError

    def attempt_overdue(self, attempt: Attempt) -> None:
        """The peer has not begun with the prompt for long."""
        raise NotImplementedError

    def attempt_done(self, attempt: Attempt, done: Done, worker: str) -> None:
        """Everything has arrived; `worker` is the name of the pod that computed it."""
        raise NotImplementedError

    def attempt_failed(self, attempt: Attempt, reason: str) -> None:
        """Nothing of it is written any more; `reason` says why."""
        raise NotImplementedError

    def attempt_resent(self, attempt: Attempt) -> None:
        """Blocks of it arrived damaged and are asked for again."""
        raise NotImplementedError

    def damaged(self, kind: str) -> None:
        """Something arrived that is not used; `checksums.Damage`."""
        raise NotImplementedError

    def received(self, num_bytes: int, seconds: float, transport: str = "TCP") -> None:
        """Blocks came in, `num_bytes` of KV in `seconds`."""
        raise NotImplementedError

    def link_closed(self, link: Connection, reason: str) -> None:
        """The connection has ended. Comes before `attempt_failed` of those that it still had."""
        raise NotImplementedError
