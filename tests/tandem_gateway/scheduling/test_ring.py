"""The ring gives every session its homes, evenly and for good."""

from collections import Counter

import pytest
from tandem_gateway.scheduling import Endpoint
from tandem_gateway.scheduling.pool import Pool
from tandem_gateway.scheduling.ring import MAX_HOMES, MAX_REMEMBERED, Ring, build_seed

from tests.tandem_gateway.scheduling.fleet import make_endpoint

NOBODY: frozenset[str] = frozenset()


def fill(count: int, prefix: str = "w-") -> tuple[Pool, list[Endpoint]]:
    pool = Pool()
    endpoints = [make_endpoint(f"{prefix}{index}") for index in range(count)]
    pool.add(endpoints)
    return pool, endpoints


def homes(ring: Ring, sessions: int = 2000) -> dict[int, list[str]]:
    seeds = [build_seed(b"%d" % session) for session in range(sessions)]
    return {seed: [endpoint.worker.name for endpoint in ring.find_homes(seed, NOBODY)] for seed in seeds}


@pytest.mark.parametrize("prefix", ["w-", "d", "llama-3-70b-decode-"])
@pytest.mark.parametrize("count", [2, 4, 16])
def test_every_endpoint_has_its_share(count: int, prefix: str) -> None:
    shares = Counter(names[0] for names in homes(fill(count, prefix)[0].ring, 8000).values())
    assert min(shares.values()) > 0.6 * 8000 / count
    assert max(shares.values()) < 1.5 * 8000 / count


def test_homes_are_distinct_and_few() -> None:
    for names in homes(fill(5)[0].ring).values():
        assert len(names) == len(set(names)) == MAX_HOMES
    assert all(names == ["w-0"] for names in homes(fill(1)[0].ring).values())
    assert Ring().find_homes(1, NOBODY) == []


def test_when_an_endpoint_leaves_only_its_own_sessions_move_and_to_their_second_home() -> None:
    pool, endpoints = fill(6)
    before = homes(pool.ring)
    pool.remove(endpoints[2])
    after = homes(pool.ring)
    for seed, names in before.items():
        assert after[seed][0] == (names[1] if names[0] == "w-2" else names[0])


def test_one_that_may_not_be_chosen_keeps_its_place() -> None:
    pool, endpoints = fill(6)
    before = homes(pool.ring)
    pool.bar(endpoints[0])
    assert not any("w-0" in names for names in homes(pool.ring).values())
    pool.admit(endpoints[0])
    assert homes(pool.ring) == before


def test_who_was_excluded_is_nobodys_home_and_then_is_again() -> None:
    ring = fill(6)[0].ring
    seed = build_seed(b"session")
    first, second = ring.find_homes(seed, NOBODY)
    assert ring.find_homes(seed, {first.worker.name})[0] is second
    assert ring.find_homes(seed, NOBODY) == [first, second]


def test_any_number_of_sessions_is_remembered_within_a_bound() -> None:
    ring = fill(3)[0].ring
    assert len(homes(ring, 3 * MAX_REMEMBERED)) == 3 * MAX_REMEMBERED
    assert len(ring._homes) <= MAX_REMEMBERED


def test_joining_one_by_one_or_together_is_the_same() -> None:
    together, endpoints = fill(20)
    single = Pool()
    for endpoint in endpoints:
        single.add([endpoint])
    assert homes(single.ring) == homes(together.ring)
