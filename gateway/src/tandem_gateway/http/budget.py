"""One sum over all connections: what clients and their answers make the gateway hold, and whose it is.

No source, which is a client's address, may have all: the last quarter is for others, the last eighth where it is small
connections that want it. Where there is no room, the newest
connection of whoever holds most gives up what it holds, unless that is who wants more.
"""

from __future__ import annotations

from typing import Protocol

from tandem_gateway.http.fairness import Sources

FREE_BYTES = 64 * 1024
"""A connection that holds no more is small: large ones leave the last eighth to those."""
UNCOUNTED_BYTES = 4 * 1024
"""Bytes of a connection that are not counted: as much as it costs by itself, and bounded with the number of
connections."""
MOST_AT_ONCE = 64
"""Connections that give up what they hold for one that wants more."""


class Holder(Protocol):
    """A connection, as what it holds sees it."""

    @property
    def source(self) -> str:
        """Whom its client belongs to."""
        ...

    def give_up(self) -> None:
        """Hold nothing any more."""
        ...


class Budget:
    """Bytes held for clients, of at most `limit`."""

    __slots__ = ("limit", "sources", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.sources: Sources[Share] = Sources()

    def has_room(self, share: Share) -> bool:
        """Whether what is held now is within what may be, by all and by the source of `share`."""
        limit = self.limit
        eighth, own = limit // 8, self.sources.used(share.holder.source)
        if share.charged > FREE_BYTES:
            return self.used <= limit - eighth and own <= limit - 2 * eighth
        return self.used <= limit and own <= limit - eighth

    def make_room(self, share: Share) -> bool:
        """Let others give up what they hold for `share`. False: it has none."""
        source = share.holder.source
        for _ in range(MOST_AT_ONCE):
            if self.has_room(share):
                return True
            excess = self.sources.find_excess(source)
            if excess is None:
                return False
            newest = next(self.sources.newest(excess))
            newest.hold(0)
            newest.holder.give_up()
        return self.has_room(share)


class Share:
    """What one connection holds of a budget."""

    __slots__ = ("_budget", "charged", "holder")

    def __init__(self, budget: Budget, holder: Holder) -> None:
        self._budget = budget
        self.holder = holder
        self.charged = 0

    def hold(self, size: int) -> bool:
        """It now holds `size` bytes. False when that is more than there is room for; they are counted all the same."""
        if size <= UNCOUNTED_BYTES:
            size = 0
        budget, grown = self._budget, size - self.charged
        if not grown:
            return True
        budget.used += grown
        if size:
            budget.sources.add(self.holder.source, self, grown)
        else:
            budget.sources.remove(self.holder.source, self, self.charged)
        self.charged = size
        return grown < 0 or budget.has_room(self) or budget.make_room(self)
