from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from operator_objects import READY, container, pod
from tandem_operator.kube.events import creation_failure
from tandem_operator.objects.problem import Problem
from tandem_operator.observe.causes import pod_problem, role_problem


def waiting(reason: str, message: str = "", **fields: Any) -> dict[str, Any]:
    return container(state={"waiting": {"reason": reason, "message": message}}, **fields)


KILLED = {"exitCode": 137, "reason": "Error"}
UNSCHEDULABLE = {
    "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}]
}


def problem(**fields: Any) -> Problem:
    found = pod_problem(pod("m-decode-0", **fields))
    assert found is not None
    return found


def test_pods_without_trouble() -> None:
    assert pod_problem(pod("a", **READY)) is None
    assert pod_problem(pod("a")) is None
    assert pod_problem(pod("a", **waiting("ContainerCreating"))) is None
    assert pod_problem(pod("a", metadata={"deletionTimestamp": "x"}, **waiting("ErrImagePull"))) is None


def test_image_errors_read_the_same_before_and_during_back_off() -> None:
    detail = "rpc error: code = NotFound: no-such-image:1: not found"
    first = problem(**waiting("ErrImagePull", detail))
    again = problem(**waiting("ImagePullBackOff", f'Back-off pulling image "no-such-image:1": ErrImagePull: {detail}'))
    assert first == again
    assert (first.reason, first.stalled) == ("ImagePullFailed", True)
    assert "no-such-image:1: not found" in first.message


def test_bad_image_names() -> None:
    assert problem(**waiting("InvalidImageName", image="A:B:C")).message.endswith("A:B:C is not an image reference")


def test_missing_secrets() -> None:
    found = problem(**waiting("CreateContainerConfigError", 'secret "hub-token" not found'))
    assert (found.reason, found.stalled) == ("CreateContainerConfigError", True)
    assert 'secret "hub-token" not found' in found.message


@pytest.mark.parametrize("state", [{"waiting": {"reason": "CrashLoopBackOff"}}, {"running": {}}])
def test_what_the_worker_said_holds_through_its_restarts(state: dict[str, Any]) -> None:
    said = json.dumps({"reason": "ModelNotFound", "message": "hf://a/b does not exist"})
    found = problem(**container(state=state, lastState={"terminated": {"exitCode": 1, "message": said}}))
    assert found == Problem(
        reason="ModelNotFound", message="Pod m-decode-0: hf://a/b does not exist", stalled=True, from_worker=True
    )


def test_crashes_without_a_sentence_show_the_last_log_line() -> None:
    ended = {"terminated": {"exitCode": 1, "message": "Traceback\nValueError: nope\n"}}
    found = problem(**waiting("CrashLoopBackOff", lastState=ended))
    assert (found.reason, found.stalled) == ("CrashLoopBackOff", True)
    assert found.message == "Pod m-decode-0: container worker ended with code 1: ValueError: nope"


def test_one_restart_is_not_yet_a_case_for_a_person() -> None:
    found = problem(**container(state={"running": {}}, lastState={"terminated": {"exitCode": 137}}))
    assert (found.reason, found.stalled) == ("ContainerKilled", False)


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        ({"exitCode": 137}, "was killed by SIGKILL: its liveness probe failed"),
        ({"exitCode": 143}, "was killed by SIGTERM: somebody asked it to end"),
        ({"exitCode": 139}, "was killed by SIGSEGV: native code read memory"),
        ({"exitCode": 1, "signal": 7}, "was killed by SIGBUS: shared memory"),
        ({"exitCode": 138}, "was killed by SIGUSR1"),
    ],
)
def test_a_killed_container_is_told_by_signal_and_cause_and_not_by_its_log(ended: dict[str, Any], words: str) -> None:
    log = json.dumps({"time": "now", "level": "info", "message": "step 17"})
    times = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:09Z"}
    told = {"terminated": ended | {"message": log} | times}
    running = problem(**container(state={"running": {}}, lastState=told, restartCount=5))
    assert (running.reason, running.stalled) == ("ContainerKilled", False), "the kubelet is not backing off"
    assert words in running.message
    assert "step 17" not in running.message
    assert problem(**waiting("CrashLoopBackOff", lastState=told, restartCount=5)).stalled


def test_a_record_of_a_log_is_told_by_its_message() -> None:
    log = json.dumps({"time": "now", "level": "error", "message": "no room for the model"})
    found = problem(**waiting("CrashLoopBackOff", lastState={"terminated": {"exitCode": 1, "message": f"x\n{log}"}}))
    assert found.message.endswith("ended with code 1: no room for the model")


@pytest.mark.parametrize(
    ("restarts", "ran_until", "stalled"),
    [(1, "00:00:09", False), (2, "00:00:09", True), (2, "00:11:00", False)],
)
def test_a_crash_loop_stays_one_while_the_container_tries_again(restarts: int, ran_until: str, stalled: bool) -> None:
    times = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": f"2026-01-01T{ran_until}Z"}
    ended = {"terminated": {"exitCode": 1, "message": "nope"} | times}
    found = problem(**container(state={"running": {}}, lastState=ended, restartCount=restarts))
    assert found.stalled == stalled
    if stalled:
        assert found == problem(**waiting("CrashLoopBackOff", lastState=ended, restartCount=restarts))


