"""By what an order moves: what was asked for, what both ends have, what is fastest."""

from __future__ import annotations

import pytest
from tandem_api.launch import KVConfig, WantedKVTransport
from tandem_worker.transfer import transports as source
from tandem_worker.transfer.choice import MEASURED_BYTES, Choice, Measured, Policy, choose, find_obstacle
from tandem_worker.transfer.contract import Identity, Offer
from tandem_worker.transfer.transports import Transports, open_transports

HAS, FAST = (Offer("Mooncake", "tcp"),), (Offer("Mooncake", "rdma"),)
LACKS = (Offer("Mooncake", "tcp", "it is not installed"),)


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (HAS, HAS, None),
        (LACKS, HAS, "this worker: it is not installed"),
        (HAS, LACKS, "prefill-0: it is not installed"),
        (HAS, (), "prefill-0 does not offer Mooncake"),
        ((), HAS, "this worker does not offer Mooncake"),
        (HAS, FAST, "Mooncake goes over tcp here and over rdma at prefill-0"),
    ],
)
def test_what_stands_in_the_way_is_named(ours: tuple[Offer, ...], theirs: tuple[Offer, ...], says: str | None) -> None:
    assert find_obstacle(ours, theirs, "prefill-0") == says


def rates(mooncake: float | None, tcp: float | None, num_bytes: int = MEASURED_BYTES) -> dict[str, Measured]:
    known = {"Mooncake": mooncake, "TCP": tcp}
    return {name: Measured(num_bytes, rate) for name, rate in known.items() if rate is not None}


@pytest.mark.parametrize(
    ("wanted", "allow", "obstacle", "measured", "choice"),
    [
        ("TCP", False, None, rates(9, 1), Choice("TCP")),
        ("TCP", False, "none", {}, Choice("TCP")),
        ("Mooncake", False, None, rates(1, 9), Choice("Mooncake")),
        ("Mooncake", False, "it is gone", {}, Choice(None, "it is gone")),
        ("Mooncake", True, "it is gone", {}, Choice("TCP", "it is gone")),
        ("Mooncake", True, None, {}, Choice("Mooncake")),
        ("Auto", False, "it is gone", {}, Choice("TCP")),
        ("Auto", False, None, {}, Choice("Mooncake")),
        ("Auto", False, None, rates(2, None), Choice("TCP")),
        ("Auto", False, None, rates(2, None, MEASURED_BYTES - 1), Choice("Mooncake")),
        ("Auto", False, None, rates(2, 1), Choice("Mooncake")),
        ("Auto", False, None, rates(1, 2), Choice("TCP")),
        ("Auto", False, "it is gone", rates(2, 1), Choice("TCP")),
    ],
)
def test_the_choice(
    wanted: WantedKVTransport, allow: bool, obstacle: str | None, measured: dict[str, Measured], choice: Choice
) -> None:
    assert choose(Policy(wanted=wanted, allow_fallback=allow), obstacle, measured) == choice


def test_auto_measures_each_and_keeps_the_fastest() -> None:
    transports, taken = Transports(Policy(), FAST), list[str | None]()
    for _ in range(6):
        choice = transports.choose(None).transport
        assert choice is not None
        taken.append(choice)
        transports.note_moved(choice, MEASURED_BYTES, 0.01 if choice == "Mooncake" else 0.02)
    assert taken == ["Mooncake", "TCP", "Mooncake", "Mooncake", "Mooncake", "Mooncake"]
    assert transports.last == "Mooncake"


def test_a_peer_that_was_not_reached_is_left_alone_for_a_while() -> None:
    now = [0.0]
    transports = Transports(Policy(wanted="Mooncake"), HAS, clock=lambda: now[0])
    peer = Identity(worker="prefill-0", revision="r", model_digest="d", layout="l", offers=HAS)
    assert transports.find_obstacle(peer, "p:1") is None
    transports.note_unreached("p:1", "no way")
    assert transports.find_obstacle(peer, "p:1") == "no way"
    assert transports.find_obstacle(peer, "p:2") is None
    now[0] = 31.0
    assert transports.find_obstacle(peer, "p:1") is None


def test_what_was_fallen_back_from_is_told_until_it_works_again() -> None:
    transports = Transports(Policy(wanted="Mooncake", allow_fallback=True), HAS)
    assert (transports.fallback, transports.last) == (None, None)
    transports.choose("it is gone")
    assert (transports.fallback, transports.last) == ("it is gone", "TCP")
    transports.choose(None)
    assert (transports.fallback, transports.last) == (None, "Mooncake")


@pytest.mark.parametrize("measures", [False, True])
def test_nothing_is_offered_that_nobody_asked_for_and_no_device_makes_faster(
    measures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "find_protocol", lambda: "tcp")
    opened = open_transports(KVConfig(measure_transports=measures), "127.0.0.1")
    assert (opened.offers, opened.fallback) == ((), None)


def test_what_is_asked_for_and_missing_is_said_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem_worker.transfer.mooncake import engine

    monkeypatch.setattr(engine, "find_mooncake_obstacle", lambda: "Mooncake is not installed")
    opened = open_transports(KVConfig(transport="Mooncake"), "127.0.0.1")
    assert [offer.obstacle for offer in opened.offers] == ["Mooncake is not installed"]
    assert opened.fallback == "this worker: Mooncake is not installed"
    assert not opened.has_mooncake
