"""What arrives and what becomes of it, counted once per request whatever happens in between."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.fleet import Traffic
from tandem_gateway.records.traffic import TrafficCounter

from tests.tandem_gateway.test_faults import ask, fail_with, question

ANYTHING = st.one_of(
    st.none(), st.integers(-5, 10_000), st.just(2**64 - 1), st.text(max_size=3), st.floats(allow_nan=True)
)
USAGE = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {},
        optional={
            "prompt_tokens": ANYTHING,
            "completion_tokens": ANYTHING,
            "prompt_tokens_details": st.one_of(ANYTHING, st.dictionaries(st.just("cached_tokens"), ANYTHING)),
        },
    ),
)
WAITING = {"waiting_requests", "waiting_tokens", "idle_seconds"}


@given(st.lists(st.tuples(USAGE, st.integers(0, 9999), st.booleans())))
def test_totals_only_grow_whatever_workers_say(answers: list[Any]) -> None:
    counter = TrafficCounter()
    before = counter.report()
    for usage, events, well in answers:
        counter.count_answer(usage, events, well=well)
        after = counter.report()
        check_growth(before, after)
        before = Traffic.model_validate_json(after.to_json())
        assert before == after


def check_growth(before: Traffic, after: Traffic) -> None:
    for name in Traffic.model_fields.keys() - WAITING:
        assert getattr(after, name) >= getattr(before, name), name
    assert after.requests >= after.finished
    assert after.computed_tokens <= after.computed_prompt_tokens
    assert after.prompt_squares * max(1, after.requests) >= after.prompt_tokens**2 * (1 - 1e-9)


def test_what_an_answer_says_is_counted() -> None:
    counter = TrafficCounter()
    usage = {"prompt_tokens": 12, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 5}}
    counter.count_answer(usage, 99, well=True)
    counter.count_answer(None, 12, well=True)
    counter.count_answer(usage, 99, well=False)
    assert counter.report(waiting_requests=2, waiting_tokens=10) == Traffic(
        computed_prompt_tokens=24, computed_tokens=14, output_tokens=7 + 10, waiting_requests=2, waiting_tokens=10
    )


def traffic_of(running: Any) -> Traffic:
    found = running.server.reports.describe_fleet().traffic
    assert found is not None
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault_name", ["die", "drain", "error", "busy"])
async def test_a_request_that_goes_to_several_workers_counts_once(
    start_gateway, start_worker, fault, chat, fault_name: str, stream: bool
) -> None:
    behaviours = {"error": fail_with(500), "busy": fail_with(429)}
    bad = await start_worker("bad", default=behaviours.get(fault_name) or getattr(fault, fault_name))
    running = await start_gateway(bad, await start_worker("good"))
    sent = 0
    while not bad.received:
        sent += 1
        assert (await ask(running, question(chat, sent, stream=stream)))[0] == 200
    await running.idle()
    traffic = traffic_of(running)
    assert (traffic.requests, traffic.finished) == (sent, sent)
    assert traffic.output_tokens == (3 if stream else 4) * sent, "streams are counted by their events"
    if not stream:
        assert traffic.computed_prompt_tokens - traffic.computed_tokens == 3 * sent, "3 were cached of each"


@pytest.mark.parametrize("kind", ["fails", "breaks off", "is given up", "is refused"])
async def test_who_gets_no_answer_has_arrived_and_not_finished(
    start_gateway, start_worker, fault, chat, kind: str
) -> None:
    default = {
        "fails": fail_with(400), "breaks off": fault.stream(2, then="error"),
        "is given up": fault.stream(2, then="hang"), "is refused": fault.answer,
    }[kind]  # fmt: skip
    running = await start_gateway(await start_worker("d", default=default))
    if kind == "is given up":
        reader, writer = await running.connect()
        writer.write(chat(stream=True))
        await reader.readuntil(b"t1 ")
        writer.transport.abort()
    elif kind == "is refused":
        await running.raw(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{]", wait=1)
    else:
        await ask(running, question(chat, 1, stream=kind == "breaks off"))
    await running.idle()
    traffic = traffic_of(running)
    arrived = 0 if kind == "is refused" else 1
    assert (traffic.requests, traffic.finished, traffic.output_tokens) == (arrived, 0, 0)
    assert (traffic.prompt_tokens > 0) == bool(arrived)


async def test_requests_that_workers_refuse_are_no_demand(start_gateway, start_worker, chat) -> None:
    """A client that repeats what is refused must not bring replicas."""
    worker = await start_worker("d", default=fail_with(400))
    running = await start_gateway(worker)
    for number in range(20):
        assert (await ask(running, question(chat, number)))[0] == 400
        await running.idle()
    assert traffic_of(running).requests == 1, "the last one may still be computed"
    worker.default = fail_with(500)
    first = traffic_of(running)
    for number in range(20):
        assert (await ask(running, question(chat, number)))[0] == 500
        await running.idle()
    second = traffic_of(running)
    assert second.requests - first.requests == 19, "a worker that fails is no reason to count less"
    assert second.prompt_tokens == 20 * first.prompt_tokens


@given(st.lists(st.tuples(st.integers(1, 10_000), st.booleans()), min_size=1, max_size=50), st.integers(0, 9))
def test_what_was_refused_is_made_up_for(requests: list[tuple[int, bool]], lag: int) -> None:
    """Refused so many requests after they came; in the end totals are those of the others."""
    counter, under_way = TrafficCounter(), []
    before = counter.report()
    for tokens, refused in [*requests, *[(10**6, False)] * 60]:
        counter.make_up(tokens)
        under_way.append((tokens, refused))
        for ended, is_refused in under_way[:-lag] if lag else under_way:
            if is_refused:
                counter.take_back(ended)
        under_way = under_way[-lag:] if lag else []
        after = counter.report()
        assert all(
            getattr(after, name) >= getattr(before, name) for name in Traffic.model_fields if name != "idle_seconds"
        )
        before = after
    served = [tokens for tokens, refused in requests if not refused] + [10**6] * 60
    assert not counter.ahead
    assert (before.requests, before.prompt_tokens) == (len(served), sum(served))
    assert before.prompt_squares == sum(tokens * tokens for tokens in served)


async def test_what_runs_no_model_is_no_traffic(start_gateway, start_worker, chat) -> None:
    running = await start_gateway(await start_worker("d"))
    body = b'{"model": "toy", "prompt": "hello"}'
    data = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        len(body),
        body,
    )
    assert b" 200 " in (await running.raw(data)).split(b"\r\n")[0]
    assert traffic_of(running).model_copy(update={"idle_seconds": None}) == Traffic()


async def test_requests_wait_while_there_is_no_worker(start_gateway, start_worker, chat, until) -> None:
    running = await start_gateway()
    asked = [asyncio.create_task(ask(running, question(chat, number))) for number in range(3)]
    await until(lambda: traffic_of(running).waiting_requests == 3)
    traffic = traffic_of(running)
    assert traffic.requests == 3
    assert traffic.waiting_tokens == traffic.prompt_tokens > 0
    running.apply(await start_worker("d"))
    assert [status for status, *_ in await asyncio.gather(*asked)] == [200] * 3
    await running.idle()
    traffic = traffic_of(running)
    assert (traffic.requests, traffic.finished) == (3, 3)
    assert (traffic.waiting_requests, traffic.waiting_tokens) == (0, 0)


@pytest.mark.parametrize("seed", range(4))
async def test_totals_only_grow_in_any_order_of_arrivals_and_ends(
    start_gateway, start_worker, fault, chat, seed: int
) -> None:
    """Requests of all kinds at once, to workers that do all kinds of things."""
    chance = random.Random(seed)
    kinds = [
        fault.answer, fault.answer, fault.die, fault.drain, fail_with(400), fail_with(500), fail_with(429),
        fault.stream(1, then="die"), fault.stream(2, then="error"), fault.stream(3, then="eof"),
    ]  # fmt: skip
    workers = [await start_worker(f"d{index}", behaviours=chance.choices(kinds, k=15)) for index in range(3)]
    running = await start_gateway(*workers)
    statuses: list[int] = []

    async def send(number: int) -> None:
        await asyncio.sleep(chance.random() * 0.3)
        length = chance.randrange(1, 4000)
        request = chat(
            stream=chance.random() < 0.5, user=str(number), messages=[{"role": "user", "content": "x" * length}]
        )
        if chance.random() < 0.2:  # it leaves
            _, writer = await running.connect()
            writer.write(request)
            await writer.drain()
            await asyncio.sleep(chance.random() * 0.01)
            writer.transport.abort()
        else:
            statuses.append((await ask(running, request))[0])

    sending = [asyncio.create_task(send(number)) for number in range(60)]
    before, open_requests = traffic_of(running), 60
    while open_requests:
        await asyncio.sleep(0.005)
        after = traffic_of(running)
        check_growth(before, after)
        before, open_requests = after, sum(not each.done() for each in sending)
    await running.idle()
    traffic = traffic_of(running)
    check_growth(before, traffic)
    assert len(statuses) - statuses.count(400) <= traffic.requests <= 60
    assert traffic.finished <= traffic.requests - sum(status not in (200, 400) for status in statuses)
    assert traffic.finished > 5, "not all of them failed"
    assert traffic.prompt_tokens > 60 * 100
