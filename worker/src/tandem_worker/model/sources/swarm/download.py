"""The threads of a shared download: one for each peer, some for the hub, one that looks for peers.

A file counts when its digest is the one that the hub announces, whoever sent its parts: the caller's thread looks at
that. Every thread asks the plan what
to do next, and everything that a source does wrong costs time: the chunk is asked of somebody else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from xxhash import xxh3_128_digest

from tandem_worker.host.errors import AuthenticationError, StartupError
from tandem_worker.host.files.exchange import Address, FileExchange
from tandem_worker.host.files.layout import Layout
from tandem_worker.host.files.share import SharedFiles
from tandem_worker.host.files.wire import ReplyHeader, WireError
from tandem_worker.model.sources.swarm.hub import HubRanges, NoRangesError
from tandem_worker.model.sources.swarm.parts import PartFiles
from tandem_worker.model.sources.swarm.peer import PeerLink, WrongBytesError
from tandem_worker.model.sources.swarm.plan import DISK, HUB, Plan

logger = logging.getLogger(__name__)

_HUB_THREADS = 4
_MAX_PEERS = 32
_NEWS_SECONDS = 0.25
"""Between two looks at a peer's news, for eight peers; more peers are looked at more rarely."""
_SEARCH_SECONDS = 2.0
_FIRST_SECONDS = 1.0
"""The hub is asked for nothing before every peer was looked at once, for so long at most: they may have all."""
_PAUSE_SECONDS = (1.0, 4.0, 15.0)
"""A peer that failed is left alone this long, the longer the more often."""
_CHUNK_SECONDS = 10.0
"""A chunk may take this long from a peer, or four times what it takes from the hub."""
_PATIENCE_SECONDS = 10.0
"""The hub helps where what peers have would take longer than this from them."""
_RATE_SECONDS = 3.0
_HUB_FAILURES = 6
_HUB_FAILED_SECONDS = 10.0
"""So many failures in a row, without a byte from anybody for so long, end the download."""
_MAX_ATTEMPTS = 2
_TICK_SECONDS = 0.1
"""Between two looks for work where nothing tells of it."""


class HubFailedError(Exception):
    """The hub failed many times in a row and nobody else had anything. The cause is chained."""


