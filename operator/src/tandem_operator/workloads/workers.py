"""The children of one worker role: headless Service, PodDisruptionBudget, StatefulSet."""

from __future__ import annotations

import math
from decimal import Decimal

from tandem_api import names
from tandem_api.crd.roles import WorkerRole
from tandem_api.names import Role
from tandem_api.quantities import parse_quantity

from tandem_operator.objects.manifests import POD_DISRUPTION_BUDGET, SERVICE, STATEFUL_SET, Manifest
from tandem_operator.workloads.blueprint import Blueprint, component_of
from tandem_operator.workloads.child import build_child, build_selector
from tandem_operator.workloads.engines import foreign_container, foreign_env, foreign_ports, is_foreign
from tandem_operator.workloads.keys import KEY_FILES, keys_mount, keys_volume
from tandem_operator.workloads.pods import http_probe, pod_template, resources_of, size_limit, thread_env
from tandem_operator.workloads.store import build_disk, build_holder

_LOADING_SECONDS = 6 * 3600
"""A worker may download and load this long before it counts as hung: large models come over slow links."""


def build_workers(blueprint: Blueprint, role: Role) -> list[Manifest]:
    """What stands around the StatefulSet of `role`."""
    return [_build_headless_service(blueprint, role), build_disruption_budget(blueprint, role)]


def build_disruption_budget(blueprint: Blueprint, role: Role) -> Manifest:
    """As many pods at a time as a rollout may take replicas, and one at least: a node can always be drained, and never
    takes the whole role with it.

    Of groups too, *pods*: one makes its whole group unready, which uses the budget up until that group serves again.
    A budget of as many pods as a group has would let a drain break that many groups. What is not ready may go without
    asking: it serves nobody, and must not keep a node from being drained.
    """
    component, rollout = component_of(role), blueprint.model.spec.rollout
    allowed = 1
    if role is not Role.GATEWAY and rollout.type != "Recreate":
        allowed = max(1, blueprint.unavailable_of(role, blueprint.worker_spec(role).replicas))
    spec = {
        "maxUnavailable": allowed,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": build_selector(blueprint, component)},
    }
    name = names.workload_name(blueprint.name, role)
    return build_child(blueprint, POD_DISRUPTION_BUDGET, name, {"spec": spec}, component=component, role=role)


def _ports(blueprint: Blueprint, role: Role) -> list[tuple[str, int]]:
    """Names and numbers: inference, probes and metrics, the KV port of every rank of the pod, and where the ranks of
    several pods meet."""
    if is_foreign(blueprint):
        return foreign_ports(blueprint, role)
    workload = blueprint.worker_spec(role)
    first = names.WORKER_KV_PORT
    ports = [("http", names.WORKER_HTTP_PORT), ("metrics", names.WORKER_METRICS_PORT), ("kv", first)]
    ports += [(f"kv-{rank}", first + rank) for rank in range(1, workload.ranks_per_pod)]
    return [*ports, ("group", names.WORKER_GROUP_PORT)] if workload.nodes_per_replica > 1 else ports


def _build_headless_service(blueprint: Blueprint, role: Role) -> Manifest:
    component = component_of(role)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # a worker that loads or drains can still be looked at by name
        "selector": build_selector(blueprint, component),
        "ports": [
            {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
            for name, port in _ports(blueprint, role)
        ],
    }
    name = names.workload_name(blueprint.name, role)
    return build_child(blueprint, SERVICE, name, {"spec": spec}, component=component, role=role)


def build_stateful_set(blueprint: Blueprint, role: Role, config: Manifest) -> Manifest:
    """The StatefulSet.

    Raises:
        InvalidOverlayError: the podTemplate does not fit.
    """
    component = component_of(role)
    name = names.workload_name(blueprint.name, role)
    workload = blueprint.worker_spec(role)
    volumes, mounts = _volumes(blueprint, workload)
    template = pod_template(
        blueprint,
        role,
        container=_container(blueprint, role, mounts),
        volumes=volumes,
        config=config,
        spec={
            "serviceAccountName": blueprint.account("worker"),
            "automountServiceAccountToken": False,
            **({"initContainers": holder} if (holder := build_holder(blueprint, role)) else {}),
            **({"readinessGates": [{"conditionType": names.CONDITION_ADMITTED}]} if blueprint.pod_defaults else {}),
        },
        workload=workload,
        path=f"spec.{component}",
    )
    spec = {
        **({} if component in blueprint.left else {"replicas": blueprint.num_pods(role) or blueprint.standby}),
        "serviceName": name,
        "podManagementPolicy": "Parallel",
        # Of a new StatefulSet. Later the partition says which pods are of the newest template (`rollout.statefulsets`).
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}},
        "revisionHistoryLimit": 3,
        "selector": {"matchLabels": build_selector(blueprint, component)},
        "template": template,
    }
    return build_child(blueprint, STATEFUL_SET, name, {"spec": spec}, component=component, role=role)


