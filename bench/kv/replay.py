"""Conversations replayed over workers that keep blocks on disks, give each other theirs and share a store: hits, first
tokens, writes, by the product's policies.

    python -m bench.kv.replay TRACE [--workers 4,16,64] [--record bench/results]

`TRACE` is a recording in the format of Mooncake's traces (`bench/routing/README.md`). Memory is the engine's own block
manager, what goes to the disk is what it offers, the disk is the tier's own index over files that go nowhere; whether a
prompt is loaded is the tier's own decision, at its own prediction. Whom a worker asks for blocks is what the gateway's
scheduling names; round robin names whoever has most, as a gateway could that knew everything. A store has as many bytes
as the disks have together; all that is computed goes there, and who lacks a prompt asks it, whoever chose the worker.
Simulated are the times: a worker computes its prompts one after another, and its disk reads, and its network brings,
one load after another, at a fixed rate each. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from tandem_gateway.scheduling import Share
from tandem_sim.traces import BLOCK_TOKENS, Arrival, read_trace
from tandem_worker.engine.schedule.block_manager import BlockManager
from tandem_worker.engine.schedule.host_cache import HostCache
from tandem_worker.tiers.files import Volume
from tandem_worker.tiers.format import Geometry, TierKey
from tandem_worker.tiers.policy import is_slow, is_sooner, predict_seconds
from tandem_worker.tiers.store import SegmentStore

from bench.kv.shared import SharedStore
from bench.routing.fleet import STEP_SECONDS, Fleet, Served
from bench.routing.policies import Policy, RoundRobin, Tandem
from bench.routing.simulate import Recorded, Replay, replay

MEMORY_TOKENS, HOST_TOKENS, DISK_TOKENS = 250_000, 2_000_000, 16_000_000
TOKEN_BYTES, TOKENS_PER_SECOND = 23_040, 16_000.0
SEGMENT_BLOCKS = 6
"""Of the recording's blocks, 512 tokens each, about 64 MiB."""
COLD_SHARE, BATCH = 0.25, 4
BANDWIDTHS = (10e6, 400e6, 750e6, 1.5e9, 3e9)
PEER_BANDWIDTH = 1.25e9
"""10 Gb Ethernet."""
PEER_GOAL = 0.365
HOST_BANDWIDTH = 25e9
"""Half of what pinned memory brings over PCIe 5."""
WRITES_GOAL = 0.45
"""Tokens written per token of the prompts with host memory, at 16 workers."""
STORE_GOAL = 0.01
"""Hits that round robin with a store may be short of affinity with disks of as many bytes."""
GOALS = {4: 0.308, 16: 0.350, 64: 0.367}
"""Hits with homes of bounded load, as the issue of this tier had measured them with policies of their own."""


class Nowhere(Volume):
    """Takes everything and keeps nothing."""

    def create(self, path: Path, header: np.ndarray) -> int:
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    def remove(self, path: Path) -> None:
        pass


