"""Whatever an API server answers to any one request of a look: nothing but what is expected is raised, status is
written where it can be, and the looks after it come to the same."""

from __future__ import annotations

import copy
import os
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from api_double import api_client, serving
from operator_objects import READY, raw_model
from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.errors import APIError, IncompleteError
from test_reconciler import DECODE, MODEL, ObjectServer, Operator

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _status(code: int, message: str, **headers: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        del request
        return web.json_response({"kind": "Status", "message": message, "code": code}, status=code, headers=headers)

    return answer


def _text(text: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        del request
        return web.Response(text=text, content_type="application/json")

    return answer


async def _hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


FAULTS: dict[str, Answer] = {
    "409": _status(409, "the object has been modified"),
    "410": _status(410, "too old"),
    "429": _status(429, "too many requests, please try again later", **{"Retry-After": "1"}),
    "500": _status(500, "etcd is away"),
    "504": _status(504, "the server was unable to return a response in time"),
    "truncated": _text('{"kind": "Secret", "meta'),
    "another": _text("[]"),
    "empty": _text(""),
    "hangs up": _hang_up,
}


class FailingServer(ObjectServer):
    """Answers the request of one number otherwise, before or after it has an effect."""

    fail_at: int | None = None
    fault: Answer
    does_it = False
    count = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        number, self.count = self.count, self.count + 1
        if number != self.fail_at:
            return await super().handle(request)
        if self.does_it:
            await super().handle(request)
        return await self.fault(request)


async def _look(operator: Operator) -> BaseException | None:
    try:
        await operator.look()
    except (APIError, IncompleteError, aiohttp.ClientError, TimeoutError) as error:
        return error
    return None


async def _settle(operator: Operator, server: FailingServer) -> dict[str, Any]:
    """What is there in the end, but for what no two histories have alike."""
    for _ in range(4):
        assert await _look(operator) is None
        server.settle()
        server.add_pod("m-decode-0", **READY)
    kept = copy.deepcopy({path: found for path, found in server.kept.items() if "/events/" not in path})
    return {path: found.get("spec", found.get("subjects")) for path, found in kept.items() if "/pods/" not in path}


EVERY = "TANDEM_ALL_FAULTS" in os.environ
"""Each fault at each request, which takes minutes; else they share the requests out."""


@pytest.mark.timeout(900 if EVERY else 120)
@pytest.mark.parametrize("does_it", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_one_answer_that_fails_changes_nothing_in_the_end(fault: str, does_it: bool) -> None:
    number, step = (0, 1) if EVERY else (list(FAULTS).index(fault), len(FAULTS))
    if not _undisturbed:
        _undisturbed.append(await _play(None, fault, does_it))
    expected, requests = _undisturbed[0]
    assert requests > 15
    for at in range(number, requests, step):
        found, _ = await _play(at, fault, does_it)
        assert found == expected, f"request {at}"


_undisturbed: list[tuple[dict[str, Any], int]] = []
"""What `_play` gives where nothing fails, once it has: the same for every fault."""


async def _play(fail_at: int | None, fault: str, does_it: bool) -> tuple[dict[str, Any], int]:
    """What is there in the end, and how many requests the first look makes."""
    server = FailingServer()
    server.kept[MODEL] = {"kind": "InferenceModel", **raw_model()}
    server.fail_at, server.fault, server.does_it = fail_at, FAULTS[fault], does_it
    async with serving(server.handle) as server.url:
        client = KubeClient(api_client(server.url, 8))
        operator = Operator(server, client)
        await _look(operator)
        requests, server.fail_at = server.count, None
        found = await _settle(operator, server)
        await client.close()
    conditions = {c["type"]: c["status"] for c in server.kept[MODEL]["status"]["conditions"]}
    assert conditions["Ready"] == "True", (fail_at, server.kept[MODEL]["status"])
    assert DECODE in found
    return found, requests
