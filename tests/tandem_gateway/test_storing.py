"""A gateway whose workers share a store: what it takes from their telemetry, and learns from answers."""

from __future__ import annotations

import asyncio

import pytest
from tandem_api.telemetry import TierTelemetry, WorkerTelemetry
from tandem_gateway.scheduling import Share
from tandem_gateway.workers.telemetry import describe_cache, describe_share

from tests.tandem_gateway.workers.test_credentials import read_answer
from tests.tandem_gateway.workers.test_telemetry import SAMPLE

DISK = TierTelemetry(tier="disk", capacity_tokens=5000, horizon=9.0)
STORE = TierTelemetry(tier="store", capacity_tokens=7000, tokens_per_second=3.0)


@pytest.mark.parametrize(
    ("tiers", "share"),
    [
        ([], None),
        ([DISK], None),
        ([DISK, STORE], Share(3.0, 7000, 11)),
        ([TierTelemetry(tier="store")], Share(0.0, 0, 11)),
        ([TierTelemetry(tier="store", reason="StoreFull", capacity_tokens=7000)], None),
    ],
)
def test_a_worker_tells_its_part_in_the_store(tiers: list[TierTelemetry], share: Share | None) -> None:
    sample: WorkerTelemetry = SAMPLE.model_copy(update={"kv_tiers": tiers, "computed_prompt_tokens_total": 11})
    assert describe_share(sample) == share


def test_what_all_share_is_no_workers_own_cache() -> None:
    alone: WorkerTelemetry = SAMPLE.model_copy(update={"kv_tiers": [DISK]})
    both: WorkerTelemetry = SAMPLE.model_copy(update={"kv_tiers": [DISK, STORE]})
    assert describe_cache(both) == describe_cache(alone)


async def test_who_gets_a_prompt_that_is_in_the_store_is_charged_its_load(start_gateway, start_worker, chat) -> None:
    first, second = await start_worker("d1"), await start_worker("d2")
    running = await start_gateway(first, second)
    now = asyncio.get_running_loop().time()
    scheduler = running.gateway.scheduler
    for endpoint in scheduler.endpoints.values():
        scheduler.observe(endpoint, now, queued_tokens=0, share=Share(20_000.0, 10**6))
    asked = chat(messages=[{"role": "user", "content": "What was said before. " * 400}])
    assert (await read_answer(running, asked))[0] == 200
    (warm,) = [worker for worker in (first, second) if worker.received]
    (cold,) = [worker for worker in (first, second) if worker is not warm]
    (holder,) = [each for each in scheduler.endpoints.values() if each.worker.address.endswith(f":{warm.port}")]
    holder.tell(100_000, now)
    assert (await read_answer(running, asked))[0] == 200
    assert len(cold.received) == 1
    decision = running.gateway.decisions[-1][4]
    assert decision.stored_tokens > 1000
