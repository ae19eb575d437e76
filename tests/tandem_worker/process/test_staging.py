from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Message
from tandem_worker.process.staging import StagedApp


def client(app: StagedApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://worker")


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


async def test_requests_are_sent_elsewhere_while_the_worker_starts() -> None:
    async with client(StagedApp(lambda: "loading weights")) as http:
        answer = await http.post("/v1/completions", json={})
    assert answer.status_code == 503
    assert answer.headers["x-tandem-retry"] == "1"
    assert answer.json()["error"]["message"] == "This worker is still loading weights."


async def test_the_installed_application_answers() -> None:
    app = StagedApp(lambda: "")
    await app.install(Starlette(routes=[Route("/v1/models", hello)]))
    async with client(app) as http:
        assert (await http.get("/v1/models")).text == "hello"


async def test_the_lifespan_of_the_installed_application_ends_with_the_server() -> None:
    events: list[str] = []

    async def inner(scope, receive, send) -> None:
        for _ in range(2):
            kind = (await receive())["type"]
            events.append(kind)
            await send({"type": f"{kind}.complete"})

    app = StagedApp(lambda: "")
    incoming = iter(["lifespan.startup", "lifespan.shutdown"])
    sent: list[str] = []

    async def receive() -> Message:
        kind = next(incoming)
        if kind == "lifespan.shutdown":
            await app.install(inner)
        return {"type": kind}

    async def send(message: Message) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan"}, receive, send)
    assert events == ["lifespan.startup", "lifespan.shutdown"]
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_an_application_that_does_not_start_is_an_error() -> None:
    async def inner(scope, receive, send) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no"})

    with pytest.raises(RuntimeError, match="refused its startup: no"):
        await StagedApp(lambda: "").install(inner)
