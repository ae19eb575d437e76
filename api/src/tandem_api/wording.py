"""Sentences for people that name what may be many."""

from __future__ import annotations

from collections.abc import Sequence


def name_some(told: Sequence[str], most: int, between: str = ", ") -> str:
    """The first `most` of them, and how many more there are."""
    more = f" and {len(told) - most} more" if len(told) > most else ""
    return f"{between.join(told[:most])}{more}"
