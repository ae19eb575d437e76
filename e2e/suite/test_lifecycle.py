"""Objects come and go, and do not disturb each other; the operator may die meanwhile."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tandem_api.names import FIELD_MANAGER
from tandem_operator.rollout.statefulsets import ABOVE_ALL

from e2e.install import NAMESPACE, install_chart, uninstall_chart
from e2e.suite.conftest import make_namespace
from e2e.suite.fleet import Fleet, Kubernetes, Object, Say, smollm2, until


def ask(fleet: Fleet, model: str) -> str:
    with fleet.openai(model) as api:
        answer = api.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=16,
            temperature=0,
        )
        return answer.choices[0].message.content or ""


def versions(fleet: Fleet, model: str) -> dict[str, Object]:
    """What the operator has a part in: statuses are Kubernetes' own, and go on changing for some time."""
    return {name: version(child) for name, child in fleet.children(model).items()}


def version(child: Object) -> Object:
    metadata = {key: value for key, value in child["metadata"].items() if key != "resourceVersion"}
    metadata["managedFields"] = [own for own in metadata["managedFields"] if own["manager"] == FIELD_MANAGER]
    return {key: value for key, value in child.items() if key != "status"} | {"metadata": metadata}


def gateway_volumes(fleet: Fleet) -> list[dict[str, Any]]:
    return fleet.get("deployments", "main")["spec"]["template"]["spec"]["volumes"]


def operator_pods(kubernetes: Kubernetes) -> list[dict[str, Any]]:
    return kubernetes.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]


@pytest.mark.alone
def test_operator_restart_changes_nothing(main: Fleet, kubernetes: Kubernetes) -> None:
    before = versions(main, "main")
    assert before
    old = operator_pods(kubernetes)
    for pod in old:
        kubernetes.request(
            "DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}?gracePeriodSeconds=0"
        )
    main.patch("main", {"gateway": {"timeouts": {"idle": "61s"}}})  # made while nobody is there to see it
    generation = main.get("inferencemodels", "main")["metadata"]["generation"]
    until(
        "the change to be applied",
        lambda: main.get("inferencemodels", "main")["status"].get("observedGeneration") == generation,
        within=180,  # its lease has to run out
    )
    main.wait_ready("main")
    after = versions(main, "main")
    touched = {name for name in before if before[name] != after.get(name)}
    (config,) = (volume["configMap"]["name"] for volume in gateway_volumes(main) if "configMap" in volume)
    assert touched == {f"configmaps/{config}"}, "what a gateway that starts is told; those that run follow the status"
    assert set(after) == set(before)


def test_drift_is_corrected(main: Fleet) -> None:
    main.kubernetes.request(
        "PATCH", main.path("statefulsets", "main-decode"), {"spec": {"replicas": 0}}, "application/merge-patch+json"
    )
    until("replicas back at 1", lambda: main.get("statefulsets", "main-decode")["spec"]["replicas"] == 1, within=60)
    strategy = {"type": "OnDelete", "rollingUpdate": None}
    main.kubernetes.request(
        "PATCH",
        main.path("statefulsets", "main-decode"),
        {"spec": {"updateStrategy": strategy}},
        "application/merge-patch+json",
    )

    def restored() -> bool:
        found = main.get("statefulsets", "main-decode")["spec"]["updateStrategy"]
        return found["type"] == "RollingUpdate" and found["rollingUpdate"].get("partition") == ABOVE_ALL

    until("the update strategy back at the operator's", restored, within=60)
    main.wait_role("main", "decode", 1)


def test_a_field_that_goes_from_the_spec_goes_from_what_was_created(fleet: Fleet) -> None:
    """Children are created by POST and applied from the first change on: what is not applied any more has to go."""
    manifest = smollm2("asleep", prefill=None, suspend=True, model={"uri": "file:///models/none"})
    manifest["spec"]["decode"]["podTemplate"] = {"metadata": {"annotations": {"example.com/team": "search"}}}
    fleet.apply(manifest)

    def annotations() -> dict[str, str]:
        template = fleet.get("statefulsets", "asleep-decode")["spec"]["template"]
        return template["metadata"].get("annotations", {})

    until("the annotation on pods", lambda: "example.com/team" in annotations(), within=60)
    fleet.patch("asleep", {"decode": {"podTemplate": None}})
    until("the annotation to be gone", lambda: "example.com/team" not in annotations(), within=60)
    managed = fleet.get("statefulsets", "asleep-decode")["metadata"]["managedFields"]
    own = [entry["operation"] for entry in managed if entry["manager"] == FIELD_MANAGER]
    assert own == ["Apply"]


