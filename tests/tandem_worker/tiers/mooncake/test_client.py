"""What goes wrong with the helper process is an error of the tier, and ends nothing else."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tandem_worker.host.errors import ThreadStartError
from tandem_worker.tiers.errors import STORE_FAILED, STORE_FROZEN, TierError
from tandem_worker.tiers.mooncake.client import MooncakeClient, _Helper

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


def test_a_helper_that_the_kernel_does_not_end_in_time() -> None:
    """Its calls end as those of any other that is late: their threads go on."""

    def wait(seconds: float) -> int:
        raise subprocess.TimeoutExpired("helper", seconds)

    client = MooncakeClient("127.0.0.1:1", 4096, plan_environment())
    process: Any = SimpleNamespace(kill=lambda: None, wait=wait)
    connection: Any = SimpleNamespace(send_bytes=lambda _: None)
    client._helper = _Helper(process, connection)
    with pytest.raises(TierError) as raised:
        client.call("exist", ["a"], seconds=0.01)
    assert (raised.value.reason, client.alive) == (STORE_FROZEN, False)
