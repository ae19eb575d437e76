"""TLS of clients: the gateway's own connections beside the event loop's `ssl=`.

    python -m bench.gateway.tls --clients 1000

For each of both, one process with uvloop and a key of RSA 2,048. Clients connect and say nothing, then all begin a
handshake at once and stop there; others ask something in peace. Told are the process's memory per client, how many
clients the gateway counts, the longest turn of the event loop meanwhile, and how an answer after which the connection
ends is told from one that was cut off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop
from tandem_api.launch import GatewayTimeouts
from tandem_gateway.errors import RequestError
from tandem_gateway.http.budget import Budget
from tandem_gateway.http.connection import ClientConnection
from tandem_gateway.http.request import Request
from tandem_gateway.http.tls import Certificate, protocol_factory

WAYS = ("own", "loop")
REFUSED = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
PATIENCE_SECONDS = 8.0


class PlainHandler:
    """Answers everything with two bytes, within bounds of its own."""

    def __init__(self) -> None:
        self.timeouts = GatewayTimeouts(header_seconds=600.0)
        self.max_body_bytes = 1 << 20
        self.budget = Budget(1 << 30)
        self.bounds, self.counted = self, 0

    def on_connect(self, connection: ClientConnection) -> None:
        self.counted += 1

    def on_disconnect(self, connection: ClientConnection) -> None:
        self.counted -= 1

    def on_request(self, connection: ClientConnection, request: Request) -> None:
        connection.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        connection.finish(keep_alive=True)

    def on_refused(self, connection: ClientConnection, error: RequestError) -> None:
        connection.write(REFUSED)


async def serve(way: str, folder: str) -> None:
    """Print the port, then for each line of input memory, clients, and the longest turn since the line before."""
    loop, handler = asyncio.get_running_loop(), PlainHandler()
    certificate, longest = Certificate(folder, min_version="TLS1.2"), 0.0
    if way == "own":
        server = await loop.create_server(protocol_factory(handler, certificate), "127.0.0.1", 0, backlog=4096)
    else:
        server = await loop.create_server(
            lambda: ClientConnection(handler), "127.0.0.1", 0, ssl=certificate.context, backlog=4096
        )
    print(server.sockets[0].getsockname()[1], flush=True)

    async def watch() -> None:
        nonlocal longest
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - began)

    watching = loop.create_task(watch())
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        print(read_resident(), handler.counted, longest * 1000, flush=True)
        longest = 0.0
    watching.cancel()


def read_resident() -> int:
    """Memory of this process, in KB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4


def measure(way: str, folder: str, clients: int) -> None:
    """Print what one way costs, and what its clients see."""
    command = [sys.executable, "-m", "bench.gateway.tls", "--serve", way, "--folder", folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        told, said = server.stdin, server.stdout
        assert told is not None
        assert said is not None
        port = int(said.readline())

        def ask() -> tuple[float, ...]:
            print(file=told, flush=True)
            return tuple(map(float, said.readline().split()))

        ask()
        base, hello = ask()[0], write_hello()
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(clients)]
        time.sleep(0.5)
        resident, counted, _ = ask()
        print(f"{way:5} silent clients: {(resident - base) / clients:.1f} KB each, {counted:.0f} counted")
        for each in silent:
            each.sendall(hello)
        time.sleep(3)
        resident, _, longest = ask()
        print(f"{way:5} all begin at once: {(resident - base) / clients:.1f} KB each, longest turn {longest:.0f} ms")
        for each in silent:
            each.close()
        print(f"{way:5} an answer that ends the connection: {ask_and_end(port)}")
        print(f"{way:5} plain HTTP: {ask_plain(port)}")
        told.close()


def ask_and_end(port: int) -> str:
    """What a client sees after an answer with `connection: close`."""
    plain = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
    with make_context().wrap_socket(plain, suppress_ragged_eofs=False) as client:
        client.sendall(b"nonsense\r\n\r\n")
        began = time.monotonic()
        try:
            while client.recv(65536):
                pass
        except OSError as error:
            return f"{type(error).__name__} after {time.monotonic() - began:.1f} s"
        return f"an end that TLS announces after {time.monotonic() - began:.1f} s"


def ask_plain(port: int) -> str:
    """What a client is told that speaks no TLS."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        said = b""
        with contextlib.suppress(ConnectionResetError):
            said = client.recv(100)
        return said.partition(b"\r\n")[0].decode() or "nothing, the connection ends"


def write_hello() -> bytes:
    """What a client begins a handshake with."""
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        make_context().wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


def make_context() -> ssl.SSLContext:
    """A client that trusts everybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def main() -> None:
    parser = argparse.ArgumentParser(description="TLS of clients: our own connections beside the event loop's.")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options.serve, options.folder))
        return
    with tempfile.TemporaryDirectory() as folder:
        names = ["-keyout", f"{folder}/tls.key", "-out", f"{folder}/tls.crt"]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=bench", "-days", "2"]
        subprocess.run([*command, *names], check=True, capture_output=True)
        for way in WAYS:
            measure(way, folder, options.clients)


if __name__ == "__main__":
    main()
