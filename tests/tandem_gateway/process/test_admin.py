"""The metrics port, read as strictly as the clients' one."""

from __future__ import annotations

import asyncio

import pytest
from tandem_gateway.process import admin as admin_module


async def ask(connect, port: int, data: bytes) -> bytes:
    reader, writer = await connect(port)
    writer.write(data)
    return await reader.read()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"200"),
        (b"GET /healthz?verbose HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"200"),
        (b"GET /fleet HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"200"),
        (b"GET /debug/endpoints HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"200"),
        (b"POST /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", b"405"),
        (b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"404"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 40_000 + b"\r\n\r\n", b"431"),
        (b"POST /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n", b"413"),
    ],
)
async def test_answers(start_gateway, start_worker, connect, data: bytes, status: bytes) -> None:
    running = await start_gateway(await start_worker())
    assert (await ask(connect, running.server.metrics_port, data)).startswith(b"HTTP/1.1 " + status)


async def test_a_scraper_may_keep_its_connection(start_gateway, start_worker, connect) -> None:
    running = await start_gateway(await start_worker())
    reader, writer = await connect(running.server.metrics_port)
    for _ in range(3):
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"tandem_gateway" in await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))


async def test_connections_are_limited(start_gateway, start_worker, connect, until, monkeypatch) -> None:
    monkeypatch.setattr(admin_module, "MAX_CONNECTIONS", 2)
    running = await start_gateway(await start_worker())
    idle = [await connect(running.server.metrics_port) for _ in range(2)]
    await until(lambda: len(running.server.admin._connections) == 2)
    probe = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    assert (await ask(connect, running.server.metrics_port, probe)).startswith(b"HTTP/1.1 200"), "a probe has room"
    assert not await idle[0][0].read(), "and the oldest of who has most makes it"
    await until(lambda: len(running.server.admin._connections) <= 2)


async def test_probes_are_answered_while_one_address_takes_all_connections(
    start_gateway, start_worker, connect, until
) -> None:
    running = await start_gateway(await start_worker())
    port = running.server.metrics_port
    idle = [await connect(port) for _ in range(2 * admin_module.MAX_CONNECTIONS)]
    await until(lambda: len(running.server.admin._connections) == admin_module.MAX_CONNECTIONS)
    probe = b"GET /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
    idle += [await connect(port) for _ in range(admin_module.MAX_CONNECTIONS)]
    writer.write(probe)
    assert (await reader.read()).startswith(b"HTTP/1.1 200"), "of the other address none went"
    writer.close()
    for _ in range(20):
        assert (await ask(connect, port, probe)).startswith(b"HTTP/1.1 200")


async def test_a_gateway_is_ready_once_it_has_asked_for_what_it_follows(start_gateway, start_worker) -> None:
    """Else one that starts in the middle of a change of name would refuse the name from before."""
    server = (await start_gateway(await start_worker())).server
    asked = False
    admin = admin_module.Admin(server.gateway, server.reports, knows_routing=lambda: asked)
    admin.discovered = True
    assert admin.answer(b"GET", "/readyz", from_here=True)[::2] == (503, b"the model has not been read yet\n")
    asked = True
    assert admin.answer(b"GET", "/readyz", from_here=True)[0] == 200


@pytest.mark.parametrize(
    ("peer", "here"),
    [
        (("127.0.0.1", 5), True), (("::1", 5, 0, 0), True), (("::ffff:127.0.0.1", 5, 0, 0), True),
        (("127.0.0.6", 5), False), (("::ffff:127.0.0.6", 5, 0, 0), False), (("127.1.2.3", 5), False),
        (("10.0.0.1", 5), False), (("fe80::1%eth0", 5, 0, 2), False), (None, False),
    ],
)  # fmt: skip
def test_who_comes_by_a_forwarded_port(peer, here: bool) -> None:
    """Istio's proxy passes on what others send from 127.0.0.6."""
    assert admin_module.is_loopback(peer) is here
