"""One model with what serves it: images, revisions and numbers of pods, as all its children are made from them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from tandem_api.crd.resource import InferenceModel
from tandem_api.crd.roles import WorkerRole
from tandem_api.engines import FOREIGN_ENGINES
from tandem_api.names import Role

from tandem_operator.objects.manifests import dig, dig_list
from tandem_operator.workloads.release import Release


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
    def decode_role(self) -> Role:
        return Role.UNIFIED if self.model.spec.prefill is None else Role.DECODE

    @property
    def worker_roles(self) -> tuple[Role, ...]:
        return (self.decode_role,) if self.model.spec.prefill is None else (Role.PREFILL, Role.DECODE)

    def account(self, component: str) -> str:
        """The ServiceAccount of its pods."""
        return f"{self.name}-{component}"

    def worker_spec(self, role: Role) -> WorkerRole:
        if role is Role.PREFILL:
            assert self.model.spec.prefill is not None
            return self.model.spec.prefill
        return self.model.spec.decode

    def replicas(self, wanted: int) -> int:
        return 0 if self.model.spec.suspend else wanted

    def num_pods(self, role: Role) -> int:
        """Pods of a worker role: whole groups."""
        spec = self.worker_spec(role)
        return self.replicas(spec.replicas) * spec.nodes_per_replica

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


def gives_blocks(blueprint: Blueprint, role: Role) -> bool:
    """Whether the workers of a role give the blocks that they have computed to others, and ask those for theirs."""
    lone = blueprint.worker_spec(role).parallelism.for_launch().num_ranks == 1
    return blueprint.model.spec.kv.peers == "Auto" and lone


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
