"""Which pair serves: tables for the rules, properties for what must hold whatever the load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.names import Role
from tandem_gateway.scheduling import Demand, Endpoint, Worker, missing_role
from tandem_gateway.scheduling.picker import MAX_PREFILL, TOLERANCE_TOKENS, group_by_revision, pick

D, P = Role.DECODE, Role.PREFILL


def make(name: str, role: Role, revision: str = "r1", *, prefill: int = 0, decode: int = 0) -> Endpoint:
    endpoint = Endpoint(Worker(name=name, address=f"{name}:1", role=role, revision=revision))
    endpoint.prefill_tokens, endpoint.decode_tokens = prefill, decode
    return endpoint


def demand(prompt: int = 100, *, output: int = 50, affinity: int = 7) -> Demand:
    return Demand(prompt_tokens=prompt, output_tokens=output, prefix=[], affinity=affinity)


def names(endpoints: list[Endpoint], wanted: Demand, cached: dict[int, int] | None = None) -> tuple[str, ...]:
    choice = pick(group_by_revision(endpoints), wanted, cached or {}, disaggregated=True)
    assert choice is not None
    return (choice.decode.worker.name, *(endpoint.worker.name for endpoint in choice.prefill))


def test_the_least_loaded_of_each_role_is_paired() -> None:
    endpoints = [
        make("p1", P, prefill=5000), make("p2", P, prefill=10), make("d1", D, decode=900), make("d2", D),
    ]  # fmt: skip
    assert names(endpoints, demand()) == ("d2", "p2", "p1")


def test_what_is_not_decoded_needs_no_prefill_worker() -> None:
    endpoints = [make("p1", P), make("d1", D, prefill=500), make("d2", D, decode=100)]
    wanted = Demand(prompt_tokens=100, output_tokens=1, prefix=[], affinity=7, local=True)
    assert names(endpoints, wanted) == ("d2",)


def test_a_cached_prefix_outweighs_a_queue_shorter_than_it() -> None:
    warm, cold = make("p1", P, prefill=300), make("p2", P)
    endpoints = [warm, cold, make("d1", D)]
    assert names(endpoints, demand(2000), {warm.serial: 1500})[1] == "p1"
    warm.prefill_tokens = 2000
    assert names(endpoints, demand(2000), {warm.serial: 1500})[1] == "p2"


def test_alternates_are_ranked_and_bounded() -> None:
    endpoints = [make(f"p{load}", P, prefill=load) for load in (400, 0, 800, 200, 600)] + [make("d", D)]
    assert names(endpoints, demand()) == ("d", "p0", "p200", "p400")
    assert MAX_PREFILL == 3


def test_a_complete_revision_is_preferred_over_an_incomplete_one() -> None:
    endpoints = [make("d-new", D, "r2"), make("d-old", D, decode=5000), make("p-old", P, prefill=5000)]
    assert names(endpoints, demand()) == ("d-old", "p-old")


def test_without_any_prefill_worker_a_decode_worker_computes_the_prompt_itself() -> None:
    assert names([make("d1", D)], demand()) == ("d1",)


def test_without_a_decode_worker_there_is_no_choice() -> None:
    endpoints = [make("p1", P)]
    assert pick(group_by_revision(endpoints), demand(), {}, disaggregated=True) is None
    assert "decode" in missing_role(endpoints)


def test_one_session_stays_while_loads_are_close_and_sessions_spread() -> None:
    endpoints = [make(f"d{index}", D) for index in range(4)]
    homes = {affinity: names(endpoints, demand(affinity=affinity))[0] for affinity in range(64)}
    assert len(set(homes.values())) == 4
    for endpoint in endpoints:
        endpoint.prefill_tokens = TOLERANCE_TOKENS // 2
    assert {affinity: names(endpoints, demand(affinity=affinity))[0] for affinity in range(64)} == homes


def test_when_an_endpoint_leaves_only_its_own_sessions_move() -> None:
    endpoints = [make(f"d{index}", D) for index in range(5)]
    before = {affinity: names(endpoints, demand(affinity=affinity))[0] for affinity in range(200)}
    after = {affinity: names(endpoints[1:], demand(affinity=affinity))[0] for affinity in range(200)}
    assert all(after[key] == home for key, home in before.items() if home != "d0")


FLEET = st.lists(
    st.tuples(st.sampled_from([D, P]), st.sampled_from(["r1", "r2", "r3"]), st.integers(0, 5000), st.integers(0, 5000)),
    max_size=12,
)


@given(FLEET, st.integers(1, 4000), st.integers(0, 2**64 - 1))
def test_a_pair_is_of_one_revision_and_its_load_is_bounded(
    fleet: list[tuple[Role, str, int, int]], prompt: int, affinity: int
) -> None:
    endpoints = [
        make(f"e{index}", role, revision, prefill=prefill, decode=decode)
        for index, (role, revision, prefill, decode) in enumerate(fleet)
    ]
    choice = pick(group_by_revision(endpoints), demand(prompt, affinity=affinity), {}, disaggregated=True)
    if choice is None:
        assert not any(endpoint.worker.role is D for endpoint in endpoints)
        return
    revision = choice.decode.worker.revision
    assert {endpoint.worker.revision for endpoint in choice.prefill} <= {revision}
    assert choice.decode.worker.role is D
    peers = [endpoint for endpoint in endpoints if endpoint.worker.revision == revision]
    if choice.prefill:
        queues = [endpoint.prefill_tokens for endpoint in peers if endpoint.worker.role is P]
        assert choice.prefill[0].prefill_tokens <= min(queues) + TOLERANCE_TOKENS
        loads = [endpoint.decode_tokens for endpoint in peers if endpoint.worker.role is D]
        assert choice.decode.decode_tokens <= min(loads) + TOLERANCE_TOKENS


@pytest.mark.parametrize("count", [2, 3, 7])
def test_nobody_starves_and_nobody_drowns_under_one_single_session(count: int) -> None:
    """All requests carry the same key and nothing ends: the load still spreads within the tolerance."""
    endpoints = [make(f"d{index}", D) for index in range(count)]
    for _ in range(40 * count):
        choice = pick(group_by_revision(endpoints), demand(100, affinity=1), {}, disaggregated=False)
        assert choice is not None
        choice.decode.prefill_tokens += 100
    loads = [endpoint.prefill_tokens for endpoint in endpoints]
    assert min(loads) > 0
    assert max(loads) - min(loads) <= TOLERANCE_TOKENS + 100
