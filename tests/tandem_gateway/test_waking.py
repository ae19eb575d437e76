"""A gateway of a model that sleeps: it holds what comes, says that it does, and answers once a worker is there."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tandem_api.fleet import FLEET_PATH, WAITING_PATH, WAITING_SECONDS, FleetReport
from tandem_api.launch import GatewayConfig, GatewayQueue, GatewayRouting
from tandem_api.names import HEADER_QUEUE_SECONDS
from tandem_gateway.process import admin
from tandem_gateway.process.server import Server
from tandem_gateway.process.settings import Settings

from tests.tandem_gateway.conftest import FakeWorker, Running, chat_request, until

WAKES = GatewayQueue(wakes=True)
REQUEST = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


async def ask(client: httpx.AsyncClient, running: Running) -> httpx.Response:
    return await client.post(f"{running.url}/v1/chat/completions", json=REQUEST, timeout=30)


async def report(client: httpx.AsyncClient, running: Running, path: str = FLEET_PATH) -> FleetReport:
    answer = await client.get(f"http://127.0.0.1:{running.server.metrics_port}{path}", timeout=30)
    assert answer.status_code == 200
    return FleetReport.model_validate_json(answer.content)


async def test_many_first_requests_are_held_and_answered(start_gateway: Any, start_worker: Any) -> None:
    running = await start_gateway(queue=WAKES)
    async with httpx.AsyncClient() as client:
        for path in ("/health", "/ping", "/v1/models", "/v1/models/toy"):
            assert (await client.get(running.url + path)).status_code == 200, path
        asked = [asyncio.create_task(ask(client, running)) for _ in range(20)]
        await until(lambda: running.gateway.queue.line.size == 20)
        traffic = (await report(client, running)).traffic
        assert traffic is not None
        assert (traffic.waiting_requests, traffic.idle_seconds) == (20, 0.0)
        running.apply(await start_worker())
        for answer in await asyncio.gather(*asked):
            assert answer.status_code == 200
            assert float(answer.headers[HEADER_QUEUE_SECONDS]) > 0
        traffic = (await report(client, running)).traffic
        assert traffic is not None
        assert traffic.waiting_requests == 0
        assert traffic.idle_seconds is not None
        assert 0 < traffic.idle_seconds < 100


async def test_an_ejected_worker_is_no_sleep(start_gateway: Any, start_worker: Any) -> None:
    """Workers that are there and fail are a failure still: a load balancer goes elsewhere."""
    worker = await start_worker()
    running = await start_gateway(worker, queue=WAKES)
    await worker.stop()
    async with httpx.AsyncClient() as client:
        asked = asyncio.create_task(ask(client, running))
        await until(lambda: all(e.state == "ejected" for e in running.gateway.scheduler.endpoints.values()))
        assert (await client.get(f"{running.url}/health")).status_code == 503
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    running.apply()
    await until(lambda: not running.gateway.exchanges)


async def test_what_the_operator_says_later_is_followed(start_gateway: Any) -> None:
    running = await start_gateway()
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{running.url}/health")).status_code == 503
        running.gateway.apply_routing(GatewayRouting(served_names=["toy"], queue=WAKES))
        assert (await client.get(f"{running.url}/health")).status_code == 200


async def test_a_gateway_that_knows_nothing_yet_holds_too(tmp_path: Path, start_worker: Any) -> None:
    """Its workers have never been listed."""
    workers = tmp_path / "workers"
    config = GatewayConfig(
        model_name="toy", served_name="toy", namespace="default", disaggregated=True, http_port=0, metrics_port=0,
        queue=WAKES,
    )  # fmt: skip
    server = Server(
        Settings(
            config=config, host="127.0.0.1", workers=(), workers_file=workers, lame_duck_seconds=0.0, log_level="info",
            access_log=False,
        )
    )  # fmt: skip
    await server.start()
    running = Running(server, [])
    worker: FakeWorker = await start_worker()
    async with httpx.AsyncClient() as client:
        asked = asyncio.create_task(ask(client, running))
        await until(lambda: server.gateway.queue.line.size == 1)
        assert not server.admin.discovered
        await asyncio.to_thread(workers.write_text, f"role=decode,url={worker.worker.address}\n")
        answer = await asked
        assert answer.status_code == 200
        assert answer.headers[HEADER_QUEUE_SECONDS]
    await server.stop()


async def test_who_asks_for_requests_is_told_of_the_first_at_once(start_gateway: Any, start_worker: Any) -> None:
    running = await start_gateway(queue=WAKES)
    async with httpx.AsyncClient() as client:
        waiting = asyncio.create_task(report(client, running, WAITING_PATH))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        asked = asyncio.create_task(ask(client, running))
        async with asyncio.timeout(WAITING_SECONDS / 2):
            found = await waiting
        assert found.traffic is not None
        assert found.traffic.waiting_requests == 1
        async with asyncio.timeout(WAITING_SECONDS / 2):
            assert (await report(client, running, WAITING_PATH)).traffic == found.traffic, "as long as it waits"
        running.apply(await start_worker())
        assert (await asked).status_code == 200


async def test_who_asks_for_requests_is_answered_after_a_while(
    start_gateway: Any, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "WAITING_SECONDS", 0.3)
    running = await start_gateway(queue=WAKES)
    reader, writer = await connect(running.server.metrics_port)
    for _ in range(2):
        writer.write(f"GET {WAITING_PATH} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        assert json.loads(body)["traffic"]["waitingRequests"] == 0
    writer.write(f"GET {WAITING_PATH} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    await until(lambda: running.server.admin._questions)
    writer.transport.abort()
    await until(lambda: not running.server.admin._questions)


async def test_a_client_that_leaves_waits_no_more(start_gateway: Any, connect: Any) -> None:
    running = await start_gateway(queue=WAKES)
    _, writer = await connect(running.port)
    writer.write(chat_request())
    await until(lambda: running.gateway.queue.line.size == 1)
    writer.transport.abort()
    await until(lambda: not running.gateway.queue.line.size)
    traffic = running.server.reports.describe_fleet().traffic
    assert traffic is not None
    assert traffic.waiting_requests == 0
    assert traffic.idle_seconds is not None
