"""One thread owns a connection and sleeps; others wake it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence

import pytest
from tandem_worker.transfer.channel import Channel, Waker
from tandem_worker.transfer.errors import TransferError


class Owner:
    """Satisfies `Events`: counts."""

    def __init__(self) -> None:
        self.posted = self.turns = 0

    def on_posted(self) -> None:
        self.posted += 1

    def on_tick(self, now: float) -> float | None:
        self.turns += 1
        return 0.05

    def next_frame(self) -> Sequence[memoryview | bytes] | None:
        return None


def test_a_wake_that_the_owner_meets_half_way_lets_it_sleep_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, then written. An owner that cleared in between would find its descriptor readable for ever."""
    mine, theirs = socket.socketpair()
    waker, owner = Waker(), Owner()
    write = os.eventfd_write

    def clear_first(fd: int, value: int) -> None:
        waker.clear()
        write(fd, value)

    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd_write", clear_first)
        waker.wake()
    channel = Channel(mine, waker, owner)

    def own() -> None:
        with pytest.raises(TransferError):
            channel.read_header(8, 1.0)

    thread = threading.Thread(target=own)
    thread.start()
    thread.join(0.5)
    turns = owner.turns
    theirs.close()
    thread.join(60)
    mine.close()
    waker.close()
    assert owner.posted == 1
    assert turns < 50
