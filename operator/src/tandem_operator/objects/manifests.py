"""Kubernetes objects as plain data: kinds, references, and reading nested fields.

Objects are JSON as the API server speaks it. Nothing here talks to a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from tandem_api import names

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One resource type of the API."""

    api_version: str
    name: str
    plural: str

    def path(self, namespace: str | None, name: str | None = None, *, subresource: str | None = None) -> str:
        """URL path of a collection or an object."""
        parts = ["/apis" if "/" in self.api_version else "/api", self.api_version]
        parts += ["namespaces", namespace] if namespace is not None else []
        parts += [self.plural, *(part for part in (name, subresource) if part is not None)]
        return "/".join(parts)


SERVICE_ACCOUNT = Kind("v1", "ServiceAccount", "serviceaccounts")
ROLE = Kind("rbac.authorization.k8s.io/v1", "Role", "roles")
ROLE_BINDING = Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings")
SECRET = Kind("v1", "Secret", "secrets")
RESOURCE_QUOTA = Kind("v1", "ResourceQuota", "resourcequotas")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
NETWORK_POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
SERVICE = Kind("v1", "Service", "services")
POD_DISRUPTION_BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
STATEFUL_SET = Kind("apps/v1", "StatefulSet", "statefulsets")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
JOB = Kind("batch/v1", "Job", "jobs")
WORKLOADS = (STATEFUL_SET.name, DEPLOYMENT.name)
"""Kinds that make pods."""
HTTP_ROUTE = Kind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes")
CONTROLLER_REVISION = Kind("apps/v1", "ControllerRevision", "controllerrevisions")
POD = Kind("v1", "Pod", "pods")
EVENT = Kind("v1", "Event", "events")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
INFERENCE_MODEL = Kind(names.API_VERSION, names.KIND, names.PLURAL)

CHILD_KINDS = (
    SERVICE_ACCOUNT, ROLE_BINDING, CONFIG_MAP, NETWORK_POLICY, SERVICE, HTTP_ROUTE, POD_DISRUPTION_BUDGET, STATEFUL_SET,
    DEPLOYMENT,
)  # fmt: skip
"""What the operator makes by applying, in the order of making: pods start when all they refer to is there. The Secret
with their keys comes before all of them (`keeper`)."""
OPTIONAL_KINDS = (HTTP_ROUTE,)
"""Those kinds of children that the API server may not have."""
FORMER_KINDS = (ROLE,)
"""What earlier releases made, and this one only deletes."""
WATCHED_KINDS = (
    *(kind for kind in CHILD_KINDS if kind not in OPTIONAL_KINDS),
    *FORMER_KINDS,
    JOB,
    POD,
    CONTROLLER_REVISION,
)
KIND_BY_NAME = {kind.name: kind for kind in (*WATCHED_KINDS, *OPTIONAL_KINDS)}


@dataclass(frozen=True, slots=True, order=True)
class ModelKey:
    """Names one InferenceModel in the cluster."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, order=True)
class ChildKey:
    """Names one child within its model's namespace."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


Children = Mapping[ChildKey, Manifest]
"""Live children of one model by their keys; pods are among them."""


def child_key(manifest: Manifest) -> ChildKey:
    return ChildKey(manifest["kind"], manifest["metadata"]["name"])


def dig(value: Any, *path: str | int) -> Any:
    """The value at `path`, or None where the path ends early."""
    try:
        for step in path:
            if value is None or type(value) is str:
                return None
            value = value[step]
    except (KeyError, IndexError, TypeError):
        return None
    return value


def dig_list(value: Any, *path: str | int) -> list[Manifest]:
    """The list at `path`; empty where there is none."""
    found = dig(value, *path)
    return cast(list[Manifest], found) if isinstance(found, list) else []


def dig_dict(value: Any, *path: str | int) -> dict[str, Any]:
    """The object at `path`; empty where there is none."""
    found = dig(value, *path)
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


def labels_of(manifest: Manifest) -> dict[str, str]:
    return dig(manifest, "metadata", "labels") or {}


def annotations_of(manifest: Manifest) -> dict[str, str]:
    return dig(manifest, "metadata", "annotations") or {}


def controller_of(manifest: Manifest) -> Manifest | None:
    """The owner reference of the object's controller."""
    for owner in dig_list(manifest, "metadata", "ownerReferences"):
        if owner.get("controller"):
            return owner
    return None


def parse_time(text: object) -> datetime | None:
    """A time as the API server writes it. None for anything else, times without a zone included."""
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return time if time.tzinfo is not None else None


def format_time(time: datetime) -> str:
    """A time of UTC as Kubernetes writes it, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def own_workloads(live: Children, *, owner_uid: str) -> dict[ChildKey, Manifest]:
    """`live` without the workloads of others: those have names like ours by chance, and their pods are none of ours."""
    return {
        key: child
        for key, child in live.items()
        if key.kind not in WORKLOADS or (controller_of(child) or {}).get("uid") == owner_uid
    }
