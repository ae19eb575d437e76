"""What is told of decisions: of those that were taken, and of one that would be."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from tandem_api.launch import CanaryTraffic, StoreLimits
from tandem_api.names import Role
from tandem_gateway.scheduling import KEPT, Demand, Scheduler, Worker

from tests.tandem_gateway.responses.test_service import answer as answer_responses

BODY = {"model": "toy", "messages": [{"role": "user", "content": "x" * 8000}], "max_tokens": 4}


async def look(running, body: dict[str, Any] | None = None, **headers: str) -> httpx.Response:
    url = f"http://127.0.0.1:{running.server.metrics_port}/debug/route"
    async with httpx.AsyncClient() as client:
        return await (client.get(url) if body is None else client.post(url, json=body, headers=headers))


@pytest.mark.parametrize("stream", [True, False])
async def test_the_last_decisions(start_gateway, start_worker, chat, stream) -> None:
    decode, prefill = await start_worker("d1"), await start_worker("p1", role=Role.PREFILL)
    running = await start_gateway(decode, prefill)
    for _ in range(2):
        await running.raw(chat(stream=stream, headers="connection: close\r\nx-request-id: it\r\n"))
    newest, oldest = (await look(running)).json()["decisions"]
    assert newest["at"] >= oldest["at"]
    assert (newest["requestId"], newest["attempt"], newest["status"]) == ("it", 1, 200)
    assert (newest["decode"], newest["prefill"], newest["revision"]) == ("d1", ["p1"], "r1")
    assert newest["why"] == {"decode": "the only candidate", "prefill": "the only candidate"}
    assert newest["promptTokens"] == newest["cachedTokens"] + newest["uncachedTokens"] > 0
    assert newest["queuedTokens"] == 0
    (candidates,) = newest["candidates"]
    assert [each["worker"] for each in candidates["prefill"]] == ["p1"]
    assert [each["worker"] for each in candidates["decode"]] == ["d1"]
    assert (newest["measuredSeconds"] is not None) is stream
    assert oldest["predictedSeconds"] is None, "nothing was known then"
    assert (newest["predictedSeconds"] is not None) is stream
    text = running.server.reports.render_metrics().decode()
    assert f"tandem_gateway_time_to_first_token_prediction_ratio_count {float(stream)}" in text


async def test_attempts_are_decisions(start_gateway, start_worker, fault, chat) -> None:
    running = await start_gateway(await start_worker("d1", behaviours=[fault.drain] * 2), await start_worker("d2"))
    first = []
    for _ in range(8):  # until the worker that drains was asked first
        await running.raw(chat(stream=True, headers="connection: close\r\n"))
        first = [each for each in (await look(running)).json()["decisions"] if each["attempt"] == 1]
        if any(each["decode"] == "d1" for each in first):
            break
    newest, before = (await look(running)).json()["decisions"][:2]
    assert (newest["attempt"], newest["decode"], newest["status"]) == (2, "d2", 200)
    assert (before["attempt"], before["decode"], before["status"]) == (1, "d1", None)
    assert newest["requestId"] == before["requestId"]
    assert len(first[0]["candidates"][0]["decode"]) == 2


async def test_who_looks_puts_nothing_into_queues(start_gateway, start_worker) -> None:
    running = await start_gateway(await start_worker("d1"))
    (endpoint,) = running.gateway.scheduler.endpoints.values()
    endpoint.tell(500, asyncio.get_running_loop().time())
    for _ in range(3):
        await look(running, BODY)
    assert endpoint.told == 500


async def test_where_a_request_would_go(start_gateway, start_worker, chat) -> None:
    """As a request does then, and nothing is sent or counted."""
    workers = [await start_worker(f"d{number}") for number in range(4)]
    running = await start_gateway(*workers)
    scheduler = running.gateway.scheduler
    for endpoint in scheduler.endpoints.values():
        for _ in range(10):
            endpoint.speed.observe(1000, 0.1)
    answer = (await look(running, BODY, **{"x-session-affinity": "me"})).json()
    assert not any(worker.received for worker in workers)
    assert not running.gateway.decisions
    assert not running.gateway.traffic.requests
    await running.idle()
    assert answer["waitingRequests"] == 0
    assert 0.15 < answer["predictedSeconds"] < 0.25
    assert answer["uncachedTokens"] == answer["promptTokens"] > 1500
    costs = [each["cost"] for each in answer["candidates"][0]["decode"]]
    assert costs == sorted(costs)
    for _ in range(3):
        await running.raw(chat(headers="connection: close\r\nx-session-affinity: me\r\n", **BODY))
        again = (await look(running, BODY, **{"x-session-affinity": "me"})).json()
        decided = (await look(running)).json()["decisions"][0]
        assert decided["decode"] == answer["decode"] == again["decode"]
    assert again["cachedTokens"] > 1500
    completion = {"model": "toy", "prompt": "once"}
    assert (await look(running, completion)).json()["promptTokens"] < 10


async def test_where_a_conversation_would_go_on(start_gateway, start_worker) -> None:
    """By all that it continues, of whoever asks; and nothing counts as used by that."""
    running = await start_gateway(
        await start_worker("d1", default=answer_responses), await start_worker("d2", default=answer_responses),
        response_store=StoreLimits(max_bytes=4 << 20, ttl_seconds=600), explain=True,
    )  # fmt: skip
    store = running.gateway.responses.store
    key = {"authorization": "Bearer mine"}
    async with httpx.AsyncClient() as client:
        url = f"{running.url}/v1/responses"
        first = (await client.post(url, json={"model": "toy", "input": "x" * 8000}, headers=key)).json()["id"]
        await client.post(url, json={"model": "toy", "input": "other"}, headers=key)
        more = {"model": "toy", "input": "y" * 100, "previous_response_id": first}
        before = dict(store.events)
        told = (await look(running, more, **key)).json()
        stranger = await look(running, more, authorization="Bearer other")
        assert dict(store.events) == before
        (tenant,) = store.tenants.known.values()
        assert next(iter(tenant.responses)) == first, "it is still what was used least recently"
        real = await client.post(url, json=more, headers=key | {"x-tandem-route": "explain"})
    assert stranger.status_code == 404
    (newest, *_) = (await look(running)).json()["decisions"]
    assert told["promptTokens"] > 1000
    assert told["cachedTokens"] > 0
    for field in ("decode", "promptTokens", "cachedTokens", "uncachedTokens"):
        assert told[field] == newest[field]
    assert f"decode={told['decode']}" in real.headers["x-tandem-route"]


async def test_what_would_not_go_anywhere(start_gateway) -> None:
    running = await start_gateway()
    nowhere = (await look(running, BODY)).json()
    assert nowhere["decode"] is None
    assert "no decode worker" in nowhere["why"]
    refused = await look(running, BODY | {"model": "other"})
    assert (refused.status_code, "'toy'" in refused.text) == (404, True)
    assert (await look(running, {"messages": 1})).status_code == 400
    assert running.server.admin.answer(b"GET", "/debug/route", from_here=False)[0] == 403
    assert running.server.admin.answer(b"POST", "/debug/route", from_here=False)[0] == 403


async def test_few_are_kept_and_long_streams_keep_nothing_of_theirs(start_gateway, start_worker, fault, chat) -> None:
    worker = await start_worker(behaviours=[fault.stream(1, then="hang")])
    running = await start_gateway(worker)
    reader, writer = await running.connect()
    writer.write(chat(stream=True))
    await reader.readuntil(b"t0")
    (exchange,) = running.gateway.exchanges
    assert exchange.choice.offers
    more, asking = await running.connect()
    for _ in range(KEPT):
        asking.write(chat())
        head = await more.readuntil(b"\r\n\r\n")
        await more.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))
    assert len(running.gateway.decisions) == KEPT
    assert exchange.choice not in [decision[-1] for decision in running.gateway.decisions]
    assert not exchange.choice.offers
    assert len(json.dumps((await look(running)).json())) < 200_000
    writer.transport.abort()


def test_asking_changes_no_later_choice() -> None:
    def choices(*, ask: bool) -> list[str]:
        scheduler = Scheduler()
        workers = [Worker(name=f"d{n}", address=f"h{n}:1", role=Role.DECODE, revision=f"r{n % 2}") for n in range(6)]
        scheduler.apply_workers(workers)
        scheduler.apply_canary(CanaryTraffic(percent=30, workers=["d0", "d2"]))
        found: list[str] = []
        for _ in range(50):
            if ask:
                assert scheduler.preview(demand(), 0.0) is not None
            wanted = demand()
            choice = scheduler.choose(wanted, 0.0)
            assert choice is not None
            scheduler.reserve(choice, wanted, 0.0)
            found.append(choice.decode.worker.name)
        return found

    def demand() -> Demand:
        return Demand(prompt_tokens=100, output_tokens=10, prefix=[], affinity=0)

    assert choices(ask=True) == choices(ask=False)
