"""What was asked for and cannot be had: refused, or replaced where that is allowed, and told either way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tandem_worker.transfer.choice import MOONCAKE, Policy
from tandem_worker.transfer.contract import Offer
from tandem_worker.transfer.mooncake.departure import StationPool
from tandem_worker.transfer.mooncake.landing import LandingPool
from tandem_worker.transfer.transports import Transports

from tests.tandem_worker.transfer.engines import begin_engine, build_transports

MISSING = (Offer(MOONCAKE, "tcp", "Mooncake is not installed"),)


def lack(*, allow_fallback: bool) -> Transports:
    return Transports(Policy(wanted="Mooncake", allow_fallback=allow_fallback), MISSING)


@pytest.mark.parametrize("allow", [False, True], ids=["refused", "allowed"])
@pytest.mark.parametrize("end", ["decode", "prefill"])
def test_an_end_that_lacks_it_is_named(kit: SimpleNamespace, end: str, allow: bool) -> None:
    pair = kit.Pair(
        transports=[
            lack(allow_fallback=allow) if end == each else build_transports("Mooncake", allow_fallback=allow)
            for each in ("decode", "prefill")
        ]
    )
    try:
        pair.client.start(pair.order(pair.serve()))
        kit.eventually(lambda: bool(pair.decode.done or pair.decode.failed))
        who = "this worker" if end == "decode" else "prefill-0"
        assert pair.client.stats().fallback == f"{who}: Mooncake is not installed"
        if allow:
            assert pair.arrived(0, 8)
            assert (pair.client.stats().transport, list(pair.client.stats().transports)) == ("TCP", ["TCP"])
        else:
            reason = f"Mooncake is asked for (spec.kv.transport), and {who}: Mooncake is not installed"
            assert reason in pair.decode.failed[0][2]
            assert pair.untouched
            assert pair.prefill.orders == {}
            assert pair.client.stats().transport is None
    finally:
        pair.close()


def test_the_end_that_lacks_it_says_so_before_anybody_asks() -> None:
    assert lack(allow_fallback=False).fallback == "this worker: Mooncake is not installed"


@pytest.mark.parametrize("end", ["decode", "prefill"])
def test_an_end_whose_engines_are_all_in_use_says_so_and_tcp_may_stand_in(kit: SimpleNamespace, end: str) -> None:
    both = [build_transports("Mooncake", allow_fallback=True) for _ in range(2)]
    options = {"landings": LandingPool(begin_engine, most=0 if end == "decode" else 9)}
    options |= {"stations": StationPool(begin_engine, most=0 if end == "prefill" else 9)}
    both[0 if end == "decode" else 1] = Transports(both[0].policy, both[0].offers, **options)
    pair = kit.Pair(transports=both)
    try:
        pair.client.start(pair.order(pair.serve()))
        kit.eventually(lambda: bool(pair.decode.done or pair.decode.failed))
        assert pair.arrived(0, 8)
        assert "in use" in (pair.client.stats().fallback or "")
    finally:
        pair.close()
