"""Conversations replayed over workers that keep blocks on disks and give each other theirs: hits, first tokens, writes,
by the product's policies.

    python -m bench.kv.replay TRACE [--workers 4,16,64] [--record bench/results]

`TRACE` is a recording in the format of Mooncake's traces (`bench/routing/README.md`). Memory is the engine's own block
manager, what goes to the disk is what it offers, the disk is the tier's own index over files that go nowhere; whether a
prompt is loaded is the tier's own decision, at its own prediction. Whom a worker asks for blocks is what the gateway's
scheduling names; round robin names whoever has most, as a gateway could that knew everything. Simulated are the times:
workers are those of `tandem_sim`, a disk reads and a network brings one load after another at a fixed rate, and a
prompt is begun once what is brought for it is there. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from tandem_api.names import Role
from tandem_operator.autoscale.plan.contract import Target
from tandem_sim.fleet import AnyWorker
from tandem_sim.profiles import WorkerProfile
from tandem_sim.replay import Setting, Simulation
from tandem_sim.routing import Routing
from tandem_sim.traces import BLOCK_TOKENS, Arrival, read_trace
from tandem_sim.workers import DecodeWorker, Flight
from tandem_worker.engine.schedule.block_manager import BlockManager
from tandem_worker.tiers.files import Volume
from tandem_worker.tiers.format import Geometry, TierKey
from tandem_worker.tiers.policy import is_slow, is_sooner, predict_seconds
from tandem_worker.tiers.store import SegmentStore

from bench.routing.policies import RoundRobin, Tandem

MEMORY_TOKENS, DISK_TOKENS = 250_000, 16_000_000
TOKEN_BYTES, TOKENS_PER_SECOND = 23_040, 16_000.0
SEGMENT_BLOCKS = 6
"""Of the recording's blocks, 512 tokens each, about 64 MiB."""
COLD_SHARE, BATCH = 0.25, 4
BANDWIDTHS = (10e6, 400e6, 750e6, 1.5e9, 3e9)
PEER_BANDWIDTH = 1.25e9
"""10 Gb Ethernet."""
PEER_GOAL = 0.365
GOALS = {4: 0.308, 16: 0.350, 64: 0.367}
"""Hits with homes of bounded load, as the issue of this tier had measured them with policies of their own."""
NO_TARGET = Target(percentile=0.9, seconds=3600.0)
PROFILE = WorkerProfile(
    name="disks", source="made up", prefill_token_seconds=1 / TOKENS_PER_SECOND, step_seconds=0.01,
    step_sequence_seconds=0.0002, kv_tokens=1 << 40,
)  # fmt: skip
"""Memory bounds what is kept (`Store`), and no answers: what is compared is where blocks come from."""


class Nowhere(Volume):
    """Takes everything and keeps nothing."""

    def create(self, path: Path, header: np.ndarray) -> int:
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    def remove(self, path: Path) -> None:
        pass


