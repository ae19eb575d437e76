"""Every test here runs Mooncake's programs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tandem_worker.tiers.mooncake import objects


@pytest.fixture(scope="module", autouse=True)
def _alone(module_on_loopback_alone: None) -> None:
    """In a network with nothing but loopback; holders that tests of a module share are there too."""


@pytest.fixture(autouse=True)
def limit_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Seconds for each call to a store from now on: few while one is to be found that answers none. One that is well
    and slow, as on a busy machine, is not to be taken for it."""

    def limit(seconds: float) -> None:
        monkeypatch.setattr(objects, "ASK_SECONDS", seconds)
        monkeypatch.setattr(objects, "MOVE_SECONDS", seconds)

    limit(15.0)
    return limit
