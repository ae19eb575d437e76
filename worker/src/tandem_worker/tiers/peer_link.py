"""The connection over which blocks come from one other worker, and what is known of that worker.

A thread of its own asks for one load's blocks at a time. What arrives lands in a buffer, is verified there, and is
copied to where it belongs under the lock of its load, unless that has ended. Whatever goes wrong ends the connection:
the next load finds a new one, or leaves the worker alone for a while.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tandem_api.keys import KeyRing

from tandem_worker.host.errors import AuthenticationError
from tandem_worker.host.peers.dial import dial
from tandem_worker.host.peers.handshake import Purpose
from tandem_worker.tiers.book import Load
from tandem_worker.tiers.format import Geometry, TierKey
from tandem_worker.tiers.memory import BlockMemory, allocate_rows
from tandem_worker.tiers.policy import cut_after
from tandem_worker.tiers.wire import is_sound, place_in, plan_piece
from tandem_worker.transfer import fetches, protocol
from tandem_worker.transfer.channel import configure
from tandem_worker.transfer.checksums import Damage
from tandem_worker.transfer.contract import BandwidthMeter, Identity
from tandem_worker.transfer.errors import IntegrityError, TransferError
from tandem_worker.transfer.protocol import FrameKind, Header

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 1.0
IDLE_SECONDS = 30.0
"""After which a connection that nobody uses is closed, with its thread."""
_TICK_SECONDS = 0.02
"""So often a thread that waits for bytes looks whether somebody still wants them."""
FAILING = 3
"""So many failures in a row are told."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds for which a worker that failed is left alone, twice as long each time."""
STALE_SECONDS = 60.0
"""What was measured so long ago keeps nobody from trying."""
_EARLY_SECONDS = 0.01
"""Two workers may differ by so much on when the time of a fetch is over."""
_HELLO = frozenset({FrameKind.HELLO, FrameKind.REFUSED})
_ANSWERS = frozenset({FrameKind.SLOTS, FrameKind.FETCHED, FrameKind.FAILED})


class _AbandonedError(Exception):
    """Nobody waits for this load any more."""


