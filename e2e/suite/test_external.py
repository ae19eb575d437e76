"""A HorizontalPodAutoscaler at work: it scales by metrics of workers, and the operator follows it and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from e2e.metrics import NAMESPACE, metrics_api
from e2e.suite.fleet import Fleet, Object, Say, smollm2, until
from e2e.suite.test_scaling import LOOSE, MODEL, count, load, scaling, targets

pytestmark = pytest.mark.external
EXAMPLES = Path(__file__).parents[2] / "examples"
NAME = f"{MODEL}-decode"
SYNC_SECONDS = 15
"""How often the controller looks at a HorizontalPodAutoscaler."""


@pytest.fixture(scope="module")
def metrics(tandem: Any) -> Iterator[None]:
    with metrics_api(tandem):
        yield


def autoscaler(*, patience: int | None = None) -> Object:
    """The one of the example, for few workers on a small machine. `patience`: its window for scaling down (seconds)."""
    _, found = yaml.safe_load_all((EXAMPLES / "external-hpa.yaml").read_text())
    found["metadata"]["name"] = NAME
    found["spec"] |= {"minReplicas": 1, "maxReplicas": 2}
    found["spec"]["scaleTargetRef"]["name"] = NAME
    found["spec"]["metrics"][0]["pods"]["target"]["averageValue"] = "3"
    if patience is not None:
        found["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] = patience
    return found


def create(fleet: Fleet, found: Object) -> None:
    fleet.kubernetes.request("POST", fleet.path("horizontalpodautoscalers"), found)


def told(fleet: Fleet) -> dict[str, Object]:
    """What the autoscaler says of itself, by type."""
    conditions = fleet.get("horizontalpodautoscalers", NAME).get("status", {}).get("conditions", [])
    return {condition["type"]: condition for condition in conditions}


def ask_as_keda(fleet: Fleet) -> list[Object]:
    """What Prometheus answers to the query of the example for KEDA."""
    model, scaled = yaml.safe_load_all((EXAMPLES / "external-keda.yaml").read_text())
    query = scaled["spec"]["triggers"][0]["metadata"]["query"].replace(model["metadata"]["name"], MODEL)
    proxy = f"/api/v1/namespaces/{NAMESPACE}/services/prometheus:9090/proxy"
    answer = fleet.kubernetes.request("GET", f"{proxy}/api/v1/query?{urlencode({'query': query})}")
    return answer["data"]["result"]


def owners(fleet: Fleet) -> set[tuple[str, str]]:
    """Managers, and subresources by which they wrote the StatefulSet's number of replicas."""
    fields = fleet.get("statefulsets", NAME)["metadata"]["managedFields"]
    owning = (each for each in fields if "f:replicas" in each["fieldsV1"].get("f:spec", {}))
    return {(each["manager"], each.get("subresource", "")) for each in owning}


def ready_pods(fleet: Fleet) -> set[str]:
    return {pod["metadata"]["uid"] for pod in fleet.pods(MODEL, "decode")}


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("metrics")
def test_an_autoscaler_moves_its_own_statefulset_and_no_other(fleet: Fleet, say: Say) -> None:
    """Up under load, down as it eases; a suspension stops it, and ends with the number from before."""
    manifest = smollm2(MODEL)
    manifest["spec"]["decode"]["scaling"] = {"mode": "External"}
    fleet.apply(manifest)
    fleet.wait_ready(MODEL)
    prefill = fleet.get("statefulsets", f"{MODEL}-prefill")["metadata"]["generation"]
    create(fleet, autoscaler(patience=SYNC_SECONDS))
    until("the autoscaler to read its metric", lambda: told(fleet)["ScalingActive"]["status"] == "True", within=180)
    with load(fleet, say, concurrency=8):
        began = time.monotonic()
        until("the autoscaler to add one", lambda: count(fleet, "decode") == 2, within=300)
        say(f"HPA scaled up after {time.monotonic() - began:.0f} s of load: {told(fleet)['AbleToScale']['message']}")
        assert owners(fleet) == {("kube-controller-manager", "scale")}
        fleet.wait_role(MODEL, "decode", 2)
        until("it to be followed", lambda: scaling(fleet)["decode"] == {"mode": "External", "desired": 2}, within=180)
        fleet.wait_ready(MODEL, within=180)
        (found,) = ask_as_keda(fleet)
        say(f"KEDA's example would have read {found['value'][1]} running requests")
    fleet.patch(MODEL, {"suspend": True})
    until("nothing to be left", lambda: not fleet.pods(MODEL, "decode"), within=180)
    disabled = until(
        "the autoscaler to leave it alone",
        lambda: found if (found := told(fleet)["ScalingActive"])["reason"] == "ScalingDisabled" else None,
        within=180,
    )
    say(f"HPA of a suspended model: {disabled['message']}")
    assert count(fleet, "decode") == 0
    fleet.patch(MODEL, {"suspend": False})
    until("the number from before", lambda: count(fleet, "decode") == 2, within=180)
    fleet.wait_ready(MODEL)
    with load(fleet, say, concurrency=1, pause=2.0):
        until("the autoscaler to take one away", lambda: count(fleet, "decode") == 1, within=300)
        fleet.wait_role(MODEL, "decode", 1)
        until("it to be followed", lambda: scaling(fleet)["decode"]["desired"] == 1, within=180)
    say(f"HPA scaled down: {told(fleet)['ScalingActive']['message']}")
    reasons = [e["message"] for e in fleet.find("events") if e["reason"] == "SuccessfulRescale"]
    say(f"HPA said: {reasons}")
    assert any("New size: 2" in reason for reason in reasons)
    assert any("New size: 1" in reason for reason in reasons)
    left = fleet.get("statefulsets", f"{MODEL}-prefill")
    assert left["spec"]["replicas"] == 1
    assert left["metadata"]["generation"] == prefill + 2, "suspended and resumed, and nothing else"


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("metrics")
def test_modes_follow_one_another_under_an_autoscaler_and_move_nothing(fleet: Fleet, say: Say) -> None:
    fleet.apply(smollm2(MODEL, decode=2, **targets(LOOSE, LOOSE)))
    fleet.wait_ready(MODEL)
    before = ready_pods(fleet)

    def stays(seconds: float) -> None:
        until_time = time.monotonic() + seconds
        while time.monotonic() < until_time:
            assert count(fleet, "decode") == 2, scaling(fleet)
            time.sleep(1)
        assert ready_pods(fleet) == before
        fleet.wait_ready(MODEL, within=180)

    def change(mode: str, **more: Any) -> None:
        fleet.patch(MODEL, {"decode": {"scaling": {"mode": mode} | more}})
        fleet.wait_ready(MODEL, within=180)

    with load(fleet, say, concurrency=8):
        change("SLO", min=1, max=3)
        stays(SYNC_SECONDS)  # three decisions of the planner
        change("External")
        assert owners(fleet) == {("tandem-operator-handover", "")}
        create(fleet, autoscaler())
        until("the autoscaler to read its metric", lambda: told(fleet)["ScalingActive"]["status"] == "True", within=180)
        stays(2 * SYNC_SECONDS)
        fleet.delete("horizontalpodautoscalers", NAME)
        change("Static")
        stays(SYNC_SECONDS)
    assert ("tandem-operator", "") in owners(fleet)
