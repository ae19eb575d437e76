"""What changes without a restart: names and time limits. And a branch that moves, which by itself replaces nobody."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest

from e2e.suite.fleet import Fleet, Say, smollm2, until
from e2e.suite.load import LoadOutcome, run_load, varied_prompts

MOVING = "tandem-e2e/moving-smollm2"
MIRROR = "/api/v1/namespaces/tandem-mirror/services/mirror:80/proxy"


def lives(fleet: Fleet, model: str) -> dict[str, tuple[str, int]]:
    """Every pod of a model, gateways too, with its uid and how often its containers were started again."""
    return {
        pod["metadata"]["name"]: (
            pod["metadata"]["uid"],
            sum(container["restartCount"] for container in pod["status"].get("containerStatuses", [])),
        )
        for pod in fleet.pods(model)
    }


async def load_both(url: str, names: list[str]) -> list[LoadOutcome]:
    """A few streams for each name, at the same time."""
    parts = (run_load(url, name, varied_prompts(8), concurrency=4, max_tokens=16) for name in names)
    return [outcome for part in await asyncio.gather(*parts) for outcome in part]


def listed(url: str) -> list[str]:
    return [model["id"] for model in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]]


def ask(url: str, name: str) -> httpx.Response:
    body = {"model": name, "prompt": "The sea is", "max_tokens": 2}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def is_refused(outcome: LoadOutcome) -> bool:
    return (outcome.error or "").startswith("NotFoundError: ")


SERVED_ON = 75
"""Seconds that a former name is served on: more than the minute that it is at least."""


@pytest.mark.timeout(1200)
def test_a_rename_under_load_fails_nothing_and_restarts_nobody(fleet: Fleet, say: Say) -> None:
    manifest = smollm2("renamed", drain={"timeout": f"{SERVED_ON}s"})
    manifest["spec"]["model"]["servedName"] = "old"
    fleet.apply(manifest)
    fleet.wait_ready("renamed")
    before = lives(fleet, "renamed")
    with fleet.url("renamed") as url:
        outcomes = asyncio.run(load_both(url, ["old"]))
        renamed_at = time.monotonic()
        fleet.patch("renamed", {"model": {"servedName": "new"}})
        outcomes += asyncio.run(load_both(url, ["old"]))
        until("the new name is listed", lambda: listed(url) == ["new"], within=180)
        say(f"rename: the gateway listed the new name after {time.monotonic() - renamed_at:.1f} s at most")
        ends = renamed_at + SERVED_ON - 2
        late = ends - 10  # what is asked for by the former name on a slow machine may come after its end
        for name in ("old", "new"):
            is_served = name == "new" or time.monotonic() < late
            answer = ask(url, name)
            assert not is_served or answer.json()["model"] == name, "an answer has the name that was asked for"
        outcomes += asyncio.run(load_both(url, ["new", "old"]))
        broken = [each for each in outcomes if not each.complete and (each.started < late or not is_refused(each))]
        assert not broken, f"{len(broken)} of {len(outcomes)} requests failed; the first: {broken[0]}"
        refused = until(
            "the former name is refused",
            lambda: answer if (answer := ask(url, "old")).status_code == 404 else None,
            within=SERVED_ON + 60,
            every=1,
        )
        assert refused.json()["error"]["code"] == "model_not_found"
        assert "'new'" in refused.json()["error"]["message"]
        assert time.monotonic() >= ends, "not before its time"
        assert ask(url, "new").status_code == 200
    fleet.wait_ready("renamed")
    assert lives(fleet, "renamed") == before
    status = fleet.get("inferencemodels", "renamed")["status"]
    assert status["routing"]["servedNames"] == ["new"]


def test_other_time_limits_and_another_time_to_drain_restart_nobody(main: Fleet, request: Any) -> None:
    main.wait_ready("main")
    before = lives(main, "main")
    (gateway,) = (pod["metadata"]["name"] for pod in main.pods("main", "gateway"))
    request.addfinalizer(lambda: main.patch("main", {"gateway": {"timeouts": None}, "drain": None}))
    main.patch("main", {"gateway": {"timeouts": {"firstToken": "123s"}}, "drain": {"timeout": "77s"}})

    def heard() -> bool:
        log = main.cluster.kubectl("-n", main.namespace, "logs", gateway, "-c", "gateway")
        lines = [line for line in log.splitlines() if "routing changed" in line]
        assert lines
        assert "123" in lines[-1], lines[-1]
        assert "77" in lines[-1], lines[-1]
        return True

    until("the gateway has heard of it", heard, within=180)
    main.wait_ready("main")
    assert lives(main, "main") == before


def weights(fleet: Fleet, model: str) -> dict[str, Any]:
    return fleet.get("inferencemodels", model).get("status", {}).get("model", {})


def move_branch(fleet: Fleet) -> str:
    """The repository's branch is a new commit with the same files. Returns it."""
    return fleet.kubernetes.request("POST", f"{MIRROR}/move/{MOVING}")["sha"]


@pytest.mark.timeout(1800)
def test_a_branch_that_moves_is_reported_and_then_followed(fleet: Fleet, say: Say) -> None:
    manifest = smollm2("moving", prefill=None)
    manifest["spec"]["model"]["uri"] = f"hf://{MOVING}"
    fleet.apply(manifest)
    fleet.wait_ready("moving")
    first, before = weights(fleet, "moving")["commit"], lives(fleet, "moving")
    assert len(first) == 40

    second, moved_at = move_branch(fleet), time.monotonic()
    until("the move is seen", lambda: weights(fleet, "moving").get("latestCommit") == second, within=180)
    say(f"a moved branch was reported after {time.monotonic() - moved_at:.0f} s")
    condition = fleet.condition("moving", "ModelResolved")
    assert condition is not None
    assert (condition["status"], condition["reason"]) == ("True", "RevisionMoved")
    fleet.wait_ready("moving")
    assert (lives(fleet, "moving"), weights(fleet, "moving")["commit"]) == (before, first), "told, and nothing else"

    fleet.annotate("moving", {"tandem.dev/resolve-model": "1"})
    until("the commit is taken", lambda: weights(fleet, "moving").get("commit") == second, within=180)
    fleet.wait_ready("moving", within=300)
    assert "moving-decode-0" in lives(fleet, "moving")
    assert lives(fleet, "moving")["moving-decode-0"] != before["moving-decode-0"]
    assert "latestCommit" not in weights(fleet, "moving")

    fleet.patch("moving", {"model": {"followRevision": True}})
    third = move_branch(fleet)
    until("the branch is followed", lambda: weights(fleet, "moving").get("commit") == third, within=180)
    fleet.wait_ready("moving", within=300)
    with fleet.url("moving") as url:
        assert ask(url, "moving").status_code == 200
