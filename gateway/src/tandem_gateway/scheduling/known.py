"""What is known of where a prompt is when a worker is chosen for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem_gateway.scheduling.endpoint import Endpoint
from tandem_gateway.scheduling.shared import SharedPrefix
from tandem_gateway.scheduling.storing import Store


@dataclass(slots=True)
class Known:
    """What is known of where a prompt is."""

    cached: dict[Endpoint, int]
    """Who has some of it, in estimated tokens."""
    shared: SharedPrefix | None
    """The longest part of it that many prompts begin with."""
    shared_tokens: int
    """Those that whoever has that has of it."""
    stored: Mapping[Store, int]
    """Tokens of it in stores."""
    unseen: float
    """The share of the rest that a session's home is taken to have all the same."""

    def count_cached(self, endpoint: Endpoint) -> int:
        """Tokens of the prompt that an endpoint probably has."""
        tokens = self.cached.get(endpoint)
        if tokens is None:
            return self.shared_tokens if self.shared is not None and self.shared.has(endpoint) else 0
        return tokens


NOTHING = Known({}, None, 0, {}, 0.0)
"""What is known of short prompts, mostly. Nobody changes it."""
