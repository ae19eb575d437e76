"""A gateway whose workers give each other their blocks: what a worker is told that gets a prompt it has not."""

from __future__ import annotations

import asyncio

import pytest
from tandem_api.telemetry import TierTelemetry, WorkerTelemetry
from tandem_gateway.workers.telemetry import describe_pulls

from tests.tandem_gateway.workers.test_credentials import read_answer
from tests.tandem_gateway.workers.test_telemetry import SAMPLE


@pytest.mark.parametrize(
    ("tiers", "rate"),
    [
        ([], None),
        ([TierTelemetry(tier="disk", tokens_per_second=7.0)], None),
        ([TierTelemetry(tier="disk"), TierTelemetry(tier="peer")], 0.0),
        ([TierTelemetry(tier="peer", tokens_per_second=7.0)], 7.0),
        ([TierTelemetry(tier="peer", reason="PeersFailing")], 1e-6),
        ([TierTelemetry(tier="peer", reason="PeersFailing", tokens_per_second=0.0)], 0.0),  # one may be tried again
        ([TierTelemetry(tier="peer", reason="PeersFailing", tokens_per_second=7.0)], 7.0),
    ],
)
def test_a_worker_says_whether_it_brings_blocks_and_how_fast(tiers: list[TierTelemetry], rate: float | None) -> None:
    sample: WorkerTelemetry = SAMPLE.model_copy(update={"kv_tiers": tiers})
    assert describe_pulls(sample) == rate


async def test_the_holder_of_a_prompt_is_named_to_who_gets_it(start_gateway, start_worker, chat) -> None:
    first, second = await start_worker("d1"), await start_worker("d2")
    running = await start_gateway(first, second)
    endpoints = running.gateway.scheduler.endpoints
    for endpoint in endpoints.values():
        endpoint.pull_rate = 20_000.0
    asked = chat(messages=[{"role": "user", "content": "What was said before. " * 400}])
    assert (await read_answer(running, asked))[0] == 200
    (warm,) = [worker for worker in (first, second) if worker.received]
    (cold,) = [worker for worker in (first, second) if worker is not warm]
    assert "x-tandem-kv-source" not in warm.received[0].headers
    (holder,) = [each for each in endpoints.values() if each.worker.address.endswith(f":{warm.port}")]
    holder.tell(100_000, asyncio.get_running_loop().time())
    assert (await read_answer(running, asked))[0] == 200
    source, _, tokens = cold.received[-1].headers["x-tandem-kv-source"].partition(";tokens=")
    assert source == f"127.0.0.1:{warm.port}"
    assert int(tokens) > 1000
