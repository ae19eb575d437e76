"""The CRD of a later release and this operator: during an upgrade, and after a rollback of the operator alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tandem_api.schema import CRD_NAME

from e2e.suite.fleet import Fleet, Kubernetes, Object, Say, smollm2, until
from e2e.suite.load import run_load
from e2e.suite.test_renames import lives

CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD_NAME}"
ENGINE = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/engine/properties"
FIELD, DEFAULT, VALUE = "lookahead", 4, "Later"
MODEL = "older"


def change_crd(kubernetes: Kubernetes, operation: str, place: str, value: object = None) -> None:
    body = [{"op": operation, "path": f"{ENGINE}/{place}"} | ({} if value is None else {"value": value})]
    kubernetes.request("PATCH", CRD, body, "application/json-patch+json")


@pytest.fixture
def later(tandem: Any, kubernetes: Kubernetes) -> Iterator[Callable[[], None]]:
    """Takes the later CRD away again: a field with a default, and a value more of a field that there is."""
    fields = kubernetes.request("GET", CRD)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    tools = fields["properties"]["engine"]["properties"]["tools"]["enum"]
    assert VALUE not in tools
    change_crd(kubernetes, "add", FIELD, {"type": "integer", "default": DEFAULT})
    change_crd(kubernetes, "add", "tools/enum/-", VALUE)
    gone = False

    def end() -> None:
        nonlocal gone
        if not gone:
            change_crd(kubernetes, "remove", FIELD)
            change_crd(kubernetes, "replace", "tools/enum", tools)
        gone = True

    yield end
    end()


def said(fleet: Fleet, kind: str, reason: str) -> Object | None:
    found = fleet.condition(MODEL, kind)
    return found if found is not None and found["reason"] == reason else None


def ask(url: str) -> None:
    (outcome,) = asyncio.run(run_load(url, MODEL, ["Name a colour."], concurrency=1, max_tokens=4))
    assert outcome.complete, outcome


@pytest.mark.alone
def test_what_a_later_release_added_is_told_and_stops_nothing(
    fleet: Fleet, later: Callable[[], None], kubernetes: Kubernetes, say: Say
) -> None:
    fleet.apply(smollm2(MODEL, prefill=None))
    live = fleet.wait_ready(MODEL)
    assert live["spec"]["engine"][FIELD] == DEFAULT, "filled in by the API server"
    told = until("the operator to tell", lambda: said(fleet, "SpecUnderstood", "UnknownFields"), within=60)
    say(f"an operator older than the CRD: {told['message']}")
    assert f"does not know spec.engine.{FIELD}: no effect until" in told["message"]
    before = lives(fleet, MODEL)
    with fleet.url(MODEL) as url:
        ask(url)
        fleet.patch(MODEL, {"engine": {FIELD: 8}, "gateway": {"replicas": 2}})
        fleet.wait_role(MODEL, "gateway", 2)
        fleet.wait_ready(MODEL)
        assert before.items() <= lives(fleet, MODEL).items(), "what is known is followed, and nobody restarts"
        ask(url)

        fleet.patch(MODEL, {"engine": {"tools": VALUE}, "gateway": {"replicas": 1}})
        stalled = until("the value to be refused", lambda: said(fleet, "Stalled", "InvalidSpec"), within=60)
        say(f"and a value that it cannot read: {stalled['message']}")
        assert "spec.engine.tools" in stalled["message"]
        ready = fleet.condition(MODEL, "Ready")
        assert ready is not None
        assert ready["status"] == "True", "as clients see it"
        assert before.items() <= lives(fleet, MODEL).items()
        assert len(fleet.pods(MODEL, "gateway")) == 2, "nothing is followed while a value cannot be read"
        fleet.delete("pods", f"{MODEL}-decode-0")
        until("Ready to go", lambda: (fleet.condition(MODEL, "Ready") or {}).get("status") == "False", within=120)
        fleet.wait_role(MODEL, "unified", 1)
        until("Ready to be back", lambda: (fleet.condition(MODEL, "Ready") or {}).get("status") == "True", within=120)
        assert said(fleet, "Stalled", "InvalidSpec") is not None
        ask(url)

        fleet.patch(MODEL, {"engine": {"tools": "Auto"}})
        fleet.wait_ready(MODEL)
        fleet.wait_role(MODEL, "gateway", 1)
        before = lives(fleet, MODEL)
        later()
        until("the field to be gone", lambda: FIELD not in live_engine(fleet), within=60)
        fleet.patch(MODEL, {"rollout": {"progressDeadline": "11m"}})
        until("the operator to know all", lambda: fleet.condition(MODEL, "SpecUnderstood") is None, within=60)
        fleet.wait_ready(MODEL)
        assert lives(fleet, MODEL) == before, "nobody restarts when the field is gone"
        ask(url)
    told_of = {"UnknownFields", "InvalidSpec", "SpecUnderstood"}
    until("Events of it", lambda: told_of <= reasons(fleet), within=60)


def reasons(fleet: Fleet) -> set[str]:
    return {e["reason"] for e in fleet.find("events") if e["involvedObject"]["name"] == MODEL}


def live_engine(fleet: Fleet) -> Object:
    return fleet.get("inferencemodels", MODEL)["spec"]["engine"]
