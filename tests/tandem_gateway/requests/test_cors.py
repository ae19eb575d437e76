"""What pages of other origins are told, on every kind of answer; and that nothing is said where CORS is off."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tandem_api.launch import CORSRules, GatewayRouting
from tandem_gateway.errors import BadRequest
from tandem_gateway.http.request import Request
from tandem_gateway.requests.cors import CORSPolicy

from tests.tandem_gateway.conftest import MODEL, chat_request

PAGE = "https://app.example.com"
OTHER = "https://elsewhere.example.com"
RULES = {"allow_origins": [PAGE, "http://localhost:3000"]}
ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


def read(lines: bytes) -> dict[str, str]:
    """Header lines as they are inserted: each after a line break. A field that occurs twice is joined."""
    found: dict[str, str] = {}
    assert not lines or lines.startswith(b"\r\n")
    for line in lines.decode().split("\r\n")[1:]:
        name, _, value = line.partition(": ")
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def preflight(policy: CORSPolicy, origin: str = PAGE, **headers: str) -> dict[str, str]:
    named = {"origin": origin} | ASKED | {name.replace("_", "-"): value for name, value in headers.items()}
    fields = {name.encode(): value.encode() for name, value in named.items()}
    return read(policy.answer_preflight(Request(b"OPTIONS", "/v1/chat/completions", fields, False, None)))


def test_a_listed_origin_is_named_and_answers_differ_by_origin() -> None:
    policy = CORSPolicy(CORSRules(**RULES))
    told = read(policy.fields(PAGE.encode()))
    assert (told["access-control-allow-origin"], told["vary"]) == (PAGE, "origin")
    assert "x-request-id" in told["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in told
    for origin in (None, b"null", b"*", OTHER.encode(), PAGE.upper().encode(), PAGE.encode() + b":443"):
        assert read(policy.fields(origin)) == {"vary": "origin"}, "caches must not give it to the page"


def test_any_origin_is_a_star_for_everybody() -> None:
    policy = CORSPolicy(CORSRules(allow_origins=["*", PAGE]))
    for origin in (None, b"null", PAGE.encode(), OTHER.encode()):
        told = read(policy.fields(origin))
        assert told["access-control-allow-origin"] == "*"
        assert "vary" not in told
    assert preflight(policy)["access-control-allow-origin"] == "*"


def test_with_credentials_a_star_is_no_wildcard() -> None:
    policy = CORSPolicy(CORSRules(allow_origins=["*", PAGE], allow_credentials=True))
    told = read(policy.fields(PAGE.encode()))
    assert (told["access-control-allow-origin"], told["access-control-allow-credentials"]) == (PAGE, "true")
    assert read(policy.fields(OTHER.encode())) == {"vary": "origin"}
    assert preflight(policy)["access-control-allow-credentials"] == "true"


def test_a_preflight_tells_methods_headers_and_age() -> None:
    told = preflight(CORSPolicy(CORSRules(**RULES, max_age_seconds=90)))
    assert told["access-control-allow-origin"] == PAGE
    assert told["access-control-allow-methods"] == "GET, HEAD, POST, DELETE"
    assert told["access-control-max-age"] == "90"
    assert set(told["vary"].split(", ")) == {
        "origin", "access-control-request-method", "access-control-request-headers",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("allowed", "asked", "told"),
    [
        ([], "authorization,x-stainless-os", "authorization,x-stainless-os"),
        ([], "authorization, x-a", "authorization, x-a"),
        ([], "", None),
        ([], "x y", None),
        ([], "a:b", None),
        (["Authorization", "x-a"], "x-b", "Authorization, x-a"),
    ],
)
def test_headers_are_those_that_are_listed_else_those_that_are_asked_for(
    allowed: list[str], asked: str, told: str | None
) -> None:
    policy = CORSPolicy(CORSRules(**RULES, allow_headers=allowed))
    assert preflight(policy, access_control_request_headers=asked).get("access-control-allow-headers") == told


def test_a_preflight_of_another_origin_says_what_to_do() -> None:
    with pytest.raises(
        BadRequest, match=r"'https://elsewhere\.example\.com'.*spec\.gateway\.cors\.allowOrigins"
    ) as told:
        preflight(CORSPolicy(CORSRules(**RULES)), OTHER)
    assert (told.value.status, told.value.code) == (403, "origin_not_allowed")


async def ask(client: httpx.AsyncClient, method: str, url: str, **options: Any) -> httpx.Response:
    headers = {"origin": PAGE} | options.pop("headers", {})
    return await client.request(method, url, headers=headers, **options)


async def test_every_answer_says_so(start_gateway: Any, start_worker: Any) -> None:
    worker = await start_worker()
    running = await start_gateway(worker, cors=CORSRules(**RULES))
    async with httpx.AsyncClient(base_url=running.url) as client:
        answers = [
            (204, await ask(client, "OPTIONS", "/v1/chat/completions", headers=ASKED)),
            (204, await ask(client, "OPTIONS", "/v1/models", headers=ASKED)),
            (200, await ask(client, "POST", "/v1/chat/completions", json=CHAT)),
            (200, await ask(client, "POST", "/v1/chat/completions", json=CHAT | {"stream": True})),
            (200, await ask(client, "GET", "/v1/models")),
            (200, await ask(client, "GET", "/health")),
            (404, await ask(client, "POST", "/v1/chat/completions", json=CHAT | {"model": "other"})),
            (400, await ask(client, "POST", "/v1/chat/completions", content=b"{")),
            (404, await ask(client, "GET", "/v1/nothing")),
            (405, await ask(client, "OPTIONS", "/v1/chat/completions")),
            (413, await ask(client, "POST", "/v1/chat/completions", content=b"x" * (9 << 20))),
        ]
        for status, answer in answers:
            assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (status, PAGE)
        assert len(worker.received) == 2, "preflights are the gateway's"
        stranger = await ask(client, "POST", "/v1/chat/completions", json=CHAT, headers={"origin": OTHER})
        assert (stranger.status_code, stranger.headers["vary"]) == (200, "origin")
        assert "access-control-allow-origin" not in stranger.headers
        refused = await ask(client, "OPTIONS", "/v1/models", headers=ASKED | {"origin": OTHER})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")


async def test_a_preflight_leaves_the_connection_open_and_has_no_body(start_gateway: Any, start_worker: Any) -> None:
    running = await start_gateway(await start_worker(), cors=CORSRules(**RULES))
    question = (
        f"OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: x\r\norigin: {PAGE}\r\n"
        "access-control-request-method: POST\r\n\r\n"
    ).encode()
    received = await running.raw(question + chat_request(headers=f"origin: {PAGE}\r\n"), wait=1.0)
    first, _, rest = received.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 204 ")
    assert b"content-length" not in first
    assert rest.startswith(b"HTTP/1.1 200 OK")


async def test_errors_of_workers_and_failures_say_so(start_gateway: Any, start_worker: Any, fault: Any) -> None:
    worker = await start_worker(behaviours=[fault.die, fault.die, fault.die])
    running = await start_gateway(worker, cors=CORSRules(**RULES))
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
        answer = await ask(client, "POST", "/v1/chat/completions", json=CHAT)
    assert answer.status_code >= 500
    assert answer.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nOrigin: %b\r\nexpect: nonsense\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\nhost: x\r\norigin: %b\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n",
    ],
    ids=["header", "body"],
)
async def test_requests_that_cannot_be_read_say_so(start_gateway: Any, start_worker: Any, request_bytes: bytes) -> None:
    running = await start_gateway(await start_worker(), cors=CORSRules(**RULES))
    answer = await running.raw(request_bytes % PAGE.encode(), wait=2.0)
    assert answer.startswith(b"HTTP/1.1 4")
    assert f"access-control-allow-origin: {PAGE}\r\n".encode() in answer


async def test_off_says_nothing_and_it_is_followed(start_gateway: Any, start_worker: Any) -> None:
    running = await start_gateway(await start_worker())
    async with httpx.AsyncClient(base_url=running.url) as client:
        for method in ("OPTIONS", "POST"):
            answer = await ask(client, method, "/v1/chat/completions", json=CHAT, headers=ASKED)
            assert answer.status_code == (405 if method == "OPTIONS" else 200)
            assert not any(name.startswith("access-control") or name == "vary" for name in answer.headers)
        running.gateway.apply_routing(GatewayRouting(served_names=[MODEL], cors=CORSRules(**RULES)))
        assert (await ask(client, "OPTIONS", "/v1/models", headers=ASKED)).status_code == 204
        running.gateway.apply_routing(GatewayRouting(served_names=[MODEL]))
        assert (await ask(client, "OPTIONS", "/v1/models", headers=ASKED)).status_code == 405
