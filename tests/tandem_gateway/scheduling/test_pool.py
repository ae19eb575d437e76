"""Buckets by load: what they say is what a scan would."""

from hypothesis import given
from hypothesis import strategies as st
from tandem_gateway.scheduling.pool import Pool, find_level, find_range

from tests.tandem_gateway.scheduling.fleet import make_endpoint

NOBODY: frozenset[str] = frozenset()


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_levels_are_in_the_order_of_loads_and_an_eighth_wide(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 0 <= find_level(low) <= find_level(high)
    if find_level(low) == find_level(high) > 0:
        assert int(high) <= int(low) * 1.13
    assert (find_level(high) == 0) == (int(high) < 64)


@given(st.floats(0, 1e9))
def test_a_load_is_in_the_range_of_its_level_and_of_no_other(load: float) -> None:
    level = find_level(load)
    low, high = find_range(level)
    assert low <= load < high
    assert find_range(level + 1)[0] == high


STEPS = st.lists(
    st.tuples(
        st.integers(0, 5), st.sampled_from(["charge", "charge", "admit", "bar", "leave", "ask"]), st.integers(0, 9000)
    ),
    max_size=60,
)


@given(STEPS)
def test_the_pool_agrees_with_a_scan(steps: list[tuple[int, str, int]]) -> None:
    """However much has changed since somebody asked last."""
    pool = Pool()
    endpoints = [make_endpoint(f"w{index}") for index in range(6)]
    pool.add(endpoints)
    open_ones = set(endpoints)
    for number, action, tokens in [*steps, (0, "ask", 0)]:
        endpoint = endpoints[number]
        if action == "charge":
            endpoint.charge(tokens - endpoint.prefill_tokens, 0)
        elif action == "admit":
            pool.admit(endpoint)
            open_ones.add(endpoint)
        elif action == "bar":
            pool.bar(endpoint)
            open_ones.discard(endpoint)
        elif action == "leave":
            pool.remove(endpoint)
            open_ones.discard(endpoint)
            endpoints[number] = make_endpoint(f"w{number}")
            pool.add([endpoints[number]])
            open_ones.add(endpoints[number])
            endpoint.charge(tokens, 0)  # what it has is no load of the pool's any more
        else:
            order = pool.find_idle(6, NOBODY)
            assert set(order) == open_ones
            levels = [find_level(endpoint.load) for endpoint in order]
            assert levels == sorted(levels)
        assert pool.available == len(open_ones)
        assert pool.load == sum(endpoint.load for endpoint in open_ones)


def test_who_was_excluded_is_passed_over() -> None:
    pool = Pool()
    endpoints = [make_endpoint(f"w{index}") for index in range(3)]
    pool.add(endpoints)
    assert pool.find_idle(1, {"w0", "w1"}) == [endpoints[2]]


@given(st.integers(0, 1 << 64), st.sets(st.integers(0, 7)))
def test_wherever_one_begins_whoever_is_not_excluded_is_found(start: int, out: set[int]) -> None:
    pool = Pool()
    endpoints = [make_endpoint(f"w{index}") for index in range(8)]
    pool.add(endpoints)
    free = {endpoints[index] for index in range(8) if index not in out}
    found = pool.find_idle(3, {f"w{index}" for index in out}, start)
    assert len(found) == len(set(found)) == min(3, len(free))
    assert set(found) <= free
