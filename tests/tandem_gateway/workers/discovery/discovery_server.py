"""An API server that lists and watches one collection, and fails as a test tells it to."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.ports import free_port


class FakeApiServer:
    """Lists `items`; a watch sends what is put into `events`, and ends at None."""

    def __init__(self, path: str, **selector: str) -> None:
        self._path, self._selector = path, selector
        self.items: list[dict[str, Any]] = []
        self.version = "10"
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.requests: list[dict[str, str]] = []
        self.tokens: list[str] = []
        self.refuse: list[int] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port or free_port())
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    @property
    def lists(self) -> list[dict[str, str]]:
        return [query for query in self.requests if "watch" not in query]

    @property
    def watches(self) -> list[dict[str, str]]:
        return [query for query in self.requests if "watch" in query]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            target = urlsplit(head.split(" ")[1])
            assert target.path == self._path
            query = {key: values[0] for key, values in parse_qs(target.query).items()}
            assert query.items() >= self._selector.items()
            self.requests.append(query)
            self.tokens.append(head.split("Authorization: Bearer ")[1].split("\r\n")[0])
            if self.refuse:
                writer.write(b"HTTP/1.1 %d No\r\ncontent-length: 2\r\n\r\n{}" % self.refuse.pop(0))
            elif "watch" in query:
                await self._watch(writer)
            else:
                body = {"metadata": {"resourceVersion": self.version}, "items": self.items}
                data = json.dumps(body).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            writer.close()

    async def _watch(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while (item := await self.events.get()) is not None:
            line = json.dumps(item).encode() + b"\n"
            for part in (line[:20], line[20:]):  # an event need not fit one chunk
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                await writer.drain()
        writer.write(b"0\r\n\r\n")
