"""Which Pods are workers to send requests to.

A replica is one Pod, or a group of `tandem.dev/nodes-per-replica` Pods with consecutive ordinals in one StatefulSet.
The first Pod of a group takes its requests, and does so only while every Pod of the group is ready: the group computes
as a whole or not at all.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tandem_api.engines import ENGINES, needs_prefill
from tandem_api.names import (
    ANNOTATION_CONFIG_HASH,
    CONDITION_ADMITTED,
    LABEL_ENGINE,
    LABEL_NODES_PER_REPLICA,
    LABEL_REVISION,
    LABEL_ROLE,
    WORKER_HTTP_PORT,
    WORKER_KV_PORT,
    WORKER_METRICS_PORT,
    Role,
    pod_ordinal,
)

from tandem_gateway.scheduling import Worker
from tandem_gateway.workers.waker import Sleeper

log = logging.getLogger(__name__)
_ROLES = {Role.PREFILL.value: Role.PREFILL, Role.DECODE.value: Role.DECODE, Role.UNIFIED.value: Role.UNIFIED}

Pod = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Names a group of Pods. Pods that were told different things do not form one."""

    stateful_set: str
    index: int
    size: int
    config: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A ready Pod."""

    worker: Worker
    replica: Replica | None = None
    """The group it belongs to; None for a Pod that is a replica by itself."""
    leads: bool = True


def read_member(pod: Pod) -> Member | None:
    """What a Pod is; None while it is nothing: not ready, being deleted, without address, role or place."""
    return _read(pod) if _is_up(pod) else None


def read_sleeper(pod: Pod) -> Sleeper | None:
    """The worker that a Pod is which takes no requests yet, and may be asked to; None of all others. Pods of a group
    serve once all of them do: nobody is asked for them."""
    if _is_up(pod):
        return None
    member = _read(pod)
    if member is None or member.replica is not None or member.worker.engine != "Tandem":
        return None
    status: dict[str, Any] = pod.get("status") or {}
    containers: list[dict[str, Any]] = status.get("containerStatuses") or []
    ended = sum(int(container.get("restartCount") or 0) for container in containers)
    return Sleeper(worker=member.worker, pod=f"{pod['metadata'].get('uid', '')}/{ended}")


def _read(pod: Pod) -> Member | None:
    """The same of one that is not ready."""
    meta: dict[str, Any] = pod.get("metadata") or {}
    status: dict[str, Any] = pod.get("status") or {}
    labels: dict[str, str] = meta.get("labels") or {}
    role = _ROLES.get(labels.get(LABEL_ROLE, ""))
    address = status.get("podIP")
    if role is None or not address or meta.get("deletionTimestamp"):
        return None
    kind = labels.get(LABEL_ENGINE, "Tandem")
    engine = ENGINES.get(kind)
    if engine is None:
        log.warning("not a worker: this gateway does not know its engine", extra={"pod": meta["name"], "engine": kind})
        return None
    host = f"[{address}]" if ":" in address else address
    worker = Worker(
        name=meta["name"],
        address=f"{host}:{_port(pod, 'http', WORKER_HTTP_PORT)}",
        role=role,
        revision=labels.get(LABEL_REVISION, ""),
        kv_address=f"{host}:{_port(pod, 'kv', WORKER_KV_PORT)}",
        status_address=f"{host}:{_port(pod, 'metrics', WORKER_METRICS_PORT)}" if engine == "Tandem" else "",
        engine=engine,
        needs_prefill=needs_prefill(engine, role),
    )
    if labels.get(LABEL_NODES_PER_REPLICA, "1") == "1":
        return Member(worker=worker)
    try:
        return _read_place(worker, meta)
    except ValueError as error:
        log.warning("not a worker: its place in its group cannot be read", extra={"error": str(error)})
        return None


def _is_up(pod: Pod) -> bool:
    """Ready, but for what gateways themselves decide.

    The operator opens the gate for pods that a gateway has admitted, so a gateway cannot wait for it; other gates are
    somebody else's word. When a node is lost the control plane takes `Ready` away and leaves `ContainersReady`.
    """
    spec: dict[str, Any] = pod.get("spec") or {}
    status: dict[str, Any] = pod.get("status") or {}
    listed: list[dict[str, Any]] = status.get("conditions") or []
    conditions = {item.get("type"): item for item in listed}
    gates: list[dict[str, Any]] = spec.get("readinessGates") or []
    wanted = {gate.get("conditionType") for gate in gates}
    if CONDITION_ADMITTED not in wanted:
        return conditions.get("Ready", {}).get("status") == "True"
    wanted = (wanted - {CONDITION_ADMITTED}) | {"ContainersReady"}
    if not all(conditions.get(kind, {}).get("status") == "True" for kind in wanted):
        return False
    ready = conditions.get("Ready", {})
    return ready.get("status") == "True" or ready.get("reason") == "ReadinessGatesNotReady"


def _read_place(worker: Worker, meta: dict[str, Any]) -> Member:
    """The member of a group that a worker is.

    Raises:
        ValueError: the Pod's name or label has no number.
    """
    size = max(1, int(meta["labels"][LABEL_NODES_PER_REPLICA]))
    annotations: dict[str, str] = meta.get("annotations") or {}
    index, node = divmod(pod_ordinal(worker.name), size)
    replica = Replica(
        stateful_set=worker.name.rpartition("-")[0],
        index=index,
        size=size,
        config=annotations.get(ANNOTATION_CONFIG_HASH, ""),
    )
    return Member(worker=worker, replica=replica, leads=node == 0)


def select_workers(members: Iterable[Member]) -> list[Worker]:
    """The members to send requests to: single Pods, and the leaders of groups that are ready as a whole."""
    known = list(members)
    ready = Counter(member.replica for member in known)
    return [
        member.worker
        for member in known
        if member.leads and (member.replica is None or ready[member.replica] == member.replica.size)
    ]


def _port(pod: Pod, name: str, usual: int) -> int:
    """The container port of that name, else the port that workers use."""
    spec: dict[str, Any] = pod.get("spec") or {}
    containers: list[dict[str, Any]] = spec.get("containers") or []
    ports: list[dict[str, Any]] = []
    for container in containers:
        ports += container.get("ports") or []
    return next((int(port["containerPort"]) for port in ports if port.get("name") == name), usual)
