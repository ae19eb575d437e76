"""The metrics port: probes, Prometheus text and a look at the scheduler. Not on the data path, so kept plain.

Probes and metrics are for whoever reaches the port. The scheduler's view names workers and their addresses, and is for
people who may forward a port into the pod: those arrive over the loopback interface.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address

import orjson

from tandem_gateway.gateway import Gateway

_READ_SECONDS = 5.0


class Admin:
    """`ready` says whether discovery has spoken once; draining makes the process unready before it stops."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.discovered = False

    @property
    def ready(self) -> bool:
        return self.discovered and not self._gateway.draining

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection: probes and scrapes are rare."""
        try:
            async with asyncio.timeout(_READ_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                status, kind, body = self.answer(head, from_here=_is_loopback(writer))
                phrase = HTTPStatus(status).phrase
                writer.write(
                    f"HTTP/1.1 {status} {phrase}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n"
                    "connection: close\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a prober that went away or sent no request: nobody is left to be told
        finally:
            writer.close()

    def answer(self, head: bytes, *, from_here: bool) -> tuple[int, str, bytes]:
        """Status, content type and body for a request header. `from_here`: it came over the loopback interface."""
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method != b"GET":
            return 405, "text/plain", b"only GET\n"
        if path == b"/metrics":
            return 200, "text/plain; version=0.0.4; charset=utf-8", self._gateway.render_metrics().encode()
        if path == b"/healthz":
            return 200, "text/plain", b"ok\n"
        if path == b"/readyz":
            return (200, "text/plain", b"ok\n") if self.ready else (503, "text/plain", self._unready())
        if path == b"/debug/endpoints":
            if not from_here:
                return 403, "text/plain", b"over the loopback interface only: kubectl port-forward, then localhost\n"
            endpoints = self._gateway.describe_endpoints()
            return 200, "application/json", orjson.dumps({"endpoints": endpoints}, option=orjson.OPT_INDENT_2)
        return 404, "text/plain", b"try /metrics, /healthz, /readyz or /debug/endpoints\n"

    def _unready(self) -> bytes:
        return b"draining\n" if self._gateway.draining else b"the workers have not been listed yet\n"


def _is_loopback(writer: asyncio.StreamWriter) -> bool:
    peer = writer.get_extra_info("peername")
    if not peer:
        return False  # it has gone already
    address = ip_address(peer[0].partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
