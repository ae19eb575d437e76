"""Which pair serves: tables for the rules, properties for what must hold whatever the load."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.names import Role
from tandem_gateway.scheduling import Demand, Scheduler, Worker, missing_role
from tandem_gateway.scheduling.picker import MAX_PREFILL, OWN_SLACK, SLACK, SLACK_TOKENS, find_capacity
from tandem_gateway.scheduling.prefix import BRANCHES
from xxhash import xxh3_64_intdigest

from tests.tandem_gateway.scheduling.fleet import (
    D,
    P,
    make_chain,
    make_demand,
    make_endpoint,
    make_scheduler,
    make_worker,
    serve,
)  # fmt: skip


def load(scheduler: Scheduler, **tokens: int) -> None:
    """Outstanding tokens: prompt tokens of prefill workers, output tokens of others."""
    for name, count in tokens.items():
        endpoint = scheduler.endpoints[name]
        prefill = endpoint.worker.role is P
        endpoint.charge(count if prefill else 0, 0 if prefill else count)


def names(scheduler: Scheduler, demand: Demand) -> tuple[str, ...]:
    choice = scheduler.choose(demand, 0.0)
    assert choice is not None
    return (choice.decode.worker.name, *(endpoint.worker.name for endpoint in choice.prefill))


def test_the_least_loaded_of_each_role_is_paired() -> None:
    scheduler = make_scheduler(*(make_worker(name, P if name[0] == "p" else D) for name in ("p1", "p2", "d1", "d2")))
    load(scheduler, p1=5000, p2=10, d1=9000)
    assert names(scheduler, make_demand()) == ("d2", "p2", "p1")


def test_what_is_not_decoded_needs_no_prefill_worker() -> None:
    scheduler = make_scheduler(make_worker("p1", P), make_worker("d1"), make_worker("d2"))
    load(scheduler, d1=5000, d2=100)
    wanted = Demand(prompt_tokens=100, output_tokens=1, prefix=[], affinity=7, local=True)
    assert names(scheduler, wanted) == ("d2",)


def test_a_cached_prefix_outweighs_a_queue_shorter_than_it() -> None:
    scheduler = make_scheduler(make_worker("p1", P), make_worker("p2", P), make_worker("d1"))
    demand = make_demand(2048, prefix=make_chain(1, 8))
    warm = serve(scheduler, demand)[1]
    load(scheduler, **{warm: 1000})
    assert names(scheduler, demand)[1] == warm
    load(scheduler, **{warm: 4000})
    assert names(scheduler, demand)[1] != warm


def test_alternates_are_ranked_and_bounded() -> None:
    scheduler = make_scheduler(*(make_worker(f"p{n}", P) for n in range(5)), make_worker("d"))
    load(scheduler, p0=4000, p2=8000, p3=2000, p4=6000)
    assert names(scheduler, make_demand(affinity=0)) == ("d", "p1", "p3", "p0")
    assert MAX_PREFILL == 3


def revision(name: str, prefills: int, decodes: int) -> list[Worker]:
    workers = [make_worker(f"p{index}-{name}", P, name) for index in range(prefills)]
    return workers + [make_worker(f"d{index}-{name}", D, name) for index in range(decodes)]


def spread(scheduler: Scheduler, streams: int, *, affinity: bool, together: bool) -> Counter[str]:
    """How many of so many streams each decode worker got: at once, or one after another."""
    counts: Counter[str] = Counter()
    for index in range(streams):
        demand = make_demand(1000, output=200, affinity=xxh3_64_intdigest(f"{index}".encode()) if affinity else 0)
        choice = scheduler.choose(demand, 0.0)
        assert choice is not None
        assert len({endpoint.worker.revision for endpoint in (choice.decode, *choice.prefill)}) == 1
        reservation = scheduler.reserve(choice, demand, 0.0)
        counts[choice.decode.worker.name] += 1
        if not together:
            reservation.first_token(0.1)
            reservation.release()
    return counts


@pytest.mark.parametrize(("affinity", "together"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize(
    ("old", "new"), [((0, 7), (1, 1)), ((1, 8), (1, 1)), ((4, 3), (0, 1)), ((2, 2), (2, 2)), ((0, 6), (1, 3))]
)
def test_during_a_rollout_no_worker_gets_much_more_than_its_share(
    old: tuple[int, int], new: tuple[int, int], affinity: bool, together: bool
) -> None:
    scheduler = make_scheduler(*revision("old", *old), *revision("new", *new))
    decodes = old[1] + new[1]
    counts = spread(scheduler, 8 * decodes, affinity=affinity, together=together)
    assert len(counts) == decodes
    assert max(counts.values()) <= 2 * 8 + 2


def test_revisions_get_what_their_scarcest_role_can_serve() -> None:
    scheduler = make_scheduler(*revision("old", 1, 6), *revision("new", 3, 2))
    counts = spread(scheduler, 1000, affinity=True, together=False)
    new = sum(count for name, count in counts.items() if name.endswith("new"))
    # 1 of 4 prefill and 6 of 8 decode endpoints; 3 of 4 and 2 of 8.
    assert 440 <= new <= 560


def test_a_session_keeps_its_revision_while_others_come_and_go() -> None:
    scheduler = make_scheduler(*revision("a", 2, 4), *revision("b", 2, 4))
    demands = [make_demand(1000, affinity=xxh3_64_intdigest(f"{n}".encode())) for n in range(200)]

    def revisions() -> list[str]:
        return [scheduler.choose(demand, 0.0).decode.worker.revision for demand in demands]  # type: ignore[union-attr]

    before = revisions()
    scheduler.apply_workers([*revision("a", 2, 4), *revision("b", 2, 3)])
    moved = sum(one != other for one, other in zip(before, revisions(), strict=True))
    assert 0 < moved < 40


def test_a_revision_with_too_much_to_do_is_left_for_another() -> None:
    scheduler = make_scheduler(*revision("new", 0, 1), *revision("old", 1, 1))
    load(scheduler, **{"d0-old": 5000, "p0-old": 5000})
    assert {names(scheduler, make_demand(affinity=n << 58)) for n in range(1, 32)} == {("d0-new",)}


COUNTS = st.tuples(st.integers(0, 20), st.integers(1, 20))


@given(st.lists(COUNTS, min_size=1, max_size=4))
def test_capacities_are_shares_that_never_exceed_the_whole(counts: list[tuple[int, int]]) -> None:
    totals = {"all_prefills": sum(p for p, _ in counts), "all_decodes": sum(d for _, d in counts)}
    shares = [find_capacity(p, d, **totals) for p, d in counts]
    assert all(share > 0 for share in shares)
    assert sum(shares) <= 1 + 1e-9
    for (prefills, decodes), share in zip(counts, shares, strict=True):
        assert find_capacity(prefills, decodes + 1, **totals) >= share


def test_without_any_prefill_worker_a_decode_worker_computes_the_prompt_itself() -> None:
    assert names(make_scheduler(make_worker("d1")), make_demand()) == ("d1",)


def test_without_a_decode_worker_there_is_no_choice() -> None:
    scheduler = make_scheduler(make_worker("p1", P))
    assert scheduler.choose(make_demand(), 0.0) is None
    assert "decode" in missing_role(scheduler.endpoints.values())


def test_sessions_stay_at_home_while_loads_are_close_and_spread() -> None:
    scheduler = make_scheduler(*(make_worker(f"d{index}") for index in range(4)))
    demands = [make_demand(affinity=session * 0x9E3779B97F4A7C15 % 2**64) for session in range(1, 65)]
    homes = [names(scheduler, demand) for demand in demands]
    assert len(set(homes)) == 4
    load(scheduler, d0=4 * SLACK_TOKENS, d1=100)
    assert [names(scheduler, demand) for demand in demands] == homes


@pytest.mark.parametrize(("first", "grown", "output"), [(30, 20, 100), (100, 100, 100), (1000, 300, 200)])
def test_a_session_keeps_its_worker_under_load(first: int, grown: int, output: int) -> None:
    """Eight requests at a time over four workers: of a session's turns, its most used worker gets nearly all."""
    scheduler = make_scheduler(*(make_worker(f"d{index}") for index in range(4)))
    used: dict[int, Counter[str]] = {session: Counter() for session in range(1, 41)}
    running = []
    for turn in range(10):
        for session, counts in used.items():
            if len(running) == 8:
                choice, demand, reservation, prompt = running.pop(0)
                scheduler.accept(choice, demand, reservation, turn + session / 40)
                reservation.first_token(turn + session / 40)
                reservation.release()
            prompt = first + turn * grown
            demand = make_demand(
                prompt, output=output, affinity=session * 0x9E3779B97F4A7C15 % 2**64,
                prefix=make_chain(session, prompt // 256),
            )  # fmt: skip
            choice = scheduler.choose(demand, turn + session / 40)
            assert choice is not None
            running.append((choice, demand, scheduler.reserve(choice, demand, turn + session / 40), prompt))
            counts[choice.decode.worker.name] += 1
    share = sum(max(counts.values()) for counts in used.values()) / 400
    assert share >= 0.9


def test_a_home_counts_for_more_where_other_gateways_send_there_too() -> None:
    scheduler = make_scheduler(*(make_worker(f"d{index}") for index in range(4)))
    demand = make_demand(20_000, prefix=make_chain(1, 80))
    home = names(scheduler, demand)[0]
    scheduler.endpoints[home].charge(8000, 0)
    assert names(scheduler, demand) != (home,)
    scheduler.estimator.unseen_hits = 0.5
    assert names(scheduler, demand) == (home,)


def test_one_session_does_not_pile_up() -> None:
    """All requests carry the same key and nothing ends: the load still spreads within the slack."""
    scheduler = make_scheduler(*(make_worker(f"d{index}") for index in range(5)))
    for _ in range(200):
        demand = make_demand(100, output=40, affinity=1)
        choice = scheduler.choose(demand, 0.0)
        assert choice is not None
        scheduler.reserve(choice, demand, 0.0)
    loads = [endpoint.load for endpoint in scheduler.endpoints.values()]
    assert max(loads) - min(loads) <= SLACK_TOKENS + SLACK * sum(loads) / 5 + 0.1 * 150 + 110 + max(loads) / 8


def test_clients_that_name_no_session_find_their_conversation_in_every_gateway() -> None:
    """What many prompts share is left out of the name that a conversation gets, in each gateway by itself."""
    gateways = [make_scheduler(*(make_worker(f"d{index}") for index in range(8))) for _ in range(2)]
    for scheduler in gateways:
        for session in range(100, 100 + 2 * BRANCHES):
            serve(scheduler, make_demand(2048, prefix=make_chain(session, 8, shared=4), affinity=0))
    found = [
        [
            names(scheduler, make_demand(3072, prefix=make_chain(session, 12, shared=4), affinity=0))
            for session in range(40)
        ]
        for scheduler in gateways
    ]
    assert found[0] == found[1]
    assert len(set(found[0])) == 8


FLEET = st.lists(
    st.tuples(st.sampled_from([D, P]), st.sampled_from(["r1", "r2", "r3"]), st.integers(0, 5000), st.booleans()),
    max_size=12,
)


@given(FLEET, st.integers(1, 4000), st.integers(0, 2**64 - 1))
def test_a_pair_is_of_one_revision_and_its_load_is_bounded(
    fleet: list[tuple[Role, str, int, bool]], prompt: int, affinity: int
) -> None:
    scheduler = make_scheduler(
        *(make_worker(f"e{n}", role, revision) for n, (role, revision, _, _) in enumerate(fleet))
    )
    excluded = {f"e{index}" for index, (_, _, _, out) in enumerate(fleet) if out}
    for index, (_, _, tokens, _) in enumerate(fleet):
        load(scheduler, **{f"e{index}": tokens})
    choice = scheduler.choose(make_demand(prompt, affinity=affinity), 0.0, excluded)
    if choice is None:
        assert not any(role is D and not out for role, _, _, out in fleet)
        return
    chosen = [choice.decode, *choice.prefill]
    assert len({endpoint.worker.revision for endpoint in chosen}) == 1
    assert not {endpoint.worker.name for endpoint in chosen} & excluded
    assert choice.decode.worker.role is D
    for endpoint in chosen[:2]:
        pool = endpoint.pool
        assert pool is not None
        least = min(member.load for member in pool.members.values() if member.worker.name not in excluded)
        slack = SLACK_TOKENS + SLACK * pool.load / pool.available + OWN_SLACK * 1.5 * prompt
        assert endpoint.load <= least * 1.13 + 64 + slack


def test_a_worker_without_a_pool_is_never_matched() -> None:
    scheduler = make_scheduler(make_worker("a"), make_worker("b"))
    demand = make_demand(2048, prefix=make_chain(1, 8))
    served = serve(scheduler, demand)[0]
    scheduler.apply_workers([make_worker(name) for name in ("a", "b") if name != served])
    assert names(scheduler, demand) != (served,)
    assert make_endpoint().pool is None
