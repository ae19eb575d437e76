"""Why a pod is not up, as a person should read it: one CamelCase reason and one sentence."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, cast

from tandem_api.names import CONDITION_ADMITTED, REASON_GROUP_INCOMPLETE, REASON_GROUP_LOST, REASON_STEP_HUNG

from tandem_operator.objects.manifests import Manifest, dig, dig_list, parse_time
from tandem_operator.objects.pods import ENDED_BY_NODE, has_started, is_leaving, is_ready
from tandem_operator.objects.problem import Problem
from tandem_operator.observe.groups import describe_pod

_IMAGE_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "RegistryUnavailable"})
_CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_MISSING_CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)" not found')
_REASON = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")
_GROUP_REASONS = frozenset({REASON_GROUP_INCOMPLETE, REASON_GROUP_LOST})
_HEALED_BY_A_RESTART = _GROUP_REASONS | {REASON_STEP_HUNG}
"""What a worker ends with so that it starts anew: only when it happens again and again does it need a person."""
_UNBOUND = re.compile(r"unbound immediate PersistentVolumeClaims|available persistent volumes to bind")
_WAITS_FOR_GATES = "ReadinessGatesNotReady"
_SLOW_TO_END = timedelta(seconds=60)
_SLOW_TO_CREATE = timedelta(seconds=60)
_MESSAGE_MAX = 600
_BACKOFF_RESET = timedelta(minutes=10)
"""A container that ran this long starts with a clean slate for the kubelet."""
OUT_OF_MEMORY = "OutOfMemory"


def missing_certificate(secret: str, *, serving: bool) -> Problem:
    """The Secret that `spec.gateway.tls` names is not there. `serving`: gateways have it from before."""
    effect = "those gateways that run go on, and new ones cannot start" if serving else "gateways cannot start"
    text = (
        f"Secret {secret}, which spec.gateway.tls.secretName names, does not exist in this namespace: {effect} without"
        f" it; kubectl create secret tls {secret} --cert=FILE --key=FILE makes one"
    )
    return Problem(reason="TLSSecretNotFound", message=text, stalled=not serving)


def role_problem(pods: Iterable[Manifest], *, now: datetime | None = None) -> Problem | None:
    """The most telling problem among a role's pods: one that needs a person first, then by pod name. When a pod takes
    its group down, the others only say that it is gone: theirs come last."""
    ordered = sorted(pods, key=lambda pod: str(dig(pod, "metadata", "name")))
    found = [problem for pod in ordered if (problem := pod_problem(pod, now=now)) is not None]
    return min(found, key=lambda problem: (problem.reason in _GROUP_REASONS, not problem.stalled), default=None)


def pod_problem(pod: Manifest, *, now: datetime | None = None) -> Problem | None:
    """Why this pod is not up, or does not go; None for a pod that is ready, or on its way without trouble. What only
    time tells is left out without `now`."""
    name = describe_pod(pod)
    if is_leaving(pod):
        return None if now is None else _ending_problem(name, pod, now)
    if is_ready(pod):
        return None
    if dig(pod, "status", "phase") == "Failed" and (reason := dig(pod, "status", "reason")) is not None:
        return _failed_problem(name, pod, str(reason))
    for status in [*dig_list(pod, "status", "initContainerStatuses"), *dig_list(pod, "status", "containerStatuses")]:
        if (problem := _container_problem(name, status)) is not None:
            return problem
    return (
        _scheduling_problem(name, pod)
        or _repeated_problem(name, pod)
        or _unready_problem(name, pod)
        or (None if now is None else _creation_problem(name, pod, now))
    )


def _ending_problem(name: str, pod: Manifest, now: datetime) -> Problem | None:
    """A pod that should be gone. A StatefulSet waits for it for ever, because its node may still run it."""
    due = parse_time(dig(pod, "metadata", "deletionTimestamp"))
    if due is None or now - due < _SLOW_TO_END:
        return None
    node = dig(pod, "spec", "nodeName") or "unknown"
    text = (
        f"{name} should have ended at {due:%Y-%m-%dT%H:%M:%SZ} and has not, on node {node}: if that node is lost,"
        " delete the Node or taint it node.kubernetes.io/out-of-service=nodeshutdown:NoExecute; kubectl delete pod"
        " --force is safe only when the node cannot run it any more"
    )
    return Problem(reason="StuckTerminating", message=text, stalled=True)


def _repeated_problem(name: str, pod: Manifest) -> Problem | None:
    """The pod before it was ended by its node: this one may be about to end the same way."""
    ended = dig(pod, "status", "endedBefore")
    if ended is None:
        return None
    found = _failed_problem(name, {"status": ended}, str(ended["reason"]))
    return Problem(reason=found.reason, message=f"{found.message}; it was made anew and is not ready yet")


def _failed_problem(name: str, pod: Manifest, reason: str) -> Problem:
    """A pod that its node has ended: evicted, shut down, not admitted. Its controller makes another one."""
    words = _short(str(dig(pod, "status", "message") or reason))
    if reason == ENDED_BY_NODE:
        text = (
            "its node ended it, which evictions and shutdowns do: kubectl get events says why; an eviction for disk or"
        )
        return Problem(reason=reason, message=f"{name}: {text} memory wants higher limits or requests")
    if reason != "Evicted":
        return Problem(reason=reason if _REASON.fullmatch(reason) else "PodFailed", message=f"{name}: {words}")
    advice = "the node ran short; give the pod what it uses as resources.requests, or the node more"
    if "ephemeral" in words or "EmptyDir" in words:
        advice = "it wrote more to its node's disk than it may; keep the model in a claim (spec.model.cache)"
    elif "memory" in words:
        advice = "the node ran out of memory; raise resources.requests.memory to what the worker uses"
    return Problem(reason="Evicted", message=f"{name}: {words}: {advice}")


def _unready_problem(name: str, pod: Manifest) -> Problem | None:
    """A pod that runs and is not ready."""
    ready = _condition(pod, "Ready")
    if ready.get("status") in (None, "True") or not has_started(pod):
        return None
    since = f" since {ready['lastTransitionTime']}" if ready.get("lastTransitionTime") else ""
    if ready.get("reason") == _WAITS_FOR_GATES:
        gate = _condition(pod, CONDITION_ADMITTED)
        if gate.get("status") != "False":
            return None  # it is up and will be looked at; what gateways say is told elsewhere
        return Problem(reason="NotAdmitted", message=f"{name}: {_short(str(gate.get('message')))}")
    unready = [str(s.get("name")) for s in dig_list(pod, "status", "containerStatuses") if not s.get("ready")]
    if unready:
        text = (
            f"{name}: container {', '.join(unready)} is not ready{since}: its readiness probe fails; its log says why"
        )
        return Problem(reason="ContainerUnready", message=text)
    node = dig(pod, "spec", "nodeName") or "unknown"
    text = f"{name} counts as unready{since}, though its containers were ready: node {node} may be out of reach"
    return Problem(reason="NodeUnreachable", message=text)


def _creation_problem(name: str, pod: Manifest, now: datetime) -> Problem | None:
    """A pod that has a node and whose containers are not made. While an image is pulled the sandbox is there."""
    sandbox, scheduled = _condition(pod, "PodReadyToStartContainers"), _condition(pod, "PodScheduled")
    since = parse_time(scheduled.get("lastTransitionTime"))
    if sandbox.get("status") != "False" or scheduled.get("status") != "True" or has_started(pod):
        return None
    if since is None or now - since < _SLOW_TO_CREATE:
        return None
    node = dig(pod, "spec", "nodeName") or "unknown"
    text = (
        f"{name} has been on node {node} since {since:%Y-%m-%dT%H:%M:%SZ} without a container: a volume cannot be"
        " mounted, or the node gives it no network; kubectl describe pod says which"
    )
    return Problem(reason="ContainersNotCreated", message=text)


def _condition(pod: Manifest, kind: str) -> Manifest:
    conditions = dig_list(pod, "status", "conditions")
    return next((condition for condition in conditions if condition.get("type") == kind), Manifest())


def _scheduling_problem(name: str, pod: Manifest) -> Problem | None:
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") != "False" or scheduled.get("reason") not in ("Unschedulable", "SchedulingGated"):
        return None
    message = str(scheduled.get("message", ""))
    if claim := _MISSING_CLAIM.search(message):
        text = f"{name}: PersistentVolumeClaim {claim[1]} does not exist in this namespace; create it"
        return Problem(reason="VolumeClaimNotFound", message=text, stalled=True)
    if _UNBOUND.search(message):
        text = (
            f"{name}: {_short(message)}: kubectl describe pvc says why the claim does not bind; it wants a volume, or a"
            " StorageClass that makes one, where the pod may run"
        )
        return Problem(reason="VolumeNotBound", message=text)
    return Problem(reason=str(scheduled["reason"]), message=f"{name}: {_short(message)}")


def _container_problem(name: str, status: Manifest) -> Problem | None:
    waiting = dig(status, "state", "waiting")
    reason, message = str(dig(waiting, "reason")), str(dig(waiting, "message") or "")
    image = status.get("image", "")
    if reason in _IMAGE_REASONS:
        # The kubelet alternates between the error and its back-off, which quotes the error: keep what is common.
        detail = message.rpartition("ErrImagePull: ")[2]
        detail = "" if detail.startswith("Back-off") else f": {_short(detail)}"
        return Problem(reason="ImagePullFailed", message=f"{name}: cannot pull {image}{detail}", stalled=True)
    if reason == "InvalidImageName":
        return Problem(reason=reason, message=f"{name}: {image} is not an image reference", stalled=True)
    if reason in _CONFIG_REASONS:
        return Problem(reason=reason, message=f"{name}: {_short(message)}", stalled=True)
    ended = dig(status, "state", "terminated") or dig(status, "lastState", "terminated")
    if ended is None or status.get("started") or (ended.get("exitCode") == 0 and not waiting):
        return None
    ended = cast(Manifest, ended)
    backs_off = reason == "CrashLoopBackOff"
    if (killed := _kill_problem(name, status, ended, looping=backs_off)) is not None:
        return killed
    return _exit_problem(name, status, ended, looping=backs_off or _ends_quickly(status, ended))


def _ends_quickly(status: Manifest, ended: Manifest) -> bool:
    """Whether a container that runs just now is between two turns of a crash loop.

    Without this the model would be stalled while the kubelet backs off and recovered while the container tries again.
    """
    try:
        began, finished = (datetime.fromisoformat(str(ended.get(name))) for name in ("startedAt", "finishedAt"))
    except ValueError:
        return False
    return (status.get("restartCount") or 0) >= 2 and finished - began < _BACKOFF_RESET


_SIGNALS = {
    signal.SIGTERM: "somebody asked it to end: a probe that failed, a node that stops, or a person",
    signal.SIGKILL: "its liveness probe failed or its time to end was over, its node ran out of memory, or a person did"
    " it; kubectl get events says which",
    signal.SIGSEGV: "native code read memory that is not its own: a driver or a library that does not fit the image",
    signal.SIGBUS: "shared memory or a file that it had mapped is too short: more room in /dev/shm or on the disk",
    signal.SIGILL: "its code has instructions that this processor does not know",
    signal.SIGABRT: "native code gave up; the container's log says where",
}
"""What a container that ended by a signal has met."""


def _kill_problem(name: str, status: Manifest, ended: Manifest, *, looping: bool) -> Problem | None:
    """A container that was ended by a signal, unless it left a sentence or the node says what for. A person is needed
    only when the kubelet backs off: who killed it may have had a reason, and it may serve again."""
    number = ended.get("signal") or (ended.get("exitCode") or 0) - 128
    if not 0 < number < signal.NSIG or ended.get("reason") == "OOMKilled":
        return None
    if _worker_message(str(ended.get("message") or "").strip()) is not None:
        return None
    try:
        found = signal.Signals(number)
    except ValueError:
        return None
    cause = f": {_SIGNALS[found]}" if found in _SIGNALS else ""
    text = f"{name}: container {status.get('name')} was killed by {found.name}{cause}"
    return Problem(reason="CrashLoopBackOff" if looping else "ContainerKilled", message=text, stalled=looping)


def _last_words(text: str) -> str:
    """The last line of a log, or what it says where it is a record of one."""
    line = text.splitlines()[-1]
    try:
        record: Any = json.loads(line)
    except ValueError:
        return line
    message = dig(record, "message")
    return message if isinstance(message, str) else line


def _exit_problem(name: str, status: Manifest, ended: Manifest, *, looping: bool) -> Problem:
    text = str(ended.get("message") or "").strip()
    if (said := _worker_message(text)) is not None:
        its_own = said[0] not in _HEALED_BY_A_RESTART
        return Problem(
            reason=said[0], message=f"{name}: {_short(said[1])}", stalled=its_own or looping, from_worker=its_own
        )
    container = status.get("name")
    if ended.get("reason") == "OOMKilled":
        sentence = f"{name}: container {container} needs more memory than its limit; raise resources.limits.memory"
        return Problem(reason=OUT_OF_MEMORY, message=sentence, stalled=looping)
    last = f": {_short(_last_words(text))}" if text else ""
    sentence = f"{name}: container {container} ended with code {ended.get('exitCode')}{last}"
    return Problem(reason="CrashLoopBackOff" if looping else "ContainerRestarting", message=sentence, stalled=looping)


def _worker_message(text: str) -> tuple[str, str] | None:
    """What a worker wrote before it exited: `{"reason": ..., "message": ...}`."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return None
    reason, message = dig(value, "reason"), dig(value, "message")
    if not isinstance(reason, str) or not isinstance(message, str) or not _REASON.fullmatch(reason):
        return None
    return reason, message


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _MESSAGE_MAX else flat[: _MESSAGE_MAX - 1] + "…"
