"""What goes wrong with the helper process is an error of the tier, and ends nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tandem_worker.host.errors import ThreadStartError
from tandem_worker.tiers.errors import STORE_FAILED, TierError
from tandem_worker.tiers.mooncake.client import MooncakeClient

from tests.mooncake.library import plan_environment


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_system_without_threads_for_it(allowed: int) -> None:
    client = MooncakeClient("127.0.0.1:1", 4096, plan_environment())
    started: list[str] = []

    def start_thread(name: str, target: Callable[[], None]) -> None:
        if len(started) == allowed:
            raise ThreadStartError("there are no more")
        started.append(name)

    with pytest.raises(TierError, match="there are no more") as raised:
        client.start(start_thread)
    assert raised.value.reason == STORE_FAILED
    assert not client.alive
