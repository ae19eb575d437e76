"""Responses that are kept where workers are asked over native links, and where these break or workers die."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import openai
import pytest
from tandem_api.launch import GatewayRouting, StoreLimits
from tandem_gateway.responses.store import ResponseStore

from tests.tandem_gateway.chaos import MODEL, open_fleet
from tests.tandem_gateway.conftest import Received, Running, until
from tests.tandem_gateway.responses.test_service import KEPT, connect, events
from tests.tandem_gateway.upstream.test_native import StartLinked, start_linked  # noqa: F401
from tests.tandem_worker.process.forking import Forker

WAIT = 60.0


def stored(running: Running) -> ResponseStore:
    assert running.gateway.responses is not None
    return running.gateway.responses.store


def send_events(count: int, release: asyncio.Event) -> Callable[..., Any]:
    """An application that sends so many events of a stream, and the others when it may."""

    async def answer(_scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        headers = [(b"content-type", b"text/event-stream")]
        told = events(Received("POST", "/v1/responses", {}, body))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"".join(told[:count]), "more_body": True})
        await release.wait()
        await send({"type": "http.response.body", "body": b"".join(told[count:])})

    return answer


@pytest.mark.parametrize(("count", "whole"), [(5, False), (6, False), (7, True)])
async def test_what_a_link_that_breaks_leaves(
    start_linked: StartLinked,  # noqa: F811
    start_gateway: Any,
    count: int,
    whole: bool,
) -> None:
    """Seven events are an answer, although the link breaks before its end is told; six are none, although all of its
    text is there."""
    worker, release = await start_linked(), asyncio.Event()
    assert worker.listener is not None
    release.set()
    worker.listener.app = send_events(7, release)
    running = await start_gateway(worker, link="Native", response_store=KEPT)
    async with connect(running) as asks:
        async with asks.responses.stream(model="toy", input="hi") as stream:
            first = await stream.get_final_response()
        used = stored(running).used_bytes
        release.clear()
        worker.listener.app = send_events(count, release)
        names: list[str] = []

        async def read() -> None:
            options: Any = {"model": "toy", "input": "more", "previous_response_id": first.id, "stream": True}
            async for each in await asks.responses.create(**options):
                names.extend([each.response.id] if hasattr(each, "response") else [])

        reading = asyncio.create_task(read())
        await until(lambda: names, wait=WAIT)
        for each in tuple(worker.listener._links):
            each.transport.abort()
        if whole:
            await reading
            assert (await asks.responses.retrieve(names[0])).previous_response_id == first.id
            await asks.responses.delete(names[0])
        else:
            with pytest.raises(openai.APIError):
                await reading
            for gone in (
                asks.responses.retrieve(names[0]),
                asks.responses.create(model="toy", input="x", previous_response_id=names[0]),
            ):
                with pytest.raises(openai.NotFoundError):
                    await gone
        release.set()
        await running.idle()
        assert (len(stored(running)), stored(running).used_bytes, running.gateway.budget.used) == (1, used, used)
        async with asks.responses.stream(model="toy", input="again", previous_response_id=first.id) as stream:
            assert (await stream.get_final_response()).output_text == "answer 3"


async def test_what_a_killed_worker_leaves(forker: Forker) -> None:
    """Every stream either ends whole and is kept as its client saw it, or is told to have broken and is not there."""
    async with open_fleet(2, forker, native=True, idle_seconds=200.0, first_token_seconds=200.0) as fleet:
        gateway = fleet.gateway
        limits = StoreLimits(max_bytes=16 << 20, ttl_seconds=3600)
        gateway.apply_routing(GatewayRouting(served_names=[MODEL], response_store=limits))
        assert gateway.responses is not None
        store = gateway.responses.store
        async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="k", max_retries=0, timeout=WAIT) as asks:
            options: Any = {"model": MODEL, "extra_body": {"ignore_eos": True, "seed": 3}}
            first = await asks.responses.create(input="hello", max_output_tokens=20, **options)
            said: dict[str, list[str]] = {}
            ended: dict[str, Any] = {}

            async def read(number: int) -> None:
                name = ""
                try:
                    async for each in await asks.responses.create(
                        input=f"number {number}", previous_response_id=first.id, max_output_tokens=300, stream=True,
                        **options,
                    ):  # fmt: skip
                        if each.type == "response.created":
                            name = each.response.id
                            said[name] = []
                        elif each.type in ("response.output_text.delta", "response.reasoning_text.delta"):
                            said[name].append(each.delta)
                        elif each.type in ("response.completed", "response.incomplete"):
                            ended[name] = each.response
                except openai.APIError:
                    ended[name] = None

            reading = [asyncio.create_task(read(number)) for number in range(6)]
            await until(lambda: sum(map(bool, said.values())) >= 4, wait=WAIT)
            name = fleet.busiest()
            fleet.send(name, signal.SIGKILL)
            await asyncio.gather(*reading)
            await fleet.remove(name)
            assert len(ended) == 6
            for name, last in ended.items():
                if last is None:
                    with pytest.raises(openai.NotFoundError):
                        await asks.responses.retrieve(name)
                    with pytest.raises(openai.NotFoundError):
                        await asks.responses.create(input="x", previous_response_id=name, **options)
                    continue
                kept: Any = await asks.responses.retrieve(name)
                texts = [part.text for item in kept.output for part in item.content]
                assert "".join(texts) == "".join(said[name])
                assert (kept.usage, kept.previous_response_id) == (last.usage, first.id)
            left = sum(last is not None for last in ended.values())
            assert left < 6 or sum(gateway.metrics.resumes.values()), "the kill met a stream"
            assert len(store) == 1 + left
            again = await asks.responses.create(
                input="on", previous_response_id=first.id, max_output_tokens=5, **options
            )
            assert (await asks.responses.retrieve(again.id)).previous_response_id == first.id
            await until(lambda: not gateway.exchanges, wait=WAIT)
            assert gateway.budget.used == store.used_bytes
            for name in [again.id, first.id, *(name for name, last in ended.items() if last is not None)]:
                await asks.responses.delete(name)
            assert (store.used_bytes, gateway.budget.used) == (0, 0)
