"""What every child of one model has in common: names, labels, owner, revision."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from tandem_api import names
from tandem_api.crd.resource import InferenceModel
from tandem_api.crd.roles import WorkerRole
from tandem_api.engines import FOREIGN_ENGINES
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
    dig_list,
)
from tandem_operator.workloads.release import Release

COMPONENT_LABEL = "app.kubernetes.io/component"
HISTORY = "history"
"""Component of the ControllerRevisions that keep a model's revisions; StatefulSets have revisions of their own."""
TEMPLATE_HASH = f"{names.GROUP}/template-hash"
"""On workloads: digest of the pod template that the operator last applied."""
_DECORATED = (STATEFUL_SET.name, DEPLOYMENT.name, SERVICE.name)
_DIGESTS = (names.ANNOTATION_SPEC_HASH, TEMPLATE_HASH)
_ORDER = {kind.name: position for position, kind in enumerate(CHILD_KINDS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """One model and the release that serves it."""

    model: InferenceModel
    release: Release
    pod_defaults: bool = True
    """Whether pods get what this release gives to those that do not say: a spread, the gateway's resources, the
    readiness gate of workers. Earlier releases gave none of it, and what runs is left as it is (`inherit`)."""
    commit: str | None = None
    """The commit of an `hf://` repository that workers load; None: each resolves `spec.model.revision` for itself."""
    draft_commit: str | None = None
    """The same of the draft head's repository."""
    kept_image: str | None = None
    """The image of workers of a model that names none, where it is not the release's (`rollout.images`)."""
    left: frozenset[str] = frozenset()
    """Components whose number of replicas something else sets at present: `replicas` of `model` follows it, and no
    manifest says it."""

    asleep_since: str | None = None
    """Since when the model sleeps; None: it is awake."""

    @property
    def name(self) -> str:
        return self.model.metadata.name

    @property
    def standby(self) -> int:
        """Replicas of each worker role, of one pod each, that are to be on standby now."""
        return 0 if self.asleep_since is None else self.replicas(self.model.spec.standby)

    @property
    def weights_revision(self) -> str:
        return self.commit or self.model.spec.model.revision

    @property
    def draft_revision(self) -> str | None:
        """What workers load of the draft head's repository; None: there is no head."""
        head = self.model.spec.engine.speculative.head
        return None if head is None else self.draft_commit or head.revision

    @property
    def worker_image(self) -> str:
        engine = self.model.spec.engine
        foreign = FOREIGN_ENGINES.get(engine.kind)
        return engine.image or self.kept_image or (self.release.worker_image if foreign is None else foreign.image)

    @property
    def gateway_image(self) -> str:
        return self.model.spec.gateway.image or self.release.gateway_image

    @property
    def decode_role(self) -> Role:
        return Role.UNIFIED if self.model.spec.prefill is None else Role.DECODE

    @property
    def worker_roles(self) -> tuple[Role, ...]:
        return (self.decode_role,) if self.model.spec.prefill is None else (Role.PREFILL, Role.DECODE)

    @property
    def worker_account(self) -> str:
        return f"{self.name}-worker"

    @property
    def gateway_account(self) -> str:
        return f"{self.name}-gateway"

    def worker_spec(self, role: Role) -> WorkerRole:
        if role is Role.PREFILL:
            assert self.model.spec.prefill is not None
            return self.model.spec.prefill
        return self.model.spec.decode

    def gives_blocks(self, role: Role) -> bool:
        """Whether its workers give the blocks that they have computed to others, and ask those for theirs."""
        lone = self.worker_spec(role).parallelism.for_launch().num_ranks == 1
        return self.model.spec.kv.peers == "Auto" and lone

    def replicas(self, wanted: int) -> int:
        return 0 if self.model.spec.suspend else wanted

    def num_pods(self, role: Role) -> int:
        """Pods of a worker role: whole groups."""
        spec = self.worker_spec(role)
        return self.replicas(spec.replicas) * spec.nodes_per_replica

    def surge_of(self, role: Role) -> int:
        """Replicas that a role may have on top while it is changed. What something else scales has none: it would be
        taken for a wish."""
        spec = self.worker_spec(role)
        return 0 if spec.scaling.mode == "External" else self.model.spec.rollout.surge_of(spec.replicas)

    def unavailable_of(self, role: Role, replicas: int) -> int:
        """Replicas that a role of so many may lack while it is changed. Without a surge one has to go first."""
        allowed = self.model.spec.rollout.unavailable_of(replicas)
        return max(1, allowed) if self.worker_spec(role).scaling.mode == "External" else allowed

    @property
    def revision(self) -> str:
        """The revision of the decode workers, which prefill workers share unless a podTemplate gives one role another
        image."""
        return self.revision_of(self.decode_role)

    def revision_of(self, role: Role) -> str:
        """Digest of all that decides whether two workers' key-value blocks mean the same. Parallelism does not: blocks
        are cut anew between workers that are spread differently."""
        spec = self.model.spec
        parts = [spec.model.uri, self.weights_revision, self.image_of(role), spec.engine.device, spec.engine.dtype]
        if spec.engine.kind != "Tandem":
            # By arguments of its own an engine may keep blocks in another form, and a worker by itself shares none.
            parts += [spec.engine.kind, *spec.engine.args, f"disaggregated={spec.prefill is not None}"]
        head = spec.engine.speculative.head
        if head is not None:
            parts += ["draft", head.uri, self.draft_revision or head.revision]
        return digest(parts)[:10]

    def image_of(self, role: Role) -> str:
        """The image that the workers of a role run: a podTemplate may name another one."""
        template = self.worker_spec(role).pod_template
        containers = dig_list(template.spec if template is not None else None, "containers")
        named = [dig(container, "image") for container in containers if dig(container, "name") == "worker"]
        return next((image for image in reversed(named) if isinstance(image, str)), self.worker_image)

    def selector(self, component: str) -> dict[str, str]:
        """Labels that select a component's pods. They never change: a selector cannot be changed after creation, and
        the role of decode workers does change when `spec.prefill` comes or goes."""
        return {names.LABEL_MODEL: self.name, COMPONENT_LABEL: component}

    def labels(self, component: str, role: Role | None = None) -> dict[str, str]:
        labels = self.selector(component) | {
            "app.kubernetes.io/name": "tandem",
            "app.kubernetes.io/instance": self.name,
            names.MANAGED_BY_LABEL: names.MANAGED_BY,
        }
        return labels if role is None else labels | {names.LABEL_ROLE: role.value}

    def child(
        self, kind: Kind, name: str, body: dict[str, Any], *, component: str, role: Role | None = None
    ) -> Manifest:
        """A child's manifest: owned by the model, labelled, with a digest of itself so that a removed field counts."""
        metadata: Manifest = {
            "name": name,
            "namespace": self.model.metadata.namespace,
            "labels": self.labels(component, role),
            "ownerReferences": [self._owner()],
        }
        if kind.name in _DECORATED and role is not None:
            wanted = people_metadata(self, role)
            metadata["labels"] = wanted["labels"] | metadata["labels"]
            metadata |= {"annotations": wanted["annotations"]} if wanted["annotations"] else {}
        return sign({"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, **body})

    def _owner(self) -> Manifest:
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": self.name,
            "uid": self.model.metadata.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }

    @staticmethod
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


def shares_files(blueprint: Blueprint) -> bool:
    """Whether workers may get the model's files from each other. Where they do not download they have nothing to do,
    and of a packed copy they have nothing to give that the hub announces."""
    cache = blueprint.model.spec.model.cache
    return cache is not None and cache.peers and cache.pack == "None"


def component_of(role: Role) -> str:
    """Value of the component label; decode workers keep theirs when they also prefill."""
    return "decode" if role is Role.UNIFIED else role.value


def digest(value: Any) -> str:
    """Hexadecimal SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def config_hash(manifest: Manifest) -> str | None:
    """The launch configuration that a pod, or a pod template, or its ConfigMap belongs to."""
    return annotations_of(manifest).get(names.ANNOTATION_CONFIG_HASH)
