"""Blocks by Mooncake's Transfer Engine between pods: through the NetworkPolicy, named by the condition."""

from __future__ import annotations

import asyncio

from e2e.suite.fleet import Fleet, Say, smollm2, until
from e2e.suite.load import run_load, varied_prompts

MODEL = "mooncake"


def test_blocks_move_by_mooncake_where_it_is_asked_for(fleet: Fleet, say: Say) -> None:
    manifest = smollm2(MODEL)
    manifest["spec"]["kv"] = {"memory": "512Mi", "transport": "Mooncake"}
    fleet.apply(manifest)
    fleet.wait_ready(MODEL)
    with fleet.url(MODEL) as url:
        outcomes = asyncio.run(run_load(url, MODEL, varied_prompts(8), concurrency=2, max_tokens=4))
    assert all(outcome.complete for outcome in outcomes)
    for role in ("prefill", "decode"):
        (pod,) = fleet.pods(MODEL, role)
        told = fleet.telemetry(pod["metadata"]["name"])["kvTransport"]
        assert (told["transport"], told["protocol"], told["fallback"]) == ("Mooncake", "tcp", ""), told
        assert told["bytesPerSecond"] > 0

    def says() -> str | None:
        found = fleet.condition(MODEL, "KVTransferReady")
        return found["message"] if found is not None and found["reason"] == "BlocksMove" else None

    message = until("the condition names what moves the blocks", says, within=120)
    assert "Mooncake over tcp" in message
    say(message)
