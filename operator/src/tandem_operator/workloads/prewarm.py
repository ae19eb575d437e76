"""The Job that fills a model's claim before workers start: download and verify first, then prepare.

Its pod is a worker's, where such a pod may run and with what it may use, without ports, keys, probes and devices. A Job
cannot be changed: it is named after all that decides what it leaves in the claim, and carries its own configuration.
"""

from __future__ import annotations

from typing import Any

from tandem_api import names
from tandem_api.crd.roles import WorkerRole
from tandem_api.launch import GroupConfig

from tandem_operator.objects.manifests import JOB, Manifest, annotations_of, dig_dict, dig_list, labels_of
from tandem_operator.workloads.blueprint import Blueprint, digest
from tandem_operator.workloads.child import build_child, build_labels
from tandem_operator.workloads.configs import CONFIG_FILE, worker_config
from tandem_operator.workloads.pods import pod_template, thread_env
from tandem_operator.workloads.workers import source_volumes, token_env

COMPONENT = "prewarm"
FETCH, PREPARE = "fetch", "worker"
"""Containers: one downloads, the next prepares. The latter has the name that podTemplates have for a worker's."""
RETRIES = 4
"""Pods that may fail before the Job does, each later than the one before; those that a node had to end do not count."""
_ANNOTATION_LAUNCH = f"{names.GROUP}/launch"
"""On the Job's pods: what they read at start."""
_GRACE_SECONDS = 10
_NOT_OF_A_JOB = frozenset(
    {"topologySpreadConstraints", "readinessGates", "resourceClaims", "containers", "initContainers", "volumes"}
)
_NOT_OF_ITS_CONTAINERS = frozenset(
    {"ports", "startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "args", "name", "resources"}
)


def wants_prewarm(blueprint: Blueprint) -> bool:
    """Whether the model's claim is to be filled before workers start."""
    cache = blueprint.model.spec.model.cache
    return cache is not None and cache.prewarm


def prepares_weights(blueprint: Blueprint) -> bool:
    """Whether the Job prepares weights too, which are those of a CPU's kernels, of workers of one rank."""
    workers = blueprint.model.spec.workers
    if blueprint.model.spec.engine.device == "CUDA" or any(
        worker.parallelism.for_launch().num_ranks > 1 for worker in workers
    ):
        return False
    return not any(_uses_devices(worker) for worker in workers)


def _uses_devices(worker: WorkerRole) -> bool:
    resources = {**worker.resources.requests, **worker.resources.limits}
    return bool(worker.resource_claims) or any("/" in name for name in resources)


def prewarm_name(blueprint: Blueprint) -> str:
    """The name of the Job: another one for whatever else workers find in the claim."""
    spec, role = blueprint.model.spec, blueprint.decode_role
    assert spec.model.cache is not None
    parts = [spec.model.uri, blueprint.weights_revision, spec.model.cache.persistent_volume_claim]
    parts += [blueprint.image_of(role), spec.engine.device, spec.engine.dtype, spec.engine.weights]
    parts += [prepares_weights(blueprint)]
    parts += [] if spec.model.cache.pack == "None" else [spec.model.cache.pack]  # names of before stay
    return f"{blueprint.name}-{COMPONENT}-{digest(parts)[:8]}"


def build_prewarm_job(blueprint: Blueprint) -> Manifest:
    """The Job.

    Raises:
        InvalidOverlayError: the podTemplate of decode workers does not fit.
    """
    spec = {
        "backoffLimit": RETRIES,
        "completions": 1,
        "parallelism": 1,
        # A node that is drained is no fault of the model.
        "podFailurePolicy": {
            "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "template": _template(blueprint),
    }
    return build_child(blueprint, JOB, prewarm_name(blueprint), {"spec": spec}, component=COMPONENT)


def _template(blueprint: Blueprint) -> Manifest:
    role = blueprint.decode_role
    worker = blueprint.worker_spec(role)
    volumes, mounts = source_volumes(blueprint, worker)
    container = {
        "name": PREPARE,
        "image": blueprint.worker_image,
        "env": [*token_env(blueprint), *thread_env(worker.resources)],
        "volumeMounts": mounts,
    }
    whole = pod_template(
        blueprint,
        role,
        container=container,
        volumes=volumes,
        config={"metadata": {"name": "", "annotations": {names.ANNOTATION_CONFIG_HASH: ""}}},
        spec={"serviceAccountName": blueprint.account("worker"), "automountServiceAccountToken": False},
        workload=worker,
        path="spec.decode",
    )
    return _as_job(blueprint, whole)


def _as_job(blueprint: Blueprint, template: Manifest) -> Manifest:
    """What a person wrote over a worker's pod counts here too, but for other containers, which may never end."""
    spec: Manifest = template["spec"]
    ours = next(c for c in dig_list(spec, "containers") if c.get("name") == PREPARE)
    plain = {key: value for key, value in ours.items() if key not in _NOT_OF_ITS_CONTAINERS}
    plain["resources"] = _without_devices(dig_dict(ours, "resources"))
    steps = {FETCH: "files", PREPARE: "weights" if prepares_weights(blueprint) else "files"}
    fetch, prepare = ({**plain, "name": name, "args": ["--prewarm", what]} for name, what in steps.items())
    config = {
        "name": "config",
        "downwardAPI": {
            "items": [{"path": CONFIG_FILE, "fieldRef": {"fieldPath": f"metadata.annotations['{_ANNOTATION_LAUNCH}']"}}]
        },
    }
    labels = build_labels(blueprint, COMPONENT)
    own = {key: value for key, value in labels_of(template).items() if not _is_ours(key)}
    annotations = {
        key: value
        for key, value in annotations_of(template).items()
        if not _is_ours(key) and key != "kubectl.kubernetes.io/default-container"
    }
    return {
        "metadata": {"labels": own | labels, "annotations": annotations | {_ANNOTATION_LAUNCH: _launch(blueprint)}},
        "spec": {
            **{key: value for key, value in spec.items() if key not in _NOT_OF_A_JOB},
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": _GRACE_SECONDS,
            "initContainers": [*dig_list(spec, "initContainers"), fetch],
            "containers": [prepare],
            "volumes": [config, *(volume for volume in dig_list(spec, "volumes") if volume.get("name") != "config")],
        },
    }


def _is_ours(key: str) -> bool:
    return key.startswith((f"{names.GROUP}/", "app.kubernetes.io/"))


def _without_devices(resources: dict[str, Any]) -> dict[str, Any]:
    """Those that serve are not to wait for a GPU that fills a disk."""
    kept = {
        kind: {name: amount for name, amount in resources.get(kind, {}).items() if "/" not in name}
        for kind in ("requests", "limits")
    }
    return {kind: amounts for kind, amounts in kept.items() if amounts}


def _launch(blueprint: Blueprint) -> str:
    """A worker's configuration, as far as it decides what is prepared: it asks nobody and serves nobody."""
    told = worker_config(blueprint, blueprint.decode_role)
    source = told.model.model_copy(update={"sharing": None})
    alone = {"model": source, "group": GroupConfig(), "keys_path": None, "tracing": None}
    return told.model_copy(update=alone).set_json()