class Store:
    """What one worker keeps: blocks in memory, by the engine's own manager, and on its disk; `disk_tokens` 0: none."""

    def __init__(self, disk_tokens: int, bandwidth: float, peer_bandwidth: float, *, write_through: bool) -> None:
        """`peer_bandwidth`: bytes per second that a worker brings of others' blocks; 0: it asks nobody."""
        blocks = MEMORY_TOKENS // BLOCK_TOKENS + 1
        self.memory = BlockManager(blocks, BLOCK_TOKENS)
        self._watched = self.memory.watch()
        self._watched.cold_blocks = blocks if write_through else int((blocks - 1) * COLD_SHARE)
        self._has_disk = disk_tokens > 0
        self._bandwidths = {"disk": bandwidth, "peer": peer_bandwidth}
        self._free = {"disk": 0.0, "peer": 0.0}
        self.now = 0.0
        geometry = Geometry((1,), SEGMENT_BLOCKS)
        segments = max(2, disk_tokens // BLOCK_TOKENS // SEGMENT_BLOCKS)
        key = TierKey(model_digest="", revision="", layout="")
        self._disk = SegmentStore(Nowhere(Path("/")), key, geometry, segments, clock=lambda: self.now)
        self._rows = np.zeros((BATCH, geometry.slot_bytes), np.uint8)
        self.written = 0
        self.brought = {"disk": 0, "peer": 0}
        """Blocks by whence."""

    def load(self, names: Sequence[bytes], source: Store | None, now: float) -> tuple[int, float]:
        """Blocks that memory lacks and that come from the disk or another worker, with which the whole is there
        sooner; and when they are."""
        self.now = now
        places = self._disk.find(names) if self._has_disk else []
        asked = source.count_held(names) if self._bandwidths["peer"] and source not in (None, self) else 0
        ways = [way for way in (self._predict("disk", len(places)), self._predict("peer", asked)) if way is not None]
        if not ways:
            return 0, now
        per_block = BLOCK_TOKENS / TOKENS_PER_SECOND
        seconds, count, whence = min(ways, key=lambda way: way[0] + (len(names) - way[1]) * per_block)
        self._free[whence] = now + seconds
        self.brought[whence] += count
        for place in places if whence == "disk" else ():
            self._disk.use(place)
        return count, now + seconds

    def _predict(self, whence: str, count: int) -> tuple[float, int, str] | None:
        """Seconds and blocks; None: there are none, or computing them is sooner."""
        bandwidth, waits = self._bandwidths[whence], max(0.0, self._free[whence] - self.now)
        size = count * BLOCK_TOKENS * TOKEN_BYTES
        seconds = predict_seconds(size, int(waits * bandwidth), 1, 1, bandwidth) if count else 0.0
        return (
            (seconds, count, whence) if count and is_sooner(seconds, count, BLOCK_TOKENS / TOKENS_PER_SECOND) else None
        )

    def count_held(self, names: Sequence[bytes]) -> int:
        """Leading blocks that it gives away: of memory, then of its disk."""
        held = len(self.memory.match_prefix(names, len(names)))
        return held + (len(self._disk.find(names[held:])) if self._has_disk else 0)

    def keep(self, names: list[bytes], matched: list[int], now: float) -> None:
        self.now, memory = now, self.memory
        if memory.count_required(matched, len(names)) > memory.num_available:
            return
        memory.hold(matched)
        blocks = matched + memory.allocate(len(names) - len(matched))
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
    """Its cache is a `Store`."""

    def __init__(self, name: str, profile: WorkerProfile, ordered_at: float, store: Store) -> None:
        super().__init__(name, profile, ordered_at)
        self.store = store
        self.loaded: dict[int, int] = {}
        """Blocks that were brought for requests that are to begin."""

    def load(self, flight: Flight, source: Store | None, now: float) -> float:
        """When everything is here that is brought for a prompt."""
        names, most = name_blocks(flight), (flight.prompt - 1) // BLOCK_TOKENS
        matched = self.store.memory.match_prefix(names, most)
        self.loaded[flight.index], ready = self.store.load(names[len(matched) : most], source, now)
        return ready

    def find(self, flight: Flight, now: float) -> int:
        names, most = name_blocks(flight), (flight.prompt - 1) // BLOCK_TOKENS
        matched = self.store.memory.match_prefix(names, most)
        self.store.keep(names, matched, now)
        return min(most, len(matched) + self.loaded.pop(flight.index)) * BLOCK_TOKENS


_LOADED = 100
"""An event beside those of `tandem_sim.replay`: what is brought for a prompt is there."""


class TieredSimulation(Simulation):
    """A prompt is begun once what is brought for it is there; `naming`: workers are told who has a part of it."""

    def __init__(self, arrivals: list[Arrival], workers: int, routing: Routing, *, naming: bool, **store: Any) -> None:
        setting = Setting(
            prefill=None, decode=PROFILE, replicas={Role.DECODE: workers}, ttft=NO_TARGET, tpot=NO_TARGET,
            deadlines=False, hold_seconds=None,
        )  # fmt: skip
        super().__init__(arrivals, setting, routing=routing)
        self._naming, self._options = naming, store
        self.stores: dict[str, Store] = {}

    def _build_decode(self, name: str, now: float) -> TieredWorker:
        self.stores[name] = Store(**self._options)
        return TieredWorker(name, self.setting.decode, now, self.stores[name])

    def _submit(self, flight: Flight, prefill: AnyWorker) -> None:
        assert isinstance(prefill, TieredWorker)
        ready = prefill.load(flight, self._find_source(flight), self.now)
        if ready > self.now:
            self._plan(ready, _LOADED, flight)
        else:
            super()._submit(flight, prefill)

    def _handle(self, kind: int, subject: object, version: int) -> None:
        if kind != _LOADED:
            super()._handle(kind, subject, version)
            return
        assert isinstance(subject, Flight)
        assert subject.prefill is not None
        super()._submit(subject, subject.prefill)

    def _find_source(self, flight: Flight) -> Store | None:
        """Whom the gateway names; where it is none of ours, whoever has most, as one could that knew everything."""
        if not self._naming:
            return None
        if flight.choice is None:
            names = name_blocks(flight)
            return max(self.stores.values(), key=lambda store: store.count_held(names))
        source = flight.choice.source
        return None if source is None else self.stores[source.worker.name]


class NamingTandem(Tandem):
    """The gateway's own scheduling, with workers that have told at which rate they bring blocks."""

    def __init__(self, kv_tokens: int, peer_bandwidth: float) -> None:
        super().__init__(kv_tokens=kv_tokens)
        self._pull_rate = peer_bandwidth / TOKEN_BYTES

    def apply(self, workers: Iterable[AnyWorker]) -> None:
        super().apply(workers)
        for gateway in self.gateways:
            for endpoint in gateway.scheduler.endpoints.values():
                endpoint.pull_rate = self._pull_rate


def play(
    arrivals: list[Arrival],
    workers: int,
    routing: Routing,
    *,
    naming: bool = False,
    disk_tokens: int = 0,
    bandwidth: float = 1.5e9,
    write_through: bool = False,
    peer_bandwidth: float = 0.0,
) -> dict[str, float]:
    simulation = TieredSimulation(
        arrivals, workers, routing, naming=naming, disk_tokens=disk_tokens, bandwidth=bandwidth,
        write_through=write_through, peer_bandwidth=peer_bandwidth,
    )  # fmt: skip
    seen, stores = simulation.run(), simulation.stores.values()
    prompts = sum(arrival.prompt for arrival in arrivals)
    return {
        "hits": round(seen.hit_ratio, 4),
        "p90": round(float(np.percentile(seen.ttft, 90)), 3),
        "written": round(sum(store.written for store in stores) * BLOCK_TOKENS / prompts, 3),
        "loaded": round(sum(store.brought["disk"] for store in stores) * BLOCK_TOKENS / prompts, 3),
        "pulled": round(sum(store.brought["peer"] for store in stores) * BLOCK_TOKENS / prompts, 3),
    }


def compare(arrivals: list[Arrival], workers: int) -> dict[str, Any]:
    """Hits and writes with and without disks, and first tokens at several bandwidths."""
    whole = MEMORY_TOKENS + DISK_TOKENS
    disk, peers = {"disk_tokens": DISK_TOKENS}, {"peer_bandwidth": PEER_BANDWIDTH, "naming": True}
    plans: dict[str, tuple[Routing, dict[str, Any]]] = {
        "homes, memory": (Tandem(kv_tokens=MEMORY_TOKENS), {}),
        "homes, disk": (Tandem(kv_tokens=whole), disk),
        "homes, disk, written through": (Tandem(kv_tokens=whole), disk | {"write_through": True}),
        "round robin, memory": (RoundRobin(), {}),
        "round robin, disk": (RoundRobin(), disk),
        "homes, disk and peers": (NamingTandem(whole, PEER_BANDWIDTH), disk | peers),
        "round robin, disk and peers": (RoundRobin(), disk | peers),
    }
    for bandwidth in BANDWIDTHS:
        # A disk that is slow switches itself off, and gateways reckon with memory alone.
        disk_tokens = 0 if is_slow(bandwidth, TOKEN_BYTES, 1 / TOKENS_PER_SECOND) else DISK_TOKENS
        plans[f"homes, disk of {bandwidth / 1e6:.0f} MB/s"] = (
            Tandem(kv_tokens=MEMORY_TOKENS + disk_tokens), {"disk_tokens": disk_tokens, "bandwidth": bandwidth},
        )  # fmt: skip
        plans[f"homes, peers at {bandwidth / 1e6:.0f} MB/s"] = (
            NamingTandem(MEMORY_TOKENS, bandwidth), {"peer_bandwidth": bandwidth, "naming": True},
        )  # fmt: skip
    found: dict[str, Any] = {}
    for name, (routing, options) in plans.items():
        found[name] = play(arrivals, workers, routing, **options)
        print(f"{workers:4} workers  {name:30} {json.dumps(found[name])}", flush=True)
    return found


def judge(workers: int, found: dict[str, Any]) -> dict[str, Any]:
    """Each promise with its figure."""
    hits, goal = found["homes, disk"]["hits"], GOALS.get(workers)
    plain = found["homes, memory"]["p90"]
    worst = max(figures["p90"] for name, figures in found.items() if name.startswith("homes, disk of"))
    slowest = max(figures["p90"] for name, figures in found.items() if name.startswith("homes, peers at"))
    rows: dict[str, Any] = {
        "worst p90 with peers at any bandwidth, s": {"value": slowest, "goal": plain, "met": slowest <= plain},
        "worst p90 at any bandwidth, s": {"value": worst, "goal": plain, "met": worst <= plain},
    }
    for way in ("homes", "round robin"):
        value = found[f"{way}, disk and peers"]["hits"]
        rows[f"hits, {way}, disk and peers"] = {"value": value, "goal": PEER_GOAL, "met": value >= PEER_GOAL}
    if goal is not None:
        rows["hits"] = {"value": hits, "goal": goal, "met": hits >= goal}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, help="a recording in the format of Mooncake's traces")
    parser.add_argument("--workers", default="4,16,64", help="numbers of workers; default 4,16,64")
    parser.add_argument("--record", type=Path, help="folder for the figures")
    options = parser.parse_args()
    arrivals = read_trace(options.trace)
    print(f"{len(arrivals)} requests, {statistics.mean(arrival.prompt for arrival in arrivals):.0f} tokens in the mean")
    found = {count: compare(arrivals, count) for count in map(int, options.workers.split(","))}
    rows = {
        f"{count} workers, {name}": row for count, each in found.items() for name, row in judge(count, each).items()
    }
    line = json.dumps({"replay with disks": rows})
    if options.record is not None:
        options.record.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"figures": found, "asked": rows}, indent=1)
        Path(options.record, f"kv-replay-{datetime.now(UTC):%Y-%m-%d}.json").write_text(text + "\n")
    print(line)


if __name__ == "__main__":
    main()
