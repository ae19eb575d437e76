"""Round robin over workers that share a store finds what affinity finds with as many bytes on disks of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tandem_sim.result import Replay
from tandem_sim.routing import Routing
from tandem_sim.synthetic import make_conversations
from tandem_sim.traces import BLOCK_TOKENS, Arrival

from bench.kv.replay import PEER_BANDWIDTH, StoringTandem
from bench.kv.shared import SharedStore
from bench.kv.tiered import TieredSimulation, Tiers
from bench.routing.policies import RoundRobin, Tandem

WORKERS, MEMORY, DISK = 4, 1 << 15, 1 << 19
STORE = {"store_tokens": WORKERS * DISK, "peer_bandwidth": PEER_BANDWIDTH}


def simulate(arrivals: list[Arrival], routing: Routing, **tiers: Any) -> tuple[Replay, TieredSimulation]:
    simulation = TieredSimulation(arrivals, WORKERS, routing, Tiers(memory_tokens=MEMORY, **tiers))
    return simulation.run(), simulation


def p90(seen: Replay) -> float:
    return float(np.percentile(seen.ttft, 90))


@pytest.fixture(scope="module")
def arrivals() -> list[Arrival]:
    return make_conversations(sessions=120, seconds=300)


@pytest.fixture(scope="module")
def affine(arrivals: list[Arrival]) -> float:
    seen, _ = simulate(arrivals, Tandem(kv_tokens=MEMORY + DISK), disk_tokens=DISK, write_through=True)
    return seen.hit_ratio


def test_round_robin_with_a_store_finds_what_affinity_finds_with_as_many_bytes(
    arrivals: list[Arrival], affine: float
) -> None:
    seen, simulation = simulate(arrivals, RoundRobin(), **STORE)
    without, _ = simulate(arrivals, RoundRobin())
    assert seen.hit_ratio >= affine - 0.01
    assert without.hit_ratio < affine - 0.1
    assert simulation.count_tokens("store") > 0.1 * seen.prompt.sum()


def test_the_gateway_that_prices_a_store_finds_as_much_and_is_sooner_than_round_robin(
    arrivals: list[Arrival], affine: float
) -> None:
    policy = StoringTandem(kv_tokens=MEMORY, room=DISK, peer_bandwidth=PEER_BANDWIDTH)
    seen, _ = simulate(arrivals, policy, **STORE)
    turns, _ = simulate(arrivals, RoundRobin(), **STORE)
    assert seen.hit_ratio >= affine - 0.01
    assert p90(seen) <= p90(turns)
    (gateway,) = policy.gateways
    endpoints = gateway.scheduler.endpoints.values()
    assert all(endpoint.store is not None and endpoint.store.found > 0.9 for endpoint in endpoints)


def test_a_store_that_is_full_gives_up_what_was_used_longest_ago() -> None:
    store = SharedStore(4)
    names = [bytes([number]) for number in range(6)]
    store.put(names[:4])
    store.use(names[:2])
    store.put(names[4:])
    assert [name in names[:2] or name in names[4:] for name in names] == [True, True, False, False, True, True]
    assert store.count_leading(names) == 2
    assert store.count_leading(names[2:]) == 0
    assert (len(store), store.num_written) == (4, 6)


def test_host_memory_is_found_and_feeds_the_disk(arrivals: list[Arrival]) -> None:
    """With a host's memory what is used again soon is found there, and is not written to the disk meanwhile."""
    disk, _ = simulate(arrivals, Tandem(kv_tokens=MEMORY + DISK), disk_tokens=DISK, write_through=True)
    both, simulation = simulate(
        arrivals, Tandem(kv_tokens=MEMORY + DISK + 8 * MEMORY), disk_tokens=DISK, host_tokens=8 * MEMORY
    )
    assert simulation.count_tokens("host") > 0.1 * both.prompt.sum()
    assert simulation.written_tokens < 0.9 * (both.prompt.sum() - both.hit.sum())
    assert both.hit_ratio >= disk.hit_ratio - 0.01


def test_who_lacks_a_prompt_loads_it_where_that_is_sooner() -> None:
    turns = [Arrival(at, 8 * BLOCK_TOKENS, 1, tuple(range(1, 8)), 1) for at in (0.0, 10.0)]
    for bandwidth, hits in ((PEER_BANDWIDTH, 7 * BLOCK_TOKENS), (1e6, 0)):
        seen, _ = simulate(turns, RoundRobin(), store_tokens=DISK, peer_bandwidth=bandwidth)
        assert seen.hit.tolist() == [0, hits]
