"""What one gateway learns of what another one has sent, through what workers tell."""

from hypothesis import given
from hypothesis import strategies as st
from tandem_gateway.scheduling import Scheduler
from tandem_gateway.scheduling.hearsay import GENERATION, Hearsay, name_prompt, parse_name
from tandem_gateway.scheduling.prefix import BRANCHES
from tandem_gateway.scheduling.shared import Holding

from tests.tandem_gateway.scheduling.fleet import P, make_chain, make_demand, make_endpoint, make_scheduler, make_worker

ENTRY = st.integers(0, 2**64 - 1)


@given(ENTRY, ENTRY, st.from_regex(r"([a-z0-9][a-z0-9.-]{0,60})?", fullmatch=True))
def test_a_name_says_what_it_was_made_of(entry: int, shared: int, prefill: str) -> None:
    assert parse_name(name_prompt(entry, shared, prefill)) == (entry, shared, prefill)


@given(st.text(max_size=60))
def test_any_other_text_is_no_error(name: str) -> None:
    parsed = parse_name(name)
    assert parsed is None or isinstance(parsed[0], int)


def test_a_conversation_is_found_by_its_deepest_entry_that_anybody_was_sent() -> None:
    hearsay, one, other = Hearsay(), make_endpoint("a"), make_endpoint("b")
    chain = make_chain(1, 12)
    hearsay.add(chain[3], [Holding(one, 0.0)])
    hearsay.add(chain[7], [Holding(other, 0.0)])
    found = {}
    hearsay.match(chain, 0, 256.0, found, {}, 0.0)
    assert found == {other: 8 * 256}
    found = {}
    hearsay.match(chain, 8, 256.0, found, {}, 0.0)  # this gateway knows more itself
    assert found == {}
    other.evicted_until = 1.0
    hearsay.match(chain, 0, 256.0, found, {}, 0.0)
    assert found == {one: 4 * 256}


def test_what_was_heard_is_bounded() -> None:
    hearsay, endpoint = Hearsay(), make_endpoint()
    for entry in range(2 * GENERATION + 10):
        hearsay.add(entry, [Holding(endpoint, 0.0)])
    assert len(hearsay) <= 2 * GENERATION
    found = {}
    hearsay.match([2 * GENERATION + 5], 0, 1.0, found, {}, 0.0)
    assert found == {endpoint: 1}


def send(scheduler: Scheduler, demand, now: float) -> tuple[tuple[str, ...], str]:
    """Through one gateway; who got it, and the name that the worker was given."""
    choice = scheduler.choose(demand, now)
    assert choice is not None
    reservation = scheduler.reserve(choice, demand, now)
    scheduler.accept(choice, demand, reservation, now)
    reservation.first_token(now)
    reservation.release()
    pair = choice.decode.worker.name, *(endpoint.worker.name for endpoint in choice.prefill[:1])
    return pair, scheduler.name_prompt(choice, demand)


def test_a_gateway_sends_a_conversation_where_another_has_sent_it() -> None:
    """Both workers of the pair are found, though another pair is less loaded and the session's home is elsewhere."""
    workers = [make_worker(f"d{n}") for n in range(8)] + [make_worker(f"p{n}", P) for n in range(4)]
    for session in range(20):
        one, other = make_scheduler(*workers), make_scheduler(*workers)
        for busy in ("d0", "d1", "d2", "d3", "p0", "p1"):  # as the first gateway sees it
            one.endpoints[busy].charge(9000, 0)
        pair, name = send(one, make_demand(4096, prefix=make_chain(session, 16), affinity=session * 977 + 1), 1.0)
        other.observe(other.endpoints[pair[0]], 1.1, queued_tokens=0, prompts=[name, name, "0", ""])
        grown = make_demand(5120, prefix=make_chain(session, 20), affinity=session * 977 + 1)
        choice = other.choose(grown, 2.0)
        assert choice is not None
        assert (choice.decode.worker.name, choice.prefill[0].worker.name) == pair
        assert choice.cached_tokens == 4096


def test_it_also_learns_who_has_a_system_prompt() -> None:
    workers = [make_worker(f"d{n}") for n in range(16)]
    one, other = make_scheduler(*workers), make_scheduler(*workers)
    for scheduler in (one, other):
        for session in range(100, 102 + BRANCHES):
            send(scheduler, make_demand(4096, prefix=make_chain(session, 16, shared=12), affinity=session), 0.0)
    new = make_demand(4096, prefix=make_chain(7, 16, shared=12), affinity=7)
    choice = one.choose(new, 1.0)
    assert choice is not None
    told = next(e for e in other.endpoints.values() if not other.index.locate(new.prefix)[1].has(e))  # type: ignore[union-attr]
    choice.decode = one.endpoints[told.worker.name]
    other.observe(told, 1.0, queued_tokens=0, prompts=[one.name_prompt(choice, new)])
    assert other.index.locate(new.prefix)[1].has(told)  # type: ignore[union-attr]


def test_short_prompts_have_no_name() -> None:
    scheduler = make_scheduler(make_worker("d"))
    choice = scheduler.choose(make_demand(100), 0.0)
    assert choice is not None
    assert scheduler.name_prompt(choice, make_demand(100, prefix=[7])) == ""
    assert scheduler.name_prompt(choice, make_demand(600, prefix=[7, 8])) != ""
