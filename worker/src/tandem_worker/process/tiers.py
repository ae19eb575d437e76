"""The tiers of a worker's blocks below memory, from its configuration, and what is told about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_api.launch import WorkerConfig
from tandem_api.telemetry import MAX_ADDRESS, MAX_FAILING, Metric, TierTelemetry

from tandem_worker.host.environment import PodFacts
from tandem_worker.host.runtime import Runtime
from tandem_worker.process.families import Families

if TYPE_CHECKING:
    from tandem_worker.engine.contract import EngineStats
    from tandem_worker.engine.core import EngineCore
    from tandem_worker.tiers.disk import DiskTier
    from tandem_worker.tiers.format import TierKey
    from tandem_worker.tiers.memory import BlockMemory
    from tandem_worker.tiers.mooncake.tier import StoreTier
    from tandem_worker.tiers.peers import PeerSource
    from tandem_worker.tiers.shelf import Shelf
    from tandem_worker.tiers.stats import TierStats

_KEPT_SHARE = 8
"""One block in so many may be pinned for a tier that writes more slowly than another one."""
_FAILING_BYTES = 2 * 1024
"""Most bytes of all addresses in a sample together, as of 64 of IPv4 with room to spare: a gateway reads 64 KiB."""


@dataclass(slots=True, kw_only=True)
class Tiers:
    """What a worker has below memory."""

    disk: DiskTier | None = None
    store: StoreTier | None = None
    """What it shares with other workers."""
    peers: PeerSource | None = None
    """Other workers, asked for what they have computed."""
    shelf: Shelf | None = None
    """What others may ask this one for."""
    host: Callable[[], EngineStats] | None = None
    """The engine's figures, where it has blocks in host memory."""

    @property
    def sinks(self) -> list[DiskTier | StoreTier]:
        """Tiers that blocks go to which memory offers."""
        return [tier for tier in (self.disk, self.store) if tier is not None]

    @property
    def sources(self) -> list[DiskTier | StoreTier | PeerSource]:
        """Tiers that blocks come from."""
        return [*self.sinks, *([] if self.peers is None else [self.peers])]

    def stats(self) -> list[TierStats]:
        """What every tier has done, and what is there now. Any thread."""
        below = [] if self.host is None else [describe_host(self.host())]
        return [*below, *(tier.stats() for tier in self.sources)]

    def flush(self, seconds: float) -> None:
        """Blocks that are in memory alone go to the tiers, for so long at most. Blocks the calling thread."""
        for tier in self.sinks:
            tier.flush(seconds / len(self.sinks))

    def close(self) -> None:
        """Nothing is read or written any more."""
        for tier in reversed(self.sources):
            tier.close()


