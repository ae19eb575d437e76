"""What every child of one model has in common: labels, owner, a digest of itself."""

from __future__ import annotations

from typing import Any

from tandem_api import names
from tandem_api.names import Role

from tandem_operator.objects.manifests import (
    CHILD_KINDS,
    DEPLOYMENT,
    SERVICE,
    STATEFUL_SET,
    Kind,
    Manifest,
    annotations_of,
    dig,
)
from tandem_operator.workloads.blueprint import Blueprint, digest

COMPONENT_LABEL = "app.kubernetes.io/component"
HISTORY = "history"
"""Component of the ControllerRevisions that keep a model's revisions; StatefulSets have revisions of their own."""
TEMPLATE_HASH = f"{names.GROUP}/template-hash"
"""On workloads: digest of the pod template that the operator last applied."""
_DECORATED = (STATEFUL_SET.name, DEPLOYMENT.name, SERVICE.name)
_DIGESTS = (names.ANNOTATION_SPEC_HASH, TEMPLATE_HASH)
_ORDER = {kind.name: position for position, kind in enumerate(CHILD_KINDS)}


def build_selector(blueprint: Blueprint, component: str) -> dict[str, str]:
    """Labels that select a component's pods. They never change: a selector cannot be changed after creation, and
    the role of decode workers does change when `spec.prefill` comes or goes."""
    return {names.LABEL_MODEL: blueprint.name, COMPONENT_LABEL: component}


def build_labels(blueprint: Blueprint, component: str, role: Role | None = None) -> dict[str, str]:
    labels = build_selector(blueprint, component) | {
        "app.kubernetes.io/name": "tandem",
        "app.kubernetes.io/instance": blueprint.name,
        names.MANAGED_BY_LABEL: names.MANAGED_BY,
    }
    return labels if role is None else labels | {names.LABEL_ROLE: role.value}


def build_child(
    blueprint: Blueprint,
    kind: Kind,
    name: str,
    body: dict[str, Any],
    *,
    component: str,
    role: Role | None = None,
) -> Manifest:
    """A child's manifest: owned by the model, labelled, with a digest of itself so that a removed field counts."""
    metadata: Manifest = {
        "name": name,
        "namespace": blueprint.model.metadata.namespace,
        "labels": build_labels(blueprint, component, role),
        "ownerReferences": [_owner(blueprint)],
    }
    if kind.name in _DECORATED and role is not None:
        wanted = people_metadata(blueprint, role)
        metadata["labels"] = wanted["labels"] | metadata["labels"]
        metadata |= {"annotations": wanted["annotations"]} if wanted["annotations"] else {}
    return sign({"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **body})


def _owner(blueprint: Blueprint) -> Manifest:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "name": blueprint.name,
        "uid": blueprint.model.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def creation_order(manifest: Manifest) -> tuple[int, str]:
    return _ORDER[manifest["kind"]], manifest["metadata"]["name"]


def people_metadata(blueprint: Blueprint, role: Role) -> dict[str, dict[str, str]]:
    """Labels and annotations that people want on the workload of a role, its pods and its Service."""
    spec = blueprint.model.spec
    parts = (spec.metadata, (spec.gateway if role is Role.GATEWAY else blueprint.worker_spec(role)).metadata)
    found: dict[str, dict[str, str]] = {"labels": {}, "annotations": {}}
    for part in parts:
        if part is not None:
            found["labels"] |= part.labels
            found["annotations"] |= part.annotations
    return found


def sign(manifest: Manifest) -> Manifest:
    """`manifest` with a digest of itself, and of its pod template where it has one."""
    annotations = {key: value for key, value in annotations_of(manifest).items() if key not in _DIGESTS}
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "annotations"}
    plain = manifest | {"metadata": metadata | ({"annotations": annotations} if annotations else {})}
    signed = annotations | {names.ANNOTATION_SPEC_HASH: digest(plain)[:16]}
    if (template := dig(manifest, "spec", "template")) is not None:
        signed[TEMPLATE_HASH] = template_hash(template)
    return plain | {"metadata": metadata | {"annotations": signed}}


def template_hash(template: Manifest) -> str:
    """Value of `TEMPLATE_HASH`."""
    return digest(template)[:16]


def config_hash(manifest: Manifest) -> str | None:
    """The launch configuration that a pod, or a pod template, or its ConfigMap belongs to."""
    return annotations_of(manifest).get(names.ANNOTATION_CONFIG_HASH)
