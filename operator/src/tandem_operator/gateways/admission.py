"""Which workers a gateway has admitted, and what their pods' readiness gate says of it. Pure.

The gate is opened once and stays open: an operator that restarts, or that cannot reach gateways, takes nothing back.
It is closed when every gateway that reports has left the worker out for long, and opens again when one has not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tandem_api.crd.status import Condition
from tandem_api.names import CONDITION_ADMITTED, Role

from tandem_operator.gateways.fleet import REJECTED_SECONDS, FleetView
from tandem_operator.objects.manifests import POD, ChildKey, Children, Manifest, ModelKey, child_key, dig, dig_list
from tandem_operator.objects.pods import is_leaving, is_ready, is_up
from tandem_operator.observe.groups import PodGroup, group_pods
from tandem_operator.observe.roles import pods_of, workload_key
from tandem_operator.rollout.partners import partner_groups
from tandem_operator.workloads.blueprint import Blueprint

CONDITION = "WorkersAdmitted"
NO_REPORTS = "NoReports"
_NO_GATEWAY = "NoGatewayReady"
_NAMED = 3
"""Workers, or gateways, that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What the gate of one pod should say."""

    pod: ChildKey
    uid: str
    status: Literal["True", "False"]
    reason: str
    message: str

    def manifest(self, key: ModelKey, now: str) -> Manifest:
        """To be applied to the pod's status."""
        condition = {
            "type": CONDITION_ADMITTED, "status": self.status, "reason": self.reason, "message": self.message,
            "lastTransitionTime": now,
        }  # fmt: skip
        return {
            "apiVersion": POD.api_version,
            "kind": POD.name,
            "metadata": {"name": self.pod.name, "namespace": key.namespace, "uid": self.uid},
            "status": {"conditions": [condition]},
        }


def gateway_addresses(blueprint: Blueprint, live: Children) -> dict[str, str]:
    """The gateway pods that take requests, by name."""
    pods = pods_of(workload_key(blueprint, Role.GATEWAY), live)
    found = {pod["metadata"]["name"]: str(dig(pod, "status", "podIP") or "") for pod in pods if is_ready(pod)}
    return {name: address for name, address in found.items() if address}


def plan_admissions(blueprint: Blueprint, live: Children, view: FleetView) -> list[Admission]:
    """Gates that say something else than they should. Those of partners that stay for a while open like others: one
    that is lost comes back, and a disruption budget counts it."""
    found: list[Admission] = []
    for group in [*_groups(blueprint, live), *partner_groups(blueprint, live)]:
        decision = _decide(blueprint, group, view)
        if decision is None:
            continue
        status, reason, message = decision
        for pod in group.pods:
            gate = gate_of(pod)
            if is_leaving(pod) or (gate.get("status"), gate.get("reason")) == (status, reason):
                continue
            if status == "True" and gate.get("status") == "True":
                continue  # why it was opened does not matter any more
            found.append(
                Admission(pod=child_key(pod), uid=pod["metadata"]["uid"], status=status, reason=reason, message=message)
            )
    return found


def _decide(blueprint: Blueprint, group: PodGroup, view: FleetView) -> tuple[Literal["True", "False"], str, str] | None:
    """The gate of a replica's pods: that of its leader. None: as it is."""
    if not any(has_gate(pod) for pod in group.pods):
        return None
    leader = group.pods[0]
    if blueprint.replicas(blueprint.model.spec.gateway.replicas) == 0:
        return "True", "NoGateway", "this model has no gateway that could admit it"
    standing = view.standings.get(leader["metadata"]["name"])
    if standing is None or standing.host != dig(leader, "status", "podIP"):
        if view.unable and not view.reporting and group.is_complete and all(is_up(pod) for pod in group.pods):
            return (
                "True",
                "GatewayCannotReport",
                "the gateway's release has no reports: it takes every worker that is up",
            )
        return None
    if standing.admitted:
        return "True", "Admitted", "a gateway sends requests to this worker"
    was_admitted = gate_of(leader).get("status") == "True"
    if standing.rejected_seconds < REJECTED_SECONDS[was_admitted]:
        return None
    reason = standing.reason or "unknown"
    return "False", "Ejected", f"no gateway sends requests to this worker: {reason}"


