"""What the gateway shows workers, and what becomes of a request when a worker does not take it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tandem_api.keys import KEY_BYTES, KeyRing, bearer_token
from tandem_api.launch import GatewayQueue
from tandem_api.names import API_KEY_FILE, Role
from tandem_gateway.process.admin import Admin, is_loopback
from tandem_gateway.scheduling import Outcome, Worker


def ring_of(*names: str, primary: str) -> KeyRing:
    return KeyRing(primary=primary, keys={name: name.encode().ljust(KEY_BYTES, b"k") for name in names})


def write_ring(folder: Path, ring: KeyRing) -> None:
    """At once, as the kubelet replaces a mounted Secret."""
    (folder / "new").write_text(ring.encode())
    os.replace(folder / "new", folder / API_KEY_FILE)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    write_ring(tmp_path, ring_of("a", primary="a"))
    return tmp_path


async def read_answer(running, data: bytes) -> tuple[int, bytes, bytes]:
    reader, writer = await running.connect()
    writer.write(data)
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
    writer.close()
    return int(head.split()[1]), head, body


async def turn_away(worker, request, writer) -> None:
    """A worker that has other keys."""
    body = b'{"error":{"message":"no","type":"invalid_request_error","param":null,"code":null}}'
    writer.write(
        b"HTTP/1.1 401 Unauthorized\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    await writer.drain()


async def test_workers_are_shown_the_token_and_never_a_clients(start_gateway, start_worker, chat, keys: Path) -> None:
    worker = await start_worker()
    running = await start_gateway(worker, keys_path=str(keys))
    forged = "x-tandem-token: a.forged\r\nX-Tandem-Token: b\r\nx-tandem-prefill: 169.254.169.254:80\r\n"
    forged += "x-tandem-kv-source: 169.254.169.254:80\r\n"
    status, head, _ = await read_answer(running, chat(headers=forged))
    assert status == 200
    received = worker.received[0].headers
    assert received["x-tandem-token"] == bearer_token(ring_of("a", primary="a"))
    assert "x-tandem-prefill" not in received
    assert "x-tandem-kv-source" not in received
    assert b"x-tandem-token" not in head


async def test_without_keys_nothing_is_shown(start_gateway, start_worker, chat) -> None:
    worker = await start_worker()
    running = await start_gateway(worker)
    await read_answer(running, chat(headers="x-tandem-token: a.forged\r\n"))
    assert "x-tandem-token" not in worker.received[0].headers


async def test_a_rotation_is_followed_between_requests(
    start_gateway, start_worker, chat, keys: Path, until, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    worker = await start_worker()
    running = await start_gateway(worker, keys_path=str(keys))
    steps = [ring_of("a", "b", primary="a"), ring_of("a", "b", primary="b"), ring_of("b", primary="b")]
    for ring in steps:
        write_ring(keys, ring)
        shown = f"x-tandem-token: {bearer_token(ring)}\r\n".encode()
        await until(lambda shown=shown: running.gateway.token_line == shown)
        assert (await read_answer(running, chat()))[0] == 200
        assert worker.received[-1].headers["x-tandem-token"] == bearer_token(ring)
    (keys / API_KEY_FILE).unlink()
    await asyncio.sleep(1.2)
    assert (await read_answer(running, chat()))[0] == 200
    assert worker.received[-1].headers["x-tandem-token"] == bearer_token(steps[-1]), "the last good keys stay"
    assert not [key for ring in steps for key in ring.keys.values() if key.hex()[:24] in caplog.text]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_with_other_keys_costs_a_retry(
    start_gateway, start_worker, chat, keys: Path, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stale, good = await start_worker("d1", default=turn_away), await start_worker("d2")
    running = await start_gateway(stale, good, keys_path=str(keys))
    for _ in range(8):
        reader, writer = await running.connect()
        writer.write(chat(stream=stream))
        async with asyncio.timeout(60):
            assert b" 200 " in await reader.readline()
        writer.close()
    assert stale.received
    assert running.gateway.metrics.retries["unauthorized"] == len(stale.received)
    complaints = [record for record in caplog.records if "gateway's key" in record.getMessage()]
    assert [vars(record)["worker"] for record in complaints] == ["d1"], "once, however many requests met it"
    assert vars(complaints[0])["key"] == "a"


async def test_a_client_is_never_told_401_for_the_gateways_key(start_gateway, start_worker, chat, keys: Path) -> None:
    worker = await start_worker(default=turn_away)
    running = await start_gateway(worker, keys_path=str(keys), queue=GatewayQueue(ttl_seconds=0.4))
    status, head, body = await read_answer(running, chat())
    assert status == 503
    assert b"retry-after" in head.lower()
    assert "key" in json.loads(body)["error"]["message"]


async def test_a_401_before_the_body_is_read_is_understood(start_gateway, start_worker, keys: Path) -> None:
    """The worker closes on input that it has not read, which resets the connection."""
    refused = 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal refused
        head = await reader.readuntil(b"\r\n\r\n")
        refused += head.startswith(b"POST ")  # it is also asked what model it has
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    stale = Worker(
        name="d1", address=f"127.0.0.1:{server.sockets[0].getsockname()[1]}", role=Role.DECODE, revision="r1"
    )
    good = await start_worker("d2")
    running = await start_gateway(good, keys_path=str(keys))
    running.server.apply_workers([stale, good.worker])
    for turn in range(20):
        body = json.dumps({"model": "toy", "prompt": f"{turn:02}" * 3_000_000}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        assert (await read_answer(running, head + body))[0] == 200
        scheduler = running.gateway.scheduler
        scheduler.report(scheduler.endpoints["d1"], Outcome.ANSWERED, 0.0)
    assert refused
    assert running.gateway.metrics.retries == {"unauthorized": refused}
    server.close()


async def test_keys_that_arrive_within_the_grace_cost_no_request(start_gateway, start_worker, chat, keys: Path) -> None:
    worker = await start_worker(behaviours=[turn_away] * 3)
    running = await start_gateway(worker, keys_path=str(keys))
    assert (await read_answer(running, chat()))[0] == 200
    assert len(worker.received) == 4, "more often than a request that fails may be tried"


@pytest.mark.parametrize("content", [None, "{}", '{"primary": "a", "keys": {}}'])
def test_keys_that_cannot_be_read_end_the_start_with_a_sentence(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / API_KEY_FILE).write_text(content)
    ended = subprocess.run(
        [
            sys.executable, "-m", "tandem_gateway", "--host", "127.0.0.1", "--port", "0", "--metrics-port", "0",
            "--worker", "url=127.0.0.1:1", "--keys", str(tmp_path),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr.startswith("tandem-gateway: ")
    assert str(tmp_path / API_KEY_FILE) in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("peer", "here"),
    [
        (("127.0.0.1", 1), True), (("::1", 1, 0, 0), True), (("::ffff:127.0.0.1", 1, 0, 0), True),
        (("10.244.0.7", 1), False), (("::ffff:10.244.0.7", 1, 0, 0), False), (("fe80::1%eth0", 1, 0, 2), False),
        (None, False),
    ],
)  # fmt: skip
async def test_the_schedulers_view_is_for_the_loopback_interface(
    start_gateway, start_worker, peer: tuple[str, int] | None, here: bool
) -> None:
    assert is_loopback(peer) is here
    admin: Admin = (await start_gateway(await start_worker())).server.admin
    status, _, body = admin.answer(b"GET", "/debug/endpoints", from_here=here)
    assert status == (200 if here else 403)
    assert (b"pod-d" in body) is here
    for path in ("/metrics", "/healthz", "/readyz"):
        assert admin.answer(b"GET", path, from_here=here)[0] == 200
