"""Workers that are killed under load: the fleet answers on, and every affected request ends."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.suite.conftest import make_namespace
from e2e.suite.fleet import Fleet, Kubernetes, Say, smollm2, until
from e2e.suite.load import LoadOutcome, run_load, stream_once, varied_prompts

SHARED_PROCESSES = {"spec": {"shareProcessNamespace": True}}
"""Process 1 cannot be killed from inside its own namespace; with a shared one the worker is not process 1."""

RECOVERY_SECONDS = 10.0
"""Until a request succeeds after a kill, beside what the machine takes for the same requests without one."""


@pytest.fixture(scope="module")
def pair(tandem: Any, kubernetes: Kubernetes) -> Iterator[Fleet]:
    """Model `pair`: two decode workers and a prefill worker."""
    made = make_namespace(tandem, kubernetes, f"e2e-pair-{uuid.uuid4().hex[:5]}")
    manifest = smollm2("pair", decode=2)
    for role in ("prefill", "decode"):
        manifest["spec"][role]["podTemplate"] = SHARED_PROCESSES
    made.apply(manifest)
    made.wait_ready("pair")
    made.wait_role("pair", "decode", 2)
    yield made
    kubernetes.request("DELETE", f"/api/v1/namespaces/{made.namespace}")


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_kill_under_load(pair: Fleet, role: str, say: Say) -> None:
    outcomes: list[LoadOutcome] = []
    with pair.url("pair") as url:

        def load() -> None:
            outcomes.extend(
                asyncio.run(run_load(url, "pair", varied_prompts(60), concurrency=12, max_tokens=24, limit=240))
            )

        sender = threading.Thread(target=load)
        sender.start()
        victim = pair.pods("pair", role)[0]["metadata"]["name"]
        until("load on the workers", lambda: sum(pair.blocks_in_use("pair").values()) > 10, within=60)
        before = asyncio.run(one_request(url, limit=120))
        assert before.complete, f"nothing has been killed yet: {before}"
        allowed = RECOVERY_SECONDS + 2 * before.seconds
        pair.send_signal(victim, "SIGKILL")
        killed = time.monotonic()

        def new_request_succeeds() -> bool:
            return asyncio.run(one_request(url, limit=allowed)).complete

        until("a new request to succeed", new_request_succeeds, within=allowed)
        recovered = time.monotonic() - killed
        sender.join()
    say(f"{role} killed: a new request succeeded after {recovered:.1f} s; before, one took {before.seconds:.1f} s")
    hung = [outcome for outcome in outcomes if outcome.hung]
    assert not hung, f"{len(hung)} requests never ended; the first: {hung[0]}"
    failed = [outcome for outcome in outcomes if not outcome.complete]
    assert all(outcome.error for outcome in failed), failed
    if role == "prefill":
        assert not failed, f"a dead prefill worker must not cost an answer: {failed[0]}"
    restarted = until("the killed container to be ready again", lambda: restarts(pair, victim), within=180)
    assert restarted >= 1
    pair.wait_role("pair", role, 2 if role == "decode" else 1)
    pair.wait_blocks_free("pair")


@pytest.mark.parametrize("how", ["killed", "deleted"])
def test_streams_outlive_their_decode_pod(pair: Fleet, how: str, say: Say) -> None:
    """Half of the streams lose their worker: each goes on at the other one, and says what it said without that."""
    prompts = varied_prompts(16)
    outcomes: list[LoadOutcome] = []
    with pair.url("pair") as url:

        def stream() -> list[LoadOutcome]:
            return asyncio.run(run_load(url, "pair", prompts, concurrency=16, max_tokens=120, limit=240))

        undisturbed = stream()
        assert all(outcome.complete for outcome in undisturbed), "nothing has happened yet"
        sender = threading.Thread(target=lambda: outcomes.extend(stream()))
        sender.start()
        decoding = {pod["metadata"]["name"] for pod in pair.pods("pair", "decode")}

        def loaded() -> str | None:
            used = pair.blocks_in_use("pair")
            return next((name for name in decoding if used.get(name, 0) > 10), None)

        victim = until("streams on a decode worker", loaded, within=60)
        if how == "killed":
            pair.send_signal(victim, "SIGKILL")
        else:
            # The grace ends the drain: the worker hands its streams on, or is gone.
            pair.cluster.kubectl("-n", pair.namespace, "delete", "pod", victim, "--grace-period=2", "--wait=false")
        sender.join()
    broken = [outcome for outcome in outcomes if not outcome.complete]
    assert not broken, f"{len(broken)} of {len(outcomes)} streams did not end; the first: {broken[0]}"
    pairs = list(zip(undisturbed, outcomes, strict=True))
    different = [
        (one, other) for one, other in pairs if (one.text, one.finish_reason) != (other.text, other.finish_reason)
    ]
    assert not different, f"{len(different)} of {len(outcomes)} streams are others; the first: {different[0]}"
    assert [one.completion_tokens for one, _ in pairs] == [other.completion_tokens for _, other in pairs]
    say(f"decode pod {how} under {len(prompts)} streams: all complete and equal")
    pair.wait_role("pair", "decode", 2)
    pair.wait_blocks_free("pair")


async def one_request(url: str, limit: float) -> LoadOutcome:
    import openai

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as api:
        return await stream_once(api, "pair", "Are you there? Answer with one word.", 4, limit)


def restarts(fleet: Fleet, pod: str) -> int:
    status = fleet.get("pods", pod)["status"]["containerStatuses"][0]
    return status["restartCount"] if status["ready"] else 0