def admission_condition(
    blueprint: Blueprint, live: Children, view: FleetView, previous: Sequence[Condition]
) -> Condition | None:
    """Whether gateways send requests to the workers that are up; None where no worker or no gateway is wanted."""
    wanted = sum(blueprint.num_pods(role) for role in blueprint.worker_roles)
    if wanted == 0 or blueprint.replicas(blueprint.model.spec.gateway.replicas) == 0:
        return None
    known = next((condition for condition in previous if condition.type == CONDITION), None)
    if not gateway_addresses(blueprint, live):
        return _condition("Unknown", _NO_GATEWAY, "no gateway is ready, so none can say")
    if not view.asked or not (view.reporting or view.unable or view.silent):
        # An operator that has just started has asked nobody yet.
        if known is not None and known.reason != _NO_GATEWAY:
            return known
        return _condition("Unknown", "NotAskedYet", "no gateway has been asked yet")
    if view.silent:
        names = sorted(view.silent)
        words = "; ".join(f"{name}: {view.silent[name]}" for name in names[:_NAMED])
        text = (
            f"{len(names)} of {len(names) + len(view.reporting) + len(view.unable)} gateways do not report: {words};"
            " let the operator reach their metrics ports"
        )
        return _condition("Unknown", NO_REPORTS, text)
    if not view.reporting:
        return _condition("Unknown", "GatewayCannotReport", "the gateways' release has no reports: update their image")
    out = [
        (group.pods[0]["metadata"]["name"], standing)
        for group in _groups(blueprint, live)
        if group.is_complete and all(is_up(pod) for pod in group.pods)
        and ((standing := _standing(group, view)) is None or not standing[0])
    ]  # fmt: skip
    if out:
        words = "; ".join(f"{name}: {'no gateway knows it yet' if s is None else s[1]}" for name, s in out[:_NAMED])
        return _condition("False", "NotAdmitted", f"{len(out)} workers that are up get no requests: {words}")
    return _condition("True", "Admitted", "gateways send requests to every worker that is up")


def _standing(group: PodGroup, view: FleetView) -> tuple[bool, str] | None:
    """Whether a replica gets requests, and why not; None where no gateway knows it. Moments do not count."""
    leader = group.pods[0]
    found = view.standings.get(leader["metadata"]["name"])
    if found is None or found.host != dig(leader, "status", "podIP"):
        return None
    return found.rejected_seconds < REJECTED_SECONDS[0], found.reason or "left out"


def is_admission_open(blueprint: Blueprint, live: Children) -> bool:
    """Whether a worker waits for its gate."""
    return any(
        has_gate(pod) and gate_of(pod).get("status") != "True"
        for group in _groups(blueprint, live)
        for pod in group.pods
    )


def _groups(blueprint: Blueprint, live: Children) -> list[PodGroup]:
    return [
        group
        for role in blueprint.worker_roles
        for group in group_pods(
            pods_of(workload_key(blueprint, role), live), blueprint.worker_spec(role).nodes_per_replica
        )
    ]


def has_gate(pod: Manifest) -> bool:
    """Whether the kubelet waits for the gate."""
    return any(gate.get("conditionType") == CONDITION_ADMITTED for gate in dig_list(pod, "spec", "readinessGates"))


def gate_of(pod: Manifest) -> Mapping[str, object]:
    """The gate's condition; empty where it was never set."""
    conditions = dig_list(pod, "status", "conditions")
    return next((condition for condition in conditions if condition.get("type") == CONDITION_ADMITTED), Manifest())


def _condition(status: Literal["True", "False", "Unknown"], reason: str, message: str) -> Condition:
    return Condition(type=CONDITION, status=status, reason=reason, message=message)