def event(reason: str, second: int, message: str = "") -> dict[str, Any]:
    return {"reason": reason, "lastTimestamp": f"2026-01-01T00:00:{second:02}Z", "message": message}


def test_a_failure_to_create_pods_ends_with_the_next_pod() -> None:
    quota = event("FailedCreate", 5, "exceeded quota")
    assert creation_failure([event("SuccessfulCreate", 4), quota]) == "exceeded quota"
    assert creation_failure([event("SuccessfulCreate", 5), quota]) == "exceeded quota"
    assert creation_failure([quota, event("SuccessfulCreate", 6), event("SuccessfulDelete", 7)]) is None
    assert creation_failure([]) is None


def test_out_of_memory_names_the_remedy() -> None:
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    found = problem(**waiting("CrashLoopBackOff", lastState=ended))
    assert (found.reason, found.stalled) == ("OutOfMemory", True)
    assert "raise resources.limits.memory" in found.message


@pytest.mark.parametrize("message", ['{"reason": 1}', "[]", '{"reason": "two words", "message": "x"}', '{"a'])
def test_only_the_agreed_shape_is_a_workers_message(message: str) -> None:
    ended = {"terminated": {"exitCode": 1, "message": message}}
    assert problem(**waiting("CrashLoopBackOff", lastState=ended)).reason == "CrashLoopBackOff"


def test_scheduling() -> None:
    def unschedulable(message: str) -> dict[str, Any]:
        return {
            "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]
        }

    found = problem(**unschedulable("0/1 nodes are available: 1 Insufficient cpu."))
    assert (found.reason, found.stalled) == ("Unschedulable", False)
    missing = problem(**unschedulable('0/1 nodes: persistentvolumeclaim "cache" not found.'))
    assert (missing.reason, missing.stalled) == ("VolumeClaimNotFound", True)


def test_a_member_of_a_group_is_named_with_its_place() -> None:
    labels = {"tandem.dev/nodes-per-replica": "2"}
    found = pod_problem(pod("m-decode-3", labels=labels, **waiting("ErrImagePull", "not found")))
    assert found is not None
    assert found.message.startswith("Pod m-decode-3 (node 1 of replica 1): cannot pull worker:1")


def lost(reason: str, *, looping: bool) -> dict[str, Any]:
    said = json.dumps({"reason": reason, "message": "rank 1 is gone"})
    state = {"waiting": {"reason": "CrashLoopBackOff"}} if looping else {"running": {}}
    return container(state=state, lastState={"terminated": {"exitCode": 1, "message": said}})


@pytest.mark.parametrize("reason", ["GroupIncomplete", "GroupLost"])
@pytest.mark.parametrize("looping", [True, False])
@pytest.mark.parametrize(
    "culprit", [waiting("ErrImagePull", "not found"), UNSCHEDULABLE, container(lastState={"terminated": KILLED})]
)
def test_the_pod_that_took_its_group_down_is_named_not_the_ones_that_miss_it(
    culprit: dict[str, Any], looping: bool, reason: str
) -> None:
    first = role_problem([pod("m-decode-0", **lost(reason, looping=looping)), pod("m-decode-1", **culprit)])
    assert first is not None
    assert "m-decode-1" in first.message


@pytest.mark.parametrize("looping", [True, False])
def test_a_group_needs_a_person_only_when_it_is_lost_again_and_again(looping: bool) -> None:
    found = role_problem([pod("m-decode-0", **lost("GroupLost", looping=looping)), pod("m-decode-1")])
    assert found == Problem(reason="GroupLost", message="Pod m-decode-0: rank 1 is gone", stalled=looping)


def test_what_needs_a_person_comes_first() -> None:
    slow = pod("a", **container(state={"running": {}}, lastState={"terminated": {"exitCode": 137}}))
    stuck = pod("b", **waiting("ErrImagePull", "not found"))
    found = role_problem([slow, stuck])
    assert found is not None
    assert found.reason == "ImagePullFailed"
    assert role_problem([pod("c", **READY)]) is None


# As the API server shows them, but for what the operator does not keep.

