"""The token ledger: counters are the sums of open reservations."""

from hypothesis import given
from hypothesis import strategies as st
from tandem_api.names import Role
from tandem_gateway.scheduling import Endpoint, Reservation, Worker
from tandem_gateway.scheduling.endpoint import BACKOFF_FIRST, BACKOFF_MAX


def make(name: str = "a", role: Role = Role.DECODE) -> Endpoint:
    return Endpoint(Worker(name=name, address="h:1", role=role, revision="r"))


def counters(endpoint: Endpoint) -> tuple[int, int, int]:
    return endpoint.requests, endpoint.prefill_tokens, endpoint.decode_tokens


def test_first_token_frees_the_prefill_endpoint() -> None:
    decode, prefill = make("d"), make("p", Role.PREFILL)
    reservation = Reservation(decode, prefill, prefill_tokens=100, decode_tokens=20)
    assert counters(prefill) == (1, 100, 0)
    assert counters(decode) == (1, 0, 20)
    reservation.first_token()
    assert counters(prefill) == (0, 0, 0)
    reservation.progress(5)
    assert counters(decode) == (1, 0, 15)


def test_a_fully_cached_prompt_frees_its_prefill_endpoint_too() -> None:
    decode, prefill = make("d"), make("p", Role.PREFILL)
    Reservation(decode, prefill, prefill_tokens=0, decode_tokens=1).release()
    assert counters(prefill) == (0, 0, 0)


def test_an_answer_longer_than_expected_still_occupies_its_worker() -> None:
    endpoint = make()
    reservation = Reservation(endpoint, endpoint, prefill_tokens=1, decode_tokens=4)
    reservation.progress(1000)
    assert endpoint.decode_tokens == 1
    reservation.release()
    assert counters(endpoint) == (0, 0, 0)


STEPS = st.lists(st.one_of(st.just("first"), st.just("release"), st.integers(0, 50)), max_size=8)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 500), st.integers(1, 100), STEPS), max_size=12))
def test_counters_never_go_negative_and_end_at_zero(plans: list[tuple[bool, int, int, list[str | int]]]) -> None:
    decode, prefill = make("d"), make("p", Role.PREFILL)
    opened = []
    for unified, prompt, output, steps in plans:
        target = decode if unified else prefill
        reservation = Reservation(decode, target, prefill_tokens=prompt, decode_tokens=output)
        opened.append(reservation)
        for step in steps:
            if step == "first":
                reservation.first_token()
            elif step == "release":
                reservation.release()
            else:
                reservation.progress(int(step))
            assert min(*counters(decode), *counters(prefill)) >= 0
    for reservation in opened:
        reservation.release()
        reservation.release()
    assert counters(decode) == counters(prefill) == (0, 0, 0)


def test_back_off_doubles_up_to_a_limit_and_success_ends_it() -> None:
    endpoint = make()
    pauses = []
    for _ in range(6):
        endpoint.fail(100.0)
        pauses.append(endpoint.backoff_until - 100.0)
    assert pauses[:2] == [BACKOFF_FIRST, 2 * BACKOFF_FIRST]
    assert pauses[-1] == BACKOFF_MAX
    endpoint.succeed()
    assert endpoint.backoff_until == 0.0
    endpoint.fail(100.0)
    assert endpoint.backoff_until == 100.0 + BACKOFF_FIRST
