"""Scaling both roles up and down under load loses nothing."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.suite.fleet import Fleet
from e2e.suite.load import run_load, varied_prompts


@pytest.mark.timeout(420)
def test_scaling_under_load(main: Fleet) -> None:
    """32 streams at once, at least 200 requests, decode 1 → 3 → 1 and prefill 1 → 2 → 1 meanwhile."""
    outcomes = []
    with main.url("main") as url, ThreadPoolExecutor(1) as walk:
        scaled = walk.submit(scale_up_and_down, main)
        while not (scaled.done() and len(outcomes) >= 200):
            prompts = varied_prompts(200)
            outcomes += asyncio.run(run_load(url, "main", prompts, concurrency=32, max_tokens=24))
        scaled.result()
    broken = [outcome for outcome in outcomes if not outcome.complete]
    assert not broken, f"{len(broken)} of {len(outcomes)} requests failed; the first: {broken[0]}"
    main.wait_blocks_free("main", within=5)
    assert len(main.pods("main", "decode")) == 1
    assert len(main.pods("main", "prefill")) == 1


def scale_up_and_down(main: Fleet) -> None:
    main.patch("main", {"decode": {"replicas": 3}, "prefill": {"replicas": 2}})
    main.wait_role("main", "decode", 3)
    main.wait_role("main", "prefill", 2)
    main.patch("main", {"decode": {"replicas": 1}, "prefill": {"replicas": 1}})
    main.wait_role("main", "decode", 1)
    main.wait_role("main", "prefill", 1)