def open_tiers(engine: EngineCore, config: WorkerConfig, pod: PodFacts, digest: str, runtime: Runtime) -> Tiers | None:
    """Joined with an engine of one rank that has computed nothing yet. Disk and store are looked at while the worker
    goes on starting; what is wrong with them ends nothing. None: blocks are kept in memory alone.

    Of a group there is host memory alone. Raises ThreadStartError.
    """
    tiers = Tiers(host=None if engine.host_pool is None else engine.stats)
    lone = config.group.parallelism.num_ranks == 1
    if config.kv.disk is None and config.kv.store is None and not (config.kv.peers and lone):
        return tiers if tiers.host is not None else None
    from tandem_worker.tiers.combined import CombinedTier
    from tandem_worker.tiers.fanout import SinkFanout
    from tandem_worker.tiers.format import TierKey
    from tandem_worker.tiers.memory import PooledMemory
    from tandem_worker.transfer.layout import KVLayout

    layout = KVLayout.of(engine.kv_cache.spec).fingerprint
    key = TierKey(model_digest=digest, revision=config.revision, layout=layout)
    if config.kv.disk is not None:
        tiers.disk = _build_disk(engine, config, key, runtime)
    if config.kv.store is not None:
        tiers.store = _build_store(engine, config, key, pod, runtime)
    if config.kv.peers:
        own = f"[{pod.pod_ip}]" if ":" in pod.pod_ip else pod.pod_ip
        tiers.peers, tiers.shelf = _build_peers(engine, key, pod, runtime, tiers.disk, f"{own}:{config.kv.port}")
    memory, num_blocks = _choose_feed(engine, config)
    cold_blocks = max((tier.plan_cold_blocks(num_blocks) for tier in tiers.sinks), default=0)
    sink = SinkFanout(tiers.sinks, most_kept=num_blocks // _KEPT_SHARE) if tiers.sinks else None
    desk = engine.open_desk(
        CombinedTier(tiers.sources, sink),
        cold_blocks=cold_blocks,
        fence=memory.fence,
        below=isinstance(memory, PooledMemory),
    )
    if sink is not None:
        sink.bind(desk)
    if tiers.peers is not None:
        tiers.peers.bind(desk)
    for tier in tiers.sources:
        tier.start()
    return tiers


def _choose_feed(engine: EngineCore, config: WorkerConfig) -> tuple[BlockMemory, int]:
    """The memory whose blocks go to disk and store, one for each that asks, and how many blocks it has: the host's,
    where they are to have what is given up there alone."""
    from tandem_worker.tiers.memory import PooledMemory, open_memory

    device, pool, disk = open_memory(engine.kv_cache), engine.host_pool, config.kv.disk
    if pool is None or config.kv.store is not None or (disk is not None and disk.write_through):
        return device, engine.kv_cache.num_blocks
    return PooledMemory(pool, device), pool.num_blocks


def _build_disk(engine: EngineCore, config: WorkerConfig, key: TierKey, runtime: Runtime) -> DiskTier:
    from tandem_worker.tiers.disk import DiskLimits, DiskTier

    wanted = config.kv.disk
    assert wanted is not None
    limits = DiskLimits(
        size_bytes=wanted.size_bytes, write_through=wanted.write_through, max_daily_writes=wanted.max_daily_writes
    )
    memory, block_size = _choose_feed(engine, config)[0], engine.kv_cache.spec.block_size
    return DiskTier(Path(wanted.path), key, memory, block_size, limits, runtime.vitals)


def _build_store(engine: EngineCore, config: WorkerConfig, key: TierKey, pod: PodFacts, runtime: Runtime) -> StoreTier:
    from tandem_worker.tiers.mooncake.tier import StoreTier

    wanted = config.kv.store
    assert wanted is not None
    memory, block_size = _choose_feed(engine, config)[0], engine.kv_cache.spec.block_size
    notes = Path(wanted.notes_path)
    address, given = f"{pod.pod_ip}:{wanted.port}", wanted.given_bytes
    return StoreTier(address, key, memory, block_size, runtime.vitals, notes=notes, given_bytes=given)


def _build_peers(
    engine: EngineCore, key: TierKey, pod: PodFacts, runtime: Runtime, disk: DiskTier | None, own: str
) -> tuple[PeerSource, Shelf]:
    import threading

    from tandem_worker.tiers.format import plan_geometry
    from tandem_worker.tiers.memory import PooledMemory, open_memory
    from tandem_worker.tiers.peer_link import PullTerms
    from tandem_worker.tiers.peers import PeerSource
    from tandem_worker.tiers.shelf import Shelf
    from tandem_worker.tiers.stats import Counters
    from tandem_worker.transfer.contract import Identity

    block_size = engine.kv_cache.spec.block_size
    incoming, outgoing = open_memory(engine.kv_cache), open_memory(engine.kv_cache)
    geometry, counters = plan_geometry(incoming.layer_bytes, 0), Counters(block_size, "peer")
    terms = PullTerms(
        key=key,
        geometry=geometry,
        memory=incoming,
        identity=Identity(worker=pod.pod, revision=key.revision, model_digest=key.model_digest, layout=key.layout),
        ring=runtime.peers,
        landing=threading.Lock(),
    )
    source = PeerSource(terms, block_size, runtime.vitals, counters, own)
    pool = engine.host_pool
    host = None if pool is None else PooledMemory(pool, outgoing)
    return source, Shelf(key, geometry, outgoing, engine.open_lending(outgoing.fence), counters, disk, host)


def describe_host(engine: EngineStats) -> TierStats:
    """Host memory as a tier."""
    from tandem_worker.tiers.stats import TierStats

    host, size = engine.host, engine.kv_block_size
    assert host is not None, "the engine has blocks there"
    return TierStats(
        tier="host",
        capacity_tokens=host.blocks_total * size,
        stored_tokens=host.blocks_stored * size,
        horizon=host.horizon,
        tokens_read=host.blocks_in_total * size,
        tokens_written=host.blocks_out_total * size,
        bytes_read=host.blocks_in_total * host.bytes_per_block,
        bytes_written=host.blocks_out_total * host.bytes_per_block,
        seconds_reading=host.seconds_in_total,
        seconds_writing=host.seconds_out_total,
        evictions=host.evictions_total,
    )


def describe_tier(stats: TierStats) -> TierTelemetry:
    """For gateways and the operator."""
    return TierTelemetry(
        tier=stats.tier,
        reason=stats.reason,
        message=stats.message[:1000],
        failing=_name_failing(stats.failing),
        capacity_tokens=stats.capacity_tokens,
        stored_tokens=stats.stored_tokens,
        horizon=stats.horizon,
        tokens_per_second=stats.tokens_per_second,
    )


def _name_failing(failing: Sequence[str]) -> list[str]:
    """As many of these addresses as a sample has room for: a sample that is too large, or that cannot be made, would
    hide everything else that a worker tells. Requests name them, up to any length and number."""
    room, found = _FAILING_BYTES, list[str]()
    for address in failing[:MAX_FAILING]:
        cut = address[:MAX_ADDRESS]
        room -= len(cut) + 3
        if room < 0:
            break
        found.append(cut)
    return found


def add_tiers(out: Families, tiers: Sequence[TierStats]) -> None:
    """The tiers' metrics."""
    labels = [{"tier": stats.tier} for stats in tiers]

    def both(read: str, written: str) -> list[tuple[dict[str, str], float]]:
        """Values of two fields of every tier."""
        fields = {"read": read, "written": written}
        return [
            (label | {"direction": direction}, getattr(stats, field))
            for label, stats in zip(labels, tiers, strict=True)
            for direction, field in fields.items()
        ]

    def each(field: str) -> list[tuple[dict[str, str], float]]:
        return [(label, getattr(stats, field)) for label, stats in zip(labels, tiers, strict=True)]

    out.counters(
        Metric.WORKER_KV_TIER_TOKENS_TOTAL,
        "Tokens whose blocks came back from a tier for a request, and of those that were written to it or, of the tier "
        "peer, given to other workers.",
        both("tokens_read", "tokens_written"),
    )
    out.counters(
        Metric.WORKER_KV_TIER_BYTES_TOTAL,
        "Bytes read from a tier and found intact, and bytes written to it.",
        both("bytes_read", "bytes_written"),
    )
    out.counters(
        Metric.WORKER_KV_TIER_SECONDS_TOTAL,
        "What that took, checking and copying included, of all threads together.",
        both("seconds_reading", "seconds_writing"),
    )
    out.counters(Metric.WORKER_KV_TIER_EVICTIONS_TOTAL, "Blocks that a tier gave up for others.", each("evictions"))
    out.counters(
        Metric.WORKER_KV_LOADS_CUT_TOTAL,
        "Loads that were late: what had not come by then was computed.",
        each("loads_cut"),
    )
    out.gauges(Metric.WORKER_KV_TIER_STORED_TOKENS, "Tokens whose blocks a tier holds.", each("stored_tokens"))
    out.gauges(
        Metric.WORKER_KV_TIER_READY,
        "1 while a tier is in use, 0 from when it was switched off until what had failed has gone through; telemetry "
        "says why.",
        [(label, int(stats.reason is None)) for label, stats in zip(labels, tiers, strict=True)],
    )
