"""A worker keeps what it has computed in Mooncake's store: a real master and a holder with a disk, behind the policies.
A holder that hangs is told of, costs nothing, and is started again."""

from __future__ import annotations

import pytest

from e2e.suite.fleet import Fleet, Object, Say, is_ready, smollm2, until

MODEL = "stored"
WORKER = f"{MODEL}-decode-0"
TOKENS = 400
"""Fewer than the prompt has."""
FREEZE = """
import os, pathlib, signal
for each in pathlib.Path("/proc").glob("[0-9]*"):
    if (each / "comm").read_text().strip() == "mooncake_client":
        os.kill(int(each.name), signal.SIGSTOP)
        print("frozen", each.name)
"""
TOLD_SECONDS = 15


def read_tokens(fleet: Fleet, direction: str, worker: str = WORKER, tier: str = "store") -> float:
    text = fleet.kubernetes.request("GET", fleet.path("pods", f"{worker}:9090") + "/proxy/metrics")
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("tandem_worker_kv_tier_tokens_total{")
        and f'tier="{tier}"' in line
        and f'direction="{direction}"' in line
    )


def is_in_use(fleet: Fleet) -> bool:
    told = fleet.condition(MODEL, "KVStoreReady")
    assert told is not None
    assert told["status"] == "True", told
    return True


def is_told(fleet: Fleet) -> bool:
    told = fleet.condition(MODEL, "KVStoreReady")
    assert told is not None
    assert told["status"] == "False", told
    return True


def is_restarted(fleet: Fleet) -> bool:
    pod = fleet.get("pods", WORKER)
    (worker,) = (each for each in pod["status"]["containerStatuses"] if each["name"] == "worker")
    return worker["restartCount"] == 1 and is_ready(pod)


@pytest.mark.timeout(600)
def test_what_a_worker_computed_outlives_it_in_the_store(fleet: Fleet, say: Say) -> None:
    fleet.apply(smollm2(MODEL, prefill=None, kv={"memory": "512Mi", "store": {"memory": "256Mi", "disk": "512Mi"}}))
    fleet.wait_ready(MODEL, within=300)
    until("the store is in use", lambda: is_in_use(fleet), within=60)
    asked: Object = {
        "model": MODEL, "prompt": "The sea is wide and the sky is high. " * 60, "max_tokens": 12, "temperature": 0.0
    }  # fmt: skip
    with fleet.openai(MODEL) as api:
        said = api.completions.create(**asked).choices[0].text
        until("the prompt is in the store", lambda: read_tokens(fleet, "written") >= TOKENS, within=30)
        fleet.run_python(WORKER, "worker", "import os, signal; os.kill(1, signal.SIGTERM)")
        until("the worker was started again", lambda: is_restarted(fleet), within=120)
        until("the store is in use again", lambda: is_in_use(fleet), within=60)
        fleet.wait_ready(MODEL)
        assert api.completions.create(**asked).choices[0].text == said
        until("the prompt came from the store", lambda: read_tokens(fleet, "read") >= TOKENS, within=30)
        say(f"a worker that was started again had {read_tokens(fleet, 'read'):.0f} tokens from the store")
        fleet.run_python(WORKER, "store", FREEZE)
        until("the frozen holder is told of", lambda: is_told(fleet), within=TOLD_SECONDS)
        assert api.completions.create(**asked).choices[0].text == said
    until("the holder was started again, and is in use", lambda: is_in_use(fleet), within=90)
