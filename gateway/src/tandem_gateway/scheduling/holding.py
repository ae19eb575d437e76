"""Records of which endpoints have a prompt's beginning in their cache, and when that stops being so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem_gateway.scheduling.endpoint import Endpoint

if TYPE_CHECKING:
    from tandem_gateway.scheduling.shared import SharedPrefix

MAX_HOLDERS = 4
"""Named by one entry, the newest."""


class Holding:
    """One endpoint's copy of a prompt: when it was last used, and how much its cache had taken in by then."""

    __slots__ = ("endpoint", "shared", "used_at", "written")

    def __init__(self, endpoint: Endpoint, now: float, shared: SharedPrefix | None = None) -> None:
        self.endpoint = endpoint
        self.used_at = now
        self.written = endpoint.kv_written
        self.shared = shared
        """The longest part of it that many prompts begin with, as far as was known then."""

    def alive(self) -> bool:
        """The worker still exists, has not said that it forgot, nor taken in a whole cache of other tokens since."""
        endpoint = self.endpoint
        return (
            endpoint.kv_written - self.written < endpoint.kv_tokens
            and self.used_at >= endpoint.evicted_until
            and not endpoint.gone
        )


Holders = tuple[Holding, ...]


def merge(holders: Holders, news: Holders, endpoints: tuple[Endpoint, ...]) -> Holders:
    """The newest of both; `endpoints` are those of `news`."""
    kept = [holding for holding in holders if holding.endpoint not in endpoints]
    return (*kept, *news)[-MAX_HOLDERS:]
