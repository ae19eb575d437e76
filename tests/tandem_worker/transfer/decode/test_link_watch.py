"""When a link gives a peer up: never for time in which its own process did not run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tandem_api.keys import open_ring
from tandem_worker.host.vitals import Vitals
from tandem_worker.transfer.blocks import BlockSpace
from tandem_worker.transfer.contract import Identity, TransferTimeouts
from tandem_worker.transfer.decode.attempt import Attempt, LinkListener
from tandem_worker.transfer.decode.link import PrefillLink
from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.transports import Transports

TIMEOUTS = TransferTimeouts()


@pytest.fixture
def link(kit: SimpleNamespace) -> Any:
    """With an order at a peer from which nothing comes; only its clock runs."""
    space = BlockSpace(kit.build_cache())
    identity = Identity(worker="decode-0", revision="r", model_digest="d", layout=space.layout.fingerprint)
    link: Any = PrefillLink(
        "peer:1", identity=identity, space=space, listener=LinkListener(), verify=True, timeouts=TIMEOUTS,
        ring=open_ring, vitals=Vitals(), transports=Transports(),
    )  # fmt: skip
    link._channel = SimpleNamespace(last_received=0.0, queue=lambda *buffers: None)
    link._active = {7: Attempt(7, "a", (1,), 0, None)}
    return link


def tick(link: Any, start: float, end: float) -> float:
    """As the owner's thread does; returns the time after `end`."""
    now = start
    while now <= end:
        now += max(link.on_tick(now), 0.01)
    return now


def test_a_silent_peer_is_given_up_in_time(link: Any) -> None:
    with pytest.raises(TransferError, match="silent for 5 s"):
        tick(link, 0.0, TIMEOUTS.silence + 2 * TIMEOUTS.heartbeat)


def test_a_process_that_stood_still_does_not_blame_its_peer(link: Any) -> None:
    now = tick(link, 0.0, 3.0)
    now = tick(link, now + 60.0, now + 60.0 + TIMEOUTS.silence - 1.0)
    with pytest.raises(TransferError, match="silent for 5 s"):
        tick(link, now, now + 2 * TIMEOUTS.heartbeat)


def test_idle_time_is_no_silence(link: Any) -> None:
    orders, link._active = link._active, {}
    assert link.on_tick(0.0) is None
    link._active = orders
    tick(link, 100.0, 100.0 + TIMEOUTS.silence - 1.0)
