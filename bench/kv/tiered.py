"""Workers of the simulator that keep blocks below their memory: on the host, on a disk, at each other, in a store.

Memory is the engine's own block manager, what goes to the disk is what it offers, the disk is the tier's own index over
files that go nowhere; whether a prompt is loaded is the tier's own decision, at its own prediction. A disk reads, and a
network brings, one load after another, at a fixed rate each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tandem_api.names import Role
from tandem_operator.autoscale.plan.contract import Target
from tandem_sim.fleet import AnyWorker
from tandem_sim.load import Recorded
from tandem_sim.profiles import WorkerProfile
from tandem_sim.replay import Simulation
from tandem_sim.routing import Routing
from tandem_sim.setting import Setting
from tandem_sim.traces import BLOCK_TOKENS, Arrival
from tandem_sim.workers import DecodeWorker, Flight
from tandem_worker.engine.schedule.block_manager import BlockManager
from tandem_worker.engine.schedule.host_cache import HostCache
from tandem_worker.tiers.files import Volume
from tandem_worker.tiers.format import Geometry, TierKey
from tandem_worker.tiers.policy import is_sooner, predict_seconds
from tandem_worker.tiers.store import SegmentStore

from bench.kv.shared import SharedStore

TOKEN_BYTES, TOKENS_PER_SECOND = 23_040, 16_000.0
SECONDS_PER_BLOCK = BLOCK_TOKENS / TOKENS_PER_SECOND
SEGMENT_BLOCKS = 6
"""Of the recording's blocks, 512 tokens each, about 64 MiB."""
COLD_SHARE, BATCH = 0.25, 4
HOST_BANDWIDTH = 25e9
"""Half of what pinned memory brings over PCIe 5."""
NO_TARGET = Target(percentile=0.9, seconds=3600.0)
PROFILE = WorkerProfile(
    name="tiers", source="made up", prefill_token_seconds=1 / TOKENS_PER_SECOND, step_seconds=0.01,
    step_sequence_seconds=0.0002, kv_tokens=1 << 40,
)  # fmt: skip
"""Memory bounds what is kept (`Blocks`), and no answers: what is compared is where blocks come from."""


class Nowhere(Volume):
    """Takes everything and keeps nothing."""

    def create(self, path: Path, header: np.ndarray) -> int:
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    def remove(self, path: Path) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """What each worker has. Tokens; bytes per second."""

    memory_tokens: int
    host_tokens: int = 0
    """Of memory below its own, which the disk is fed from then."""
    disk_tokens: int = 0
    bandwidth: float = 1.5e9
    """The disk's."""
    write_through: bool = False
    peer_bandwidth: float = 0.0
    """At which a worker brings others' blocks, and the store's; 0: it asks nobody."""
    names_peers: bool = False
    """Workers are told who has a part of the prompt."""
    store_tokens: int = 0
    """Room of the store that all share."""


