"""What an adapter of another engine is given and what it offers. An exchange sees one `Call`, however many workers it
takes to carry it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tandem_api.launch import GatewayTimeouts
from tandem_api.names import Role

from tandem_gateway.requests.prompt import Inquiry
from tandem_gateway.scheduling import Choice, Endpoint, Scheduler, Worker
from tandem_gateway.upstream.base import Call, Link, Sink

Fields = dict[str, Any]
"""A JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One attempt at one request."""

    method: bytes
    path: str
    headers: Mapping[bytes, bytes]
    """Header fields of the client's request."""
    body: bytes
    request_id: bytes
    choice: Choice
    """Its prefill endpoints that fail are taken out of it, so that it tells in the end who did the work."""
    fresh: bool = False
    """As for `Link.start`."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """What kinds of workers there are."""

    others: tuple[str, ...] = ()
    """Engines of other projects, by name."""
    mixed: bool = False
    """Workers of several engines serve side by side: no engine may judge a request that another one may get."""
    pairs: bool = False
    """Decode workers have prefill workers beside them."""

    @staticmethod
    def of(workers: Iterable[Worker]) -> Kinds:
        workers = tuple(workers)
        engines = {worker.engine for worker in workers}
        return Kinds(
            others=tuple(sorted(engines - {"Tandem"})),
            mixed=len(engines) > 1,
            pairs=any(worker.role is Role.DECODE for worker in workers),
        )


class Host(Protocol):
    """The gateway, as adapters see it."""

    scheduler: Scheduler
    timeouts: GatewayTimeouts
    served_names: tuple[str, ...]
    kinds: Kinds

    def link(self, endpoint: Endpoint) -> Link: ...

    def on_prefill_lost(self, endpoint: Endpoint, reason: str) -> None:
        """A prefill worker did not do its part; another one is asked, or none."""
        ...


class Engine(Protocol):
    """Chosen by what the decode worker of a pair runs."""

    def admit(self, path: str, body: bytes, inquiry: Inquiry) -> None:
        """Judge a request before it is sent, and mark one that needs no prefill worker as `local`.

        Raises:
            RequestError: this engine does not serve it.
        """
        ...

    def start(self, sink: Sink, order: Order) -> Call:
        """Send it.

        Raises:
            RequestError: it cannot be put into words for this engine. Nothing was sent.
        """
        ...