NOW = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
RUNNING = {"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "restartCount": 0}
SINCE = "2026-01-01T00:05:00Z"


def condition(kind: str, status: str, reason: str = "", message: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": SINCE}


EVICTED = (
    "The node was low on resource: memory. Threshold quantity: 100Mi, available: 96Mi. Container worker was using"
    " 3Gi, request is 1Gi, has larger consumption of memory. "
)
DISK = "Pod ephemeral local storage usage exceeds the total limit of containers 10Gi. "
VOLUME = 'Usage of EmptyDir volume "models" exceeds the limit "10Gi". '


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        ({"phase": "Pending", "endedBefore": {"reason": "Evicted", "message": DISK}}, "Evicted", "made anew"),
        ({"phase": "Pending", "endedBefore": {"reason": "EndedByNode", "message": None}}, "EndedByNode", "get events"),
        ({"phase": "Failed", "reason": "Evicted", "message": EVICTED}, "Evicted", "raise resources.requests.memory"),
        ({"phase": "Failed", "reason": "Evicted", "message": DISK}, "Evicted", "keep the model in a claim"),
        ({"phase": "Failed", "reason": "Evicted", "message": VOLUME}, "Evicted", "keep the model in a claim"),
        ({"phase": "Failed", "reason": "NodeShutdown", "message": "Node is shutting down"}, "NodeShutdown", "shutting"),
        (
            {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed: no healthy devices"},
            "UnexpectedAdmissionError",
            "no healthy devices",
        ),
        (
            {"conditions": [condition("PodScheduled", "False", "Unschedulable",
                "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.")]},
            "VolumeNotBound",
            "kubectl describe pvc",
        ),
        (
            {"conditions": [condition("PodScheduled", "False", "Unschedulable",
                "0/3 nodes are available: 3 node(s) didn't find available persistent volumes to bind.")]},
            "VolumeNotBound",
            "a StorageClass that makes one",
        ),
        (
            {"conditions": [condition("PodScheduled", "True"), condition("PodReadyToStartContainers", "False")]}
            | waiting("ContainerCreating"),
            "ContainersNotCreated",
            "on node node-1 since 2026-01-01T00:05:00Z without a container",
        ),
        (
            {"conditions": [condition("Ready", "False", "ContainersNotReady")]}
            | container(started=True, ready=False, **RUNNING),
            "ContainerUnready",
            "container worker is not ready since 2026-01-01T00:05:00Z",
        ),
        (
            {"conditions": [condition("Ready", "False"), condition("ContainersReady", "True")]}
            | container(started=True, ready=True, **RUNNING),
            "NodeUnreachable",
            "node node-1 may be out of reach",
        ),
        (
            {"conditions": [condition("Ready", "False", "ReadinessGatesNotReady"),
                            condition("tandem.dev/admitted", "False", "Ejected", "no gateway sends requests: kv")]}
            | container(started=True, ready=True, **RUNNING),
            "NotAdmitted",
            "no gateway sends requests: kv",
        ),
    ],
)  # fmt: skip
def test_what_happens_to_a_pod_is_named_and_needs_no_person(status: dict[str, Any], reason: str, words: str) -> None:
    found = pod_problem(pod("m-decode-0", **status) | {"spec": {"nodeName": "node-1"}}, now=NOW)
    assert found is not None
    assert (found.reason, found.stalled) == (reason, False)
    assert found.message.startswith("Pod m-decode-0")
    assert words in found.message


def test_a_pod_that_does_not_go_is_named_once_it_is_overdue() -> None:
    def leaving(due: str) -> Problem | None:
        found = pod("m-decode-0", metadata={"deletionTimestamp": due, "deletionGracePeriodSeconds": 75}, **READY)
        return pod_problem(found | {"spec": {"nodeName": "node-1"}}, now=NOW)

    assert leaving("2026-01-01T00:11:00Z") is None, "it drains"
    assert leaving("2026-01-01T00:09:30Z") is None
    found = leaving("2026-01-01T00:08:00Z")
    assert found is not None
    assert (found.reason, found.stalled) == ("StuckTerminating", True)
    assert "node node-1" in found.message
    assert "out-of-service" in found.message


@pytest.mark.parametrize(
    "status",
    [
        {"conditions": [condition("PodScheduled", "True"), condition("PodReadyToStartContainers", "True")]}
        | waiting("ContainerCreating"),  # an image is pulled
        {"conditions": [condition("Ready", "False", "ContainersNotReady")]} | container(started=False, **RUNNING),
        {"conditions": [condition("Ready", "False", "ReadinessGatesNotReady")]}
        | container(started=True, ready=True, **RUNNING),
    ],
)
def test_a_pod_on_its_way_is_no_problem(status: dict[str, Any]) -> None:
    assert pod_problem(pod("m-decode-0", **status), now=NOW) is None


def test_a_volume_is_given_time() -> None:
    conditions = [condition("PodScheduled", "True"), condition("PodReadyToStartContainers", "False")]
    found = pod("m-decode-0", conditions=conditions, **waiting("ContainerCreating"))
    assert pod_problem(found, now=datetime(2026, 1, 1, 0, 5, 30, tzinfo=UTC)) is None


@pytest.mark.parametrize("looping", [True, False])
def test_a_hung_step_needs_a_person_only_when_it_hangs_again_and_again(looping: bool) -> None:
    found = problem(**lost("StepHung", looping=looping))
    assert (found.reason, found.stalled, found.from_worker) == ("StepHung", looping, False)