class TieredFleet(Fleet):
    """Workers with a disk each; `disk_tokens` 0: none. `host_tokens`: of memory below their own, which the disk is fed
    from. `peer_bandwidth`: bytes per second that a worker brings of others' blocks, and of the store's; None: it asks
    nobody. `store_tokens`: room of the store that all share."""

    def __init__(
        self,
        count: int,
        *,
        tokens_per_second: float,
        kv_tokens: int,
        disk_tokens: int = 0,
        host_tokens: int = 0,
        bandwidth: float = 1.5e9,
        write_through: bool = False,
        peer_bandwidth: float | None = None,
        store_tokens: int = 0,
    ) -> None:
        super().__init__(count, tokens_per_second=tokens_per_second, kv_tokens=kv_tokens)
        self._bandwidth = bandwidth
        self._has_disk = disk_tokens > 0
        self._memories = [BlockManager(self.capacity + 1, BLOCK_TOKENS) for _ in range(count)]
        size = host_tokens // BLOCK_TOKENS
        self._hosts = [HostCache(size + 1, BLOCK_TOKENS) if host_tokens else None for _ in range(count)]
        fed = [
            memory if host is None else host.blocks for memory, host in zip(self._memories, self._hosts, strict=True)
        ]
        for memory, host in zip(self._memories, self._hosts, strict=True):
            memory.cache.on_evict = None if host is None else host.keep
        self._watched = watched = [manager.watch() for manager in fed]
        for cache, manager in zip(watched, fed, strict=True):
            cache.cold_blocks = manager.num_blocks + 1 if write_through else int(manager.num_blocks * COLD_SHARE)
        key = TierKey(model_digest="", revision="", layout="")
        geometry = Geometry((1,), SEGMENT_BLOCKS)
        segments = max(2, disk_tokens // BLOCK_TOKENS // SEGMENT_BLOCKS)
        self._now = 0.0
        self._stores = [
            SegmentStore(Nowhere(Path("/")), key, geometry, segments, clock=lambda: self._now) for _ in range(count)
        ]
        self._disk_free = np.zeros(count)
        self.peer_bandwidth = peer_bandwidth
        self._network_free = np.zeros(count)
        self.source: int | None = None
        """Who was named to have a part of the next prompt."""
        self.pulled_tokens = self.fetched_tokens = 0
        self._rows = np.zeros((BATCH, geometry.slot_bytes), np.uint8)
        self.written_tokens = 0
        self.loaded_tokens = 0
        self.store = SharedStore(store_tokens // BLOCK_TOKENS)
        self.stored_tokens = 0
        """Those that came from there."""
        self.computed_tokens = np.zeros(count)

    def serve(self, worker: int, arrival: Arrival) -> Served:
        """Load what is sooner, then compute the rest in the order of arrival."""
        self._now = arrival.at
        memory = self._memories[worker]
        names = [block.to_bytes(16, "little", signed=True) for block in arrival.blocks]
        most = (arrival.prompt - 1) // BLOCK_TOKENS
        matched, host = memory.match_prefix(names, most), self._hosts[worker]
        below = [] if host is None else host.find(names[len(matched) : most])
        near = len(matched) + len(below)
        loaded, ready = self._load(worker, names[near:most], arrival.at)
        tokens = (near + loaded) * BLOCK_TOKENS
        self.computed_tokens[worker] += arrival.prompt - tokens
        fetching = len(below) * BLOCK_TOKENS * TOKEN_BYTES / HOST_BANDWIDTH  # as if nothing were computed meanwhile
        first = max(ready, float(self.free_at[worker])) + fetching + (arrival.prompt - tokens) / self.rate
        self.free_at[worker] = first
        self.fetched_tokens += len(below) * BLOCK_TOKENS
        self._keep_blocks(worker, names, matched, below, arrival.at)
        return Served(first, first + STEP_SECONDS * arrival.output, tokens, STEP_SECONDS)

    def _load(self, worker: int, names: Sequence[bytes], now: float) -> tuple[int, float]:
        """Blocks that come from the disk or another worker, with which the whole is there sooner, and when they are."""
        places = self._stores[worker].find(names) if self._has_disk else []
        asked = self._count_held(self.source, names) if self.peer_bandwidth and self.source not in (None, worker) else 0
        network = self.peer_bandwidth or 1.0
        ways = {
            "disk": self._predict(len(places), self._disk_free, worker, self._bandwidth, now),
            "peer": self._predict(asked, self._network_free, worker, network, now),
            "store": self._predict(self.store.count_leading(names), self._network_free, worker, network, now),
        }
        sooner = {way: found for way, found in ways.items() if found is not None}
        if not sooner:
            return 0, now
        per_block = BLOCK_TOKENS / self.rate
        way = min(sooner, key=lambda way: sooner[way][0] + (len(names) - sooner[way][1]) * per_block)
        seconds, count, free = sooner[way]
        free[worker] = now + seconds
        if way == "peer":
            self.pulled_tokens += count * BLOCK_TOKENS
        elif way == "store":
            self.store.use(names[:count])
            self.stored_tokens += count * BLOCK_TOKENS
        else:
            for place in places:
                self._stores[worker].use(place)
            self.loaded_tokens += count * BLOCK_TOKENS
        return count, now + seconds

    def _predict(
        self, count: int, free: np.ndarray, worker: int, bandwidth: float, now: float
    ) -> tuple[float, int, np.ndarray] | None:
        """Seconds, blocks and when the way is free; None: there are none, or computing them is sooner."""
        size, waits = count * BLOCK_TOKENS * TOKEN_BYTES, max(0.0, float(free[worker]) - now)
        seconds = predict_seconds(size, int(waits * bandwidth), 1, 1, bandwidth)
        return (seconds, count, free) if count and is_sooner(seconds, count, BLOCK_TOKENS / self.rate) else None

    def _count_held(self, worker: int | None, names: Sequence[bytes]) -> int:
        """Leading blocks that a worker gives away: of memory, then of its disk."""
        if worker is None:
            return 0
        held, host = len(self._memories[worker].match_prefix(names, len(names))), self._hosts[worker]
        held += 0 if host is None else len(host.find(names[held:]))
        return held + (len(self._stores[worker].find(names[held:])) if self._has_disk else 0)

    def find_holder(self, arrival: Arrival) -> int:
        """Who has most of a prompt."""
        names = [block.to_bytes(16, "little", signed=True) for block in arrival.blocks]
        return max(range(self.count), key=lambda worker: self._count_held(worker, names))

    def _keep_blocks(self, worker: int, names: list[bytes], matched: list[int], below: list[int], now: float) -> None:
        memory, host = self._memories[worker], self._hosts[worker]
        missing = len(names) - len(matched)
        self.store.put(names[len(matched) :])
        if memory.count_required(matched, len(names)) > memory.num_available:
            return
        memory.hold(matched)
        if host is not None:
            host.blocks.hold(below)
        blocks = matched + memory.allocate(missing)
        if host is not None:
            host.fetch(below, blocks[len(matched) : len(matched) + len(below)])
            host.take_moves(now)
        memory.release(blocks, names, now)
        while self._has_disk and self._watched[worker].is_due:
            self._write(worker)

    def _write(self, worker: int) -> None:
        cache, store = self._watched[worker], self._stores[worker]
        taken = cache.take_coldest(BATCH, lambda name, reused: store.has(name))
        names = [name for _, name in reversed(taken)]
        while names:
            places = store.plan(len(names))
            store.append(places, names[: len(places)], self._rows[: len(places)])
            names = names[len(places) :]
        cache.unpin([block for block, _ in taken])
        self.written_tokens += len(taken) * BLOCK_TOKENS


class NamingTandem(Tandem):
    """The gateway's own scheduling, with workers that have told at which rate they bring blocks."""

    def __init__(self, fleet: TieredFleet, *, kv_tokens: int) -> None:
        super().__init__(fleet, kv_tokens=kv_tokens)
        self._tiered = fleet
        for scheduler in self._schedulers:
            for endpoint in scheduler.endpoints.values():
                endpoint.pull_rate = (fleet.peer_bandwidth or 0.0) / TOKEN_BYTES

    def choose(self, arrival: Arrival) -> int:
        worker = super().choose(arrival)
        assert self._pending is not None
        source = self._pending[1].source
        self._tiered.source = None if source is None else self._numbers[source.worker.name]
        return worker


class StoringTandem(Tandem):
    """The gateway's own scheduling, with workers that tell of the store that they share, and of their queues."""

    def __init__(self, fleet: TieredFleet, *, kv_tokens: int, store_tokens: int) -> None:
        super().__init__(fleet, kv_tokens=kv_tokens)
        self._tiered, self._room = fleet, store_tokens // fleet.count
        for worker in range(fleet.count):
            self._share(worker, 0.0)

    def served(self, arrival: Arrival, worker: int, result: Served) -> None:
        super().served(arrival, worker, result)
        self._share(worker, arrival.at)

    def _share(self, worker: int, now: float) -> None:
        fleet = self._tiered
        rate = (fleet.peer_bandwidth or 0.0) / TOKEN_BYTES
        for scheduler in self._schedulers:
            scheduler.observe(
                scheduler.endpoints[self._workers[worker].name],
                now,
                queued_tokens=max(0.0, float(fleet.free_at[worker]) - now) * fleet.rate,
                share=Share(rate, self._room, int(fleet.computed_tokens[worker])),
            )


class NamingRoundRobin(RoundRobin):
    """One after another, each told of whoever has most of the prompt."""

    def __init__(self, fleet: TieredFleet) -> None:
        super().__init__(fleet)
        self._tiered = fleet

    def choose(self, arrival: Arrival) -> int:
        self._tiered.source = self._tiered.find_holder(arrival)
        return super().choose(arrival)


def play(
    arrivals: list[Arrival], workers: int, build: Callable[[TieredFleet], Policy], **disk: Any
) -> tuple[Replay, TieredFleet]:
    fleet = TieredFleet(workers, tokens_per_second=TOKENS_PER_SECOND, kv_tokens=MEMORY_TOKENS, **disk)
    return replay(Recorded(arrivals), fleet, build(fleet)), fleet


def homes(kv_tokens: int) -> Callable[[TieredFleet], Policy]:
    """The gateway's own scheduling, told how many tokens a worker keeps."""
    return lambda fleet: Tandem(fleet, kv_tokens=kv_tokens)


def naming_homes(kv_tokens: int) -> Callable[[TieredFleet], Policy]:
    """The same, naming holders."""
    return lambda fleet: NamingTandem(fleet, kv_tokens=kv_tokens)


def storing_homes(kv_tokens: int, store_tokens: int) -> Callable[[TieredFleet], Policy]:
    """The same, told of a store."""
    return lambda fleet: StoringTandem(fleet, kv_tokens=kv_tokens, store_tokens=store_tokens)


def compare(arrivals: list[Arrival], workers: int) -> dict[str, Any]:
    """Hits and writes with and without disks, and first tokens at several bandwidths."""
    whole = MEMORY_TOKENS + DISK_TOKENS
    store = workers * DISK_TOKENS
    shared = {"store_tokens": store, "peer_bandwidth": PEER_BANDWIDTH}
    both = {"disk_tokens": DISK_TOKENS, "peer_bandwidth": PEER_BANDWIDTH}
    plans: dict[str, tuple[Callable[[TieredFleet], Policy], dict[str, Any]]] = {
        "homes, memory": (homes(MEMORY_TOKENS), {}),
        "homes, disk": (homes(whole), {"disk_tokens": DISK_TOKENS}),
        "homes, disk, written through": (homes(whole), {"disk_tokens": DISK_TOKENS, "write_through": True}),
        "homes, host memory": (homes(MEMORY_TOKENS + HOST_TOKENS), {"host_tokens": HOST_TOKENS}),
        "homes, host memory and disk": (
            homes(whole + HOST_TOKENS),
            {"host_tokens": HOST_TOKENS, "disk_tokens": DISK_TOKENS},
        ),
        "round robin, memory": (RoundRobin, {}),
        "round robin, disk": (RoundRobin, {"disk_tokens": DISK_TOKENS}),
        "homes, disk and peers": (naming_homes(whole), both),
        "round robin, disk and peers": (NamingRoundRobin, both),
        "homes, store": (storing_homes(MEMORY_TOKENS, store), shared),
        "round robin, store": (RoundRobin, shared),
    }
    prompts = sum(arrival.prompt for arrival in arrivals)
    found: dict[str, Any] = {}
    for name, (build, disk) in plans.items():
        seen, fleet = play(arrivals, workers, build, **disk)
        figures = {
            "hits": round(seen.hit_ratio(), 4),
            "p90": round(seen.ttft_at(90), 3),
            "written": round(fleet.written_tokens / prompts, 3),
            "loaded": round(fleet.loaded_tokens / prompts, 3),
            "pulled": round(fleet.pulled_tokens / prompts, 3),
            "fetched": round(fleet.fetched_tokens / prompts, 3),
            "stored": round(fleet.stored_tokens / prompts, 3),
        }
        found[name] = figures
        print(f"{workers:4} workers  {name:30} {json.dumps(figures)}", flush=True)
    for bandwidth in BANDWIDTHS:
        # A disk that is slow switches itself off, and gateways reckon with memory alone.
        disk_tokens = 0 if is_slow(bandwidth, TOKEN_BYTES, 1 / TOKENS_PER_SECOND) else DISK_TOKENS
        build = homes(MEMORY_TOKENS + disk_tokens)
        seen, _ = play(arrivals, workers, build, disk_tokens=disk_tokens, bandwidth=bandwidth)
        figures = {"hits": round(seen.hit_ratio(), 4), "p90": round(seen.ttft_at(90), 3)}
        found[f"homes, disk of {bandwidth / 1e6:.0f} MB/s"] = figures
        print(f"{workers:4} workers  disk at {bandwidth / 1e6:5.0f} MB/s: {json.dumps(figures)}", flush=True)
        seen, _ = play(arrivals, workers, naming_homes(MEMORY_TOKENS), peer_bandwidth=bandwidth)
        figures = {"hits": round(seen.hit_ratio(), 4), "p90": round(seen.ttft_at(90), 3)}
        found[f"homes, peers at {bandwidth / 1e6:.0f} MB/s"] = figures
        print(f"{workers:4} workers  peers at {bandwidth / 1e6:4.0f} MB/s: {json.dumps(figures)}", flush=True)
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
    if workers == 16:
        written, same = found["homes, host memory and disk"], found["homes, disk, written through"]["hits"]
        rows["writes with host memory"] = {
            "value": written["written"],
            "goal": WRITES_GOAL,
            "met": written["written"] <= WRITES_GOAL,
        }
        rows["hits with host memory"] = {"value": written["hits"], "goal": same, "met": written["hits"] >= same - 0.005}
    affine = found["homes, disk, written through"]["hits"]
    for way in ("homes", "round robin"):
        value = found[f"{way}, store"]["hits"]
        least = round(affine - STORE_GOAL, 4)
        rows[f"hits, {way}, store, to homes with disks of as many bytes"] = {
            "value": value, "goal": least, "met": value >= least
        }  # fmt: skip
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