class _DeclinedError(TransferError):
    """The peer is well, and gives nothing now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullTerms:
    """What all links of a worker share. `memory` is theirs alone, and used by one thread at a time."""

    key: TierKey
    geometry: Geometry
    memory: BlockMemory
    identity: Identity
    ring: Callable[[], KeyRing]
    landing: threading.Lock
    """Held while `memory` is used."""


class PeerRecord:
    """What is known of one worker; it outlives connections. Any thread."""

    def __init__(self) -> None:
        self.meter = BandwidthMeter()
        """Bytes of slots per second while they come, verified and copied."""
        self.latency = 0.0
        """Seconds until the first of them."""
        self.measured_at = self.tried_at = self.failed_at = self.answered_at = float("-inf")
        self.queued_bytes = 0
        """Bytes that loads wait for."""
        self.failures = 0
        """One after another."""
        self.faults = 0
        """Those of them since it last answered, if only to decline, at `answered_at`; the first was at `failed_at`."""
        self.retry_at = float("-inf")
        self.message = ""

    def note_failure(self, message: str, now: float, *, is_well: bool = False) -> None:
        """Leave it alone for a while. `is_well`: it is there, whatever it gives."""
        if not self.faults:
            self.failed_at = now
        if is_well:
            self.answered_at = now
        self.message, self.tried_at, self.faults = message, now, 0 if is_well else self.faults + 1
        self.retry_at = now + min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**self.failures)
        self.failures = min(self.failures + 1, 16)

    def note_success(self, now: float) -> None:
        """It gives what it is asked for."""
        self.failures, self.faults, self.message = 0, 0, ""
        self.tried_at = self.answered_at = now

    def is_failing(self) -> bool:
        """Whether it has failed again and again: a single time many a sound one is late."""
        return self.faults >= FAILING

    def predict(self, num_bytes: int, usual: float | None, now: float) -> float:
        """Seconds until so many bytes would be here; `usual`: bytes per second of others. 0 where nobody knows, or has
        known for long: somebody has to try."""
        if now - self.measured_at > STALE_SECONDS:
            return 0.0 if usual is None else num_bytes / usual
        rate = self.meter.rate
        return self.latency + (0.0 if rate is None else (num_bytes + self.queued_bytes) / rate)


class PeerLink:
    """Loads are given to it until it says that it is closed; each is reported once, when no more of it comes."""

    def __init__(
        self,
        endpoint: str,
        record: PeerRecord,
        terms: PullTerms,
        report: Callable[[Load], None],
        count_read: Callable[[int, float], None],
        count_damage: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint, self.record, self._terms, self._clock = endpoint, record, terms, clock
        self._report, self._count_read, self._count_damage = report, count_read, count_damage
        self._wake = threading.Condition()
        self._loads: deque[Load] = deque()
        self._closed = False
        self._sock: socket.socket | None = None
        self._rows: np.ndarray | None = None

    def submit(self, load: Load) -> bool:
        """False: it is closed."""
        with self._wake:
            if self._closed:
                return False
            self._loads.append(load)
            self.record.queued_bytes += self._size_of(load)
            self._wake.notify()
        return True

    def close(self) -> None:
        """Any thread. What waits is reported."""
        with self._wake:
            self._closed = True
            self._wake.notify()

    @property
    def busy(self) -> bool:
        """Whether somebody waits for it."""
        return self.record.queued_bytes > 0

    def run(self) -> None:
        """The thread's work."""
        try:
            while (load := self._next()) is not None:
                self._serve(load)
        finally:
            self._drop()
            with self._wake:
                self._closed = True
                left, self._loads = list(self._loads), deque()
                self.record.queued_bytes -= sum(self._size_of(load) for load in left)
            for load in left:
                self._report(load)

    def _size_of(self, load: Load) -> int:
        return len(load.order.names) * self._terms.geometry.slot_bytes

    def _next(self) -> Load | None:
        with self._wake:
            if not self._loads and not self._closed:
                self._wake.wait(IDLE_SECONDS)
            if self._closed or not self._loads:
                self._closed = True
                return None
            return self._loads.popleft()

    def _serve(self, load: Load) -> None:
        if not load.ended and self.record.retry_at <= self._clock():  # else it waited behind one that has failed
            self._try(load)
        with self._wake:
            self.record.queued_bytes -= self._size_of(load)
        self._report(load)

    def _try(self, load: Load) -> None:
        """Bring what can be had, and note how that went."""
        try:
            self._fetch(load)
        except _DeclinedError as error:
            self._leave_alone(str(error), is_well=True)
        except _AbandonedError:
            self._drop()
            if load.valid:  # it gives, if not all
                self.record.note_success(self._clock())
            elif not load.cancelled:
                self._leave_alone("nothing came before it was late")
        except IntegrityError as error:
            self._count_damage()
            self._drop()
            self._leave_alone(str(error))
        except (TransferError, AuthenticationError, OSError, ValueError, OverflowError) as error:
            self._drop()
            self._leave_alone(str(error))
        except Exception as error:  # a defect must not leave requests waiting, nor end the thread
            logger.exception("blocks could not be had from %s", self.endpoint)
            self._drop()
            self._leave_alone(f"internal error: {error!r}")
        else:
            self.record.note_success(self._clock())

    def _leave_alone(self, failure: str, *, is_well: bool = False) -> None:
        self.record.note_failure(failure, self._clock(), is_well=is_well)
        logger.warning("blocks of the worker at %s are computed here: %s", self.endpoint, failure)

    # -- the connection --------------------------------------------------------------------------------------------

    def _connect(self, load: Load) -> socket.socket:
        host, _, port = self.endpoint.rpartition(":")
        sock = dial(host.strip("[]"), int(port), self._terms.ring(), Purpose.KV, seconds=CONNECT_SECONDS)
        try:
            self._shake_hands(sock, load)
        except BaseException:
            sock.close()
            raise
        return sock

    def _shake_hands(self, sock: socket.socket, load: Load) -> None:
        configure(sock)
        sock.settimeout(_TICK_SECONDS)
        self._send(sock, protocol.encode_hello(self._terms.identity), load)
        header, body = self._read_frame(sock, _HELLO, load)
        if header.kind is FrameKind.REFUSED:
            raise TransferError(f"refused: {protocol.decode_text(body)}")
        refusal = self._terms.identity.refusal(protocol.decode_hello(body))
        if refusal is not None:
            raise TransferError(refusal)

    def _drop(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def _fetch(self, load: Load) -> None:
        asked = self._clock()
        sock = self._sock
        if sock is None:
            sock = self._sock = self._connect(load)
        names = load.order.names
        seconds = cut_after(len(names), len(names), load.order.seconds_per_block)
        order = fetches.FetchOrder(
            transfer=secrets.randbits(64),
            key=self._terms.key.digest,
            names=names[: protocol.MAX_NAMES],
            seconds=max(0.001, load.began + seconds - self._clock()),
        )
        over_at = self._clock() + min(order.seconds, protocol.MAX_FETCH_SECONDS) - _EARLY_SECONDS
        self._send(sock, fetches.encode_fetch(order), load)
        came = 0
        while True:
            header = self._read_header(sock, _ANSWERS, load)
            if header.transfer != order.transfer:
                raise IntegrityError("the peer answers what it was not asked", Damage.BODY)
            if came == 0:
                self._note_latency(self._clock() - asked)
            if header.kind is FrameKind.SLOTS:
                came += self._land(sock, header, order, load, came)
                continue
            body = self._read_body(sock, header, load)
            if header.kind is FrameKind.FAILED:
                if came and self._clock() >= over_at:
                    return  # it gave all that it could in the time that it was asked for
                raise _DeclinedError(protocol.decode_text(body))
            if fetches.decode_fetched(body) != came:
                raise IntegrityError("the peer says that it has sent other blocks than have come", Damage.BODY)
            return

    def _note_latency(self, seconds: float) -> None:
        record = self.record
        record.latency = seconds if not record.latency else 0.5 * (record.latency + seconds)
        record.measured_at = self._clock()

    def _land(self, sock: socket.socket, header: Header, order: fetches.FetchOrder, load: Load, first: int) -> int:
        """The blocks of one frame: read, verified, copied. How many. Raises IntegrityError where one is damaged; those
        before it stay."""
        terms, began = self._terms, self._clock()
        size, count = terms.geometry.slot_bytes, header.num_blocks
        head = self._read(sock, protocol.SLOTS_HEAD_BYTES, load)
        protocol.check_body(header, head)
        if self._rows is None:
            self._rows = allocate_rows(plan_piece(size), size)
        rows = self._rows
        if (
            fetches.decode_slots_head(head) != first
            or header.length != len(head) + count * size
            or count > len(rows)
            or first + count > len(order.names)
        ):
            raise IntegrityError("the peer sent other blocks than it was asked for", Damage.BODY)
        self._fill(sock, rows[:count].reshape(-1).data, load)
        good = next(
            (
                row
                for row in range(count)
                if not is_sound(
                    rows[row],
                    terms.geometry,
                    terms.key,
                    order.names[first + row],
                    place_in(order.transfer, first + row),
                )
            ),
            count,
        )
        with load.lock:
            if load.ended:
                raise _AbandonedError
            if good:
                with terms.landing:
                    ids = load.order.block_ids[first : first + good]
                    terms.memory.copy_in(rows[:good], terms.geometry.slot_header_bytes, ids)
                load.valid = first + good
        seconds = self._clock() - began
        self._count_read(good * size, seconds)
        self.record.meter.observe(count * size, seconds)
        self.record.measured_at = self._clock()
        if good < count:
            raise IntegrityError("a block arrived damaged", Damage.BLOCK)
        return count

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _send(self, sock: socket.socket, data: bytes, load: Load) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[sock.send(view) :]
            except TimeoutError:
                self._check(load)

    def _read_header(self, sock: socket.socket, allowed: frozenset[FrameKind], load: Load) -> Header:
        return protocol.decode_header(self._read(sock, protocol.HEADER_BYTES, load), allowed)

    def _read_body(self, sock: socket.socket, header: Header, load: Load) -> bytes:
        body = bytes(self._read(sock, header.length, load))
        protocol.check_body(header, body)
        return body

    def _read_frame(self, sock: socket.socket, allowed: frozenset[FrameKind], load: Load) -> tuple[Header, bytes]:
        header = self._read_header(sock, allowed, load)
        return header, self._read_body(sock, header, load)

    def _read(self, sock: socket.socket, num_bytes: int, load: Load) -> bytearray:
        """What is small: frames' sizes are bounded."""
        data = bytearray(num_bytes)
        self._fill(sock, memoryview(data), load)
        return data

    def _fill(self, sock: socket.socket, view: memoryview, load: Load) -> None:
        """Wait for as long as somebody waits for the load. Raises _AbandonedError, TransferError, OSError."""
        while view:
            try:
                received = sock.recv_into(view)
            except TimeoutError:
                self._check(load)
                continue
            if not received:
                raise TransferError("the peer closed the connection")
            view = view[received:]
            self._check(load)

    @staticmethod
    def _check(load: Load) -> None:
        if load.ended:
            raise _AbandonedError
