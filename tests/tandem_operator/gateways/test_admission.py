"""Which gates open and close, by what gateways report; and what the condition says of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_objects import blueprint, settled
from tandem_api.names import CONDITION_ADMITTED
from tandem_operator.gateways.admission import (
    Admission,
    admission_condition,
    gateway_addresses,
    is_admission_open,
    plan_admissions,
)
from tandem_operator.gateways.fleet import REJECTED_SECONDS, FleetView, Standing
from tandem_operator.objects.manifests import ChildKey, Manifest, ModelKey
from tandem_operator.workloads import Blueprint

GATE = [{"conditionType": CONDITION_ADMITTED}]
GATEWAY = frozenset({"m-gw"})
FRESH, LONG = REJECTED_SECONDS


def up(*, gate: str | None = None, host: str = "10.0.0.1", reason: str = "Admitted", is_up: bool = True) -> Manifest:
    """The spec and status of a pod whose containers are ready."""
    conditions = [{"type": "ContainersReady", "status": "True" if is_up else "False"}]
    if gate is not None:
        conditions.append({"type": CONDITION_ADMITTED, "status": gate, "reason": reason})
    return {"spec": {"readinessGates": GATE}, "status": {"podIP": host, "conditions": conditions}}


def gateway_pod(name: str, **status: Any) -> Manifest:
    owner = {"kind": "ReplicaSet", "name": "m-5f", "uid": "rs", "controller": True}
    return {"metadata": {"name": name, "namespace": "n", "uid": name, "ownerReferences": [owner]}, "status": status}


READY = {"conditions": [{"type": "Ready", "status": "True"}]}


def live(plan: Blueprint, **pods: Manifest) -> dict[ChildKey, Manifest]:
    """What there is of a model, with these of its decode pods changed, by number: `p0`."""
    children = settled(plan) | {ChildKey("Pod", "m-5f-a"): gateway_pod("m-5f-a", podIP="10.1.0.1", **READY)}
    for name, fields in pods.items():
        children[ChildKey("Pod", f"m-decode-{name[1:]}")] |= fields
    return children


def view(*, unable: bool = False, **standings: Standing) -> FleetView:
    return FleetView(
        standings={f"m-decode-{name[1:]}": standing for name, standing in standings.items()},
        reporting=frozenset() if unable else GATEWAY,
        unable=GATEWAY if unable else frozenset(),
        asked=True,
    )


def admitted(host: str = "10.0.0.1") -> Standing:
    return Standing(host=host, admitted=True)


def rejected(seconds: float, reason: str = "silent") -> Standing:
    return Standing(host="10.0.0.1", admitted=False, reason=reason, rejected_seconds=seconds)


def decided(plan: Blueprint, children: dict[ChildKey, Manifest], known: FleetView) -> dict[str, tuple[str, str]]:
    found = plan_admissions(plan, children, known)
    return {admission.pod.name: (admission.status, admission.reason) for admission in found}


@pytest.mark.parametrize(
    ("pod", "known", "expected"),
    [
        (up(), view(p0=admitted()), ("True", "Admitted")),
        (up(gate="True"), view(p0=admitted()), None),
        (up(gate="False", reason="Ejected"), view(p0=admitted()), ("True", "Admitted")),
        (up(), view(), None),
        (up(), FleetView(), None),
        (up(), view(p0=admitted("10.0.0.9")), None),  # of an earlier pod of this name
        (up(gate="True"), view(), None),
        (up(gate="True"), FleetView(), None),
        (up(), view(p0=rejected(FRESH - 1)), None),
        (up(), view(p0=rejected(FRESH)), ("False", "Ejected")),
        (up(gate="True"), view(p0=rejected(LONG - 1)), None),
        (up(gate="True"), view(p0=rejected(LONG)), ("False", "Ejected")),
        (up(gate="False", reason="Ejected"), view(p0=rejected(LONG)), None),
        (up(), view(unable=True), ("True", "GatewayCannotReport")),
        (up(is_up=False), view(unable=True), None),
    ],
)
def test_a_gate_follows_what_gateways_report(pod: Manifest, known: FleetView, expected: tuple[str, str] | None) -> None:
    plan = blueprint()
    assert decided(plan, live(plan, p0=pod), known) == ({} if expected is None else {"m-decode-0": expected})


def test_the_gate_says_why_no_gateway_takes_the_worker() -> None:
    plan = blueprint()
    (admission,) = plan_admissions(plan, live(plan, p0=up()), view(p0=rejected(FRESH, "kv")))
    manifest = admission.manifest(ModelKey("n", "m"), "2026-01-01T00:00:00Z")
    assert manifest["metadata"] == {"name": "m-decode-0", "namespace": "n", "uid": "uid-m-decode-0"}
    (condition,) = manifest["status"]["conditions"]
    assert condition["type"] == CONDITION_ADMITTED
    assert condition["message"] == "no gateway sends requests to this worker: kv"


def test_members_of_a_group_are_admitted_with_their_leader() -> None:
    plan = blueprint(decode={"replicas": 2, "nodesPerReplica": 2, "parallelism": {"pipeline": 2}})
    children = live(plan, p0=up(), p1=up(host="10.0.0.2"), p2=up(host="10.0.0.3"), p3=up(host="10.0.0.4"))
    assert decided(plan, children, view(p0=admitted())) == {
        "m-decode-0": ("True", "Admitted"),
        "m-decode-1": ("True", "Admitted"),
    }


def test_where_no_gateway_is_wanted_nothing_waits_for_one() -> None:
    plan = blueprint(gateway={"replicas": 0})
    assert decided(plan, live(plan, p0=up()), FleetView()) == {"m-decode-0": ("True", "NoGateway")}
    assert admission_condition(plan, live(plan, p0=up()), FleetView(), []) is None


def test_a_partner_that_comes_back_while_its_role_goes_is_admitted() -> None:
    """As when its node is drained before the last decode worker that needs it is gone."""
    children = live(blueprint(prefill={}, decode={"replicas": 2}))
    children[ChildKey("Pod", "m-prefill-0")] |= up()
    known = FleetView(standings={"m-prefill-0": admitted()}, reporting=GATEWAY, asked=True)
    alone = blueprint(decode={"replicas": 2})
    assert decided(alone, children, known) == {"m-prefill-0": ("True", "Admitted")}
    for key in [key for key in children if key.kind == "Pod" and key.name.startswith("m-decode")]:
        del children[key]
    assert decided(alone, children, known) == {}, "it goes"


def test_pods_without_the_gate_are_left_as_they_are() -> None:
    plan = blueprint()
    for known in (view(p0=admitted()), view(p0=rejected(LONG)), view(unable=True)):
        assert decided(plan, live(plan), known) == {}
    assert not is_admission_open(plan, live(plan))
    assert is_admission_open(plan, live(plan, p0=up()))
    assert not is_admission_open(plan, live(plan, p0=up(gate="True")))


STANDINGS = st.builds(
    Standing,
    host=st.sampled_from(["10.0.0.1", "10.0.0.2"]),
    admitted=st.booleans(),
    reason=st.sampled_from([None, "silent"]),
    rejected_seconds=st.sampled_from([0.0, FRESH, LONG]),
)


@given(
    gate=st.sampled_from([None, "True", "False"]),
    standing=st.none() | STANDINGS,
    unable=st.booleans(),
)
def test_an_open_gate_closes_only_on_a_fresh_word(gate: str | None, standing: Standing | None, unable: bool) -> None:
    plan = blueprint()
    children = live(plan, p0=up(gate=gate))
    known = view(unable=unable and standing is None, **({} if standing is None else {"p0": standing}))
    found: list[Admission] = plan_admissions(plan, children, known)
    for admission in found:
        if admission.status == "False":
            assert standing is not None
            assert (standing.admitted, standing.host) == (False, "10.0.0.1")
        # What was decided is not decided again.
        after = live(plan, p0=up(gate=admission.status, reason=admission.reason))
        assert plan_admissions(plan, after, known) == []


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (FleetView(), ("Unknown", "NotAskedYet", "")),
        (view(p0=admitted()), ("True", "Admitted", "")),
        (view(), ("False", "NotAdmitted", "m-decode-0: no gateway knows it yet")),
        (view(p0=rejected(FRESH)), ("False", "NotAdmitted", "m-decode-0: silent")),
        (view(p0=rejected(1.0)), ("True", "Admitted", "")),
        (view(unable=True), ("Unknown", "GatewayCannotReport", "update their image")),
        (
            FleetView(silent={"m-gw": "it cannot be reached within 3 s"}, asked=True),
            ("Unknown", "NoReports", "1 of 1 gateways do not report: m-gw: it cannot be reached within 3 s"),
        ),
    ],
)
def test_what_is_not_known_is_told(known: FleetView, expected: tuple[str, str, str]) -> None:
    plan = blueprint()
    found = admission_condition(plan, live(plan, p0=up(gate="True")), known, [])
    assert found is not None
    assert (found.status, found.reason) == expected[:2]
    assert expected[2] in found.message


def test_an_operator_that_has_just_started_says_what_was_said_before() -> None:
    plan = blueprint()
    before = admission_condition(plan, live(plan, p0=up(gate="True")), view(p0=admitted()), [])
    assert before is not None
    assert admission_condition(plan, live(plan, p0=up()), FleetView(), [before]) == before


def test_without_a_gateway_that_is_ready_nobody_can_say() -> None:
    plan = blueprint()
    children = live(plan, p0=up(gate="True"))
    del children[ChildKey("Pod", "m-5f-a")]
    before = admission_condition(plan, live(plan, p0=up(gate="True")), view(p0=admitted()), [])
    assert before is not None
    found = admission_condition(plan, children, FleetView(), [before])
    assert found is not None
    assert (found.status, found.reason) == ("Unknown", "NoGatewayReady")


def test_gateways_that_take_requests_are_asked() -> None:
    plan = blueprint()

    pods = {
        "m-5f-b": gateway_pod("m-5f-b", podIP="10.1.0.2"),
        "m-5f-c": gateway_pod("m-5f-c", **READY),
    }
    children = live(plan) | {ChildKey("Pod", name): pod for name, pod in pods.items()}
    assert gateway_addresses(plan, children) == {"m-5f-a": "10.1.0.1"}
