"""Ready means routable: gates open when a gateway has admitted the worker, and what stands still is named."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import openai
import pytest

from e2e.suite.fleet import Fleet, Object, Say, is_ready, smollm2, until
from e2e.suite.load import stream_once
from e2e.suite.test_diagnosis import cause
from e2e.suite.test_faults import SHARED_PROCESSES, restarts

GATE = "tandem.dev/admitted"


def conditions(pod: Object) -> dict[str, Any]:
    return {condition["type"]: condition for condition in pod.get("status", {}).get("conditions", [])}


def workers(fleet: Fleet, model: str) -> list[Object]:
    found = [pod for pod in fleet.pods(model) if pod["metadata"]["labels"]["tandem.dev/role"] != "gateway"]
    return sorted(found, key=lambda pod: pod["metadata"]["name"])


def test_workers_are_ready_once_a_gateway_has_admitted_them(main: Fleet, say: Say) -> None:
    main.wait_ready("main")
    for pod in workers(main, "main"):
        assert pod["spec"]["readinessGates"] == [{"conditionType": GATE}]
        found = conditions(pod)
        assert (found[GATE]["status"], found["Ready"]["status"]) == ("True", "True")
        assert found["ContainersReady"]["lastTransitionTime"] <= found["Ready"]["lastTransitionTime"]
        say(f"gate of {pod['metadata']['name']}: {found[GATE]['reason']}: {found[GATE]['message']}")

    def known() -> Object | None:
        found = main.condition("main", "WorkersAdmitted")
        return found if found is not None and found["reason"] in ("Admitted", "GatewayCannotReport") else None

    seen = until("admission to be known", known, within=120)
    say(f"WorkersAdmitted: {seen['status']} {seen['reason']}: {seen['message']}")
    with main.openai("main") as api:
        raw = api.chat.completions.with_raw_response.create(
            model="main",
            messages=[{"role": "user", "content": "Say in a few words why key-value blocks move between workers."}],
            max_tokens=2,
        )
    assert raw.headers["x-tandem-prefill-worker"] == "main-prefill-0"


def test_without_a_gateway_no_worker_waits_for_one(fleet: Fleet) -> None:
    fleet.apply(smollm2("lonely", prefill=None, gateway={"replicas": 0}))
    fleet.wait_role("lonely", "unified", 1)
    (pod,) = workers(fleet, "lonely")
    assert conditions(pod)[GATE]["reason"] == "NoGateway"
    fleet.patch("lonely", {"gateway": {"replicas": 1}})
    fleet.wait_ready("lonely")


def test_a_worker_that_stands_still_is_named_and_serves_again(fleet: Fleet, say: Say) -> None:
    """Stopped as a whole, as by a paused machine: nobody restarts it, and it goes on where it was."""
    manifest = smollm2("still", prefill=None)
    manifest["spec"]["decode"]["podTemplate"] = SHARED_PROCESSES
    fleet.apply(manifest)
    fleet.wait_ready("still")
    before = restarts(fleet, "still-decode-0")
    fleet.send_signal("still-decode-0", "SIGSTOP")
    try:
        seen = until(
            "the worker to be named", lambda: cause(fleet, "still", "ContainerUnready", "still-decode-0"), within=40
        )
        say(f"stopped: {seen['type']} {seen['reason']}: {seen['message']}")
        ready, available = fleet.condition("still", "Ready"), fleet.condition("still", "Available")
        assert ready is not None
        assert available is not None
        assert (ready["status"], available["status"]) == ("False", "False")
    finally:
        fleet.send_signal("still-decode-0", "SIGCONT")
    fleet.wait_ready("still")
    assert restarts(fleet, "still-decode-0") == before


@pytest.mark.timeout(1200)
def test_a_step_that_hangs_is_named_and_mended(fleet: Fleet, say: Say) -> None:
    """One of two ranks stops inside a step: the leader says so and its replica starts anew."""
    manifest = smollm2("hung", prefill=None, kv={"memory": "128Mi"})
    manifest["spec"]["engine"]["stepTimeout"] = "4s"
    manifest["spec"]["decode"] |= {
        "nodesPerReplica": 2, "parallelism": {"pipeline": 2}, "podTemplate": SHARED_PROCESSES
    }  # fmt: skip
    fleet.apply(manifest)
    fleet.wait_ready("hung", within=300)
    before = restarts(fleet, "hung-decode-0")
    with fleet.url("hung") as url:
        named = threading.Event()

        def ask() -> None:
            while not named.wait(0.5):  # an answer may end before the rank is stopped
                asyncio.run(one_long_answer(url))

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            until("a step to run", lambda: fleet.blocks_in_use("hung")["hung-decode-0"] > 0, within=120)
            fleet.send_signal("hung-decode-1", "SIGSTOP")
            seen = until("the step to be named", lambda: cause(fleet, "hung", "StepHung", "rank 0 of 2"), within=120)
            say(f"hung step: {seen['type']} {seen['reason']}: {seen['message']}")
        finally:
            named.set()
            fleet.send_signal("hung-decode-1", "SIGCONT")
        asking.join()
    until("the leader to have restarted", lambda: restarts(fleet, "hung-decode-0") > before, within=300)
    fleet.wait_ready("hung", within=300)
    assert all(is_ready(pod) for pod in workers(fleet, "hung"))


async def one_long_answer(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as api:
        await stream_once(api, "hung", "Write a long story about a lighthouse.", 400, 120)
