"""Loads under way, and the clock that is looked at for them."""

from __future__ import annotations

import threading
import time

from tandem_worker.tiers.book import Load, LoadBook
from tandem_worker.tiers.stats import Counters


def test_who_looks_at_the_clock_misses_nothing_that_begins_meanwhile() -> None:
    """What has become due while it was asked for wakes it: it would sleep on for as long as it may."""
    book: LoadBook[Load] = LoadBook(Counters(4), lambda: 100.0)
    waker = threading.Thread(target=book.wake)

    def find_due() -> None:
        waker.start()  # another thread begins with something, and says so
        time.sleep(0.05)

    looking = threading.Thread(target=book.cut_late, args=(600.0, find_due), daemon=True)
    looking.start()
    looking.join(60)
    assert not looking.is_alive()
    waker.join(60)
