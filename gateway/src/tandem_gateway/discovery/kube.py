"""A thin asyncio client for the two things discovery asks of the Kubernetes API server: list, and watch.

One connection per request: lists and watches are rare and long. Everything that can rotate (token, CA) is read again
for every connection.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

import orjson

from tandem_gateway.errors import ConfigError, DiscoveryError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT_SECONDS = 10.0
LIST_SECONDS = 30.0
STREAM_LIMIT = 16 * 1024 * 1024
"""Bytes of one line: a watch event is a whole Pod, which etcd keeps under 1.5 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiServer:
    """How to reach and trust the API server."""

    host: str
    port: int
    ca: Path | None
    """None speaks plain HTTP, which only a proxy on the same machine does."""
    token: Path | None

    @classmethod
    def in_cluster(cls, folder: Path = SERVICE_ACCOUNT) -> ApiServer:
        """From what the kubelet gives every pod.

        Raises:
            ConfigError: this process does not run in a pod.
        """
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError("not inside a cluster: name workers with --worker or --workers-file")
        return cls(host=host, port=int(port), ca=folder / "ca.crt", token=folder / "token")


class Response:
    """An answer whose body is read as it comes."""

    def __init__(
        self, status: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int | None
    ) -> None:
        self.status = status
        self._reader = reader
        self._writer = writer
        self._length = length

    async def read(self) -> bytes:
        """The whole body."""
        if self._length is not None:
            return await self._reader.readexactly(self._length)
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self, silence: float | None = None) -> AsyncIterator[bytes]:
        """Body pieces of a chunked answer.

        Raises:
            TimeoutError: nothing came for `silence` seconds.
        """
        while True:
            async with asyncio.timeout(silence):
                line = await self._reader.readuntil(b"\r\n")
                size = int(line.split(b";")[0], 16)
                data = (await self._reader.readexactly(size + 2))[:-2]
            if not size:
                return
            yield data

    async def lines(self, silence: float) -> AsyncIterator[bytes]:
        pending = b""
        async for chunk in self.chunks(silence):
            *complete, pending = (pending + chunk).split(b"\n")
            for line in complete:
                if line:
                    yield line

    def close(self) -> None:
        self._writer.close()


async def get(server: ApiServer, path: str, query: dict[str, str]) -> Response:
    """Send a GET and read the answer's header.

    Raises:
        DiscoveryError: the answer is not HTTP as expected.
        OSError: no connection. TimeoutError (a subclass): none in time.
    """
    context = None
    if server.ca is not None:
        context = ssl.create_default_context(cafile=str(server.ca))
    async with asyncio.timeout(CONNECT_SECONDS):
        reader, writer = await asyncio.open_connection(server.host, server.port, ssl=context, limit=STREAM_LIMIT)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            writer.write(_build_head(server, f"{path}?{urlencode(query)}"))
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
        status, length = _parse_head(head)
    except BaseException:
        writer.close()
        raise
    return Response(status, reader, writer, length)


def _build_head(server: ApiServer, target: str) -> bytes:
    host = f"[{server.host}]" if ":" in server.host else server.host
    lines = [
        f"GET {target} HTTP/1.1",
        f"Host: {host}:{server.port}",
        "Accept: application/json",
        "User-Agent: tandem-gateway",
    ]
    if server.token is not None:
        lines.append(f"Authorization: Bearer {server.token.read_text().strip()}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _parse_head(head: bytes) -> tuple[int, int | None]:
    status_line, *lines = head.decode("latin-1").split("\r\n")
    parts = status_line.split(" ", 2)
    if len(parts) < 2 or not parts[1].isdigit():
        raise DiscoveryError(f"the API server sent {status_line[:80]!r}")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = fields.get("content-length")
    return int(parts[1]), int(length) if length is not None else None


def parse_object(data: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        DiscoveryError: `data` is something else.
    """
    try:
        parsed: Any = orjson.loads(data)
    except ValueError as error:
        raise DiscoveryError("the API server sent something that is not JSON") from error
    if not isinstance(parsed, dict):
        raise DiscoveryError("the API server sent JSON that is not an object")
    return cast(dict[str, Any], parsed)
