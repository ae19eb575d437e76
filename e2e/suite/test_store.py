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
    try:
        name = (each / "comm").read_text().strip()
    except OSError:  # it has ended: the kubelet's probe is a process here too
        continue
    if name == "mooncake_client":
        os.kill(int(each.name), signal.SIGSTOP)
        print("frozen", each.name)
"""
PROMPTS = [f"{number} times the sea is wide and the sky is high. " + "The wind blows on. " * 90 for number in range(4)]
"""Each may be computed instead where a busy machine brings it too late."""
LONGEST_SECONDS = 120


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


def has_store(fleet: Fleet) -> bool:
    """As the worker says itself: of one that was started again the condition tells a moment later."""
    (store,) = (tier for tier in fleet.telemetry(WORKER)["kvTiers"] if tier["tier"] == "store")
    assert store.get("reason") is None, store
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


@pytest.mark.timeout(1200)
def test_what_a_worker_computed_outlives_it_in_the_store(fleet: Fleet, say: Say) -> None:
    fleet.apply(smollm2(MODEL, prefill=None, kv={"memory": "512Mi", "store": {"memory": "256Mi", "disk": "512Mi"}}))
    fleet.wait_ready(MODEL, within=300)
    until("the store is in use", lambda: is_in_use(fleet), within=LONGEST_SECONDS)
    with fleet.openai(MODEL) as api:

        def ask(number: int) -> str:
            asked: Object = {"model": MODEL, "prompt": PROMPTS[number], "max_tokens": 12, "temperature": 0.0}
            return api.completions.create(**asked).choices[0].text

        said = [ask(number) for number in range(len(PROMPTS))]
        written = len(PROMPTS) * TOKENS
        until("the prompts are in the store", lambda: read_tokens(fleet, "written") >= written, within=LONGEST_SECONDS)
        fleet.run_python(WORKER, "worker", "import os, signal; os.kill(1, signal.SIGTERM)")
        until("the worker was started again", lambda: is_restarted(fleet), within=240)
        until("the store is in use again", lambda: has_store(fleet) and is_in_use(fleet), within=LONGEST_SECONDS)
        fleet.wait_ready(MODEL)
        assert [ask(number) for number in range(len(PROMPTS))] == said
        until("a prompt came from the store", lambda: read_tokens(fleet, "read") >= TOKENS, within=LONGEST_SECONDS)
        say(f"a worker that was started again had {read_tokens(fleet, 'read'):.0f} tokens from the store")
        fleet.run_python(WORKER, "store", FREEZE)
        until("the frozen holder is told of", lambda: is_told(fleet), within=LONGEST_SECONDS)
        assert ask(0) == said[0]
    until("the holder was started again, and is in use", lambda: is_in_use(fleet), within=240)
