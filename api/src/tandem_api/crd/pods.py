"""What the owner says of pods: resources, placement, labels, ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from tandem_api.crd.authored import Authored
from tandem_api.crd.fields import (
    Annotations,
    LabelKey,
    ObjectName,
    PartName,
    PreserveUnknown,
    Quantity,
    Selector,
    unreserved,
)
from tandem_api.launch import Parallelism
from tandem_api.validation import RULES_KEY, rule


class ContainerClaim(Authored):
    name: PartName
    """One of the pod's `resourceClaims`."""
    request: Annotated[str, Field(max_length=128)] | None = None
    """One request of that claim. Defaults to all of it."""


class Resources(Authored):
    """Kubernetes resource requests and limits of the main container."""

    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    "!has(self.requests) || !has(self.limits) || self.requests.all(k, !(k in self.limits)"
                    " || !isQuantity(string(self.requests[k])) || !isQuantity(string(self.limits[k]))"
                    " || quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) <= 0)",
                    "must not be above the limit of the same resource: lower the request or raise the limit",
                    path=".requests",
                    server_only=True,
                )
            ]
        }
    )

    requests: Annotated[dict[str, Quantity], Field(max_length=16)] = Field(default_factory=dict)
    """What the scheduler sets aside, for example `{cpu: 500m, memory: 2Gi}`."""
    limits: Annotated[dict[str, Quantity], Field(max_length=16)] = Field(default_factory=dict)
    """What the container may use at most, for example `{nvidia.com/gpu: "1"}`."""
    claims: Annotated[list[ContainerClaim], Field(max_length=16)] = Field(default_factory=list[ContainerClaim])
    """Devices of the pod's `resourceClaims` that the container may use (dynamic resource allocation)."""


class PodTemplate(Authored):
    """A strategic overlay: maps merge, `containers`, `env`, `volumes` and the like merge by their key."""

    metadata: PreserveUnknown | None = None
    """Labels and annotations to add. Labels of the groups `tandem.dev` and `app.kubernetes.io` are the operator's."""
    spec: PreserveUnknown | None = None
    """Fields of a PodSpec."""


class Toleration(Authored):
    key: LabelKey | None = None
    """The taint's key. Without one all are meant, and `operator` must be `Exists`."""
    operator: Literal["Exists", "Equal"] | None = None
    """`Equal` compares the value too; it is what Kubernetes takes where nothing is said."""
    value: Annotated[str, Field(max_length=63)] | None = None
    """The taint's value, for `Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Defaults to all effects."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2_147_483_647)] | None = None
    """How long a `NoExecute` taint is tolerated. Defaults to for ever."""


class Affinity(Authored):
    """As in a PodSpec."""

    node_affinity: PreserveUnknown | None = None
    """Which nodes, by their labels."""
    pod_affinity: PreserveUnknown | None = None
    """Near which other pods."""
    pod_anti_affinity: PreserveUnknown | None = None
    """Away from which other pods."""


NodePolicy = Literal["Honor", "Ignore"]


class TopologySpreadConstraint(Authored):
    topology_key: LabelKey
    """Label of nodes; nodes with the same value count as one place."""
    max_skew: Annotated[int, Field(ge=1, le=1000)] = 1
    """Pods by which places may differ."""
    when_unsatisfiable: Literal["ScheduleAnyway", "DoNotSchedule"] = "ScheduleAnyway"
    label_selector: PreserveUnknown | None = None
    """Which pods count. Defaults to those of this role of this model."""
    match_label_keys: Annotated[list[LabelKey], Field(max_length=8)] | None = None
    """Labels of which a pod counts those alone that have its own values."""
    min_domains: Annotated[int, Field(ge=1, le=1000)] | None = None
    """How many places there should be at least; for `DoNotSchedule`."""
    node_affinity_policy: NodePolicy | None = None
    """Whether nodes count that the pod's affinity and node selector exclude."""
    node_taints_policy: NodePolicy | None = None
    """Whether nodes count whose taints the pod does not tolerate."""


class PullSecret(Authored):
    name: ObjectName
    """A Secret in the model's namespace."""


class PodClaim(Authored):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    "has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
                    "must name a claim or a template of claims: write resourceClaimName or resourceClaimTemplateName",
                    server_only=True,
                )
            ]
        }
    )

    name: PartName
    """What `resources.claims` calls it."""
    resource_claim_name: ObjectName | None = None
    """A ResourceClaim that all pods share."""
    resource_claim_template_name: ObjectName | None = None
    """A ResourceClaimTemplate, from which each pod gets a claim of its own."""


class Metadata(Authored):
    """Labels and annotations of people's own."""

    model_config = ConfigDict(json_schema_extra={RULES_KEY: [unreserved("labels"), unreserved("annotations")]})

    labels: Selector = Field(default_factory=dict)
    """For example `kueue.x-k8s.io/queue-name`. A change replaces the pods, as a rollout does."""
    annotations: Annotations = Field(default_factory=dict)
    """The same of annotations."""


class Workload(Authored):
    """What can be said of any group of pods."""

    metadata: Metadata | None = None
    """Added to the StatefulSet or Deployment of this role, to its pods and to its Service. It wins over
    `spec.metadata`."""
    resources: Resources = Field(default_factory=Resources)
    """Requests and limits of the main container."""
    resource_claims: Annotated[list[PodClaim], Field(max_length=16)] = Field(default_factory=list[PodClaim])
    """Devices by dynamic resource allocation; `resources.claims` hands them to the main container."""
    node_selector: Selector = Field(default_factory=dict)
    """Labels that nodes must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = Field(default_factory=list[Toleration])
    """Taints of nodes that the pods put up with."""
    affinity: Affinity | None = None
    """Nodes and neighbours that the pods want, or want to avoid."""
    topology_spread_constraints: Annotated[list[TopologySpreadConstraint], Field(max_length=8)] | None = None
    """How the pods spread over nodes and zones. Defaults to a preference: workers over nodes, gateways over nodes and
    zones. An empty list asks for none."""
    priority_class_name: ObjectName | None = None
    """PriorityClass of the pods."""
    runtime_class_name: ObjectName | None = None
    """RuntimeClass of the pods."""
    image_pull_secrets: Annotated[list[PullSecret], Field(max_length=16)] = Field(default_factory=list[PullSecret])
    """Secrets with which the images are pulled."""
    tmp_size_limit: Quantity | None = None
    """What `/tmp` may hold; a pod that holds more is evicted."""
    pod_template: PodTemplate | None = None
    """Strategic overlay on the generated pod template, for what has no field of its own: environment variables,
    sidecars, volumes. It is merged last, so it wins over the fields here. Containers merge by name; the main one is
    `worker` or `gateway`."""


class RoleParallelism(Authored):
    """How one replica is spread over ranks. A rank is a process with a device of its own."""

    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks that split every matrix and the attention heads of a layer among them. They talk in every layer: keep them
    on one node where they fit."""
    pipeline: Annotated[int, Field(ge=1, le=64)] = 1
    """Stages that split the layers. They talk once a stage and step, so they suit several nodes."""
    expert: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks that split the routed experts of a mixture-of-experts model; each computes attention for a batch of its
    own."""
    data: Annotated[int, Field(ge=1, le=64)] = 1
    """Copies of all of the above behind one endpoint."""

    def for_launch(self) -> Parallelism:
        """The same, as pods are told."""
        return Parallelism(**self.model_dump())
