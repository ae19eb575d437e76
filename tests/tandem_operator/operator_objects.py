"""InferenceModels and live objects for the operator's tests."""

from __future__ import annotations

import copy
from typing import Any

from tandem_api.inferencemodel import InferenceModel
from tandem_operator.manifests import ChildKey, Manifest, child_key
from tandem_operator.settings import Release
from tandem_operator.workloads import Blueprint, build_children

RELEASE = Release(worker_image="worker:1", gateway_image="gateway:1")
UID = "11111111-2222-3333-4444-555555555555"


def raw_model(name: str = "m", **spec: Any) -> Manifest:
    metadata = {"name": name, "namespace": "n", "uid": UID, "generation": 1}
    return {"metadata": metadata, "spec": {"model": {"uri": "hf://org/repo"}} | spec}


def blueprint(name: str = "m", *, release: Release = RELEASE, **spec: Any) -> Blueprint:
    return Blueprint(model=InferenceModel.model_validate(raw_model(name, **spec)), release=release)


def children(plan: Blueprint) -> dict[ChildKey, Manifest]:
    """The model's children as they are right after they were made."""
    return {child_key(child): copy.deepcopy(child) for child in build_children(plan)}


def pod(name: str, *, owner: str = "sts-uid", component: str = "decode", **fields: Any) -> Manifest:
    """A live pod of a StatefulSet."""
    labels = {"app.kubernetes.io/component": component, "tandem.dev/model": "m", "controller-revision-hash": "new"}
    metadata = {
        "name": name, "namespace": "n", "uid": f"uid-{name}", "labels": labels | fields.pop("labels", {}),
        "ownerReferences": [{"kind": "StatefulSet", "name": "m-decode", "uid": owner, "controller": True}],
        "annotations": fields.pop("annotations", {}),
    }  # fmt: skip
    return {"kind": "Pod", "metadata": metadata | fields.pop("metadata", {}), "status": fields}


def container(**fields: Any) -> Manifest:
    return {"containerStatuses": [{"name": "worker", "image": "worker:1", "started": False} | fields]}


def stateful_set(*, nodes: int = 1, **fields: Any) -> Manifest:
    """A live StatefulSet whose newest template is `new`."""
    labels = {"tandem.dev/nodes-per-replica": str(nodes)}
    return {
        "kind": "StatefulSet",
        "metadata": {"name": "m-decode", "namespace": "n", "uid": "sts-uid", "generation": 2},
        "spec": {"template": {"metadata": {"labels": labels}}} | fields,
        "status": {"observedGeneration": 2, "updateRevision": "new"},
    }


READY = {"conditions": [{"type": "Ready", "status": "True"}], **container(started=True)}