def test_models_side_by_side_then_deleted(fleet: Fleet, tandem: Any, kubernetes: Kubernetes) -> None:
    """Two in one namespace, one of the same name in another; apply, delete, apply."""
    other = make_namespace(tandem, kubernetes, fleet.namespace + "-b")
    try:
        fleet.apply(smollm2("first", prefill=None))
        fleet.apply(smollm2("second", prefill=None))
        other.apply(smollm2("first", prefill=None))
        for where, model in ((fleet, "first"), (fleet, "second"), (other, "first")):
            where.wait_ready(model)
            assert "Paris" in ask(where, model)
        untouched = versions(fleet, "second"), versions(other, "first")
        fleet.delete("inferencemodels", "first")
        until("every child to be gone", lambda: not fleet.children("first") and not fleet.pods("first"), within=120)
        assert (versions(fleet, "second"), versions(other, "first")) == untouched
        assert "Paris" in ask(fleet, "second")
        fleet.apply(smollm2("first", prefill=None))
        fleet.wait_ready("first")
        assert "Paris" in ask(fleet, "first")
    finally:
        kubernetes.request("DELETE", f"/api/v1/namespaces/{other.namespace}")


def test_suspend_and_resume(fleet: Fleet) -> None:
    fleet.apply(smollm2("nap", prefill=None))
    fleet.wait_ready("nap")
    fleet.patch("nap", {"suspend": True})
    until("every pod to be gone", lambda: not fleet.pods("nap"), within=120)
    until("a person to be waited for", lambda: reason_of(fleet, "nap", "Stalled") == "Suspended", within=60)
    condition = fleet.condition("nap", "Ready")
    assert condition is not None
    assert (condition["status"], condition["reason"]) == ("False", "Suspended")
    assert reason_of(fleet, "nap", "Available") == "NothingServed"
    fleet.patch("nap", {"suspend": False})
    fleet.wait_ready("nap")
    assert "Paris" in ask(fleet, "nap")


def reason_of(fleet: Fleet, model: str, kind: str) -> str | None:
    condition = fleet.condition(model, kind)
    return None if condition is None else condition["reason"]


@pytest.mark.alone
def test_helm_upgrade_uninstall_reinstall(main: Fleet, tandem: Any) -> None:
    """The serving pods live through everything that is done to the operator."""

    def serving() -> dict[str, tuple[str, int]]:
        return {
            p["metadata"]["name"]: (p["metadata"]["uid"], p["status"]["containerStatuses"][0]["restartCount"])
            for p in main.pods("main")
        }

    before = serving()
    install_chart(tandem, "--set", "logLevel=debug")
    assert serving() == before
    uninstall_chart(tandem)
    assert main.exists("inferencemodels", "main")
    assert "Paris" in ask(main, "main")
    assert main.may(f"{main.namespace}:main-gateway", "watch", "pods"), "gateways see new workers without an operator"
    install_chart(tandem)
    main.wait_ready("main")
    assert serving() == before
    assert "Paris" in ask(main, "main")


def test_a_pod_that_is_stopped_while_it_starts_ends_at_once(
    kubernetes: Kubernetes, fleet: Fleet, main: Fleet, say: Say
) -> None:
    """Before a program has a handler for SIGTERM, process 1 would not get it, and the pod stay for its grace period."""
    model = main.get("inferencemodels", "main")["metadata"]["name"]
    workloads = {"worker": main.get("statefulsets", f"{model}-decode"), "gateway": main.get("deployments", model)}
    pods, maps = (f"/api/v1/namespaces/{fleet.namespace}/{kind}" for kind in ("pods", "configmaps"))
    slow = {"sitecustomize.py": "print('starting', flush=True)\nimport time\ntime.sleep(600)\n"}
    kubernetes.request("POST", maps, {"metadata": {"name": "slow"}, "data": slow})
    for name, workload in workloads.items():
        template = workload["spec"]["template"]["spec"]
        container = {key: template["containers"][0][key] for key in ("image", "securityContext")} | {
            "name": name, "env": [{"name": "PYTHONPATH", "value": "/slow"}],
            "volumeMounts": [{"name": "slow", "mountPath": "/slow"}],
        }  # fmt: skip
        spec = {
            "securityContext": template["securityContext"], "containers": [container], "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 120, "volumes": [{"name": "slow", "configMap": {"name": "slow"}}],
        }  # fmt: skip
        kubernetes.request("POST", pods, {"metadata": {"name": name}, "spec": spec})
        until("it starts", lambda path=f"{pods}/{name}/log": "starting" in kubernetes.request("GET", path), within=120)
        began = time.monotonic()
        kubernetes.request("DELETE", f"{pods}/{name}")
        until("it is gone", lambda name=name: name not in names_of(kubernetes, pods), within=60)
        say(f"{name} that was starting: gone after {time.monotonic() - began:.1f} s")


def names_of(kubernetes: Kubernetes, path: str) -> set[str]:
    return {item["metadata"]["name"] for item in kubernetes.request("GET", path)["items"]}
