"""A client that goes away frees its blocks on both workers within a second."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from e2e.suite.fleet import Fleet, until

LONG = "Tell me everything you know about the sea, slowly and with many words. " * 40


def body(stream: bool, max_tokens: int) -> dict[str, object]:
    return {
        "model": "main",
        "messages": [{"role": "user", "content": LONG}],
        "max_tokens": max_tokens,
        "stream": stream,
        "ignore_eos": True,
    }


def test_disconnect_inside_a_stream(main: Fleet) -> None:
    with main.url("main") as url, httpx.Client(timeout=60) as client:
        with client.stream("POST", f"{url}/v1/chat/completions", json=body(stream=True, max_tokens=2000)) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            for _ in range(6):
                next(lines)
            assert sum(main.blocks_in_use("main").values()) > 0
        main.wait_blocks_free("main", within=1)


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_before_the_first_token(main: Fleet, stream: bool) -> None:
    """The prompt is long enough that the prefill worker is still at it when the client leaves."""

    def send(url: str) -> None:
        document = body(stream, 2000) | {"messages": [{"role": "user", "content": f"{time.time()} {LONG * 4}"}]}
        with httpx.Client(timeout=httpx.Timeout(60, read=1.0)) as client, pytest.raises(httpx.ReadTimeout):
            client.post(f"{url}/v1/chat/completions", json=document)

    with main.url("main") as url:
        sender = threading.Thread(target=send, args=(url,))
        sender.start()
        until("blocks in use", lambda: any(main.blocks_in_use("main").values()), within=5, every=0.05)
        sender.join()
        main.wait_blocks_free("main", within=1)
