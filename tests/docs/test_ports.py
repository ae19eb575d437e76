"""A port that is given is nobody else's, and a server may have it at any time."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ports
from tests.mooncake.fixtures import try_own_network

LOOPBACKS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def connect(port: int) -> None:
    socket.create_connection(("127.0.0.1", port), 5).close()


def test_it_refuses_connections_until_somebody_listens_and_again_afterwards() -> None:
    port = ports.free_port()
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            connect(port)
        with socket.create_server(("127.0.0.1", port)):
            connect(port)


def test_servers_have_it_on_several_addresses() -> None:
    port = ports.free_port()
    for server in [socket.create_server((address, port)) for address in LOOPBACKS]:
        server.close()


def test_no_other_process_finds_it_free() -> None:
    """Nor does this one, by another way."""
    port = ports.free_port(neighbours=2)
    code = "import socket, sys; socket.socket().bind((sys.argv[1], int(sys.argv[2])))"
    for address, number in zip(LOOPBACKS, range(port, port + 3), strict=True):
        told = subprocess.run([sys.executable, "-c", code, address, str(number)], capture_output=True, check=False)
        assert b"Address already in use" in told.stderr


def test_the_kernel_gives_it_to_no_connection() -> None:
    """Where others are left, and where none is."""
    with try_own_network(required=True), contextlib.ExitStack() as opened:
        before = RANGE.read_text()
        try:
            RANGE.write_text("40000 40019")
        except OSError as error:
            pytest.skip(f"the range of ports cannot be set: {error}")
        opened.callback(RANGE.write_text, before)
        given = {ports.free_port() for _ in range(10)}
        address = opened.enter_context(socket.create_server(("127.0.0.1", 39999))).getsockname()
        callers = [opened.enter_context(socket.create_connection(address)) for _ in range(10)]
        assert given.isdisjoint(caller.getsockname()[1] for caller in callers)
        with pytest.raises(OSError, match="Cannot assign requested address"):
            socket.create_connection(address)
        with pytest.raises(OSError, match="Address already in use"):
            ports.free_port()


def test_the_oldest_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "MAX_HELD", 4)
    first, *others = (ports.free_port() for _ in range(5))
    assert len(ports._held) == 4
    with socket.socket() as anybody:
        anybody.bind(("0.0.0.0", first))
    for port in others:
        with socket.socket() as anybody, pytest.raises(OSError, match="in use"):
            anybody.bind(("0.0.0.0", port))


def test_where_there_are_none_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Taken(socket.socket):
        def bind(self, address: tuple[str, int]) -> None:  # type: ignore[override]
            if address[1]:
                raise OSError(98, "Address already in use")
            super().bind(address)

    monkeypatch.setattr(socket, "socket", Taken)
    with pytest.raises(OSError, match="8 ports in a row: not in 1000 tries"):
        ports.free_port(neighbours=7)
