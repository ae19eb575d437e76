"""The status of a model from what was observed. Pure; the time comes from the caller.

`Ready` sums up. `Reconciling` and `Stalled` are present only while true, and never both: Stalled means that a person
has to act. The other conditions tell where it stands. An unchanged state gives an equal status, so nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tandem_api import names
from tandem_api.inferencemodel import Condition, InferenceModelStatus, RoleStatus
from tandem_api.names import Role

from tandem_operator.causes import Problem, role_problem
from tandem_operator.groups import Group, group_pods
from tandem_operator.manifests import DEPLOYMENT, POD, STATEFUL_SET, ChildKey, Manifest, dig, dig_list, labels_of
from tandem_operator.planner import Children
from tandem_operator.workloads.blueprint import COMPONENT_LABEL, Blueprint, component_of

State = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleState:
    """One role as it is, counted in replicas."""

    role: Role
    desired: int
    replicas: int
    ready: int
    updated: int
    observed: bool
    """The controller has seen the newest template and count."""
    problem: Problem | None

    @property
    def settled(self) -> bool:
        return self.observed and self.replicas == self.ready == self.updated == self.desired

    @property
    def component(self) -> str:
        return component_of(self.role)

    @property
    def summary(self) -> str:
        return f"{self.ready}/{self.desired}"

    def to_status(self) -> RoleStatus:
        return RoleStatus(replicas=self.replicas, ready=self.ready, updated=self.updated, summary=self.summary)


def observe_role(blueprint: Blueprint, role: Role, live: Children, failures: Mapping[ChildKey, str]) -> RoleState:
    """One role's state. `failures` has, by workload, why its controller could not create pods."""
    kind = DEPLOYMENT if role is Role.GATEWAY else STATEFUL_SET
    key = ChildKey(kind.name, names.workload_name(blueprint.name, role))
    workload = live.get(key, {})
    pods = pods_of(component_of(role), live)
    problem = role_problem(pods)
    failure = failures.get(key) or replica_failure(workload)
    if role is Role.GATEWAY:
        desired = desired_pods = blueprint.replicas(blueprint.model.spec.gateway.replicas)
        counts = tuple(dig(workload, "status", name) or 0 for name in ("replicas", "readyReplicas", "updatedReplicas"))
    else:
        spec = blueprint.worker_spec(role)
        desired, desired_pods = blueprint.replicas(spec.replicas), blueprint.num_pods(role)
        revision = str(dig(workload, "status", "updateRevision"))
        counts = _count_groups(group_pods(pods, spec.nodes_per_replica), revision=revision)
    if failure and problem is None and len(pods) < desired_pods:
        problem = Problem(reason="PodsNotCreated", message=f"{key}: {failure}", stalled=True)
    generation = dig(workload, "metadata", "generation")
    return RoleState(
        role=role,
        desired=desired,
        replicas=counts[0],
        ready=counts[1],
        updated=counts[2],
        observed=generation is not None and generation == dig(workload, "status", "observedGeneration"),
        problem=problem,
    )


def _count_groups(groups: Sequence[Group], *, revision: str) -> tuple[int, int, int]:
    """Replicas that exist, that are ready, and that are of this revision of the template."""
    return len(groups), sum(group.is_ready for group in groups), sum(group.is_of(revision) for group in groups)


def pods_of(component: str, live: Children) -> list[Manifest]:
    return [
        pod for key, pod in live.items() if key.kind == POD.name and labels_of(pod).get(COMPONENT_LABEL) == component
    ]


def replica_failure(workload: Manifest) -> str | None:
    """Why a Deployment cannot create pods; StatefulSets say so in Events only."""
    for condition in dig_list(workload, "status", "conditions"):
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return str(condition.get("message"))
    return None


def build_status(
    blueprint: Blueprint,
    live: Children,
    *,
    problems: Sequence[Problem],
    failures: Mapping[ChildKey, str],
    waiting: Sequence[str],
    now: str,
) -> InferenceModelStatus:
    """The whole status. `problems` are those of planning and applying, `waiting` what has to vanish first."""
    model = blueprint.model
    states = {role: observe_role(blueprint, role, live, failures) for role in (*blueprint.worker_roles, Role.GATEWAY)}
    workers = [state for role, state in states.items() if role is not Role.GATEWAY]
    found = [*problems, *(state.problem for state in states.values() if state.problem is not None)]
    blocking = next((problem for problem in found if problem.stalled), None)
    conditions = _summary(blueprint, states, blocking=blocking, waiting=waiting)
    conditions.append(_model_condition(blueprint, workers, live))
    conditions += [_role_condition(blueprint, state) for state in states.values()]
    gateway = states[Role.GATEWAY]
    return InferenceModelStatus(
        observed_generation=model.metadata.generation,
        url=names.service_url(blueprint.name, model.metadata.namespace),
        revision=blueprint.revision,
        prefill=states[Role.PREFILL].to_status() if Role.PREFILL in states else None,
        decode=states[blueprint.decode_role].to_status(),
        gateway=gateway.to_status(),
        conditions=stamp(conditions, model.status, generation=model.metadata.generation, now=now),
    )


