"""Keeping a session where it was: rendezvous hashing, the same in every gateway process without any talk."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from tandem_gateway.scheduling.endpoint import Endpoint


def build_seed(key: bytes) -> int:
    """The number that stands for a session."""
    return xxh3_64_intdigest(key)


def weigh(endpoint: Endpoint, seed: int) -> int:
    """Rank of an endpoint for a session; the highest wins. When an endpoint leaves, only its own sessions move."""
    return xxh3_64_intdigest(endpoint.affinity_seed, seed)
