"""Who computes a prompt while prefill workers are behind: tables for the decision, and the scheduler that asks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.launch import TTFTDeadline
from tandem_gateway.scheduling import Reservation, Scheduler, Terms, Verdict
from tandem_gateway.scheduling.conversion import LEAST_QUEUE, Offer, decide, find_share, predict_own
from tandem_gateway.scheduling.decision import describe_choice, predict
from tandem_gateway.scheduling.own_prompts import OwnPrompts

from tests.tandem_gateway.scheduling.fleet import P, make_chain, make_demand, make_endpoint, make_scheduler, make_worker

IDLE = Offer(tokens=1000)
STREAMING = Offer(tokens=1000, busy=True, decode_seconds=0.03)
TERMS = Terms(step_seconds=0.06)
RATE = 1000.0


@pytest.mark.parametrize(
    ("offer", "share"),
    [
        (IDLE, 1.0),
        (STREAMING, 0.5),
        (Offer(tokens=1, busy=True), 0.5),  # it has not told yet
        (Offer(tokens=1, busy=True, decode_seconds=0.049), 0.0),  # a fifth is the least
        (Offer(tokens=1, busy=True, decode_seconds=0.2), 0.0),
    ],
)
def test_streams_leave_a_share_of_each_step(offer: Offer, share: float) -> None:
    assert find_share(offer, 0.06) == pytest.approx(share)


@pytest.mark.parametrize(
    ("prefill_seconds", "queued", "limit", "offers", "verdict", "worker"),
    [
        # no target: wherever the first token comes sooner
        (3.0, 2000, None, {"d": STREAMING}, Verdict.CONVERTED, "d"),
        (1.9, 900, None, {"d": STREAMING}, Verdict.SLOWER, ""),
        (1.9, 900, None, {"d": IDLE}, Verdict.CONVERTED, "d"),
        (1.9, 900, None, {"d": STREAMING, "e": IDLE}, Verdict.CONVERTED, "e"),
        # nothing waits: the prefill worker is not behind, however long the prompt is
        (9.0, LEAST_QUEUE - 1, None, {"d": IDLE}, Verdict.ON_TIME, ""),
        (9.0, LEAST_QUEUE - 1, 1.0, {"d": IDLE}, Verdict.ON_TIME, ""),
        # who is on time stays, and being sooner alone is no reason
        (3.0, 2000, 4.0, {"d": IDLE}, Verdict.ON_TIME, ""),
        (3.3, 2000, 4.0, {"d": IDLE}, Verdict.CONVERTED, "d"),
        (3.3, 2000, 4.0, {"d": Offer(tokens=1000, queued=5000)}, Verdict.SLOWER, ""),
        # no room, nobody able, nothing known
        (3.3, 2000, 1.0, {"d": Offer(tokens=1, busy=True, decode_seconds=0.06)}, Verdict.NO_ROOM, ""),
        (3.3, 2000, 1.0, {}, Verdict.UNKNOWN, ""),
        (None, 2000, 1.0, {"d": IDLE}, Verdict.UNKNOWN, ""),
        # prompts have taken longer than predicted there
        (1.9, 900, None, {"d": Offer(tokens=1000, factor=2.0)}, Verdict.SLOWER, ""),
        # what it has cached need not be computed
        (1.9, 900, None, {"d": Offer(tokens=100, busy=True, decode_seconds=0.03)}, Verdict.CONVERTED, "d"),
    ],
)
def test_the_prediction_decides(
    prefill_seconds: float | None,
    queued: float,
    limit: float | None,
    offers: dict[str, Offer],
    verdict: Verdict,
    worker: str,
) -> None:
    decided, best = decide(
        prefill_seconds, rate=RATE, queued=queued, limit=limit, offers=offers, step_seconds=0.06
    )  # fmt: skip
    assert (decided.verdict, best) == (verdict, worker)
    assert decided.converted is bool(best)
    assert decided.step_seconds == (0.06 if best else 0.0)


OFFERS = st.builds(
    Offer,
    tokens=st.integers(0, 100_000),
    queued=st.floats(0, 1e6),
    busy=st.booleans(),
    decode_seconds=st.none() | st.floats(0, 1),
    factor=st.floats(0.25, 8),
)


@given(
    st.floats(0.001, 1e4), st.floats(1, 1e6), st.floats(0, 1e6), st.none() | st.floats(0.01, 100),
    st.dictionaries(st.sampled_from("abc"), OFFERS), st.floats(0.001, 1),
)  # fmt: skip
def test_converted_is_sooner_leaves_a_share_to_streams_and_is_late_otherwise(
    seconds: float, rate: float, queued: float, limit: float | None, offers: dict[str, Offer], step: float
) -> None:
    decided, best = decide(seconds, rate=rate, queued=queued, limit=limit, offers=offers, step_seconds=step)
    if best:
        mine = predict_own(offers[best], rate, step)
        assert mine is not None
        assert mine == decided.decode_seconds < seconds
        assert limit is None or seconds > 0.8 * limit
        assert queued >= LEAST_QUEUE
        others = [predict_own(offer, rate, step) for offer in offers.values()]
        assert mine == min(value for value in others if value is not None)


# the scheduler


def make_fleet(terms: Terms | None = TERMS, **fields: bool) -> Scheduler:
    """A prefill worker of 1,000 tokens per second, and two decode workers, one of which has streams."""
    scheduler = make_scheduler(make_worker("p", P), make_worker("d"), make_worker("e"))
    scheduler.terms = terms
    for _ in range(4):
        scheduler.endpoints["p"].speed.observe(1000, 1.0)
    for name in ("d", "e"):
        own = scheduler.endpoints[name].own
        own.tell(keeps_steps=True, decode_seconds=0.03, running=int(name == "d"))
    return scheduler


def queue_up(scheduler: Scheduler, tokens: int) -> None:
    scheduler.endpoints["p"].charge(tokens, 0)
    scheduler.endpoints["p"].working_since = 100.0


def test_a_prompt_goes_to_a_decode_worker_while_the_prefill_worker_is_behind() -> None:
    scheduler = make_fleet()
    demand = make_demand(1000)
    choice = scheduler.choose(demand, 100.0)
    assert choice is not None
    assert [one.worker.name for one in choice.prefill] == ["p"]
    queue_up(scheduler, 3000)
    choice = scheduler.choose(demand, 100.0)
    assert choice is not None
    assert choice.conversion is not None
    assert (choice.decode.worker.name, choice.prefill) == ("e", [])
    assert (choice.conversion.prefill_seconds, choice.conversion.decode_seconds) == (4.0, 1.0)
    assert choice.conversion.step_seconds == 0.06
    scheduler.reserve(choice, demand, 100.0)
    assert scheduler.conversions == {Verdict.CONVERTED: 1}
    # The next ones see what is there: 1 s of computing before them, and streams beside them.
    after = [scheduler.choose(demand, 100.0) for _ in range(3)]
    assert [one and one.conversion and one.conversion.decode_seconds for one in after] == [2.0, 2.0, 2.0]


def test_nothing_changes_without_terms() -> None:
    scheduler = make_fleet(None)
    queue_up(scheduler, 100_000)
    choice = scheduler.choose(make_demand(1000), 100.0)
    assert choice is not None
    assert ([one.worker.name for one in choice.prefill], choice.conversion) == (["p"], None)
    scheduler.reserve(choice, make_demand(1000), 100.0)
    assert not scheduler.conversions


def test_workers_that_cannot_hold_steps_compute_no_prompts_beside_streams() -> None:
    scheduler = make_fleet()
    queue_up(scheduler, 100_000)
    for name in ("d", "e"):
        scheduler.endpoints[name].own.tell(keeps_steps=False, decode_seconds=0.03, running=0)
    choice = scheduler.choose(make_demand(1000), 100.0)
    assert choice is not None
    assert choice.conversion is not None
    assert (choice.conversion.verdict, bool(choice.prefill)) == (Verdict.UNKNOWN, True)


def test_a_target_keeps_on_time_prompts_where_they_are() -> None:
    scheduler = make_fleet(Terms(step_seconds=0.06, ttft=TTFTDeadline(seconds=1, seconds_per_token=0.005)))
    queue_up(scheduler, 3000)
    longer, shorter = scheduler.choose(make_demand(1000), 100.0), scheduler.choose(make_demand(100), 100.0)
    assert longer is not None
    assert shorter is not None
    assert (bool(longer.prefill), bool(shorter.prefill)) == (True, False)  # 4 of 6 s, and 3.1 of 1.5 s


def test_a_prefix_that_a_decode_worker_has_counts() -> None:
    scheduler = make_fleet()
    demand = make_demand(2048, prefix=make_chain(1, 8))
    d = scheduler.endpoints["d"]
    scheduler.index.record(demand.prefix, (d,), 100.0)
    queue_up(scheduler, 1100)
    choice = scheduler.choose(demand, 100.0)
    assert choice is not None
    assert (choice.decode, choice.prefill) == (d, [])
    assert choice.cached_tokens + choice.uncached_tokens == 2048
    assert choice.known_tokens == choice.cached_tokens > 1000


def test_the_ledger_of_converted_prompts_returns_to_zero_and_says_nothing_of_speed() -> None:
    scheduler = make_fleet()
    queue_up(scheduler, 3000)
    e = scheduler.endpoints["e"]
    ways = [("first", "release"), ("release",), ("first",), ()]
    reservations: list[Reservation] = []
    for _ in ways:
        choice = scheduler.choose(make_demand(600), 100.0)
        assert choice is not None
        reservations.append(scheduler.reserve(choice, make_demand(600), 100.0))
    assert e.own.tokens == e.prefill_tokens > 0
    for reservation, way in zip(reservations, ways, strict=True):
        if "first" in way:
            reservation.first_token(101.0)
        if "release" in way:
            reservation.release()
            reservation.release()
    for reservation in reservations:
        reservation.release()
    assert [(one.own.tokens, one.requests, one.decode_tokens) for one in scheduler.endpoints.values()] == [
        (0, 0, 0)
    ] * 3
    assert (e.prefill_tokens, e.speed.samples, e.speed.value) == (0, 0, 0.0)


def test_a_preview_counts_nothing() -> None:
    scheduler = make_fleet()
    queue_up(scheduler, 3000)
    demand = make_demand(1000)
    choice = scheduler.preview(demand, 100.0)
    assert choice is not None
    predict(choice, output_tokens=50, now=100.0)
    told = describe_choice(choice)
    assert (told["decode"], told["prefill"], told["converted"], told["predictedSeconds"]) == ("e", [], True, 1.0)
    assert "behind (4.00 s)" in str(told["why"])
    assert not scheduler.conversions
    assert [one.own.tokens for one in scheduler.endpoints.values()] == [0, 0, 0]


def test_predictions_follow_what_prompts_take_there() -> None:
    own = OwnPrompts()
    for _ in range(40):
        own.learn(own.factor * 1.0, 2.0, 0.0)
    assert own.factor == pytest.approx(2.0, rel=0.01)
    own.learn(own.factor, 1e6, 0.0)  # a pause is not a speed
    assert own.factor < 3.0
    for _ in range(100):
        own.learn(own.factor, 1e6, 0.0)
    assert own.factor == 8.0
    for _ in range(100):
        own.learn(own.factor, 0.0, 0.0)
    assert own.factor == 0.25


def test_prompts_under_way_are_computed_as_time_passes() -> None:
    own = OwnPrompts()
    own.begin(1000, 10.0)
    own.begin(1000, 12.0)
    assert [own.left(now, RATE) for now in (9.0, 10.0, 11.0, 99.0)] == [2000, 2000, 1000, pytest.approx(200)]
    own.end(2000)
    assert own.left(20.0, RATE) == 0


def test_an_answer_in_one_piece_frees_its_prompt_when_it_should_be_computed() -> None:
    endpoint = make_endpoint()
    decided, _ = decide(9.0, rate=RATE, queued=9000, limit=None, offers={"a": IDLE}, step_seconds=0.06)
    reservation = Reservation(
        endpoint, endpoint, prefill_tokens=1000, decode_tokens=8, now=0.0, stream=False, conversion=decided
    )
    reservation.assume(0.9)
    assert endpoint.own.tokens == 1000
    reservation.assume(1.1)
    assert endpoint.own.tokens == endpoint.prefill_tokens == 0
    reservation.complete(62.0)
    reservation.release()
    assert endpoint.speed.samples == 0
