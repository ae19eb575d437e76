"""One sum over all connections: what clients and their answers make the gateway hold."""

from __future__ import annotations

FREE_BYTES = 64 * 1024
"""Every connection may hold this much, uncounted, so that large requests never shut out small ones."""


class Budget:
    """Bytes held for clients, of at most `limit`. Connections are bounded in number, so their free bytes are, too."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class Share:
    """What one connection holds of a budget."""

    __slots__ = ("_budget", "charged")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.charged = 0

    def hold(self, size: int) -> bool:
        """It now holds `size` bytes. False when that is more than there is room for; they are counted all the same."""
        if size <= FREE_BYTES:
            size = 0
        budget = self._budget
        grown = size > self.charged
        budget.used += size - self.charged
        self.charged = size
        return not grown or budget.used <= budget.limit
