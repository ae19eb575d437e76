"""Progress lines with the seconds each step took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    print(f"  {text}", flush=True)


@contextmanager
def step(text: str, *, quiet_below: float = 0.0) -> Iterator[None]:
    """Print `text` and its duration once the block is done; steps shorter than `quiet_below` seconds say nothing."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    if took >= quiet_below:
        say(f"{text} … {took:.1f} s")
