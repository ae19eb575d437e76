"""Workers are replaced under load: complete pairs of one build serve throughout, and Ready says so."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from e2e.suite.fleet import Fleet, Say, smollm2
from e2e.suite.load import LoadOutcome, run_load, varied_prompts

MODEL = "rolling"


def workers(fleet: Fleet, model: str = MODEL) -> set[str]:
    return {pod["metadata"]["uid"] for role in ("prefill", "decode") for pod in fleet.pods(model, role)}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({"dtype": "BFloat16"}, id="build"),
        pytest.param({"maxBatchTokens": 1024}, id="setting", marks=pytest.mark.full),
    ],
)
def test_a_pair_is_replaced_beside_itself_without_a_failed_request(
    fleet: Fleet, engine: dict[str, Any], say: Say
) -> None:
    """One prefill and one decode worker: a second pair comes up, then the first is replaced, then the second goes."""
    fleet.apply(smollm2(MODEL))
    fleet.wait_ready(MODEL)
    before = workers(fleet)
    outcomes: list[LoadOutcome] = []
    with fleet.url(MODEL) as url, ThreadPoolExecutor(1) as walk:
        started = time.monotonic()
        rolled = walk.submit(roll, fleet, engine)
        while not rolled.done():
            outcomes += asyncio.run(run_load(url, MODEL, varied_prompts(12), concurrency=4, max_tokens=24))
        seen = rolled.result()
    say(f"rollout of {engine}: {len(outcomes)} requests in {time.monotonic() - started:.0f} s, Ready was {seen}")
    broken = [outcome for outcome in outcomes if not outcome.complete]
    assert not broken, f"{len(broken)} of {len(outcomes)} requests failed; the first: {broken[0]}"
    assert seen == {"True"}, "what is promised was served throughout"
    after = workers(fleet)
    assert len(after) == 2
    assert not before & after


def roll(fleet: Fleet, engine: dict[str, Any]) -> set[str]:
    """Change the engine and wait for the end. Returns what Ready was on the way."""
    generation = fleet.patch(MODEL, {"engine": engine})["metadata"]["generation"]
    seen: set[str] = set()
    conditions: dict[str, str] = {}
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        status = fleet.get("inferencemodels", MODEL)["status"]
        conditions = {condition["type"]: condition["status"] for condition in status["conditions"]}
        seen.add(conditions["Ready"])
        if status["observedGeneration"] == generation and not {"Reconciling", "Stalled"} & conditions.keys():
            return seen
        time.sleep(0.5)
    raise AssertionError(f"the rollout does not end: {conditions}")


def test_another_time_to_drain_restarts_no_worker(main: Fleet, request: pytest.FixtureRequest) -> None:
    main.wait_ready("main")
    before = workers(main, "main")
    request.addfinalizer(lambda: main.patch("main", {"drain": None}))
    main.patch("main", {"drain": {"timeout": "90s"}})
    main.wait_ready("main")
    assert workers(main, "main") == before
