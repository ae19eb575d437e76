"""A client that goes away frees its blocks on both workers within a second of the step that is under way."""

from __future__ import annotations

import json
import select
import time
from contextlib import closing
from http.client import HTTPConnection

import httpx
import pytest

from e2e.suite.fleet import Fleet, until

LONG = "Tell me everything you know about the sea, slowly and with many words. " * 40
CHAT = "/v1/chat/completions"


def body(stream: bool, max_tokens: int, content: str = LONG) -> dict[str, object]:
    return {
        "model": "main",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "stream": stream,
        "ignore_eos": True,
    }


def wait_used(main: Fleet) -> None:
    until("blocks in use", lambda: any(main.blocks_in_use("main").values()), within=60, every=0.05)


def wait_freed(main: Fleet, url: str) -> None:
    """Behind another client's answer, which waited for the same step: on a machine with other tests one takes longer
    than a second."""
    httpx.post(f"{url}{CHAT}", json=body(False, 1, "Say yes."), timeout=120).raise_for_status()
    main.wait_blocks_free("main", within=1)


def test_disconnect_inside_a_stream(main: Fleet) -> None:
    with main.url("main") as url, httpx.Client(timeout=120) as client:
        with client.stream("POST", f"{url}{CHAT}", json=body(stream=True, max_tokens=2000)) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
            wait_used(main)
        wait_freed(main, url)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_before_the_first_token(main: Fleet, stream: bool) -> None:
    """The prompt is long enough that the prefill worker is still at it when the client leaves."""
    document = json.dumps(body(stream, 2000, f"{time.time()} {LONG * 4}"))
    with main.url("main") as url:
        with closing(HTTPConnection(httpx.URL(url).netloc.decode())) as link:
            link.request("POST", CHAT, document, {"Content-Type": "application/json"})
            wait_used(main)
            assert select.select([link.sock], [], [], 0)[0] == [], "nothing has been answered yet"
        wait_freed(main, url)