class Blocks:
    """What one worker keeps, and what it brings."""

    def __init__(self, tiers: Tiers, shared: SharedStore) -> None:
        size, below = tiers.memory_tokens // BLOCK_TOKENS, tiers.host_tokens // BLOCK_TOKENS
        self.memory = BlockManager(size + 1, BLOCK_TOKENS)
        self.host = HostCache(below + 1, BLOCK_TOKENS) if below else None
        fed = self.memory if self.host is None else self.host.blocks
        self.memory.cache.on_evict = None if self.host is None else self.host.keep
        self._watched = fed.watch()
        self._watched.cold_blocks = fed.num_blocks + 1 if tiers.write_through else int(fed.num_blocks * COLD_SHARE)
        self._has_disk = tiers.disk_tokens > 0
        geometry = Geometry((1,), SEGMENT_BLOCKS)
        segments = max(2, tiers.disk_tokens // BLOCK_TOKENS // SEGMENT_BLOCKS)
        key = TierKey(model_digest="", revision="", layout="")
        self.now = 0.0
        self._disk = SegmentStore(Nowhere(Path("/")), key, geometry, segments, clock=lambda: self.now)
        self._rows = np.zeros((BATCH, geometry.slot_bytes), np.uint8)
        self._shared = shared
        self._bandwidths = {"disk": tiers.bandwidth, "network": tiers.peer_bandwidth}
        self._free = {"disk": 0.0, "network": 0.0}
        self.written = 0
        self.brought = {"host": 0, "disk": 0, "peer": 0, "store": 0}
        """Blocks by whence."""

    def find(self, names: Sequence[bytes]) -> tuple[list[int], list[int]]:
        """The longest beginning in memory, and what follows it on the host."""
        matched = self.memory.match_prefix(names, len(names))
        return matched, [] if self.host is None else self.host.find(names[len(matched) :])

    def load(self, names: Sequence[bytes], source: Blocks | None, now: float) -> tuple[int, float]:
        """Blocks that come from the disk, another worker or the store, with which the whole is there sooner; and when
        they are. `names`: what neither memory nor the host has."""
        self.now = now
        places = self._disk.find(names) if self._has_disk else []
        asked = source.count_held(names) if self._bandwidths["network"] and source not in (None, self) else 0
        counts = {
            "disk": ("disk", len(places)),
            "peer": ("network", asked),
            "store": ("network", self._shared.count_leading(names)),
        }
        sooner = {
            whence: (seconds, count, way)
            for whence, (way, count) in counts.items()
            if count and (seconds := self._predict(way, count)) is not None
        }
        if not sooner:
            return 0, now
        whence = min(sooner, key=lambda name: sooner[name][0] + (len(names) - sooner[name][1]) * SECONDS_PER_BLOCK)
        seconds, count, way = sooner[whence]
        self._free[way] = now + seconds
        self.brought[whence] += count
        if whence == "store":
            self._shared.use(names[:count])
        for place in places if whence == "disk" else ():
            self._disk.use(place)
        return count, now + seconds

    def _predict(self, way: str, count: int) -> float | None:
        """Seconds until so many blocks are there; None: computing them is sooner."""
        bandwidth, waits = self._bandwidths[way], max(0.0, self._free[way] - self.now)
        if not bandwidth:
            return None
        seconds = predict_seconds(count * BLOCK_TOKENS * TOKEN_BYTES, int(waits * bandwidth), 1, 1, bandwidth)
        return seconds if is_sooner(seconds, count, SECONDS_PER_BLOCK) else None

    def count_held(self, names: Sequence[bytes]) -> int:
        """Leading blocks that it gives away: of memory and the host, then of its disk."""
        held = sum(map(len, self.find(names)))
        return held + (len(self._disk.find(names[held:])) if self._has_disk else 0)

    def keep(self, names: list[bytes], matched: list[int], below: list[int], now: float) -> None:
        """A prompt is in memory from now on, of which this was there and on the host."""
        self.now, memory, host = now, self.memory, self.host
        self._shared.put(names[len(matched) :])
        self.brought["host"] += len(below)
        if memory.count_required(matched, len(names)) > memory.num_available:
            return
        memory.hold(matched)
        if host is not None:
            host.blocks.hold(below)
        blocks = matched + memory.allocate(len(names) - len(matched))
        if host is not None:
            host.fetch(below, blocks[len(matched) : len(matched) + len(below)])
            host.take_moves(now)
        memory.release(blocks, names, now)
        while self._has_disk and self._watched.is_due:
            self._write()

    def _write(self) -> None:
        taken = self._watched.take_coldest(BATCH, lambda name, reused: self._disk.has(name))
        names = [name for _, name in reversed(taken)]
        while names:
            places = self._disk.plan(len(names))
            self._disk.append(places, names[: len(places)], self._rows[: len(places)])
            names = names[len(places) :]
        self._watched.unpin([block for block, _ in taken])
        self.written += len(taken)


def name_blocks(flight: Flight) -> list[bytes]:
    return [block.to_bytes(16, "little", signed=True) for block in flight.blocks]


class TieredWorker(DecodeWorker):
    """Its cache is `Blocks`."""

    def __init__(self, name: str, profile: WorkerProfile, ordered_at: float, blocks: Blocks) -> None:
        super().__init__(name, profile, ordered_at)
        self.blocks = blocks
        self.loaded: dict[int, int] = {}
        """Blocks that were brought for requests that are to begin."""

    def load(self, flight: Flight, source: Blocks | None, now: float) -> float:
        """When everything is here that is brought for a prompt."""
        names, most = name_blocks(flight), (flight.prompt - 1) // BLOCK_TOKENS
        matched, below = self.blocks.find(names[:most])
        near = len(matched) + len(below)
        self.loaded[flight.index], ready = self.blocks.load(names[near:most], source, now)
        return ready + len(below) * BLOCK_TOKENS * TOKEN_BYTES / HOST_BANDWIDTH

    def find(self, flight: Flight, now: float) -> int:
        names, most = name_blocks(flight), (flight.prompt - 1) // BLOCK_TOKENS
        matched, below = self.blocks.find(names[:most])
        self.blocks.keep(names, matched, below, now)
        return min(most, len(matched) + len(below) + self.loaded.pop(flight.index)) * BLOCK_TOKENS


_LOADED = 100
"""An event beside those of `tandem_sim.replay`: what is brought for a prompt is there."""


class TieredSimulation(Simulation):
    """A prompt is begun once what is brought for it is there."""

    def __init__(self, arrivals: Sequence[Arrival], workers: int, routing: Routing, tiers: Tiers) -> None:
        setting = Setting(
            prefill=None, decode=PROFILE, replicas={Role.DECODE: workers}, ttft=NO_TARGET, tpot=NO_TARGET,
            deadlines=False, hold_seconds=None,
        )  # fmt: skip
        super().__init__(Recorded(arrivals), setting, routing=routing)
        self._tiers, self._shared = tiers, SharedStore(tiers.store_tokens // BLOCK_TOKENS)
        self.kept: dict[str, Blocks] = {}
        """By worker."""

    def count_tokens(self, whence: str) -> int:
        """Those that were brought from there."""
        return sum(blocks.brought[whence] for blocks in self.kept.values()) * BLOCK_TOKENS

    @property
    def written_tokens(self) -> int:
        return sum(blocks.written for blocks in self.kept.values()) * BLOCK_TOKENS

    def _build(self, role: Role, name: str, now: float) -> TieredWorker:
        self.kept[name] = Blocks(self._tiers, self._shared)
        return TieredWorker(name, self.setting.decode, now, self.kept[name])

    def _submit(self, flight: Flight, prefill: AnyWorker) -> None:
        assert isinstance(prefill, TieredWorker)
        ready = prefill.load(flight, self._find_source(flight), self.now)
        if ready > self.now:
            self._events.plan(ready, _LOADED, flight)
        else:
            super()._submit(flight, prefill)

    def _handle(self, kind: int, subject: object, version: int) -> None:
        if kind != _LOADED:
            super()._handle(kind, subject, version)
            return
        assert isinstance(subject, Flight)
        assert subject.prefill is not None
        super()._submit(subject, subject.prefill)

    def _find_source(self, flight: Flight) -> Blocks | None:
        """Whom the gateway names; where it is none of ours, whoever has most, as one could that knew everything."""
        if not self._tiers.names_peers:
            return None
        if flight.choice is None:
            names = name_blocks(flight)
            return max(self.kept.values(), key=lambda blocks: blocks.count_held(names))
        source = flight.choice.source
        return None if source is None else self.kept[source.worker.name]
