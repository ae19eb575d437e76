"""What of a model's pods those are told who decide about its replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_objects import blueprint, container, pod, settled, stateful_set
from tandem_api.crd.status import Condition, RolloutStatus
from tandem_api.names import Role
from tandem_operator.autoscale.accelerators import count_gpus
from tandem_operator.autoscale.observed import ObservedModel, observe_model
from tandem_operator.autoscale.plan.snapshots import PodStart
from tandem_operator.objects.manifests import ChildKey, Manifest
from tandem_operator.rollout.plan import is_rolling

P, D = Role.PREFILL, Role.DECODE
SLO = {"ttft": {"percentile": 90, "seconds": 1, "secondsPerThousandTokens": 2}, "tpot": {"seconds": 0.05}}
MODE = {"scaling": {"mode": "SLO", "max": 4}}


def worker(number: int, *, ready: bool = True, took: int = 20, restarts: int = 0, **told: Any) -> Manifest:
    """A decode pod, made a minute after the one before it."""
    state = "True" if ready else "False"
    since = f"2026-01-01T00:{number + took // 60:02}:{took % 60:02}Z"
    return pod(
        f"m-decode-{number}", metadata={"creationTimestamp": f"2026-01-01T00:{number:02}:00Z"},
        conditions=[{"type": "Ready", "status": state, "lastTransitionTime": since}],
        **container(started=True, restartCount=restarts, **told),
    )  # fmt: skip


def live(*pods: Manifest) -> dict[ChildKey, Manifest]:
    found = [stateful_set(replicas=3), *pods]
    return {ChildKey(one["kind"], one["metadata"]["name"]): one for one in found}


def observed(*pods: Manifest, **spec: Any) -> ObservedModel | None:
    told = {"prefill": MODE, "decode": {"replicas": 3}, "slo": SLO} | spec
    return observe_model(blueprint(**told), live(*pods), None)


def test_ready_replicas_are_counted_and_start_up_is_learned() -> None:
    found = observed(worker(0), worker(1, took=50), worker(2, took=40, restarts=1), worker(3, ready=False))
    assert found is not None
    count = found.counts[D]
    assert (count.replicas, count.ready) == (3, 3)
    assert count.starts == {
        "m-decode-0": PodStart(before=0.0, whole=20.0),
        "m-decode-1": PodStart(before=0.0, whole=50.0),
        "m-decode-2": PodStart(before=0.0),
    }
    assert count.leaders == {"m-decode-0", "m-decode-1", "m-decode-2"}


def test_what_came_before_a_container_is_no_part_of_its_own_start() -> None:
    started = {"state": {"running": {"startedAt": "2026-01-01T00:00:07Z"}}}
    found = observed(worker(0, **started), worker(1, restarts=1, **started))
    assert found is not None
    assert [start.before for start in found.counts[D].starts.values()] == [7.0, 0.0]


@pytest.mark.parametrize(("ready", "steady"), [([0, 1, 2], 3), ([0, 2], 1), ([1, 2], 0), ([], 0)])
def test_replicas_are_steady_up_to_the_first_that_does_not_serve(ready: list[int], steady: int) -> None:
    found = observed(*(worker(number, ready=number in ready) for number in range(3)))
    assert found is not None
    assert found.circumstances.steady is not None
    assert found.circumstances.steady[D] == steady


def test_a_role_that_somebody_else_sets_is_sized_along_as_it_is() -> None:
    found = observed()
    assert found is not None
    assert found.spec is not None
    assert (found.spec.roles[D].min, found.spec.roles[D].max, found.spec.roles[P].max) == (3, 3, 4)
    assert found.circumstances.followed == {P}
    assert (found.ttft.percentile, found.ttft.limit(500)) == (0.9, 2.0)


def test_workers_that_do_both_are_sized_as_the_role_of_their_field() -> None:
    found = observed(worker(0), worker(1), prefill=None, decode={"replicas": 2} | MODE)
    assert found is not None
    assert found.spec is not None
    assert (found.spec.roles.keys(), found.spec.prompt_role) == ({D}, D)
    assert (found.circumstances.followed, found.circumstances.steady) == ({D}, {D: 2})
    assert (found.counts.keys(), found.counts[D].leaders) == ({D}, {"m-decode-0", "m-decode-1"})
    assert found.fewest == {D: 1}


def role(count: int = 1, resource: str = "nvidia.com/gpu", **more: Any) -> dict[str, Any]:
    return MODE | {"resources": {"limits": {resource: count}}} | more


def overlay(**containers: dict[str, Any]) -> dict[str, Any]:
    """A podTemplate that gives containers these limits."""
    made = [{"name": name, "image": "i:1", "resources": {"limits": limits}} for name, limits in containers.items()]
    return {"podTemplate": {"spec": {"containers": made}}}


@pytest.mark.parametrize(
    ("prefill", "decode", "resource", "gpus"),
    [
        (role(), role(), "nvidia.com/gpu", {P: 1, D: 1}),
        (role(1, "amd.com/gpu"), role(1, "amd.com/gpu"), "amd.com/gpu", {P: 1, D: 1}),
        (role(2, "gpu.intel.com/xe"), role(1, "gpu.intel.com/xe"), "gpu.intel.com/xe", {P: 2, D: 1}),
        (
            None,
            role(2, "gpu.intel.com/i915")
            | overlay(worker={"gpu.intel.com/memory.max": "8Gi"}, beside={"gpu.intel.com/i915_monitoring": 1}),
            "gpu.intel.com/i915",
            {D: 2},
        ),
        (role(1, "nvidia.com/mig-1g.10gb"), role(1, "nvidia.com/mig-1g.10gb"), "nvidia.com/mig-1g.10gb", {P: 1, D: 1}),
        (None, role(4, parallelism={"tensor": 8}, nodesPerReplica=2), "nvidia.com/gpu", {D: 8}),
        (role(), MODE | overlay(worker={"nvidia.com/gpu": 3}), "nvidia.com/gpu", {P: 1, D: 3}),
        (role(), role(1) | overlay(beside={"nvidia.com/gpu": 1}), "nvidia.com/gpu", {P: 1, D: 2}),
        (MODE, role(), "", {}),
        (role(0), role(), "", {}),
        (role(), role(1, "nvidia.com/mig-1g.10gb"), "", {}),
        (role(), role(1) | overlay(beside={"amd.com/gpu": 1}), "", {}),
        (role(1, "example.com/nic"), role(1, "example.com/nic"), "", {}),
    ],
)
def test_what_pods_ask_for_tells_whether_a_quota_bounds_the_model(
    prefill: Any, decode: Any, resource: str, gpus: dict[Role, int]
) -> None:
    plan = blueprint(prefill=prefill, decode=decode, slo=SLO, autoscaling={"priority": 7})
    found = observe_model(plan, settled(plan), None)
    assert found is not None
    assert (found.gpu_resource, found.gpus) == (resource, gpus)
    assert found.priority == 7


def test_a_model_without_pods_yet_takes_no_gpus() -> None:
    plan = blueprint(prefill=role(), decode=role(), slo=SLO)
    found = observe_model(plan, {}, None)
    assert found is not None
    assert found.gpu_resource == ""


def test_init_containers_take_theirs_before_the_others_and_sidecars_beside_them() -> None:
    def one(count: int, **more: Any) -> Manifest:
        return {"resources": {"limits": {"nvidia.com/gpu": str(count), "cpu": "1"}}} | more

    template = {"spec": {"containers": [one(1), {}], "initContainers": [one(2), one(1, restartPolicy="Always")]}}
    assert count_gpus(template) == {"nvidia.com/gpu": 2}
    template["spec"]["initContainers"].append(one(4))
    assert count_gpus(template) == {"nvidia.com/gpu": 5}


def test_what_cannot_be_sized_is_told() -> None:
    external = observed(decode={"replicas": 9, "scaling": {"mode": "External"}}, autoscaling={"gpuBudget": 4})
    assert external is not None
    assert external.spec is None
    assert "gpuBudget is 4: raise it to 10" in external.problem


def test_without_targets_or_while_suspended_there_is_nothing_to_decide() -> None:
    assert observed(prefill={}, slo=None) is None
    assert observed(suspend=True) is None
    measured = observed(prefill={})
    assert measured is not None
    assert (measured.spec, measured.problem, measured.circumstances.followed) == (None, "", frozenset())


@pytest.mark.parametrize(("phase", "rolls"), [("Complete", False), ("RolledBack", False), ("Canary", True)])
def test_a_model_rolls_until_it_is_done(phase: Any, rolls: bool) -> None:
    assert is_rolling(RolloutStatus(phase=phase, revision=1, digest="", stable_revision=1)) is rolls
    assert is_rolling(None)


@pytest.mark.parametrize(
    ("rollout", "waiting", "stalled", "forbids"),
    [
        ({}, False, False, True),
        ({}, True, False, False),
        ({"paused": True}, False, False, False),
        ({}, False, True, False),
    ],
)
def test_only_what_is_in_motion_forbids_fewer_replicas(
    rollout: dict[str, Any], waiting: bool, stalled: bool, forbids: bool
) -> None:
    """A rollout that waits, is paused or is stuck may last for days."""
    plan = blueprint(prefill=MODE, decode={"replicas": 3}, slo=SLO, rollout=rollout)
    found = [Condition(type="Stalled", status="True", reason="ImagePullFailed", message="")] if stalled else []
    model = plan.model.model_copy(update={"status": plan.model.status.model_copy(update={"conditions": found})})
    state = RolloutStatus(phase="Progressing", revision=2, digest="", stable_revision=2, waiting=waiting)
    seen = observe_model(replace(plan, model=model), live(), state)
    assert seen is not None
    assert seen.circumstances.rolling == forbids
