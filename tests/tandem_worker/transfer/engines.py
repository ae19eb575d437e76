"""Both ends' transports in tests. Mooncake's engines are never destroyed: all tests of a process share some."""

from __future__ import annotations

import functools

from tandem_worker.transfer.choice import MOONCAKE, Policy
from tandem_worker.transfer.contract import Offer
from tandem_worker.transfer.mooncake.departure import StationPool
from tandem_worker.transfer.mooncake.engine import Engine
from tandem_worker.transfer.mooncake.frames import SLOT_BYTES
from tandem_worker.transfer.mooncake.landing import LandingPool
from tandem_worker.transfer.transports import Transports

from tests.mooncake.library import load_verbs


def begin_engine() -> Engine:
    """On loopback, over the engine's own TCP."""
    load_verbs()
    return Engine("127.0.0.1", "tcp")


@functools.cache
def share_landings() -> LandingPool:
    """Those of all decode ends of this process."""
    return LandingPool(begin_engine, most=256)  # peers that lie are engines of this process, and stay connected


@functools.cache
def share_stations() -> StationPool:
    """Those of all prefill ends of this process."""
    return StationPool(begin_engine, most=256)


def build_transports(wanted: str, *, allow_fallback: bool = False) -> Transports:
    """As `open_transports` does, for either end."""
    if wanted == "TCP":
        return Transports(Policy(wanted="TCP"))
    policy = Policy(wanted="Mooncake", allow_fallback=allow_fallback)
    for pool in (share_landings(), share_stations()):
        _begin_early(pool)
    return Transports(policy, (Offer(MOONCAKE, "tcp"),), landings=share_landings(), stations=share_stations())


@functools.cache
def _begin_early(pool: LandingPool | StationPool) -> None:
    """The first engine loads the library: no test's deadline is to run meanwhile."""
    if isinstance(pool, LandingPool):
        pool.give_back(pool.take(SLOT_BYTES), "")
    else:
        pool.give_back(pool.take(SLOT_BYTES))