class SharedDownload:
    """One model's download. `run` once."""

    def __init__(
        self,
        layout: Layout,
        folder: Path,
        exchange: FileExchange,
        ranges: HubRanges,
        *,
        verify: Callable[[int, Path], bool],
        on_progress: Callable[[int], None],
        check: Callable[[], None],
    ) -> None:
        """`verify`: whether a file of the layout, by its number, is what the hub announces. `check` raises when
        somebody else has taken over. `on_progress` gets the bytes that are there."""
        self._layout, self._exchange, self._ranges = layout, exchange, ranges
        self._verify, self._on_progress, self._check = verify, on_progress, check
        self._plan = Plan(layout, exchange.id)
        self._parts = PartFiles(layout, folder)
        self._changed = threading.Condition()
        """Guards everything below, and the plan; notified when a chunk has come."""
        self._sealed: set[int] = set()
        self._writes = [0] * len(layout.files)
        self._over = False
        self._fatal: Exception | None = None
        self._hub_error: Exception | None = None
        self._hub_failures = 0
        self._present = 0
        self._arrivals: deque[tuple[float, str, int]] = deque()
        self._helps, self._helps_until = False, 0.0
        self._active: set[Address] = set()
        self._met: set[Address] = set()
        self._searched = False
        self._failures: dict[Address, int] = {}
        self._not_before: dict[Address, float] = {}
        self._banned: set[Address] = set()
        self._own: set[Address] = set()
        """Addresses at which this process itself answers."""
        self._progressed = time.monotonic()
        self._started = time.monotonic()
        self.received: dict[str, int] = {"peer": 0, "hub": 0}

    def run(self) -> SharedFiles:
        """Block until every file is there and verified. What is offered to others then.

        Raises StartupError, HubFailedError, NoRangesError, OSError of the disk, ThreadStartError.
        """
        attempts: dict[int, int] = {}
        try:
            share = self._share = self._resume()
            share.starting = True
            self._exchange.offer(share)
            if self._plan.missing:
                self._exchange.start_thread("find-sources", self._search)
                for number in range(_HUB_THREADS):
                    self._exchange.start_thread(f"hub-{number}", self._fetch_from_hub)
            while len(self._sealed) < len(self._layout.files):
                self._check()
                self._raise_failures()
                if (file := self._wait_for_file()) is not None and not self._seal(file):
                    attempts[file] = attempts.get(file, 0) + 1
                    if attempts[file] == _MAX_ATTEMPTS:
                        raise _corrupt(self._layout.files[file].path)
            share.starting = False
            return share
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            self._parts.close()

    def _resume(self) -> SharedFiles:
        """What an earlier process has left. Raises OSError."""
        files = range(len(self._layout.files))
        self._sealed = {file for file in files if self._is_whole(file)}
        paths = {file: (self._parts.target if file in self._sealed else self._parts.part)(file) for file in files}
        share, now = SharedFiles(self._layout, paths), time.monotonic()
        for file in files:
            whole = file in self._sealed
            for index, digest in self._parts.sums_of_target(file) if whole else self._parts.resume(file):
                self._plan.done(index, digest, DISK, now)
                share.add(index, digest)
                self._present += self._layout.chunk(index).size
            if whole:
                self._plan.seal(file)
        return share

    def _is_whole(self, file: int) -> bool:
        target = self._parts.target(file)
        return target.is_file() and self._verify(file, target)

    # The caller's thread.

    def _wait_for_file(self) -> int | None:
        """A file whose chunks are all here; None after a moment without one."""
        with self._changed:
            for _ in range(2):
                for file in range(len(self._layout.files)):
                    if file not in self._sealed and self._plan.is_complete(file):
                        return file
                self._changed.wait(0.25)
            self._on_progress(self._present)
        return None

    def _seal(self, file: int) -> bool:
        """Count a file whose digest is right. False when it is wrong though all of it came from the hub."""
        with self._changed:
            writes = self._writes[file]
        right = self._verify(file, self._parts.part(file))
        with self._changed:
            if writes != self._writes[file] or not self._plan.is_complete(file):
                return True  # it changed meanwhile: look again
            if right:
                self._ban(self._plan.seal(file))
                target = self._parts.target(file)
                target.parent.mkdir(parents=True, exist_ok=True)
                self._share.move(file, target)
                self._sealed.add(file)
                return True
            logger.warning("%s is not what the hub announces", self._layout.files[file].path)
            by_others = self._plan.reject(file)
            self._publish()
            self._changed.notify_all()
            return by_others

    def _raise_failures(self) -> None:
        with self._changed:
            if self._fatal is not None:
                raise self._fatal
            silent = time.monotonic() - self._progressed
            if self._hub_failures >= _HUB_FAILURES and silent >= _HUB_FAILED_SECONDS:
                raise HubFailedError from self._hub_error

    # Any thread.

    def _store(self, index: int, data: memoryview | bytes | bytearray, digest: bytes, source: str) -> None:
        """Write down a chunk that has come, unless it is wanted no longer; `source` is the plan's."""
        with self._changed:
            if self._over or not self._plan.accepts(index, source):
                self._plan.release([index])
                return
            self._writes[self._layout.chunk(index).file] += 1
        try:
            self._parts.write(index, data, digest)
        except OSError as error:
            with self._changed:
                self._fatal = error
            raise
        with self._changed:
            kind = HUB if source == HUB else "peer"
            self._ban(self._plan.done(index, digest, source, time.monotonic()))
            self._share.add(index, digest)
            self._publish()
            self._hub_failures, self._progressed = 0, time.monotonic()
            self._present += len(data)
            self.received[kind] += len(data)
            self._exchange.received[kind] += len(data)
            self._arrivals.append((time.monotonic(), kind, len(data)))
            self._changed.notify_all()

    def _publish(self) -> None:
        """Tell others what the plan has decided. With the lock."""
        for index in self._plan.retracted:
            self._share.retract(index)
            self._present -= self._layout.chunk(index).size
        for index in self._plan.restored:
            self._share.add(index, self._plan.sums[index])
            self._present += self._layout.chunk(index).size
        self._plan.retracted.clear()
        self._plan.restored.clear()
        self._share.idle = self._plan.idle
        self._share.set_in_flight(self._plan.in_flight)

    def _ban(self, wrong: list[str]) -> None:
        """Peers that gave, or told of, what is not so. With the lock."""
        for name in wrong:
            host, _, port = name.partition(" ")
            address = (host, int(port))
            if address not in self._banned:
                self._banned.add(address)
                self._exchange.faults["wrong"] += 1
                logger.warning("the worker at %s port %s is asked no more: its bytes are wrong", host, port)

    # Threads of the hub.

    def _fetch_from_hub(self) -> None:
        self._meet_peers()
        failures = 0
        while not self._over:
            with self._changed:
                run = self._plan.next_from_hub(time.monotonic(), help_peers=self._hub_helps())
                self._publish()
                if not run:
                    if not self._over:
                        self._changed.wait(_TICK_SECONDS)
                    continue
            try:
                self._read_run(run)
                failures = 0
            except NoRangesError as error:
                with self._changed:
                    self._fatal = error
                return
            except Exception as error:  # of the hub's client and its transport: told when nobody else helps
                failures += 1
                with self._changed:
                    self._hub_failures += 1
                    self._hub_error = error
                logger.warning("the hub failed for a part of the model: %s", error)
            finally:
                with self._changed:
                    self._plan.release(run)
                    self._publish()
            if failures:
                self._sleep(min(8.0, 0.25 * 2**failures))

    def _read_run(self, run: list[int]) -> None:
        first = self._layout.chunk(run[0])
        size = sum(self._layout.chunk(index).size for index in run)
        waiting = iter(run)
        index = next(waiting)
        data = bytearray()
        for piece in self._ranges.stream(self._layout.files[first.file].path, first.offset, size):
            if self._over:
                return
            data += piece
            while len(data) >= (wanted := self._layout.chunk(index).size):
                chunk = bytes(memoryview(data)[:wanted])
                self._store(index, chunk, xxh3_128_digest(chunk), HUB)
                del data[:wanted]
                if (following := next(waiting, None)) is None:
                    return
                index = following
        raise ConnectionError("the hub's answer ended early")

    def _hub_helps(self) -> bool:
        """Whether peers are too slow with what they have. With the lock; looked at once a second."""
        now = time.monotonic()
        if now >= self._helps_until:
            self._helps_until = now + 1.0
            while self._arrivals and now - self._arrivals[0][0] > _RATE_SECONDS:
                self._arrivals.popleft()
            rates = {"peer": 0.0, "hub": 0.0}
            for _, kind, size in self._arrivals:
                rates[kind] += size / _RATE_SECONDS
            late = self._plan.bytes_at_peers() > rates["peer"] * _PATIENCE_SECONDS
            in_time = self._plan.hub_seconds is None or rates["hub"] == 0 or 4 * rates["hub"] >= rates["peer"]
            self._helps = now - self._started > _RATE_SECONDS and late and in_time
        return self._helps

    # Threads of peers.

    def _meet_peers(self) -> None:
        deadline = self._started + _FIRST_SECONDS
        with self._changed:
            while not self._over and not (self._searched and self._active <= self._met):
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)

    def _search(self) -> None:
        while not self._over:
            found = self._exchange.find_peers(_SEARCH_SECONDS)
            now = time.monotonic()
            with self._changed:
                new = [
                    address
                    for address in found - self._active - self._banned - self._own
                    if self._not_before.get(address, 0.0) <= now
                ][: max(0, _MAX_PEERS - len(self._active))]
                self._active |= set(new)
            for host, port in new:
                self._exchange.start_thread(f"source-{host}-{port}", self._fetch_from_peer, (host, port))
            with self._changed:
                self._searched = True
                self._changed.notify_all()
            quiet = time.monotonic() + (0.25 if now - self._started < _SEARCH_SECONDS else _SEARCH_SECONDS)
            heard = self._exchange.num_heard
            while not self._over and time.monotonic() < quiet and self._exchange.num_heard == heard:
                self._sleep(_TICK_SECONDS)

    def _fetch_from_peer(self, address: Address) -> None:
        name = f"{address[0]} {address[1]}"
        fault = ""
        link: PeerLink | None = None
        try:
            link = PeerLink(address, self._layout, self._exchange.ring, self._exchange.id, self._exchange.port)
            self._converse(link, address, name)
        except WrongBytesError as error:
            logger.warning("%s: %s", name, error)
            with self._changed:
                self._ban([name])
        except TimeoutError:
            fault = "slow"
        except (OSError, WireError, AuthenticationError) as error:
            logger.log(
                logging.DEBUG if isinstance(error, OSError) and link is None else logging.INFO,
                "the worker at %s is no source now: %s", name, error,
            )  # fmt: skip
            fault = "lost"
        finally:
            with self._changed:
                self._plan.forget(name)
                self._part_from(address, fault if link is not None else "")
            if link is not None:
                link.close()

    def _part_from(self, address: Address, fault: str) -> None:
        """With the lock."""
        count = self._failures.get(address, 0)
        if fault and not self._over:
            self._exchange.faults[fault] += 1
            self._failures[address] = count + 1
        pause = _PAUSE_SECONDS[min(count, len(_PAUSE_SECONDS) - 1)] if fault else _TICK_SECONDS
        self._not_before[address] = time.monotonic() + pause
        self._active.discard(address)
        self._met.add(address)
        self._changed.notify_all()

    def _converse(self, link: PeerLink, address: Address, name: str) -> None:
        """Until the download is over. Raises what the link does."""
        while not self._over and address not in self._banned:
            header, changes = link.news()
            if header.source == self._exchange.id:
                self._own.add(address)
                return
            self._exchange.hear(header.peers)
            if header.known:
                self._take_in(header, changes, name)
            with self._changed:
                self._met.add(address)
                self._changed.notify_all()
                pause = _NEWS_SECONDS * max(1.0, len(self._active) / 8) * (1 if header.known else 4)
            self._fetch_until(time.monotonic() + pause, link, address, name, known=header.known)

    def _take_in(self, header: ReplyHeader, changes: list[tuple[int, bytes]], name: str) -> None:
        with self._changed:
            honest = self._plan.observe(
                name,
                header.source,
                changes,
                time.monotonic(),
                in_flight=header.in_flight,
                starting=header.starting,
                idle=header.idle,
            )
            self._publish()
            self._changed.notify_all()
        if not honest:
            raise WrongBytesError("it tells of other bytes than the hub's")

    def _fetch_until(self, until: float, link: PeerLink, address: Address, name: str, *, known: bool) -> None:
        """Get chunks until the news are old."""
        while not self._over and address not in self._banned and (left := until - time.monotonic()) > 0:
            with self._changed:
                index = self._plan.next_from_peer(name) if known else None
                if index is None:
                    self._changed.wait(left)
                    continue
            got = link.chunk(index, max(_CHUNK_SECONDS, 4 * (self._plan.hub_seconds or 0.0)))
            if got is None:
                with self._changed:
                    self._plan.release([index])
                    self._plan.disclaim(name, index)
                continue
            self._store(index, *got, name)

    def _sleep(self, seconds: float) -> None:
        """Or until the download is over."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._over and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)


def _corrupt(path: str) -> StartupError:
    return StartupError(
        "DownloadCorrupt",
        f"{path} does not have the size or the digest that the hub announces, {_MAX_ATTEMPTS} times in a row.",
    )
