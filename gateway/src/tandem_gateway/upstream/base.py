"""The contract between an exchange and the link that carries it to a worker.

An exchange hands over one request and is called back as the answer arrives. Exactly one of `on_upstream_end` and
`on_upstream_failure` ends it; after that, and after `Call.cancel`, there are no more callbacks. How many connections
carry the calls is not visible here.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from tandem_gateway.http.response import ResponseHead


class Failure(Enum):
    """Why a call ended without a complete answer."""

    CONNECT = "connect"
    """The worker did not accept the connection."""
    LOCAL = "local"
    """This process could not even try, for want of descriptors or ports: says nothing about the worker."""
    RESET = "reset"
    """The connection ended before the answer did."""
    STALE = "stale"
    """A connection that had been idle ended under it: by itself, or because the worker died of it."""
    PROTOCOL = "protocol"
    """The worker sent something that is not HTTP."""
    HELPER = "helper"
    """Another worker that this one cannot do without failed: says nothing about this one."""


class Sink(Protocol):
    """The side of an exchange that a link calls."""

    __slots__ = ()

    def on_upstream_head(self, head: ResponseHead) -> None: ...

    def on_upstream_body(self, data: bytes, *, final: bool) -> None:
        """`final` tells that `on_upstream_end` follows at once, so that both can leave in one write."""
        ...

    def on_upstream_end(self) -> None: ...

    def on_upstream_failure(self, failure: Failure, detail: str) -> None: ...


class Call(Protocol):
    """One request on its way."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the answer, kept because the client is slow."""
        ...

    @property
    def resent(self) -> bool:
        """The worker was sent the request twice: the first time the connection ended without a word."""
        ...

    def cancel(self) -> None:
        """Give up: the worker learns at once. No callback follows."""
        ...

    def pause_reading(self) -> None:
        """Stop taking the answer from the worker: the client is slow."""
        ...

    def resume_reading(self) -> None: ...


class Link(Protocol):
    """Carries calls to one worker."""

    def start(
        self,
        sink: Sink,
        head: bytes,
        body: bytes,
        *,
        fresh: bool = False,
        elsewhere: Callable[[], bool] | None = None,
    ) -> Call:
        """Send a request. `head` is a complete HTTP/1.1 header including the blank line. `fresh`: it is sent at most
        once, and over no connection of which cannot be told whether it is the request that ends it. `elsewhere`:
        whether another worker can have it; then it is not sent to this one twice, but fails as STALE."""
        ...

    def reap(self, now: float) -> None:
        """Close what was idle for too long."""
        ...

    def close(self) -> None:
        """Close idle connections; calls in flight finish."""
        ...
