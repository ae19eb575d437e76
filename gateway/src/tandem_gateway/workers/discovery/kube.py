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

import httptools
import orjson

from tandem_gateway.errors import ConfigError, DiscoveryError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT_SECONDS = 10.0
LIST_SECONDS = 30.0
READ_BYTES = 64 * 1024
MAX_LINE_BYTES = 16 * 1024 * 1024
"""A watch event is a whole Pod, which etcd keeps under 1.5 MiB."""


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
    """An answer whose body is read as it comes. The callbacks named `on_*` are httptools'."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        self._reader = reader
        self._writer = writer
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._complete = False

    async def read_head(self) -> None:
        """Sets `status`."""
        while not self.status:
            await self._read_on()

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([part async for part in self.parts()])

    async def parts(self, silence: float | None = None) -> AsyncIterator[bytes]:
        """The body in pieces of any size.

        Raises:
            TimeoutError: nothing came for `silence` seconds.
        """
        while True:
            if self._body:
                part, self._body = b"".join(self._body), []
                yield part
            elif self._complete:
                return
            else:
                async with asyncio.timeout(silence):
                    await self._read_on()

    async def lines(self, silence: float) -> AsyncIterator[bytes]:
        pending = b""
        async for part in self.parts(silence):
            *complete, pending = (pending + part).split(b"\n")
            if len(pending) > MAX_LINE_BYTES:
                raise DiscoveryError(f"the API server sent more than {MAX_LINE_BYTES} bytes without a line feed")
            for line in complete:
                if line:
                    yield line

    def close(self) -> None:
        self._writer.close()

    async def _read_on(self) -> None:
        data = await self._reader.read(READ_BYTES)
        if not data:
            raise ConnectionResetError("the API server closed the connection in the middle of its answer")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise DiscoveryError(f"the API server sent something that is not HTTP: {error}") from error

    # httptools

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._complete = True


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
        reader, writer = await asyncio.open_connection(server.host, server.port, ssl=context)
    response = Response(reader, writer)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            writer.write(_build_head(server, f"{path}?{urlencode(query)}"))
            await writer.drain()
            await response.read_head()
    except BaseException:
        writer.close()
        raise
    return response


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
