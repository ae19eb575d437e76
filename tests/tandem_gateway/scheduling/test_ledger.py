"""The token ledger: counters are the sums of open reservations."""

from hypothesis import given
from hypothesis import strategies as st
from tandem_api.names import Role
from tandem_gateway.scheduling import Endpoint, Reservation
from tandem_gateway.scheduling.speed import SHORT_TOKENS, Speed

from tests.tandem_gateway.scheduling.fleet import make_endpoint as make


def counters(endpoint: Endpoint) -> tuple[int, int, int]:
    return endpoint.requests, endpoint.prefill_tokens, endpoint.decode_tokens


def test_first_token_frees_the_prefill_endpoint() -> None:
    decode, prefill = make("d"), make("p", Role.PREFILL)
    reservation = Reservation(decode, prefill, prefill_tokens=100, decode_tokens=20, now=0.0)
    assert counters(prefill) == (1, 100, 0)
    assert counters(decode) == (1, 0, 20)
    reservation.first_token(1.0)
    assert counters(prefill) == (0, 0, 0)
    reservation.progress(5, 1.0)
    assert counters(decode) == (1, 0, 15)


def test_a_fully_cached_prompt_frees_its_prefill_endpoint_too() -> None:
    decode, prefill = make("d"), make("p", Role.PREFILL)
    Reservation(decode, prefill, prefill_tokens=0, decode_tokens=1, now=0.0).release()
    assert counters(prefill) == (0, 0, 0)


def test_an_answer_longer_than_expected_still_occupies_its_worker() -> None:
    endpoint = make()
    reservation = Reservation(endpoint, endpoint, prefill_tokens=1, decode_tokens=4, now=0.0)
    reservation.progress(1000, 1.0)
    assert endpoint.decode_tokens == 1
    reservation.release()
    assert counters(endpoint) == (0, 0, 0)


@given(st.lists(st.integers(0, 7), max_size=30), st.floats(1.0, 9.0))
def test_an_event_counts_as_many_tokens_as_the_worker_says_it_carries(events: list[int], each: float) -> None:
    """However they come: what is less than a token is not lost between two looks."""
    endpoint = make()
    endpoint.tokens_per_event = each
    reservation = Reservation(endpoint, endpoint, prefill_tokens=1, decode_tokens=10_000, now=0.0)
    for seen in events:
        reservation.progress(seen, 1.0)
    assert abs(10_000 - endpoint.decode_tokens - each * sum(events)) < 1.001
    reservation.release()
    assert counters(endpoint) == (0, 0, 0)


STEPS = st.lists(st.one_of(st.just("first"), st.just("release"), st.integers(0, 50)), max_size=8)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 500), st.integers(1, 100), STEPS), max_size=12))
def test_counters_never_go_negative_and_end_at_zero(plans: list[tuple[bool, int, int, list[str | int]]]) -> None:
    decode, prefill = make("d"), make("p", Role.PREFILL)
    opened = []
    for unified, prompt, output, steps in plans:
        target = decode if unified else prefill
        reservation = Reservation(decode, target, prefill_tokens=prompt, decode_tokens=output, now=0.0)
        opened.append(reservation)
        for step in steps:
            if step == "first":
                reservation.first_token(1.0)
            elif step == "release":
                reservation.release()
            else:
                reservation.progress(int(step), 1.0)
            assert min(*counters(decode), *counters(prefill)) >= 0
    for reservation in opened:
        reservation.release()
        reservation.release()
    assert counters(decode) == counters(prefill) == (0, 0, 0)


def learn(endpoint: Endpoint, tokens_per_second: float) -> None:
    for _ in range(10):
        endpoint.speed.observe(tokens_per_second, 1.0)


def test_an_answer_in_one_piece_frees_its_prefill_tokens_when_they_should_be_computed() -> None:
    endpoint = make()
    learn(endpoint, 1000)
    reservation = Reservation(endpoint, endpoint, prefill_tokens=2000, decode_tokens=10, now=0.0, stream=False)
    reservation.assume(1.9)
    assert endpoint.prefill_tokens == 2000
    reservation.assume(2.1)
    assert counters(endpoint) == (1, 0, 10)
    assert len(endpoint.owing) == 1  # it has still shown no sign of life
    reservation.complete(9.0)
    reservation.release()
    assert counters(endpoint) == (0, 0, 0)
    assert (len(endpoint.owing), endpoint.deserted, endpoint.heard_at) == (0, 0, 9.0)


def test_nothing_is_assumed_of_a_worker_whose_speed_is_unknown() -> None:
    endpoint = make()
    reservation = Reservation(endpoint, endpoint, prefill_tokens=2000, decode_tokens=10, now=0.0, stream=False)
    reservation.assume(1000.0)
    assert endpoint.prefill_tokens == 2000


def test_the_queue_shrinks_while_the_worker_computes() -> None:
    endpoint = make()
    learn(endpoint, 1000)
    Reservation(endpoint, endpoint, prefill_tokens=4000, decode_tokens=4, now=10.0)
    assert endpoint.find_queue(10.0) == 4000
    assert endpoint.find_queue(12.0) == 2000
    assert endpoint.find_queue(99.0) == 400  # never all of it: the first token tells


def test_speed_is_learned_from_first_tokens_with_all_that_was_ahead() -> None:
    endpoint = make()
    first = Reservation(endpoint, endpoint, prefill_tokens=1000, decode_tokens=1, now=0.0)
    second = Reservation(endpoint, endpoint, prefill_tokens=1000, decode_tokens=1, now=0.0)
    first.first_token(1.0)
    second.first_token(2.0)
    for _ in range(20):
        Reservation(endpoint, endpoint, prefill_tokens=1000, decode_tokens=1, now=5.0).first_token(6.0)
    assert abs(endpoint.speed.value - 1000) < 10


def test_short_prompts_tell_latency_and_not_speed() -> None:
    speed = Speed()
    for _ in range(10):
        speed.observe(SHORT_TOKENS - 1, 0.03)
    assert speed.value == 0.0
    assert abs(speed.latency - 0.03) < 1e-9
    assert speed.predict(100) == speed.latency
    assert Speed().predict(100) is None
