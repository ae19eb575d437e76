"""`spec.prefill` is added to a model that serves, and removed: nobody is failed, and no pair loses its partner."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from e2e.suite.fleet import Fleet, Say, is_ready, smollm2
from e2e.suite.load import LoadOutcome, run_load, varied_prompts

MODEL = "shaped"


def change(fleet: Fleet, prefill: dict[str, Any] | None) -> tuple[set[str], list[dict[str, int]]]:
    """Change `spec.prefill` and wait for the end. Returns what Ready was on the way, and the ready workers by role."""
    generation = fleet.patch(MODEL, {"prefill": prefill})["metadata"]["generation"]
    ready: set[str] = set()
    counts: list[dict[str, int]] = []
    conditions: dict[str, str] = {}
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline:
        status = fleet.get("inferencemodels", MODEL)["status"]  # before the pods, which are then at least as far
        roles = [pod["metadata"]["labels"]["tandem.dev/role"] for pod in fleet.pods(MODEL) if is_ready(pod)]
        counts.append({role: roles.count(role) for role in ("prefill", "decode", "unified")})
        conditions = {condition["type"]: condition["status"] for condition in status["conditions"]}
        ready.add(conditions["Ready"])
        if status["observedGeneration"] == generation and not {"Reconciling", "Stalled"} & conditions.keys():
            return ready, counts
        time.sleep(0.25)
    raise AssertionError(f"the rollout does not end: {conditions}")


@pytest.mark.timeout(1800)
def test_prefill_is_added_and_removed_without_a_failed_request(fleet: Fleet, say: Say) -> None:
    manifest = smollm2(MODEL)
    prefill = manifest["spec"].pop("prefill")
    fleet.apply(manifest)
    fleet.wait_ready(MODEL)
    outcomes: list[LoadOutcome] = []
    with fleet.url(MODEL) as url, ThreadPoolExecutor(1) as walk:
        for wanted, end in (
            (prefill, {"prefill": 1, "decode": 1, "unified": 0}),
            (None, {"prefill": 0, "decode": 0, "unified": 1}),
        ):
            started = time.monotonic()
            walked = walk.submit(change, fleet, wanted)
            while not walked.done():
                outcomes += asyncio.run(run_load(url, MODEL, varied_prompts(16), concurrency=3, max_tokens=16))
            ready, counts = walked.result()
            say(f"prefill {'added' if wanted else 'removed'}: {time.monotonic() - started:.0f} s, Ready was {ready}")
            assert counts[-1] | {"prefill": 0} == end | {"prefill": 0}
            assert ready == {"True"}, "what was promised is served"
            alone = [found for found in counts if found["decode"] and not (found["prefill"] or found["unified"])]
            assert not alone, "no decode worker of a pair serves by itself"
            fleet.wait_role(MODEL, "prefill", end["prefill"])
    broken = [outcome for outcome in outcomes if not outcome.complete]
    assert not broken, f"{len(broken)} of {len(outcomes)} requests failed; the first: {broken[0]}"
    say(f"prefill added and removed under {len(outcomes)} requests")
    fleet.wait_blocks_free(MODEL, within=60)
