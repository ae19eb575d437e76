"""The garbage collector while a process starts: it looks at what libraries make again and again, and finds nothing.

Importing torch takes a seventh less without. Every process that calls `hold_collector` calls `release_collector` once
it has what stays.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def hold_collector() -> None:
    """Collect no cycles from here on."""
    gc.disable()


def release_collector() -> None:
    """Everything that stays is there: collect cycles from here on, of what comes after."""
    # Looking at every object there is takes 0.3 s for those of the libraries alone, and all streams wait: so they are
    # set aside without a look. The some thousand cycles that a start leaves behind stay with them.
    gc.freeze()
    gc.enable()
    # The collector looks at old objects again when a quarter as many have become old since: a quarter of what is left
    # now, which is nothing. Ended connections are cycles that hold what they had read.
    gc.collect()


@contextmanager
def paused_collector() -> Iterator[None]:
    """Collect no cycles meanwhile, on any thread."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
