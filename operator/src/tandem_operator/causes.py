"""Why a pod is not up, as a person should read it: one CamelCase reason and one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, cast

from tandem_api.names import REASON_GROUP_INCOMPLETE, REASON_GROUP_LOST

from tandem_operator.groups import describe_pod, is_leaving, is_ready
from tandem_operator.manifests import Manifest, dig, dig_list

_IMAGE_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "RegistryUnavailable"})
_CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_MISSING_CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)" not found')
_REASON = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")
_GROUP_REASONS = frozenset({REASON_GROUP_INCOMPLETE, REASON_GROUP_LOST})
_MESSAGE_MAX = 600
_BACKOFF_RESET = timedelta(minutes=10)
"""A container that ran this long starts with a clean slate for the kubelet."""
OUT_OF_MEMORY = "OutOfMemory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that keeps the model from being ready."""

    reason: str
    message: str
    stalled: bool = False
    """It needs a person; waiting alone will not do."""
    from_worker: bool = False
    """The worker itself said so, or the hub: it is about the model rather than about Kubernetes."""


def role_problem(pods: Iterable[Manifest]) -> Problem | None:
    """The most telling problem among a role's pods: one that needs a person first, then by pod name. When a pod takes
    its group down, the others only say that it is gone: theirs come last."""
    ordered = sorted(pods, key=lambda pod: str(dig(pod, "metadata", "name")))
    found = [problem for pod in ordered if (problem := pod_problem(pod)) is not None]
    return min(found, key=lambda problem: (problem.reason in _GROUP_REASONS, not problem.stalled), default=None)


def pod_problem(pod: Manifest) -> Problem | None:
    """Why this pod is not up; None for a pod that is ready, leaving, or on its way without trouble."""
    if is_leaving(pod) or is_ready(pod):
        return None
    name = describe_pod(pod)
    for status in [*dig_list(pod, "status", "initContainerStatuses"), *dig_list(pod, "status", "containerStatuses")]:
        if (problem := _container_problem(name, status)) is not None:
            return problem
    return _scheduling_problem(name, pod)


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
    return _exit_problem(name, status, ended, looping=reason == "CrashLoopBackOff" or _ends_quickly(status, ended))


def _ends_quickly(status: Manifest, ended: Manifest) -> bool:
    """Whether a container that runs just now is between two turns of a crash loop.

    Without this the model would be stalled while the kubelet backs off and recovered while the container tries again.
    """
    try:
        began, finished = (datetime.fromisoformat(str(ended.get(name))) for name in ("startedAt", "finishedAt"))
    except ValueError:
        return False
    return (status.get("restartCount") or 0) >= 2 and finished - began < _BACKOFF_RESET


def _exit_problem(name: str, status: Manifest, ended: Manifest, *, looping: bool) -> Problem:
    text = str(ended.get("message") or "").strip()
    if (said := _worker_message(text)) is not None:
        # The members of a group that ended meet anew; only when they end again and again does it need a person.
        its_own = said[0] not in _GROUP_REASONS
        return Problem(
            reason=said[0], message=f"{name}: {_short(said[1])}", stalled=its_own or looping, from_worker=its_own
        )
    container = status.get("name")
    if ended.get("reason") == "OOMKilled":
        sentence = f"{name}: container {container} needs more memory than its limit; raise resources.limits.memory"
        return Problem(reason=OUT_OF_MEMORY, message=sentence, stalled=looping)
    last = f": {_short(text.splitlines()[-1])}" if text else ""
    sentence = f"{name}: container {container} ended with code {ended.get('exitCode')}{last}"
    return Problem(reason="CrashLoopBackOff" if looping else "ContainerRestarting", message=sentence, stalled=looping)


def creation_failure(events: Iterable[Manifest]) -> str | None:
    """Why a workload could not create a pod, by the Events about it; None when it has since created one."""
    outcomes = [event for event in events if event.get("reason") in ("FailedCreate", "SuccessfulCreate")]
    # Times are whole seconds: of two in one, the failure is what is still open.
    last = max(
        outcomes, key=lambda event: (str(event.get("lastTimestamp")), event["reason"] == "FailedCreate"), default=None
    )
    return None if last is None or last["reason"] == "SuccessfulCreate" else str(last.get("message"))


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
