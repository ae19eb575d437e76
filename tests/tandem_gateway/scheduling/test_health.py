"""When a worker gets no requests: circuit breaking, probes, and who is never left out."""

import pytest
from tandem_gateway.scheduling import Demand, Endpoint, Outcome, Reservation, Scheduler, classify_status
from tandem_gateway.scheduling.health import RULES
from tandem_gateway.scheduling.outliers import SILENT_SECONDS, SLOW_SAMPLES
from tandem_gateway.scheduling.scheduler import PROBE_SECONDS, RETRY_BURST

from tests.tandem_gateway.scheduling.fleet import D, P, make_demand, make_scheduler, make_worker, serve

HARD = [outcome for outcome, rule in RULES.items() if rule.hard]
SOFT = [outcome for outcome, rule in RULES.items() if not rule.hard]


def fleet(count: int) -> Scheduler:
    return make_scheduler(*(make_worker(f"w{index}") for index in range(count)))


def states(scheduler: Scheduler) -> dict[str, str]:
    return {name: endpoint.state for name, endpoint in scheduler.endpoints.items()}


def chosen(scheduler: Scheduler, now: float, sessions: int = 64) -> set[str]:
    choices = [scheduler.choose(make_demand(affinity=(n + 1) << 57), now) for n in range(sessions)]
    return {choice.decode.worker.name for choice in choices if choice is not None}


@pytest.mark.parametrize(
    ("status", "retry", "outcome"),
    [
        (200, None, Outcome.ANSWERED), (400, None, Outcome.ANSWERED), (404, None, Outcome.ANSWERED),
        (401, None, Outcome.UNAUTHORIZED), (429, None, Outcome.BUSY), (500, None, Outcome.ERROR),
        (502, None, Outcome.ERROR), (503, None, Outcome.BUSY), (503, b"1", Outcome.DRAINING),
        (503, b"request", Outcome.ERROR), (429, b"request", Outcome.ERROR), (400, b"request", Outcome.ANSWERED),
    ],
)  # fmt: skip
def test_what_a_status_says(status: int, retry: bytes | None, outcome: Outcome) -> None:
    assert classify_status(status, retry) is outcome


@pytest.mark.parametrize("outcome", list(RULES))
def test_a_failing_worker_is_left_out_after_its_threshold_and_probed_after_its_pause(outcome: Outcome) -> None:
    scheduler = fleet(4)
    bad = scheduler.endpoints["w0"]
    rule = RULES[outcome]
    for _ in range(rule.threshold):
        assert bad.state == "available"
        scheduler.report(bad, outcome, 10.0)
    assert bad.state == "ejected"
    assert chosen(scheduler, 10.0 + rule.first * 0.99) == {"w1", "w2", "w3"}
    assert "w0" in chosen(scheduler, 10.0 + rule.first)
    assert bad.state == "half-open"
    assert scheduler.failures[outcome] == rule.threshold
    assert scheduler.ejections[outcome] == 1


def test_half_open_takes_one_request_until_it_is_answered() -> None:
    scheduler = fleet(3)
    bad = scheduler.endpoints["w0"]
    scheduler.report(bad, Outcome.RESET, 0.0)
    demand = make_demand()
    probe = None
    while probe is None:
        choice = scheduler.choose(demand, 1.0)
        assert choice is not None
        reservation = scheduler.reserve(choice, demand, 1.0)
        probe = reservation if choice.decode is bad else None
    assert "w0" not in chosen(scheduler, 1.1)
    scheduler.report(bad, Outcome.ANSWERED, 1.2)
    assert bad.state == "available"
    assert bad.health.failures == 0


def test_a_probe_that_tells_nothing_is_followed_by_another() -> None:
    scheduler = fleet(2)
    bad = scheduler.endpoints["w0"]
    scheduler.report(bad, Outcome.RESET, 0.0)
    scheduler.endpoints["w1"].charge(10**6, 0)
    demand = make_demand()
    choice = scheduler.choose(demand, 1.0)
    assert choice is not None
    assert choice.decode is bad
    reservation = scheduler.reserve(choice, demand, 1.0)
    assert chosen(scheduler, 1.0) == {"w1"}
    reservation.release()
    assert bad.state == "half-open"
    assert "w0" in chosen(scheduler, 1.0)