def _container(blueprint: Blueprint, role: Role, mounts: list[Manifest]) -> Manifest:
    workload = blueprint.worker_spec(role)
    container: Manifest = {
        "name": "worker",
        "image": blueprint.worker_image,
        "env": [*token_env(blueprint), *thread_env(workload.resources, processes=workload.ranks_per_pod)],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in _ports(blueprint, role)],
        "startupProbe": http_probe(_started_path(blueprint), "metrics", period=1, failures=_LOADING_SECONDS),
        "readinessProbe": http_probe("/readyz", "metrics", period=2, failures=2),
        "livenessProbe": http_probe("/healthz", "metrics", period=10, failures=6),
        "volumeMounts": mounts,
    }
    host_memory = blueprint.model.spec.kv.host_memory
    if host_memory is not None:
        container["resources"] = _resources(workload, parse_quantity(host_memory) * workload.ranks_per_pod)
    if is_foreign(blueprint):
        env = [*container["env"], *foreign_env(blueprint, role)]
        container |= {"env": env, **foreign_container(blueprint, role)}
    return container


def _resources(workload: WorkerRole, needed: Decimal) -> Manifest:
    """What the role asks for, and as many bytes of memory as its ranks pin: without it a pod that says nothing would be
    put where they do not fit, and be ended for it."""
    resources, requests, limits = (
        resources_of(workload.resources),
        workload.resources.requests,
        workload.resources.limits,
    )
    asked = requests.get("memory", limits.get("memory"))
    if asked is not None and parse_quantity(asked) >= needed:
        return resources
    return {**resources, "requests": {**requests, "memory": str(math.ceil(needed))}}


def _started_path(blueprint: Blueprint) -> str:
    """A worker that may be on standby has started by then: it is looked at for whether it lives, and never serves."""
    return names.STARTED_PATH if blueprint.model.spec.standby else "/readyz"


def token_env(blueprint: Blueprint) -> list[Manifest]:
    """The hub's tokens. No Secret is optional: a missing one holds the pod back and shows in the conditions."""
    spec = blueprint.model.spec
    head = spec.engine.speculative.head
    secrets = {"HF_TOKEN": spec.model.secret_ref, "HF_TOKEN_DRAFT": None if head is None else head.secret_ref}
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}}
        for name, secret in secrets.items()
        if secret is not None
    ]


def _volumes(blueprint: Blueprint, workload: WorkerRole) -> tuple[list[Manifest], list[Manifest]]:
    """Volumes and mounts: the keys, what the model's source needs and that of its draft head, the disk for blocks, and
    memory that the ranks of a pod share."""
    volumes, mounts = source_volumes(blueprint, workload)
    if not is_foreign(blueprint):  # which could prove nothing with them
        volumes, mounts = [keys_volume(blueprint, KEY_FILES), *volumes], [keys_mount(), *mounts]
    disk = blueprint.model.spec.kv.disk
    if disk is not None:
        volumes = [*volumes, {"name": "kv", "emptyDir": size_limit(disk.size)}]
        mounts = [*mounts, {"name": "kv", "mountPath": names.KV_DISK_PATH}]
    volumes = [*volumes, *build_disk(blueprint)]
    size = workload.shared_memory_size_limit
    if workload.ranks_per_pod > 1 or size is not None:
        # The 64 MiB that container runtimes mount there are too few for NCCL. It counts to the container's memory.
        volumes = [*volumes, {"name": "shared-memory", "emptyDir": {"medium": "Memory"} | size_limit(size)}]
        mounts = [*mounts, {"name": "shared-memory", "mountPath": "/dev/shm"}]
    return volumes, mounts


def source_volumes(blueprint: Blueprint, workload: WorkerRole) -> tuple[list[Manifest], list[Manifest]]:
    """Volumes and mounts that the sources of the model and of its draft head need."""
    volumes, mounts = model_volumes(blueprint, workload)
    more, mounted = draft_volumes(blueprint, workload)
    return [*volumes, *more], [*mounts, *mounted]


def draft_volumes(blueprint: Blueprint, workload: WorkerRole) -> tuple[list[Manifest], list[Manifest]]:
    """Volumes and mounts that the source of the draft head needs beside those of the model's."""
    head, model = blueprint.model.spec.engine.speculative.head, blueprint.model.spec.model
    if head is None:
        return [], []
    scheme, _, rest = head.uri.partition("://")
    if scheme == "hf" and not model.uri.startswith("hf://"):
        volume: Manifest = {"emptyDir": size_limit(workload.download_size_limit)}
        return [{"name": "draft", **volume}], [{"name": "draft", "mountPath": names.MODEL_CACHE_PATH}]
    claim = rest.split("/", 1)[0]
    if scheme == "pvc" and not model.uri.startswith(f"pvc://{claim}/"):
        path = f"{names.MODEL_CLAIMS_PATH}/{claim}"
        volume = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        return [{"name": "draft", **volume}], [{"name": "draft", "mountPath": path, "readOnly": True}]
    return [], []


def model_volumes(blueprint: Blueprint, workload: WorkerRole) -> tuple[list[Manifest], list[Manifest]]:
    """Volumes and mounts that the model's source needs."""
    source = blueprint.model.spec.model
    scheme, _, rest = source.uri.partition("://")
    if scheme == "hf":
        claim = None if source.cache is None else source.cache.persistent_volume_claim
        own = {"emptyDir": size_limit(workload.download_size_limit)}
        volume: Manifest = own if claim is None else {"persistentVolumeClaim": {"claimName": claim}}
        return [{"name": "models", **volume}], [{"name": "models", "mountPath": names.MODEL_CACHE_PATH}]
    if scheme == "pvc":
        claim = rest.split("/", 1)[0]
        path = f"{names.MODEL_CLAIMS_PATH}/{claim}"
        volume = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        return [{"name": "models", **volume}], [{"name": "models", "mountPath": path, "readOnly": True}]
    return [], []
