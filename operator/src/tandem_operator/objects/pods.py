"""What one pod says of itself: whether it is ready, up, started, on standby or leaving. Pure."""

from __future__ import annotations

from tandem_operator.objects.manifests import Manifest, dig, dig_list, labels_of, parse_time

ENDED_BY_NODE = "EndedByNode"
"""Reason of a pod whose node has ended it: its controller makes another one."""
_REVISION_LABEL = "controller-revision-hash"


def is_ready(pod: Manifest) -> bool:
    """The kubelet says so; the pod may be leaving nevertheless."""
    for condition in dig_list(pod, "status", "conditions"):
        if condition.get("type") == "Ready":
            return condition.get("status") == "True"
    return False


def is_up(pod: Manifest) -> bool:
    """Every container is ready, whatever readiness gates say."""
    return any(
        condition.get("type") == "ContainersReady" and condition.get("status") == "True"
        for condition in dig_list(pod, "status", "conditions")
    )


def is_on_standby(pod: Manifest) -> bool:
    """For a worker that may rest: it has started as far as it is to, or wakes up, and was never ready since."""
    return has_started(pod) and not is_up(pod) and not is_leaving(pod) and not _has_been_ready(pod)


def _has_been_ready(pod: Manifest) -> bool:
    """Whether its readiness changed after its container began; before that no pod is ready."""
    conditions = (c for c in dig_list(pod, "status", "conditions") if c.get("type") == "Ready")
    since = parse_time(next(conditions, Manifest()).get("lastTransitionTime"))
    statuses = dig_list(pod, "status", "containerStatuses")
    began = [time for status in statuses if (time := parse_time(dig(status, "state", "running", "startedAt")))]
    return since is not None and bool(began) and since > max(began)


def has_started(pod: Manifest) -> bool:
    """Every container runs and has passed its startup probe."""
    statuses = dig_list(pod, "status", "containerStatuses")
    return bool(statuses) and all(status.get("started") for status in statuses)


def is_leaving(pod: Manifest) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def revision_of(pod: Manifest) -> str | None:
    """The revision of its StatefulSet's template that a pod was made from."""
    return labels_of(pod).get(_REVISION_LABEL)
