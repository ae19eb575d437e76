"""Pod templates that meet the `restricted` Pod Security Standard, and the parts they are made of."""

from __future__ import annotations

import math
from typing import Any

from tandem_api import names
from tandem_api.crd.pods import Resources, Workload
from tandem_api.crd.rollout import LONGEST_DRAIN
from tandem_api.names import Role
from tandem_api.quantities import parse_duration, parse_quantity

from tandem_operator.objects.errors import InvalidOverlayError
from tandem_operator.objects.manifests import Manifest
from tandem_operator.workloads.blueprint import Blueprint, component_of, digest
from tandem_operator.workloads.child import build_labels, people_metadata
from tandem_operator.workloads.overlay import overlay_template
from tandem_operator.workloads.placement import placement

USER = 65532
GRACE_SECONDS = 15
"""Added to the drain timeout before a pod is killed: what the process needs to stop after it has drained."""
ROOM_TO_DRAIN_SECONDS = 600
"""Pod templates leave at least this much, so that a longer `drain.timeout` needs no new pods."""
_RESTART_MAX = 64
"""Characters of a wish to restart that are kept as they are."""
_CONFIG_FOLDER = names.CONFIG_PATH.rsplit("/", 1)[0]


def pod_template(
    blueprint: Blueprint,
    role: Role,
    *,
    container: Manifest,
    volumes: list[Manifest],
    config: Manifest,
    spec: Manifest,
    workload: Workload,
    path: str,
) -> Manifest:
    """The pod template around one main container: what is generated, the fields of the workload, the person's overlay.

    `config` is the ConfigMap's manifest: its hash on the template makes a new configuration roll the pods.
    """
    labels = build_labels(blueprint, component_of(role), role)
    if role is not Role.GATEWAY:
        labels[names.LABEL_REVISION] = blueprint.revision_of(role)
        labels[names.LABEL_NODES_PER_REPLICA] = str(blueprint.worker_spec(role).nodes_per_replica)
        if (kind := blueprint.model.spec.engine.kind) != "Tandem":
            labels[names.LABEL_ENGINE] = kind
    annotations: Manifest = {
        names.ANNOTATION_CONFIG_HASH: config["metadata"]["annotations"][names.ANNOTATION_CONFIG_HASH],
        "kubectl.kubernetes.io/default-container": container["name"],
    }
    restart = blueprint.model.metadata.annotations.get(names.ANNOTATION_RESTART)
    if restart and role is not Role.GATEWAY:
        annotations[names.ANNOTATION_RESTART] = restart if len(restart) <= _RESTART_MAX else digest(restart)
    wanted = people_metadata(blueprint, role)
    template: Manifest = {
        "metadata": {"labels": wanted["labels"] | labels, "annotations": wanted["annotations"] | annotations},
        "spec": {
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "terminationGracePeriodSeconds": template_grace_seconds(blueprint),
            **spec,
            **placement(blueprint, role, workload),
            "containers": [_hardened(container, blueprint, workload)],
            "volumes": [
                {"name": "config", "configMap": {"name": config["metadata"]["name"]}},
                {"name": "tmp", "emptyDir": size_limit(workload.tmp_size_limit)},
                *volumes,
            ],
        },
    }
    if workload.pod_template is None:
        return template
    overlay = workload.pod_template.model_dump(by_alias=True, exclude_none=True)
    merged = overlay_template(template, overlay, path=f"{path}.podTemplate")
    beside = frozenset(each["name"] for each in spec.get("initContainers", []))
    return _confined(merged, container["name"], path=f"{path}.podTemplate", beside=beside)


_CONFINED_POD: Manifest = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
CONFINED: Manifest = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""What every container has that the operator writes."""


def _confined(template: Manifest, name: str, *, path: str, beside: frozenset[str]) -> Manifest:
    """`template` with what an overlay has left out of the confinement of the pod, of its main container, and of init
    containers that the operator writes (`beside`). What it says itself stays: whether it may is judged by policies.

    Raises:
        InvalidOverlayError: the main container is gone.
    """
    spec = template["spec"]
    containers: list[Manifest] = spec.get("containers") or []
    if not any(container.get("name") == name for container in containers):
        raise InvalidOverlayError(f"{path}.spec.containers must keep {name}: it is what the pod is for")
    confined: Manifest = {"containers": _confine(containers, frozenset({name}))}
    if beside and spec.get("initContainers"):
        confined["initContainers"] = _confine(spec["initContainers"], beside)
    return template | {
        "spec": spec | confined | {"securityContext": _completed(spec.get("securityContext"), _CONFINED_POD)}
    }


def _confine(containers: list[Manifest], names_of: frozenset[str]) -> list[Manifest]:
    return [
        container | {"securityContext": _completed(container.get("securityContext"), CONFINED)}
        if container.get("name") in names_of
        else container
        for container in containers
    ]


def _completed(said: Manifest | None, usual: Manifest) -> Manifest:
    found = said or {}
    return found | {key: value for key, value in usual.items() if key not in found}


def _hardened(container: Manifest, blueprint: Blueprint, workload: Workload) -> Manifest:
    return {
        **container,
        "imagePullPolicy": blueprint.release.image_pull_policy,
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the last log lines, where no sentence was left
        "env": [*_identity_env(), *container["env"]],
        "resources": container.get("resources") or resources_of(workload.resources),
        "volumeMounts": [
            {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            *container["volumeMounts"],
        ],
        "securityContext": CONFINED,
    }


def _identity_env() -> list[Manifest]:
    """Per-pod facts; everything else is in the launch configuration."""
    fields = {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_IP": "status.podIP"}
    from_fields = [
        {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
        for name, path in fields.items()
    ]
    # Libraries ask for the user's name and home; an image need not have an entry for this user id.
    return [*from_fields, {"name": "HOME", "value": "/tmp"}, {"name": "USER", "value": "tandem"}]


def resources_of(resources: Resources) -> dict[str, Any]:
    """As a container says it; only what is set."""
    return {key: value for key, value in resources.model_dump(by_alias=True, exclude_none=True).items() if value}


def size_limit(size: str | None) -> dict[str, str]:
    """The part of an emptyDir that limits its size; `size` is a Kubernetes quantity."""
    return {} if size is None else {"sizeLimit": size}


def thread_env(resources: Resources, *, processes: int = 1) -> list[Manifest]:
    """As many compute threads as the CPU limit allows each process: libraries would count the node's cores instead."""
    limit = resources.limits.get("cpu")
    if limit is None:
        return []
    return [{"name": "OMP_NUM_THREADS", "value": str(max(1, math.ceil(parse_quantity(limit) / processes)))}]


def drain_seconds(blueprint: Blueprint) -> float:
    """Stored objects may be older than the bound."""
    return min(parse_duration(blueprint.model.spec.drain.timeout), parse_duration(LONGEST_DRAIN))


def grace_seconds(blueprint: Blueprint) -> int:
    """How long a pod may take to end after SIGTERM."""
    return math.ceil(drain_seconds(blueprint)) + GRACE_SECONDS


def template_grace_seconds(blueprint: Blueprint) -> int:
    """What new pod templates say."""
    return max(grace_seconds(blueprint), ROOM_TO_DRAIN_SECONDS)


def http_probe(path: str, port: str, *, period: int, failures: int, timeout: int = 5) -> Manifest:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": timeout,
    }