def refused_status(
    problem: Problem, previous: InferenceModelStatus, *, generation: int, now: str
) -> InferenceModelStatus:
    """The status of a model that cannot be planned: what ran before keeps running and keeps its place here."""
    kept = [c for c in previous.conditions if c.type not in ("Ready", "Reconciling", "Stalled")]
    conditions = [_condition("Ready", "False", problem.reason, problem.message), _stalled(problem), *kept]
    return previous.model_copy(
        update={
            "observed_generation": generation,
            "conditions": stamp(conditions, previous, generation=generation, now=now),
        }
    )


def stamp(
    conditions: Sequence[Condition], previous: InferenceModelStatus, *, generation: int, now: str
) -> list[Condition]:
    """Conditions with their times: a transition is a change of `status` alone."""
    before = {condition.type: condition for condition in previous.conditions}
    stamped: list[Condition] = []
    for condition in conditions:
        old = before.get(condition.type)
        time = old.last_transition_time if old is not None and old.status == condition.status else now
        stamped.append(condition.model_copy(update={"observed_generation": generation, "last_transition_time": time}))
    return stamped


def _condition(kind: str, state: State, reason: str, message: str) -> Condition:
    return Condition(type=kind, status=state, reason=reason, message=message)


def _stalled(problem: Problem) -> Condition:
    return _condition("Stalled", "True", problem.reason, problem.message)


def _summary(
    blueprint: Blueprint,
    states: Mapping[Role, RoleState],
    *,
    blocking: Problem | None,
    waiting: Sequence[str],
) -> list[Condition]:
    """Ready, and Stalled or Reconciling where they hold."""
    counts = ", ".join(f"{state.component} {state.summary}" for state in states.values())
    if blocking is not None:
        return [_condition("Ready", "False", blocking.reason, blocking.message), _stalled(blocking)]
    if waiting:
        text = f"waiting for the removal of an earlier object: {', '.join(waiting)}"
        ready = _condition("Ready", "False", "WaitingForRemoval", text)
    elif all(state.settled for state in states.values()):
        if blueprint.model.spec.suspend:
            return [_condition("Ready", "False", "Suspended", "spec.suspend is true; set it to false to resume")]
        if not any(state.desired for state in states.values()):
            return [_condition("Ready", "False", "ScaledToZero", "every role has 0 replicas")]
        return [_condition("Ready", "True", "AllReplicasReady", counts)]
    elif blueprint.model.spec.suspend:
        ready = _condition("Ready", "False", "Suspended", f"pods are leaving: {counts}")
    else:
        ready = _condition("Ready", "False", "Progressing", counts)
    return [ready, _condition("Reconciling", "True", ready.reason, ready.message)]


def _model_condition(blueprint: Blueprint, workers: Sequence[RoleState], live: Children) -> Condition:
    """Whether the weights are where they should be: a worker is ready only after it has computed a token with them."""
    uri = blueprint.model.spec.model.uri
    told = next((state.problem for state in workers if state.problem is not None and state.problem.from_worker), None)
    if told is not None:
        return _condition("ModelReady", "False", told.reason, told.message)
    loaded = any(
        group.is_ready and labels_of(group.pods[0]).get(names.LABEL_REVISION) == blueprint.revision
        for state in workers
        for group in group_pods(pods_of(state.component, live), blueprint.worker_spec(state.role).nodes_per_replica)
    )
    if loaded:
        return _condition("ModelReady", "True", "Loaded", f"{uri} is loaded")
    if not any(state.desired for state in workers):
        return _condition("ModelReady", "Unknown", "NoWorkers", "no worker is wanted, so none has loaded the model")
    return _condition("ModelReady", "Unknown", "Loading", f"no worker has loaded {uri} yet")


def _role_condition(blueprint: Blueprint, state: RoleState) -> Condition:
    kind = f"{state.component.capitalize()}Ready"
    if state.problem is not None:
        return _condition(kind, "False", state.problem.reason, state.problem.message)
    if not state.settled:
        return _condition(
            kind, "False", "Progressing", f"{state.summary} ready, {state.updated} of the newest template"
        )
    if state.desired == 0:
        suspended = blueprint.model.spec.suspend
        return _condition(kind, "False", "Suspended" if suspended else "ScaledToZero", "0 replicas")
    return _condition(kind, "True", "AllReplicasReady", f"{state.summary} ready")