def test_pauses_double_up_to_a_limit_and_an_answer_ends_them() -> None:
    scheduler = fleet(1)
    only = scheduler.endpoints["w0"]
    pauses = []
    now = 0.0
    for _ in range(6):
        scheduler.report(only, Outcome.REFUSED, now)
        pauses.append(only.health.until - now)
        now = only.health.until
        scheduler.choose(make_demand(), now)
    assert pauses[:3] == [0.5, 1.0, 2.0]
    assert pauses[-1] == 3.0
    scheduler.report(only, Outcome.ANSWERED, now)
    scheduler.report(only, Outcome.REFUSED, now)
    assert only.health.until - now == 0.5


@pytest.mark.parametrize("outcome", SOFT)
def test_a_suspicion_never_takes_the_last_nor_more_than_half(outcome: Outcome) -> None:
    for count in (1, 2, 3, 4, 9):
        scheduler = fleet(count)
        for endpoint in scheduler.endpoints.values():
            for _ in range(RULES[outcome].threshold):
                scheduler.report(endpoint, outcome, 0.0)
        left = sum(state == "available" for state in states(scheduler).values())
        assert left == max(1, (count + 1) // 2)
        assert scheduler.choose(make_demand(), 0.1) is not None


@pytest.mark.parametrize("outcome", HARD)
def test_who_cannot_serve_is_left_out_even_when_last(outcome: Outcome) -> None:
    scheduler = fleet(1)
    scheduler.report(scheduler.endpoints["w0"], outcome, 0.0)
    assert scheduler.choose(make_demand(), 0.1) is None
    assert scheduler.choose(make_demand(), 0.5) is not None


def test_the_last_one_serves_all_while_it_is_half_open() -> None:
    scheduler = fleet(1)
    scheduler.report(scheduler.endpoints["w0"], Outcome.REFUSED, 0.0)
    for _ in range(3):
        choice = scheduler.choose(make_demand(), 1.0)
        assert choice is not None
        scheduler.reserve(choice, make_demand(), 1.0)


@pytest.mark.parametrize("outcome", list(RULES))
def test_a_pause_ends_though_nobody_asks(outcome: Outcome) -> None:
    """What is told of a worker must not wait for the next client: by it a pod counts as ready or not."""
    scheduler = fleet(4)
    worker = scheduler.endpoints["w0"]
    for _ in range(RULES[outcome].threshold):
        scheduler.report(worker, outcome, 1000.0)
    scheduler.tick(1000.0 + RULES[outcome].first * 0.99)
    assert worker.state == "ejected"
    scheduler.tick(1000.0 + RULES[outcome].first)
    assert (worker.state, worker.level >= 0) == ("half-open", True)


def test_many_failures_at_once_cost_one_pause() -> None:
    scheduler = fleet(2)
    for _ in range(64):
        scheduler.report(scheduler.endpoints["w0"], Outcome.TIMEOUT, 0.0)
    assert scheduler.endpoints["w0"].health.until == RULES[Outcome.TIMEOUT].first
    assert scheduler.failures[Outcome.TIMEOUT] == 64
    assert scheduler.ejections[Outcome.TIMEOUT] == 1


@pytest.mark.parametrize(("outcome", "state"), [(Outcome.SLOW, "ejected"), (Outcome.SILENT, "available")])
def test_an_answer_from_before_ends_a_pause_only_where_it_proves_something(outcome: Outcome, state: str) -> None:
    scheduler = fleet(3)
    endpoint = scheduler.endpoints["w0"]
    scheduler.report(endpoint, outcome, 0.0)
    scheduler.report(endpoint, Outcome.ANSWERED, 0.1)
    assert endpoint.state == state


def test_single_errors_between_answers_eject_nobody() -> None:
    scheduler = fleet(3)
    for now in range(50):
        scheduler.report(scheduler.endpoints["w0"], Outcome.ERROR, now)
        scheduler.report(scheduler.endpoints["w0"], Outcome.ANSWERED, now)
    assert set(states(scheduler).values()) == {"available"}


def stream(scheduler: Scheduler, demand: Demand, now: float, speed: dict[str, float]) -> None:
    choice = scheduler.choose(demand, now)
    assert choice is not None
    reservation = scheduler.reserve(choice, demand, now)
    reservation.first_token(now + demand.prompt_tokens / speed[choice.decode.worker.name])
    reservation.release()
    scheduler.report(choice.decode, Outcome.ANSWERED, now)


@pytest.mark.parametrize("given_up_after", [None, 1.2])
def test_a_hung_worker_is_noticed_by_its_silence(given_up_after: float | None) -> None:
    """Whether its clients wait, or leave when they have waited for long enough."""
    scheduler = fleet(4)
    speed = dict.fromkeys(scheduler.endpoints, 5000.0)
    for turn in range(200):
        stream(scheduler, make_demand(1000, affinity=(turn + 1) << 56), turn / 10, speed)
    hung = scheduler.endpoints["w2"]
    now = 30.0
    sent = 0
    waiting: list[tuple[float, Reservation]] = []
    while now < 60 and hung.state == "available":
        demand = make_demand(1000, affinity=(sent + 1) * 0x9E3779B97F4A7C15 % 2**64)
        choice = scheduler.choose(demand, now)
        assert choice is not None
        reservation = scheduler.reserve(choice, demand, now)
        if choice.decode is not hung:
            reservation.first_token(now + 0.2)
            reservation.release()
        elif given_up_after is not None:
            waiting.append((now + given_up_after, reservation))
        while waiting and waiting[0][0] <= now:
            _, left = waiting.pop(0)
            left.desert(now)
            left.release()
        sent += 1
        now += 0.1
        scheduler.tick(now)
    assert hung.state == "ejected"
    assert now < 30 + 2 * SILENT_SECONDS + 4
    assert [name for name, state in states(scheduler).items() if state != "available"] == ["w2"]


def test_the_first_request_to_a_worker_begins_its_silence() -> None:
    scheduler = fleet(3)
    for endpoint in scheduler.endpoints.values():
        endpoint.speed.observe(10, 0.01)
    scheduler.reserve(scheduler.choose(make_demand(), 1000.0), make_demand(), 1000.0)  # type: ignore[arg-type]
    for second in range(int(SILENT_SECONDS)):
        scheduler.tick(1000.5 + second)
    assert not scheduler.failures
    for second in range(2):
        scheduler.tick(1000.5 + SILENT_SECONDS + second)
    assert scheduler.failures == {Outcome.SILENT: 1}


def test_a_gateway_that_was_held_up_blames_nobody_for_what_it_did_not_hear() -> None:
    scheduler = fleet(4)
    for endpoint in scheduler.endpoints.values():
        endpoint.speed.observe(10, 0.01)
        Reservation(endpoint, endpoint, prefill_tokens=10, decode_tokens=10, now=1000.0)
    scheduler.tick(1000.1)
    scheduler.tick(1010.0)
    assert not scheduler.failures
    for second in range(1011, 1015):
        scheduler.tick(float(second))
    assert scheduler.ejections == {Outcome.SILENT: 2}


def test_a_worker_busy_with_a_long_prompt_is_not_silent() -> None:
    scheduler = fleet(3)
    speed = dict.fromkeys(scheduler.endpoints, 5000.0)
    for turn in range(200):
        stream(scheduler, make_demand(1000, affinity=(turn + 1) << 56), turn / 10, speed)
    demand = make_demand(100_000)
    choice = scheduler.choose(demand, 30.0)
    assert choice is not None
    reservation = scheduler.reserve(choice, demand, 30.0)
    for tenth in range(300, 500):
        scheduler.tick(tenth / 10)
    assert choice.decode.state == "available"
    reservation.first_token(50.0)
    reservation.release()


@pytest.mark.parametrize("tokens", [40, 2000])
def test_a_latency_outlier_is_ejected(tokens: int) -> None:
    scheduler = fleet(4)
    speed = {"w0": 50.0, "w1": 5000.0, "w2": 5000.0, "w3": 5000.0}
    for turn in range(60 * SLOW_SAMPLES):
        demand = make_demand(tokens, affinity=turn * 0x9E3779B97F4A7C15 % 2**64)
        stream(scheduler, demand, turn / 10, speed)
        scheduler.tick(turn / 10)
        if scheduler.ejections:
            break
    assert scheduler.ejections == {Outcome.SLOW: 1}
    assert scheduler.endpoints["w0"].state == "ejected"


def test_dead_prefill_workers_are_backed_off() -> None:
    scheduler = make_scheduler(make_worker("d", D), *(make_worker(f"p{n}", P) for n in range(3)))
    demand = make_demand(8000)
    for now in range(2):
        choice = scheduler.choose(demand, float(now))
        assert choice is not None
        dead, used = choice.prefill[:2]
        scheduler.report_prefill(choice, used.worker.name, float(now))
    assert dead.state == "ejected"
    assert used.state == "available"
    assert scheduler.choose(demand, 1.5).prefill[0] is not dead  # type: ignore[union-attr]


def test_a_prompt_that_the_decode_worker_computed_itself_blames_nobody_unless_it_is_long() -> None:
    scheduler = make_scheduler(make_worker("d", D), make_worker("p0", P), make_worker("p1", P))
    for prompt, blamed in ((500, 0), (50_000, 2)):
        choice = scheduler.choose(make_demand(prompt), 0.0)
        assert choice is not None
        scheduler.report_prefill(choice, "d", 0.0)
        assert sum(endpoint.health.failures for endpoint in scheduler.endpoints.values()) == blamed


def test_retries_have_a_budget() -> None:
    scheduler = fleet(2)
    assert sum(scheduler.may_retry() for _ in range(1000)) == RETRY_BURST
    for _ in range(1000):
        serve(scheduler, make_demand())
    assert sum(scheduler.may_retry() for _ in range(1000)) == RETRY_BURST


def test_an_answer_in_one_piece_is_waited_for_however_quick_short_ones_are() -> None:
    """It shows no sign of life before it is there: what short streams take says nothing about it."""
    endpoint = Endpoint(make_worker("d"))
    endpoint.speed.observe(1, 0.001)
    for stream in (True, False):
        wait = Reservation(endpoint, endpoint, prefill_tokens=1, decode_tokens=1, now=0.0, stream=stream)
        assert (wait.patience < 1.0) is stream


@pytest.mark.parametrize("patience", [0.0, 0.3, 0.8])
def test_clients_that_leave_at_once_speak_against_nobody(patience: float) -> None:
    """However many they are: the worker had no time to answer."""
    scheduler = fleet(4)
    speed = dict.fromkeys(scheduler.endpoints, 5000.0)
    for turn in range(200):
        stream(scheduler, make_demand(1000, affinity=(turn + 1) << 56), turn / 10, speed)
    leaving: list[tuple[float, Reservation]] = []
    for tenth in range(200, 800):
        now = tenth / 10
        for sent in range(4):
            demand = make_demand(100, affinity=(tenth * 4 + sent) * 0x9E3779B97F4A7C15 % 2**64)
            choice = scheduler.choose(demand, now)
            assert choice is not None
            leaving.append((now + patience, scheduler.reserve(choice, demand, now)))
        while leaving and leaving[0][0] <= now:
            _, left = leaving.pop(0)
            left.desert(now)
            left.release()
        scheduler.tick(now)
    assert not scheduler.failures


def test_one_client_that_leaves_does_not_wear_out_the_patience_with_another() -> None:
    """A long prompt is computed for as long as it takes, whoever comes and goes beside it."""
    scheduler = fleet(3)
    speed = dict.fromkeys(scheduler.endpoints, 5000.0)
    for turn in range(200):
        stream(scheduler, make_demand(1000, affinity=(turn + 1) << 56), turn / 10, speed)
    demand = make_demand(100_000)
    choice = scheduler.choose(demand, 30.0)
    assert choice is not None
    long = scheduler.reserve(choice, demand, 30.0)
    for tenth in range(300, 480):
        now = tenth / 10
        left = Reservation(choice.decode, choice.decode, prefill_tokens=10, decode_tokens=10, now=now)
        left.desert(now)
        left.release()
        scheduler.tick(now)
    assert not scheduler.failures
    long.first_token(50.0)
    long.release()


def test_a_queue_behind_answers_in_one_piece_is_no_silence() -> None:
    """Streams wait while others' whole answers come every few seconds: those are its signs of life."""
    scheduler = fleet(3)
    endpoint = scheduler.endpoints["w0"]
    for _ in range(10):
        endpoint.speed.observe(10, 0.05)
    answers = [
        Reservation(endpoint, endpoint, prefill_tokens=10, decode_tokens=99, now=0.0, stream=False) for _ in range(9)
    ]
    for second in range(1, 40):
        if second % 5 == 0:
            answers[second // 5].complete(second)
        if second == 8:
            Reservation(endpoint, endpoint, prefill_tokens=10, decode_tokens=10, now=8.0)
        scheduler.tick(float(second))
    assert not scheduler.failures


def test_a_probe_that_takes_long_is_followed_by_another() -> None:
    """An answer in one piece may take minutes: it must not bar a healthy worker for so long."""
    scheduler = fleet(2)
    bad = scheduler.endpoints["w0"]
    scheduler.report(bad, Outcome.RESET, 0.0)
    scheduler.endpoints["w1"].charge(10**6, 0)
    demand = make_demand()
    demand.stream = False
    choice = scheduler.choose(demand, 1.0)
    assert choice is not None
    assert choice.decode is bad
    first = scheduler.reserve(choice, demand, 1.0)
    assert chosen(scheduler, 1.0 + PROBE_SECONDS / 2) == {"w1"}
    for second in range(1, 8):
        scheduler.tick(float(second))
    assert "w0" in chosen(scheduler, 7.0)
    second_probe = scheduler.reserve(scheduler.choose(make_demand(), 7.0), make_demand(), 7.0)  # type: ignore[arg-type]
    first.release()
    assert bad.health.probe is second_probe
    scheduler.report(bad, Outcome.ANSWERED, 7.1)
    assert bad.state == "available"


def test_a_probe_of_a_worker_that_still_hangs_ends_in_its_next_pause() -> None:
    scheduler = fleet(2)
    bad = scheduler.endpoints["w0"]
    for _ in range(10):
        bad.speed.observe(10, 0.05)
    scheduler.report(bad, Outcome.SILENT, 0.0)
    scheduler.endpoints["w1"].charge(10**6, 0)
    choice = scheduler.choose(make_demand(), 2.0)
    assert choice is not None
    assert choice.decode is bad
    scheduler.reserve(choice, make_demand(), 2.0)
    for tenth in range(20, 80):
        scheduler.tick(tenth / 10)
    assert bad.state == "ejected"
    assert bad.health.ejections == 2


def test_a_timeout_counts_at_once_only_where_nothing_else_came_from_the_worker() -> None:
    scheduler = fleet(4)
    alive, hung = scheduler.endpoints["w0"], scheduler.endpoints["w1"]
    for endpoint in (alive, hung):
        other = Reservation(endpoint, endpoint, prefill_tokens=1, decode_tokens=99, now=0.0)
        other.first_token(1.0)
        if endpoint is alive:
            other.progress(5, 299.0)
        scheduler.report_timeout(endpoint, 300.0, 300.0)
    assert (alive.state, hung.state) == ("available", "ejected")
    assert scheduler.failures == {Outcome.LATE: 1, Outcome.TIMEOUT: 1}
    for _ in range(RULES[Outcome.LATE].threshold - 1):
        scheduler.report_timeout(alive, 300.0, 300.0)
    assert alive.state == "ejected"  # three in a row, and not one answer between them
