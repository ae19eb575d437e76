"""What of a model's pods those are told who decide about its replicas."""

from __future__ import annotations

from typing import Any

import pytest
from operator_objects import blueprint, container, pod, stateful_set
from tandem_api.inferencemodel import RolloutStatus
from tandem_api.names import Role
from tandem_operator.manifests import ChildKey, Manifest
from tandem_operator.scene import Scene, is_rolling, set_scene

P, D = Role.PREFILL, Role.DECODE
SLO = {"ttft": {"percentile": 90, "seconds": 1, "secondsPerThousandTokens": 2}, "tpot": {"seconds": 0.05}}
MODE = {"scaling": {"mode": "SLO", "max": 4}}


def worker(number: int, *, ready: bool = True, took: int = 20, restarts: int = 0) -> Manifest:
    """A decode pod, made a minute after the one before it."""
    state = "True" if ready else "False"
    since = f"2026-01-01T00:{number + took // 60:02}:{took % 60:02}Z"
    return pod(
        f"m-decode-{number}", metadata={"creationTimestamp": f"2026-01-01T00:{number:02}:00Z"},
        conditions=[{"type": "Ready", "status": state, "lastTransitionTime": since}],
        **container(started=True, restartCount=restarts),
    )  # fmt: skip


def live(*pods: Manifest) -> dict[ChildKey, Manifest]:
    found = [stateful_set(replicas=3), *pods]
    return {ChildKey(one["kind"], one["metadata"]["name"]): one for one in found}


def scene(*pods: Manifest, **spec: Any) -> Scene | None:
    told = {"prefill": MODE, "decode": {"replicas": 3}, "slo": SLO} | spec
    return set_scene(blueprint(**told), live(*pods), None)


def test_ready_replicas_are_counted_and_start_up_is_learned() -> None:
    found = scene(worker(0), worker(1, took=50), worker(2, took=40, restarts=1), worker(3, ready=False))
    assert found is not None
    count = found.counts[D]
    assert (count.replicas, count.ready, count.starts) == (3, 3, (20.0, 50.0))
    assert count.leaders == {"m-decode-0", "m-decode-1", "m-decode-2"}


@pytest.mark.parametrize(("ready", "steady"), [([0, 1, 2], 3), ([0, 2], 1), ([1, 2], 0), ([], 0)])
def test_replicas_are_steady_up_to_the_first_that_does_not_serve(ready: list[int], steady: int) -> None:
    found = scene(*(worker(number, ready=number in ready) for number in range(3)))
    assert found is not None
    assert found.circumstances.steady is not None
    assert found.circumstances.steady[D] == steady


def test_a_role_that_somebody_else_sets_is_sized_along_as_it_is() -> None:
    found = scene()
    assert found is not None
    assert found.spec is not None
    assert (found.spec.roles[D].min, found.spec.roles[D].max, found.spec.roles[P].max) == (3, 3, 4)
    assert found.circumstances.followed == {P}
    assert (found.ttft.percentile, found.ttft.limit(500)) == (0.9, 2.0)


def test_workers_that_do_both_are_sized_as_the_role_of_their_field() -> None:
    found = scene(worker(0), worker(1), prefill=None, decode={"replicas": 2} | MODE)
    assert found is not None
    assert found.spec is not None
    assert (found.spec.roles.keys(), found.spec.prompt_role) == ({D}, D)
    assert (found.circumstances.followed, found.circumstances.steady) == ({D}, {D: 2})
    assert (found.counts.keys(), found.counts[D].leaders) == ({D}, {"m-decode-0", "m-decode-1"})
    assert found.fewest == {D: 1}


def test_a_model_of_which_every_replica_takes_gpus_is_in_the_quota() -> None:
    gpus = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    found = scene(worker(0), prefill=MODE | gpus, decode={"replicas": 3} | gpus, autoscaling={"priority": 7})
    half = scene(prefill=MODE, decode={"replicas": 3} | gpus)
    assert found is not None
    assert half is not None
    assert (found.in_quota, found.priority, found.counts[D].present) == (True, 7, 1)
    assert (half.in_quota, half.priority) == (False, 0)


def test_what_cannot_be_sized_is_told() -> None:
    external = scene(decode={"replicas": 9, "scaling": {"mode": "External"}}, autoscaling={"gpuBudget": 4})
    assert external is not None
    assert external.spec is None
    assert "gpuBudget is 4: raise it to 10" in external.problem


def test_without_targets_or_while_suspended_there_is_nothing_to_decide() -> None:
    assert scene(prefill={}, slo=None) is None
    assert scene(suspend=True) is None
    measured = scene(prefill={})
    assert measured is not None
    assert (measured.spec, measured.problem, measured.circumstances.followed) == (None, "", frozenset())


@pytest.mark.parametrize(("phase", "rolls"), [("Complete", False), ("RolledBack", False), ("Canary", True)])
def test_a_model_rolls_until_it_is_done(phase: Any, rolls: bool) -> None:
    assert is_rolling(RolloutStatus(phase=phase, revision=1, digest="", stable_revision=1)) is rolls
    assert is_rolling(None)
