"""The InferenceModel resource, `inferencemodels.tandem.dev/v1alpha1`.

These classes are the one definition: the CRD's schema, the operator's parser and the reference in `docs/` come from
them. Only what works is in here; a field that is not here is refused by the API server's strict validation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from tandem_api.base import Authored, Wire
from tandem_api.engines import EngineKind, find_refusal, foreign_rules
from tandem_api.launch import (
    Device,
    DType,
    GatewayRouting,
    GenerationSettings,
    LinkKind,
    Parallelism,
    SpeculativeMethod,
    TLSVersion,
    ToolForm,
    WeightsForm,
)
from tandem_api.names import GROUP
from tandem_api.quantities import DURATION_PATTERN, QUANTITY_PATTERN, parse_duration, parse_quantity
from tandem_api.validation import RULES_KEY, Lacks, Matches, Satisfies, check_collector, rule

MODEL_NAME_MAX = 40
"""Child names append a role, an ordinal and a controller hash, and Pod labels end at 63 characters."""
RANKS_PER_POD_MAX = 64
"""Each rank listens at a KV port of its own, counted up from the first one."""

HUB_URI = r"hf://[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+"
CLAIM_URI = r"pvc://[a-z0-9]([a-z0-9-]*[a-z0-9])?/[^ \t\r\n]*"
FILE_URI = r"file:///[^ \t\r\n]+"
PARENT_SEGMENT = r"/(\.|%2[eE]){2}(/|%2[fF]|$)"
"""`..` between slashes, each character perhaps as its code."""

ModelURI = Annotated[
    str,
    Matches(
        f"{HUB_URI}|{CLAIM_URI}|{FILE_URI}",
        "must be hf://ORGANIZATION/REPOSITORY, pvc://CLAIM/PATH or file:///PATH, without spaces",
    ),
    Lacks(PARENT_SEGMENT, "must not have `..` in its path: write the path from the root, or from the claim's"),
    Field(max_length=1024),
]
Revision = Annotated[
    str,
    Matches(r"[A-Za-z0-9][A-Za-z0-9_./-]*", "must be a branch, a tag or a commit, for example main"),
    Field(max_length=128),
]
Quantity = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Matches(
        QUANTITY_PATTERN,
        "must be a Kubernetes quantity: a number and an optional suffix, for example 500m or 16Gi",
        int_or_string=True,
    ),
    Field(max_length=32),
]
Share = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Matches(
        "0|[1-9][0-9]{0,2}|1000|(0|[1-9][0-9]?|100)%",
        "must be a number of replicas up to 1000, or a percentage of them up to 100%, for example 2 or 25%",
        int_or_string=True,
    ),
]
"""Some of a role's replicas."""


def is_none(share: str | None) -> bool:
    """Whether a share is none, however many replicas there are."""
    return share in ("0", "0%")


def count_share(share: str, replicas: int, *, up: bool) -> int:
    """How many of so many replicas a share is. Percentages are rounded up or down, as those of Deployments are."""
    if not share.endswith("%"):
        return int(share)
    exact = int(share[:-1]) * replicas
    return -(-exact // 100) if up else exact // 100


def _is_some(field: str) -> str:
    """A CEL expression: the share in this field is not none."""
    return f"!string({field}).matches('^0%?$')"


Duration = Annotated[
    str,
    Matches(DURATION_PATTERN, "must be a duration in hours, minutes and seconds, for example 30s or 1h30m"),
    Field(max_length=16),
]
ClientTimeout = Annotated[
    Duration,
    Satisfies("!self.matches('^([0-9]+[hms])+$') || duration(self) >= duration('1s')", "must be at least 1s"),
]
ObjectName = Annotated[
    str,
    Matches(
        r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?",
        "must be the name of an object in this namespace: lower-case letters, digits, '-' and '.'",
    ),
    Field(max_length=253),
]
Image = Annotated[
    str,
    Matches(
        r"[A-Za-z0-9][A-Za-z0-9_.:/@-]*",
        "must be a container image, for example ghcr.io/tandem-dev/tandem-worker:0.1.0",
    ),
    Field(max_length=512),
]
PreserveUnknown = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
LabelKey = Annotated[str, Field(min_length=1, max_length=317)]
"""A domain and a name."""
PartName = Annotated[
    str,
    Matches(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", "must be lower-case letters, digits and '-', for example gpus"),
    Field(max_length=63),
]
"""The name of something inside an object."""
Hostname = Annotated[
    str,
    Matches(
        r"([*][.])?[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*",
        "must be a host name in lower case, for example llm.example.com or *.example.com",
    ),
    Field(max_length=253),
]
Selector = Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)]
"""Labels and their values."""
Annotations = Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=32)]
_RESERVED = (f"{GROUP}/", "app.kubernetes.io/")
_NOT_RESERVED = " && ".join(f"!k.startsWith('{prefix}')" for prefix in _RESERVED)


class SecretKey(Authored):
    name: ObjectName
    """Name of a Secret in the model's namespace."""
    key: Annotated[
        str,
        Matches(r"[-._a-zA-Z0-9]+", "must be a key of the Secret: letters, digits, '-', '_' and '.'"),
        Field(max_length=253),
    ] = "token"
    """Key inside the Secret that holds the access token."""


_NO_CLAIM = (
    "fills a PersistentVolumeClaim before workers start, and a volume that ends with its pod cannot be filled"
    " beforehand: name a claim in persistentVolumeClaim, or remove prewarm"
)


_NOTHING_KEPT = (
    "packs what is kept in a PersistentVolumeClaim, and a volume that ends with its pod keeps nothing: name a claim in"
    " persistentVolumeClaim, or remove pack"
)


class ModelCache(Authored):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    "!has(self.prewarm) || !self.prewarm || has(self.persistentVolumeClaim)",
                    _NO_CLAIM,
                    path=".prewarm",
                ),
                rule(
                    "!has(self.pack) || self.pack == 'None' || has(self.persistentVolumeClaim)",
                    _NOTHING_KEPT,
                    path=".pack",
                ),
            ]
        }
    )

    persistent_volume_claim: ObjectName | None = None
    """A claim that the workers share: one of them downloads, the others wait and reuse. It must be ReadWriteMany, or
    ReadWriteOnce on a single node. Without it every pod downloads into a volume of its own."""
    peers: bool = False
    """Workers get the model's files from each other, and from the hub what nobody has."""
    prewarm: bool = False
    """A Job downloads, verifies and prepares the model in the claim before workers start, and before a new revision
    rolls out."""
    pack: Literal["Fixed", "Archive", "None"] = "None"
    """How safetensors files are kept in the claim, bit for bit. Whoever downloads packs and verifies them, and leaves
    the packed copy alone there. `Archive`: a third smaller. `Fixed`: a quarter smaller, read without work under
    `engine.weights: Lossless`. Takes room for both copies meanwhile, and switches `peers` off."""

    @model_validator(mode="after")
    def _has_a_claim(self) -> ModelCache:
        if self.prewarm and self.persistent_volume_claim is None:
            raise ValueError(f"prewarm {_NO_CLAIM}")
        if self.pack != "None" and self.persistent_volume_claim is None:
            raise ValueError(f"pack {_NOTHING_KEPT}")
        return self


def _hub_only(field: str, meaning: str, *, unset: str | None = None) -> Any:
    """A rule that `field` is written only beside an hf:// uri."""
    absent = f"!has(self.{field})" + ("" if unset is None else f" || self.{field} == '{unset}'")
    message = f"is {meaning} of an hf:// repository: remove it, or let uri be hf://ORGANIZATION/REPOSITORY"
    return rule(f"{absent} || self.uri.startsWith('hf://')", message, path=f".{field}")


class Model(Authored):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                _hub_only("revision", "the branch, tag or commit", unset="main"),
                _hub_only("secretRef", "the access token"),
                _hub_only("cache", "the download folder"),
                rule(
                    "!has(self.followRevision) || !self.followRevision || self.uri.startsWith('hf://')",
                    "is about the branch of an hf:// repository: remove it, or let uri be hf://ORGANIZATION/REPOSITORY",
                    path=".followRevision",
                ),
            ]
        }
    )

    uri: ModelURI
    """Place of the weights: `hf://ORG/REPOSITORY`, `pvc://CLAIM/path`, or `file:///path/in/container`. The folder holds
    safetensors files with a `config.json`, or a GGUF file."""
    revision: Revision = "main"
    """Branch, tag or commit of an `hf://` repository. The operator asks once which commit a branch or tag is, and all
    workers load that one: see `status.model`."""
    follow_revision: bool = False
    """Replace the workers whenever the branch of `revision` has moved. Otherwise that is only reported."""
    served_name: (
        Annotated[
            str,
            Matches(r"[A-Za-z0-9][A-Za-z0-9_.:/-]*", "must be letters, digits and '_.:/-', for example smollm2"),
            Field(max_length=128),
        ]
        | None
    ) = None
    """What clients pass as `model`. Defaults to the object's name."""
    secret_ref: SecretKey | None = None
    """Access token for a private `hf://` repository."""
    cache: ModelCache | None = None
    """Volume in which downloads are kept. Without it every pod downloads into a volume of its own."""


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


def _unreserved(field: str) -> Any:
    """A rule that a map of labels or annotations has none of the operator's."""
    message = f"must not hold names of {' or '.join(_RESERVED)}, which the operator writes: use a domain of your own"
    return rule(f"!has(self.{field}) || self.{field}.all(k, {_NOT_RESERVED})", message, path=f".{field}")


class Metadata(Authored):
    """Labels and annotations of people's own."""

    model_config = ConfigDict(json_schema_extra={RULES_KEY: [_unreserved("labels"), _unreserved("annotations")]})

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


ScalingMode = Literal["Static", "SLO", "External"]
_NO_MAX = "is needed with mode SLO: write the most replicas that this role may have"
_BOUNDS = "must not be above max: lower it, or raise max"


class RoleScaling(Authored):
    """Who decides how many replicas a role has."""

    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule("!has(self.mode) || self.mode != 'SLO' || has(self.max)", _NO_MAX, path=".max"),
                rule("!has(self.min) || !has(self.max) || self.min <= self.max", _BOUNDS, path=".min"),
            ]
        }
    )

    mode: ScalingMode = "Static"
    """`Static`: `replicas` does. `SLO`: the operator does, by `spec.slo` and by what gateways and workers measure.
    `External`: whoever scales the StatefulSet does, for example a HorizontalPodAutoscaler; the operator then leaves its
    number alone. A change to `SLO` or `External` goes on with the number that is there, one to `Static` goes to
    `replicas`."""
    min: Annotated[int, Field(ge=1, le=1000)] = 1
    """Fewest replicas in the mode `SLO`. Other modes do not look at it."""
    max: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Most replicas in the mode `SLO`, which needs it. Other modes do not look at it."""

    @model_validator(mode="after")
    def _is_bounded(self) -> RoleScaling:
        if self.mode == "SLO" and self.max is None:
            raise ValueError(f"max {_NO_MAX}")
        if self.max is not None and self.min > self.max:
            raise ValueError(f"min {_BOUNDS}")
        return self


_SPREAD = "!has(self.parallelism) || "
"""The API server also judges the default of `spec.decode`, and does so before it has filled in the defaults inside."""
_RANKS = "self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.expert * self.parallelism.data"
_IS_GPU = "(k.endsWith('/gpu') || k.startsWith('nvidia.com/mig-'))"
_GPUS = "string(self.resources.limits[k])"
_NUM_GPUS = f"quantity({_GPUS}).asInteger()"
_GPUS_SHOULD_BE = (
    "'must be %d of each kind of GPU, one for each rank of a pod: tensor %d x pipeline %d x expert %d x data %d,"
    f" divided by nodesPerReplica %d'.format([{_RANKS} / self.nodesPerReplica, self.parallelism.tensor,"
    " self.parallelism.pipeline, self.parallelism.expert, self.parallelism.data, self.nodesPerReplica])"
)
_UNEVEN = "must divide the ranks, tensor x pipeline x expert x data, evenly: change it or spec.*.parallelism"
_PODS_APART = (
    "of External needs nodesPerReplica to be 1, because what scales a StatefulSet counts pods: use SLO or Static"
)


class WorkerRole(Workload):
    """Worker pods of one kind. `prefill` and `decode` are the same type, and may be spread differently: the key-value
    cache is cut anew on its way."""

    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(f"{_SPREAD}({_RANKS}) % self.nodesPerReplica == 0", _UNEVEN, path=".nodesPerReplica"),
                rule(
                    f"{_SPREAD}({_RANKS}) / self.nodesPerReplica <= {RANKS_PER_POD_MAX}",
                    f"puts more than {RANKS_PER_POD_MAX} ranks into a pod: raise nodesPerReplica",
                    path=".parallelism",
                ),
                rule(
                    f"{_SPREAD}!has(self.resources) || !has(self.resources.limits)"
                    f" || self.resources.limits.all(k, !{_IS_GPU}"
                    f" || !isQuantity({_GPUS}) || quantity({_GPUS}).isInteger()"
                    f" && ({_NUM_GPUS} == 0 || {_NUM_GPUS} * self.nodesPerReplica == {_RANKS}))",
                    "must be one GPU for each rank of a pod: tensor x pipeline x expert x data, divided by"
                    " nodesPerReplica",
                    path=".resources.limits",
                    figures=_GPUS_SHOULD_BE,
                ),
                rule(
                    "!has(self.scaling) || !has(self.scaling.mode) || self.scaling.mode != 'External'"
                    " || self.nodesPerReplica == 1",
                    f"mode {_PODS_APART}",
                    path=".scaling",
                ),
            ]
        }
    )

    replicas: Annotated[int, Field(ge=0, le=1000)] = 1
    """Replicas of this role: each serves by itself and consists of `nodesPerReplica` pods. With another
    `scaling.mode` than `Static` a new StatefulSet begins with so many, and later it is not looked at."""
    scaling: RoleScaling = Field(default_factory=RoleScaling)
    """Who decides how many replicas there are."""
    nodes_per_replica: Annotated[int, Field(ge=1, le=64)] = 1
    """Pods of one replica, for models that need more devices than a node has. They start, serve and end as a group; the
    first one of each group takes its requests."""
    parallelism: RoleParallelism = Field(default_factory=RoleParallelism)
    """How one replica is spread over devices: tensor x pipeline x expert x data of them, shared out evenly among its
    pods."""
    download_size_limit: Quantity | None = None
    """What a pod's own volume for downloads may hold, where `spec.model.cache` names no claim; a pod that holds more is
    evicted."""
    shared_memory_size_limit: Quantity | None = None
    """Size of `/dev/shm`, which counts to the container's memory. Pods of several ranks have one without a limit of its
    own; with this field pods of one rank have one too."""

    @property
    def ranks_per_pod(self) -> int:
        """Processes, and devices, of one pod."""
        return self.parallelism.for_launch().num_ranks // self.nodes_per_replica

    @model_validator(mode="after")
    def _divides(self) -> WorkerRole:
        if self.parallelism.for_launch().num_ranks % self.nodes_per_replica:
            raise ValueError(f"nodesPerReplica {_UNEVEN}")
        if self.scaling.mode == "External" and self.nodes_per_replica > 1:
            raise ValueError(f"scaling.mode {_PODS_APART}")
        return self

    @property
    def num_gpus(self) -> int:
        """Devices of one replica: one for each rank."""
        return self.parallelism.for_launch().num_ranks

    @property
    def fewest(self) -> int:
        """Replicas that there are at least, as far as the spec tells: one of a role that something else scales."""
        return {"Static": self.replicas, "SLO": self.scaling.min, "External": 1}[self.scaling.mode]


EngineArgument = Annotated[
    str,
    Satisfies("size(self) > 0", "must not be empty: remove it"),
    Field(max_length=2048),
]


_NO_FALLBACK = "is for kv.transport Mooncake, which TCP may stand in for: remove it, or ask for Mooncake"
_SMALL_DISK = "must be larger than kv.memory, whose blocks it takes: raise it, or leave disk out"


_NO_HEAD = "says where the head is that guesses under method Draft: write draft.uri, or choose Auto or Lookup"
_HEADLESS = "is a head, and method Lookup guesses without one: remove it, or choose Auto or Draft"


class Draft(Authored):
    """A draft head: an EAGLE-3 checkpoint that was trained for this model."""

    model_config = ConfigDict(
        json_schema_extra={RULES_KEY: [_hub_only("revision", "the branch, tag or commit", unset="main")]}
    )

    uri: ModelURI
    """Place of the head: `hf://ORG/REPOSITORY`, `pvc://CLAIM/path`, or `file:///path/in/container`. The folder holds
    safetensors files with a `config.json`, in the layout of EAGLE or of speculators."""
    revision: Revision = "main"
    """Branch, tag or commit of an `hf://` repository. Name a commit: workers with different heads exchange no blocks,
    and each asks for itself what a branch is."""


class Speculative(Authored):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule("!has(self.method) || self.method != 'Draft' || has(self.draft)", _NO_HEAD, path=".draft"),
                rule("!has(self.method) || self.method != 'Lookup' || !has(self.draft)", _HEADLESS, path=".draft"),
            ]
        }
    )

    method: SpeculativeMethod = "Auto"
    """Who guesses what an answer says next. `Lookup` looks where its last tokens stood before: in its own text, in the
    `prediction` of the request, and in earlier answers with the same cache salt. `Draft` asks the head `draft` alone.
    `Auto` is `Lookup`, and the head where there is one, where answers stay the same to the last bit, which the log says
    at the start; elsewhere nobody guesses."""
    draft: Draft | None = None
    """A draft head, so far for workers of one rank on CPUs. With `method: Off` it is not loaded."""
    max_tokens: Annotated[int, Field(ge=1, le=32)] = 8
    """Guesses of one answer that a step checks at the most."""
    adaptive: bool = True
    """Check a guess only where it makes the worker faster by what was measured. Otherwise all guesses are checked."""
    history: Quantity = "64Mi"
    """Memory of each worker for earlier answers; `0` keeps none."""

    @property
    def head(self) -> Draft | None:
        """The head that workers load."""
        return None if self.method == "Off" else self.draft

    @model_validator(mode="after")
    def _has_its_head(self) -> Speculative:
        if self.method == "Draft" and self.draft is None:
            raise ValueError(f"draft {_NO_HEAD}")
        if self.method == "Lookup" and self.draft is not None:
            raise ValueError(f"draft {_HEADLESS}")
        return self


class Engine(Authored):
    kind: EngineKind = "Tandem"
    """Which engine the workers run. `VLLM` and `SGLang` run the published images of those projects behind the same
    gateway and operator; what they cannot do is refused."""
    image: Image | None = None
    """Worker image. Defaults to the one of the operator's release; of other engines to a release that their project
    has published."""
    args: Annotated[list[EngineArgument], Field(max_length=64)] = Field(default_factory=list[str])
    """More arguments for an engine of another kind, for example `--gpu-memory-utilization=0.9`. They come after those
    that the operator writes, which must not be among them."""
    device: Device = "Auto"
    """`Auto` uses CUDA when the container sees a GPU."""
    dtype: DType = "Auto"
    """`Auto` is the checkpoint's type on a GPU, and BFloat16 on a CPU that has instructions for it (else Float32)."""
    weights: WeightsForm = "Auto"
    """`Lossless` keeps bfloat16 matrices in 12 bits a weight, bit for bit, and multiplies them so: a quarter less
    memory, and on a CPU the same answers to the last bit. It takes an NVIDIA GPU, where it has not been measured yet,
    or a CPU with AVX-512 VBMI and bfloat16; elsewhere a worker says why and does not start. `Plain` keeps 16 bits.
    `Auto` is `Plain`."""
    speculative: Speculative = Field(default_factory=Speculative)
    """Several tokens of an answer in a step of the engine: what it may say next is guessed and checked. It changes no
    answer, only when it comes."""
    max_model_len: Annotated[int, Field(ge=16, le=10_485_760)] | None = None
    """Prompt plus output tokens of one request. Defaults to what the model supports."""
    max_batch_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 2048
    """Tokens computed in one engine step: longer prompts are prefilled in chunks of this size."""
    max_running_requests: Annotated[int, Field(ge=1, le=4096)] = 256
    """Requests that one worker computes at a time; more wait in its queue."""
    step_timeout: Duration | None = None
    """A step of the engine that takes longer makes its worker unready, and at twice that the worker restarts: a GPU, a
    rank or a thread hangs. Slow steps are learned: three times the longest one before is always allowed. Defaults to
    15s; `0s` turns it off. Changing it restarts nothing."""
    free_form_grammars: bool = False
    """Let clients hold answers to grammars of their own (`response_format` of type `grammar` with syntax `lark`). JSON
    schemas and regexes need no permission; all three have limits."""
    request_chat_templates: bool = False
    """Let clients bring the chat template of their request along (`chat_template`). It is a program: it runs in Jinja's
    sandbox, in a process of its own with bounded time and memory, and can write any prompt."""
    tools: ToolForm = "Auto"
    """How functions get into a prompt and calls out of an answer. `Template` is the model's own way, by its chat
    template. `Generic` describes functions in the system message, with calls as JSON, whatever the template has.
    `Auto` is the model's own way where it has one; else only calls that a client requires are made, in the generic
    form. `Off` refuses requests with tools."""
    generation_settings: GenerationSettings = "Model"
    """What stands for the sampling fields that a request leaves out. `Model` is what the model's makers wrote into its
    `generation_config.json` (`temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`), `Off` is what the API
    says: a temperature of 1 and nothing else. Tokens that end an answer count either way."""


class KVDisk(Authored):
    """The volume on which a worker keeps blocks that its memory gives up: one of its own, an emptyDir of the pod."""

    size: Annotated[
        Quantity,
        Satisfies(
            "!isQuantity(string(self)) || quantity(string(self)).compareTo(quantity('64Mi')) >= 0",
            "must be at least 64Mi",
        ),
    ]
    """Size of each worker's volume, for example `200Gi`. A twentieth of it stays free. It takes as much of its node's
    ephemeral storage, unless nodes give emptyDirs another place."""
    write_through: bool = False
    """Write blocks as soon as no request holds them, not when memory is about to give them up. Then a worker that is
    killed loses nothing that was written, and more is written."""
    max_daily_writes: (
        Annotated[
            Quantity,
            Satisfies(
                "!isQuantity(string(self)) || quantity(string(self)).compareTo(quantity('1Mi')) >= 0",
                "must be at least 1Mi: leave it out for no limit",
            ),
        ]
        | None
    ) = None
    """What each worker writes to its volume within 24 hours at most, for example `1Ti`, so that an SSD lasts. Once four
    fifths are written, only blocks that more than one request has used are. Without it there is no limit."""


class KVStore(Authored):
    """A store that workers share blocks through, over the network: each keeps a part of it in memory of its own."""

    kind: Literal["Mooncake"] = "Mooncake"
    """Whose store it is. `Mooncake` is that of the Mooncake project, over TCP."""
    memory: Annotated[
        Quantity,
        Satisfies(
            "!isQuantity(string(self)) || quantity(string(self)).compareTo(quantity('64Mi')) >= 0",
            "must be at least 64Mi",
        ),
    ]
    """What each worker pod gives to the store, for example `16Gi`, beside the worker's own memory. Blocks that were
    used longest ago are given up when all of it is full."""
    master: (
        Annotated[
            str,
            Field(max_length=253),
            Satisfies(
                "self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?:[1-9][0-9]{0,4}$')",
                "must be host:port of a mooncake_master, for example mooncake-master.kv:50051",
            ),
        ]
        | None
    ) = None
    """`host:port` of a `mooncake_master` that runs already and that other models may share. Without it the model gets
    one of its own."""


class KV(Authored):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    "!has(self.disk) || !has(self.memory) || !isQuantity(string(self.disk.size))"
                    " || !isQuantity(string(self.memory))"
                    " || quantity(string(self.disk.size)).compareTo(quantity(string(self.memory))) > 0",
                    _SMALL_DISK,
                    path=".disk.size",
                ),
                rule(
                    "!self.allowFallback || self.transport == 'Mooncake'",
                    _NO_FALLBACK,
                    path=".allowFallback",
                ),
            ]
        }
    )

    transport: Literal["Auto", "TCP", "Mooncake"] = "Auto"
    """How blocks move from prefill to decode workers. `TCP` is Tandem's own; `Mooncake` its Transfer Engine, over RDMA
    where pods have a device for it, else over TCP. `Auto` takes Mooncake where both workers have an RDMA device and it
    measures faster, else TCP."""
    allow_fallback: bool = False
    """Let TCP stand in where Mooncake was asked for and cannot be had. Without it decode workers compute prompts
    themselves until it can. Either way the condition `KVTransferReady` says why."""
    memory: (
        Annotated[
            Quantity,
            Satisfies(
                "!isQuantity(string(self)) || quantity(string(self)).compareTo(quantity('16Mi')) >= 0",
                "must be at least 16Mi",
            ),
        ]
        | None
    ) = None
    """Size of each worker's block space, for example `2Gi`; of each rank's, where a replica has several. Defaults to a
    share of what is free after loading."""
    verify: bool = True
    """Checksum every received block; a bad one is sent again, then recomputed."""
    disk: KVDisk | None = None
    """Keep blocks that memory gives up on a disk, where later requests find them. Without it they are computed again.
    It is for workers of one rank."""
    peers: Literal["Auto", "Off"] = "Off"
    """Auto: workers give each other the blocks that they have computed, from memory and from disk, where that is sooner
    than computing them; gateways tell them who has which. Every worker then listens at its KV port, and may reach those
    of all others of the model. Workers of several ranks neither give nor take."""

    @model_validator(mode="after")
    def _fallback_is_from_something(self) -> KV:
        if self.allow_fallback and self.transport != "Mooncake":
            raise ValueError(f"allowFallback {_NO_FALLBACK}")
        return self

    store: KVStore | None = None
    """Share blocks with the model's other workers through a store, where what one has computed others find. Without it
    each computes for itself. It is for workers of one rank."""

    @model_validator(mode="after")
    def _disk_is_larger(self) -> KV:
        if self.disk is None or self.memory is None:
            return self
        if parse_quantity(self.disk.size) <= parse_quantity(self.memory):
            raise ValueError(f"disk.size {_SMALL_DISK}")
        return self


class Timeouts(Authored):
    first_token: ClientTimeout = "300s"
    """How long a client may wait for the first token."""
    idle: ClientTimeout = "60s"
    """How long a worker may be silent inside an answer."""
    answer: ClientTimeout = "600s"
    """How long an answer in one piece may take: unlike a stream it shows no sign of life before it is complete."""


class Queue(Authored):
    max: Annotated[int, Field(ge=0, le=8192)] = 1000
    """Requests that may wait at once in each gateway; further ones are answered 503. 0: nobody waits."""
    ttl: Duration | None = None
    """How long a request may wait for a worker before it is answered 503. `0s`: nobody waits. Defaults to `30s`, and to
    `10m` with `autoscaling.scaleToZero`, where the first request waits for a start."""


class GatewayService(Authored):
    """The Service in front of the gateways."""

    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    "!has(self.nodePort) || self.type != 'ClusterIP'",
                    "is for a type of NodePort or LoadBalancer: remove it, or change type",
                    path=".nodePort",
                ),
                rule(
                    "!has(self.externalTrafficPolicy) || self.type != 'ClusterIP'",
                    "is for a type of NodePort or LoadBalancer: remove it, or change type",
                    path=".externalTrafficPolicy",
                ),
                rule(
                    "!has(self.loadBalancerClass) || self.type == 'LoadBalancer'",
                    "is for a type of LoadBalancer: remove it, or change type",
                    path=".loadBalancerClass",
                ),
                _unreserved("labels"),
                _unreserved("annotations"),
            ]
        }
    )

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Whoever reaches the Service may use the model: gateways ask clients for no key."""
    annotations: Annotations = Field(default_factory=dict)
    """Added to the Service, for example for a cloud's load balancer."""
    labels: Selector = Field(default_factory=dict)
    """Added to the Service."""
    load_balancer_class: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Which implementation of load balancers is meant. Kubernetes does not let it change while the type stays."""
    node_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of every node, in the range that the cluster has for them. Chosen by Kubernetes where nothing is said."""
    external_traffic_policy: Literal["Cluster", "Local"] | None = None
    """`Local` keeps the client's address and uses gateways of the node that was reached alone."""


class ParentReference(Authored):
    name: ObjectName
    """A Gateway, of the Gateway API."""
    namespace: ObjectName | None = None
    """Defaults to the model's."""
    section_name: ObjectName | None = None
    """One of its listeners. Defaults to all that admit the route."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of its listeners. Defaults to all."""
    group: Annotated[str, Field(max_length=253)] | None = None
    """The API group of a parent that is not a Gateway."""
    kind: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """The kind of a parent that is not a Gateway."""


class HTTPRoute(Authored):
    """A route of the Gateway API to the Service."""

    model_config = ConfigDict(json_schema_extra={RULES_KEY: [_unreserved("labels"), _unreserved("annotations")]})

    parent_refs: Annotated[list[ParentReference], Field(min_length=1, max_length=16)]
    """Gateways that the route is attached to. They must admit routes of the model's namespace."""
    hostnames: Annotated[list[Hostname], Field(max_length=16)] = Field(default_factory=list[str])
    """Hosts whose requests are meant. Defaults to those of the listener."""
    annotations: Annotations = Field(default_factory=dict)
    """Added to the route."""
    labels: Selector = Field(default_factory=dict)
    """Added to the route."""
    timeouts: Literal["Disabled", "Unset"] = "Disabled"
    """`Disabled` writes timeouts of `0s`, which mean none: a long stream is not cut, and `gateway.timeouts` ends what
    is stuck. `Unset` writes nothing, for a Gateway API older than 1.2 or an implementation that refuses the field; many
    of them then cut streams after 15 to 60 seconds."""


Origin = Annotated[
    str,
    Matches(
        r"[*]|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?",
        "must be * or an origin in lower case, without a path: https://app.example.com or http://localhost:3000",
    ),
    Satisfies(
        "!(self.startsWith('https://') && self.endsWith(':443'))"
        " && !(self.startsWith('http://') && self.endsWith(':80'))",
        "must not have the port that its scheme implies: browsers leave it out",
    ),
    Field(max_length=253),
]
HeaderName = Annotated[
    str,
    Matches("[A-Za-z0-9!#$%&'+.^_`|~-]+", "must be the name of a header, for example authorization"),
    Field(max_length=128),
]


class CORS(Authored):
    """Which web pages of other origins may read the gateway's answers (the CORS protocol of the Fetch standard)."""

    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    "!has(self.allowCredentials) || !self.allowCredentials || !('*' in self.allowOrigins)",
                    "must name the origins where allowCredentials is true: browsers take no * then",
                    path=".allowOrigins",
                )
            ]
        }
    )

    allow_origins: Annotated[list[Origin], Field(min_length=1, max_length=32)]
    """Origins of the pages, for example `https://app.example.com`; `*` is any."""
    allow_headers: Annotated[list[HeaderName], Field(max_length=64)] = Field(default_factory=list[str])
    """Request headers that pages may send beside those that need no leave. Defaults to whatever a page asks for, as
    clients in browsers send many of their own."""
    allow_credentials: bool = False
    """Pages may send cookies and the like, for a proxy in front: the gateway asks for none itself."""
    max_age: Duration = "10m"
    """How long a browser may go by the answer to its question before it asks again."""


class GatewayTLS(Authored):
    """TLS between clients and gateways. Port 443 of the Service speaks it, and port 80 is gone unless `plainHttp`."""

    secret_name: ObjectName
    """A Secret of type `kubernetes.io/tls` in the model's namespace: `tls.crt` has the certificate and those that lead
    to its root, `tls.key` the key. A new certificate in it holds within about two minutes and restarts nothing."""
    min_version: TLSVersion = "TLS1.2"
    """Clients that speak older versions only are refused."""
    plain_http: bool = False
    """Port 80 stays, without TLS: for what is inside of the cluster, or an HTTPRoute."""


_ONE_GATEWAY = (
    "must not be more than 1 while responseStore is set, because each gateway keeps its own responses and a client's"
    " next request may reach another: write 1, or remove responseStore"
)
_STORE_TOO_LARGE = (
    "must not be more than a quarter of resources.limits.memory, because requests need the rest: raise the limit, or"
    " write less"
)
_STORE_LIMIT = "256Mi"
"""Half of what a gateway holds for clients at most (`launch.MAX_HELD_BYTES`)."""
_STORE_BYTES = "string(self.responseStore.maxBytes)"
_STORE = f"quantity({_STORE_BYTES})"


class ResponseStore(Authored):
    """Responses that the gateway keeps in memory, so that clients continue them by `previous_response_id`."""

    max_bytes: Annotated[
        Quantity,
        Satisfies(
            "!isQuantity(string(self)) || (quantity(string(self)).compareTo(quantity('1Mi')) >= 0"
            f" && quantity(string(self)).compareTo(quantity('{_STORE_LIMIT}')) <= 0)",
            f"must be between 1Mi and {_STORE_LIMIT}",
        ),
    ]
    """What they may take of the gateway's memory, all together: at most 256Mi, and a quarter of
    `gateway.resources.limits` where that has `memory`."""
    ttl: ClientTimeout = "1h"
    """How long each is kept after it was made. It goes earlier where others need its room."""


class GatewayScaling(Authored):
    mode: Literal["Static", "External"] = "Static"
    """`Static`: `replicas` does. `External`: whoever scales the Deployment does, for example a HorizontalPodAutoscaler;
    the operator then leaves its number alone, but for a suspension."""


class Gateway(Workload):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule("!has(self.responseStore) || self.replicas <= 1", _ONE_GATEWAY, path=".replicas"),
                rule(
                    "!has(self.responseStore) || !has(self.scaling) || !has(self.scaling.mode)"
                    " || self.scaling.mode == 'Static'",
                    _ONE_GATEWAY,
                    path=".scaling.mode",
                ),
                rule(
                    "!has(self.responseStore) || !has(self.resources) || !has(self.resources.limits)"
                    " || !('memory' in self.resources.limits) || !isQuantity(string(self.resources.limits['memory']))"
                    f" || !isQuantity({_STORE_BYTES})"
                    " || quantity(string(self.resources.limits['memory'])).compareTo("
                    f"{_STORE}.add({_STORE}).add({_STORE}).add({_STORE})) >= 0",
                    _STORE_TOO_LARGE,
                    path=".responseStore.maxBytes",
                ),
            ]
        }
    )

    resources: Resources = Field(default_factory=Resources)
    """Requests and limits of the gateway's container. Where nothing is said: a tenth of a core and 256Mi requested, and
    a limit of 1Gi of memory."""
    service: GatewayService = Field(default_factory=GatewayService)
    """How clients reach the gateways."""
    http_route: HTTPRoute | None = None
    """Route of the Gateway API to the Service, where its CRDs are installed."""
    replicas: Annotated[int, Field(ge=0, le=100)] = 1
    """Pods that take requests; any of them serves any client. With `scaling.mode: External` a Deployment that is new,
    or was suspended, begins with so many."""
    scaling: GatewayScaling = Field(default_factory=GatewayScaling)
    """Who decides how many there are."""
    image: Image | None = None
    """Gateway image. Defaults to the one of the operator's release."""
    timeouts: Timeouts = Field(default_factory=Timeouts)
    """When the gateway gives up on a request."""
    cors: CORS | None = None
    """Let web pages of other origins use the model from a browser. Off where nothing is said. Changing it restarts
    nothing."""
    queue: Queue = Field(default_factory=Queue)
    """Requests that wait while no worker serves."""
    link: LinkKind = "HTTP"
    """How gateways ask workers. `Native`: over one connection for all requests, which costs both sides less per token
    and tells a worker that hangs within three seconds. Changing it restarts workers and gateways; meanwhile each worker
    is asked as it can be."""
    tls: GatewayTLS | None = None
    """Serve clients over TLS. Where nothing is said they are served without, at port 80."""
    response_store: ResponseStore | None = None
    """Keep what the Responses API answers (`store`), so that clients continue it by `previous_response_id`. Off where
    nothing is said. It is gone when the gateway restarts, and needs `replicas` of 1. Changing it restarts nothing."""
    min_priority: Annotated[int, Field(ge=-1000, le=0)] = 0
    """The lowest `priority` that clients may ask for. Lower ones run first, so by default a client can only stand back.
    Changing it restarts nothing."""
    explain_routes: bool = False
    """Answer `x-tandem-route: explain` with the workers chosen and the prompt tokens that were believed to be cached,
    which tells who asks what others have asked. Changing it restarts nothing."""
    convert_decode_workers: bool = True
    """Let a decode worker compute a prompt itself while prefill workers are behind, in steps that take at most
    `slo.tpot.seconds` with a part of it. It needs prefill and decode workers that are apart, and `slo`. Changing it
    restarts nothing."""

    @model_validator(mode="after")
    def _has_room_for_responses(self) -> Gateway:
        store, memory = self.response_store, self.resources.limits.get("memory")
        if store is not None and self.replicas > 1:
            raise ValueError(f"replicas {_ONE_GATEWAY}")
        if store is not None and self.scaling.mode != "Static":
            raise ValueError(f"scaling.mode {_ONE_GATEWAY}")
        if store is not None and memory is not None and parse_quantity(memory) < 4 * parse_quantity(store.max_bytes):
            raise ValueError(f"responseStore.maxBytes {_STORE_TOO_LARGE}")
        return self


_PORT = "6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3}"
"""1 to 65535."""


class Tracing(Authored):
    enabled: bool = True
    """Set it to false where the chart sends every model's spans somewhere, and those of this one are not to go."""
    endpoint: (
        Annotated[
            str,
            Matches(
                rf"https?://([A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(:({_PORT}))?(/[^\s?#]*)?",
                "must be the URL of a collector that takes OTLP over HTTP, for example"
                " http://collector.observability.svc:4318",
            ),
            AfterValidator(check_collector),
            Field(max_length=512),
        ]
        | None
    ) = None
    """A collector that takes OTLP over HTTP, for example `http://collector.observability.svc:4318`; `/v1/traces` is
    added where there is no path. Defaults to the one of the chart; without either nothing is traced."""
    sampling_percent: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    """How many of the requests are traced whose clients do not say it themselves in `traceparent`. Defaults to the
    chart's, which is 100 unless changed."""


class Observability(Authored):
    tracing: Tracing = Field(default_factory=Tracing)
    """Spans of requests, from the gateway through prefill, transfer and decode, by OpenTelemetry. Changing it restarts
    nothing; workers follow within two minutes."""


LONGEST_DRAIN = "1h"


class Drain(Authored):
    timeout: Annotated[
        Duration,
        Satisfies(
            f"!self.matches('^([0-9]+[hms])+$') || duration(self) <= duration('{LONGEST_DRAIN}')",
            f"must be at most {LONGEST_DRAIN}: a node that is drained, and a rollout, wait for as long",
        ),
    ] = "60s"
    """How long a pod that is being removed may finish what it runs: an hour at most."""


class CanaryStep(Authored):
    weight: Annotated[int, Field(ge=1, le=99)]
    """Percent of new requests that go to the new workers. There are as many of these as that share of each role is, and
    at least one of each; at least one of each stays of the revision before."""
    duration: Duration
    """How long the step takes. It counts from when its workers are ready, and anew when one of them was not."""


class MaxTTFT(Authored):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    "has(self.factor) != has(self.duration)",
                    "needs either a factor of what the other workers take, or a duration: write one of them",
                    path=".factor",
                )
            ]
        }
    )

    percentile: Annotated[int, Field(ge=50, le=99)] = 95
    """Which of the times to the first token is compared: 95 is the one that 95 of 100 requests do not exceed."""
    factor: Annotated[float, Field(ge=1.0, le=100.0)] | None = None
    """How many times as long as that of the other workers it may be."""
    duration: Duration | None = None
    """How long it may be, whatever the other workers take."""

    @model_validator(mode="after")
    def _says_one(self) -> MaxTTFT:
        if (self.factor is None) == (self.duration is None):
            raise ValueError("needs either a factor of what the other workers take, or a duration: write one of them")
        return self


_RISING = "must not fall from step to step: give each step at least the weight of the one before"


class Canary(Authored):
    steps: Annotated[
        list[CanaryStep],
        Field(min_length=1, max_length=20),
        Satisfies("self.map(step, step.weight).isSorted()", _RISING),
    ]
    """Shares of traffic, one after another. After the last one all workers are replaced."""
    max_error_rate: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    """Percent of the canary's requests of a step that may fail. More of them end it, and the model goes on with the
    revision before. Without it failed requests end no canary."""
    max_ttft: Annotated[MaxTTFT | None, Field(alias="maxTTFT")] = None
    """How long the canary may take to the first token. Without it slow answers end no canary."""
    min_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    """Requests that the canary must have answered in a step before `maxErrorRate` and `maxTTFT` are judged. A step goes
    on until there were as many; without these limits none is needed."""

    @model_validator(mode="after")
    def _rises(self) -> Canary:
        weights = [step.weight for step in self.steps]
        if weights != sorted(weights):
            raise ValueError(f"steps: weight {_RISING}")
        return self


_SURGE = "25%"
"""The default, as Deployments have it."""
_NO_BUDGET = "and maxUnavailable are both 0, so nothing could be replaced: raise one of them"
_NO_CANARY = "needs the type RollingUpdate, because both revisions serve side by side: remove canary or type Recreate"
_NO_ROOM = (
    "has room for a canary only where each role has two replicas or a surge: raise rollout.maxSurge or remove"
    " rollout.canary"
)


class Rollout(Authored):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    "!has(self.maxSurge) || !has(self.maxUnavailable)"
                    f" || {_is_some('self.maxSurge')} || {_is_some('self.maxUnavailable')}",
                    _NO_BUDGET,
                    path=".maxSurge",
                ),
                rule(
                    "!has(self.canary) || self.type != 'Recreate'",
                    _NO_CANARY,
                    path=".canary",
                ),
            ]
        }
    )

    type: Literal["RollingUpdate", "Recreate"] = "RollingUpdate"
    """`RollingUpdate` replaces workers so that complete pairs of prefill and decode workers go on serving. `Recreate`
    replaces all at once, where there is room for no more than there is and an outage is no harm."""
    max_surge: Share | None = None
    """Replicas of each role that there may be beyond its number while workers are replaced, as a number or a percentage
    that is rounded up. Defaults to 25%; to 0 where `maxUnavailable` lets a replica go, but for a single replica with a
    canary."""
    max_unavailable: Share | None = None
    """Replicas of each role that may be missing while workers are replaced, as a number or a percentage that is rounded
    down. A node that is drained takes as many at a time, and one at least. Defaults to 0 for a role with a single
    replica, and else to 1, so that a rollout goes on where nothing has room beside what there is."""
    paused: bool = False
    """Replace nothing for now. Scaling, suspension and configurations that need no restart are not held up."""
    progress_deadline: Duration = "1h"
    """When nothing has come up for this long, the model is Stalled with the reason. Loading counts: let it be longer
    than a worker takes to download and load the model."""

    canary: Canary | None = None
    """Try a new revision with a part of the requests first. It is promoted by itself after the last step, and goes back
    by itself when it fails. Without it workers are replaced as fast as the budget allows. A change that adds or removes
    `spec.prefill`, or changes `nodesPerReplica`, has no canary."""
    revision: Annotated[int, Field(ge=1)] | None = None
    """Run this revision of `model`, `engine`, `kv`, `prefill` and `decode` instead of what the object says of them;
    `replicas` and `servedName` are not part of it. `kubectl get controllerrevisions` lists those that are kept. It has
    no canary. Remove it to run what the object says."""
    follow_image: bool | None = None
    """Whether a model that names no image gets that of another release of the operator once that is installed, when its
    turn comes. Without it workers and gateways keep the images that they have. Defaults to `images.follow` of the
    chart, which is false."""
    revision_history_limit: Annotated[int, Field(ge=1, le=100)] = 10
    """Revisions that are kept, besides those in use."""

    @model_validator(mode="after")
    def _can_move(self) -> Rollout:
        if is_none(self.max_surge) and is_none(self.max_unavailable):
            raise ValueError(f"maxSurge {_NO_BUDGET}")
        if self.canary is not None and self.type == "Recreate":
            raise ValueError(f"canary {_NO_CANARY}")
        return self

    def surge_of(self, replicas: int) -> int:
        """Replicas that a role of so many may have on top while it is changed."""
        if self.type == "Recreate":
            return 0
        if self.max_surge is not None:
            return count_share(self.max_surge, replicas, up=True)
        is_tried_beside_itself = self.canary is not None and replicas == 1
        if self.max_unavailable is not None and self.unavailable_of(replicas) > 0 and not is_tried_beside_itself:
            return 0
        return max(1, count_share(_SURGE, replicas, up=True))

    def unavailable_of(self, replicas: int) -> int:
        """Replicas that a role of so many may lack while it is changed."""
        if self.type == "Recreate":
            return replicas
        has_surge = not is_none(self.max_surge)
        if self.max_unavailable is not None:
            # Rounded down to nothing without a surge, nothing could be replaced.
            return max(0 if has_surge else 1, count_share(self.max_unavailable, replicas, up=False))
        return 0 if replicas == 1 and has_surge else 1


class TTFTTarget(Authored):
    percentile: Annotated[int, Field(ge=50, le=99)] = 95
    """How many of 100 requests are to meet it."""
    seconds: Annotated[float, Field(ge=0.001, le=3600)]
    """Longest time to the first token, for example 0.5."""
    seconds_per_thousand_tokens: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Longer by so much for each thousand tokens of the prompt."""

    @property
    def seconds_per_token(self) -> float:
        return self.seconds_per_thousand_tokens / 1000

    def limit(self, tokens: float) -> float:
        """Seconds allowed to a request with so many prompt tokens."""
        return self.seconds + self.seconds_per_token * tokens


class TPOTTarget(Authored):
    seconds: Annotated[float, Field(ge=0.0001, le=60)]
    """Longest mean time of an output token after the first, for example 0.05."""


class SLO(Authored):
    """What clients are to get. Requests are served in the order in which they are due by it, roles with the mode `SLO`
    are scaled for it, and the condition `SLOMet` tells whether they do."""

    ttft: TTFTTarget
    """Time to the first token."""
    tpot: TPOTTarget
    """Time per output token."""


_RATIO = "must not be above max: lower it, or raise max"


class RoleRatio(Authored):
    """Prefill replicas per decode replica."""

    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [rule("!has(self.min) || !has(self.max) || self.min <= self.max", _RATIO, path=".min")]
        }
    )

    min: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """At least so many."""
    max: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    """At most so many. Defaults to any number."""

    @model_validator(mode="after")
    def _is_bounded(self) -> RoleRatio:
        if self.max is not None and self.min > self.max:
            raise ValueError(f"min {_RATIO}")
        return self


class ScalingBehavior(Authored):
    scale_down_stabilization: Duration = "10m"
    """A role loses replicas only once nothing has asked for them for so long; where demand surely falls, for as
    long as another replica would take to come, a minute at least."""


class Standby(Authored):
    """Workers that stay while a model sleeps: libraries are loaded, no weights and no blocks."""

    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """Pods of each role; at most its `scaling.min`, which is what it has when the model wakes."""


class ScaleToZero(Authored):
    """No worker runs while nobody asks anything; gateways stay, and hold what comes until a worker is there."""

    idle_after: Annotated[
        Duration,
        Satisfies("!self.matches('^([0-9]+[hms])+$') || duration(self) >= duration('10s')", "must be at least 10s"),
    ] = "15m"
    """Both roles go to zero replicas when no gateway has had a request for so long. The next request wakes the model:
    each role gets its `scaling.min`."""
    standby: Standby | None = None
    """Pods that stay meanwhile, with their nodes' resources, and serve as soon as they have read the weights. None stay
    where it is left out."""


class Autoscaling(Authored):
    """How roles with the mode `SLO` are scaled."""

    gpu_budget: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Devices that the replicas of both roles may take together; a replica has one for each rank, tensor x pipeline x
    expert x data. Without it `max` of each role is the only bound."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Among the models of the namespace that follow demand, where a ResourceQuota on GPUs of their kind, for example
    `requests.nvidia.com/gpu`, does not hold all that they want: higher ones grow first, and lower ones give up what
    they have beyond `scaling.min`."""
    role_ratio: RoleRatio = Field(default_factory=RoleRatio)
    """Prefill replicas per decode replica."""
    behavior: ScalingBehavior = Field(default_factory=ScalingBehavior)
    """How eagerly replicas follow."""
    scale_to_zero: ScaleToZero | None = None
    """Let the model sleep while nobody uses it. Needs both roles to have the mode `SLO`; while both are `Static` it is
    not looked at."""
    dry_run: bool = False
    """Decide and tell in `status.scaling`, and move nothing. A request still wakes a model that sleeps."""


_NO_SLO = "is needed by a role with scaling.mode SLO: write slo.ttft.seconds and slo.tpot.seconds"
_NO_TRIAL = (
    "must not be set while something else scales a role, because a canary counts replicas: remove it, or let"
    " scaling.mode be SLO or Static"
)
_NO_LOSS = (
    "must not be 0 while scaling.mode of a role is External, which has no surge: a rollout could replace nothing. Write"
    " 1 or more"
)
_SLEEPS_WHOLE = (
    "needs every worker role to have scaling.mode SLO, because a model sleeps as a whole and the operator wakes it:"
    " change the modes, or remove scaleToZero"
)
_NOBODY_WAITS = (
    "must let the first request wait for a start while autoscaling.scaleToZero is set: write {}, or remove it"
)
_NO_WAKER = "must not be 0 while autoscaling.scaleToZero is set, because gateways hold the request that wakes the model"
_IDLE_STANDBY = (
    "must be at most scaling.min of every worker role, because that many wake: lower it, or raise scaling.min"
)
_LONE_STANDBY = (
    "needs workers of one rank, because the ranks of a group meet while they load: leave standby out, or leave"
    " parallelism at 1"
)
_LONE_DISK = (
    "needs workers of one rank, because the ranks of a group keep no blocks on disks yet: leave disk out, or leave"
    " parallelism at 1"
)
_LONE_HEAD = (
    "needs workers of one rank, because the ranks of a group compute no heads yet: leave draft out, or leave"
    " parallelism at 1"
)
_LONE_STORE = (
    "needs workers of one rank, because the ranks of a group share no blocks through a store yet: leave store out, or"
    " leave parallelism at 1"
)
_TOO_SMALL = "is less than what the fewest replicas of both roles take: raise it, or lower scaling.min or replicas"


def _has_mode(role: str, mode: str) -> str:
    scaling = f"self.{role}.scaling"
    has = f"has(self.{role}) && " if role == "prefill" else ""
    return f"({has}has({scaling}) && has({scaling}.mode) && {scaling}.mode == '{mode}')"


def _either(mode: str) -> str:
    return f"({_has_mode('prefill', mode)} || {_has_mode('decode', mode)})"


_AXES = ("tensor", "pipeline", "expert", "data")
SHORTEST_TTL = "1m"
"""For requests that may wait for a start."""
_SAYS_QUEUE = "!has(self.gateway) || !has(self.gateway.queue) || !has(self.gateway.queue."
_SLEEPS = f"(has(self.autoscaling) && has(self.autoscaling.scaleToZero) && {_either('SLO')})"


def _fewest(role: str) -> str:
    external = f"{_has_mode(role, 'External')} ? 1 : self.{role}.replicas"
    return f"({_has_mode(role, 'SLO')} ? self.{role}.scaling.min : ({external}))"


def _fewest_gpus(role: str) -> str:
    axes = " * ".join(f"self.{role}.parallelism.{axis}" for axis in _AXES)
    return f"{_fewest(role)} * {axes}"


_BATCH_RANKS = " && ".join(
    f"self.{role}.parallelism.{axis} == 1" for role in ("prefill", "decode") for axis in ("expert", "data")
)


_RESTS = "has(self.autoscaling) && has(self.autoscaling.scaleToZero) && has(self.autoscaling.scaleToZero.standby)"
_STANDBY_PATH = ".autoscaling.scaleToZero.standby"


def _rests_less(role: str) -> str:
    return f"(!{_has_mode(role, 'SLO')} || self{_STANDBY_PATH}.replicas <= self.{role}.scaling.min)"


def _is_lone(role: str) -> str:
    lone = " && ".join(f"self.{role}.parallelism.{axis} == 1" for axis in _AXES)
    return f"(!has(self.prefill) || {lone})" if role == "prefill" else lone


class InferenceModelSpec(Authored):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    f"!has(self.prefill) || ({_BATCH_RANKS})",
                    "needs expert and data ranks of both roles to be 1, because blocks are not yet moved between them:"
                    " leave prefill out, or use tensor and pipeline ranks",
                    path=".prefill",
                ),
                rule(
                    "!has(self.rollout) || !has(self.rollout.canary) || !has(self.rollout.maxSurge)"
                    f" || {_is_some('self.rollout.maxSurge')}"
                    f" || {_fewest('decode')} != 1 && (!has(self.prefill) || {_fewest('prefill')} != 1)",
                    _NO_ROOM,
                    path=".rollout",
                ),
                rule(f"has(self.slo) || !{_either('SLO')}", _NO_SLO, path=".slo"),
                rule(
                    f"!has(self.rollout) || !has(self.rollout.canary) || !{_either('External')}",
                    _NO_TRIAL,
                    path=".rollout.canary",
                ),
                rule(
                    f"!has(self.rollout) || !has(self.rollout.maxUnavailable) || !{_either('External')}"
                    f" || {_is_some('self.rollout.maxUnavailable')}",
                    _NO_LOSS,
                    path=".rollout.maxUnavailable",
                ),
                rule(
                    "!has(self.autoscaling) || !has(self.autoscaling.gpuBudget)"
                    f" || {_fewest_gpus('decode')} + (has(self.prefill) ? {_fewest_gpus('prefill')} : 0)"
                    " <= self.autoscaling.gpuBudget",
                    _TOO_SMALL,
                    path=".autoscaling.gpuBudget",
                ),
                rule(
                    "!has(self.autoscaling) || !has(self.autoscaling.scaleToZero)"
                    f" || {_has_mode('decode', 'SLO')} && (!has(self.prefill) || {_has_mode('prefill', 'SLO')})"
                    f" || !{_either('SLO')} && !{_either('External')}",
                    _SLEEPS_WHOLE,
                    path=".autoscaling.scaleToZero",
                ),
                rule(
                    f"!{_SLEEPS} || !has(self.gateway) || !has(self.gateway.replicas) || self.gateway.replicas > 0",
                    _NO_WAKER,
                    path=".gateway.replicas",
                ),
                rule(
                    f"!{_SLEEPS} || {_SAYS_QUEUE}max) || self.gateway.queue.max > 0",
                    _NOBODY_WAITS.format("1 or more"),
                    path=".gateway.queue.max",
                ),
                rule(
                    f"!{_SLEEPS} || {_SAYS_QUEUE}ttl) || !self.gateway.queue.ttl.matches('^([0-9]+[hms])+$')"
                    f" || duration(self.gateway.queue.ttl) >= duration('{SHORTEST_TTL}')",
                    _NOBODY_WAITS.format(f"{SHORTEST_TTL} or more"),
                    path=".gateway.queue.ttl",
                ),
                rule(
                    f"!({_RESTS}) || {_rests_less('decode')} && {_rests_less('prefill')}",
                    _IDLE_STANDBY,
                    path=f"{_STANDBY_PATH}.replicas",
                ),
                rule(
                    f"!({_RESTS}) || {_is_lone('decode')} && {_is_lone('prefill')}",
                    _LONE_STANDBY,
                    path=_STANDBY_PATH,
                ),
                rule(
                    f"!has(self.kv) || !has(self.kv.disk) || {_is_lone('decode')} && {_is_lone('prefill')}",
                    _LONE_DISK,
                    path=".kv.disk",
                ),
                rule(
                    "!has(self.engine) || !has(self.engine.speculative) || !has(self.engine.speculative.draft)"
                    f" || {_is_lone('decode')} && {_is_lone('prefill')}",
                    _LONE_HEAD,
                    path=".engine.speculative.draft",
                ),
                rule(
                    f"!has(self.kv) || !has(self.kv.store) || {_is_lone('decode')} && {_is_lone('prefill')}",
                    _LONE_STORE,
                    path=".kv.store",
                ),
                *foreign_rules(),
            ]
        }
    )

    model: Model
    """What is served."""
    metadata: Metadata | None = None
    """Added to the StatefulSets, the Deployment, their pods and their Services."""
    prefill: WorkerRole | None = None
    """Workers that compute prompts. Leave it out for aggregated serving: decode workers then do both."""
    decode: WorkerRole = Field(default_factory=WorkerRole)
    """Workers that generate tokens."""
    engine: Engine = Field(default_factory=Engine)
    """How the workers compute."""
    kv: KV = Field(default_factory=KV)
    """The key-value cache and how it moves from prefill to decode workers."""
    gateway: Gateway = Field(default_factory=Gateway)
    """The OpenAI-compatible endpoint."""
    slo: SLO | None = None
    """What clients are to get. Roles with `scaling.mode: SLO` are scaled for it."""
    autoscaling: Autoscaling = Field(default_factory=Autoscaling)
    """How roles with `scaling.mode: SLO` are scaled."""
    observability: Observability = Field(default_factory=Observability)
    """What is told about requests."""
    drain: Drain = Field(default_factory=Drain)
    """How pods leave."""
    rollout: Rollout = Field(default_factory=Rollout)
    """How workers are replaced when something changes that they read at start."""
    managed_by: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Which operator serves this model, where there are several: the one whose chart has the same `managedBy`. Without
    it that is one whose chart has none."""
    suspend: bool = False
    """Scale every pod of this model to zero and keep the object; set it back to resume."""

    @model_validator(mode="after")
    def _has_room(self) -> InferenceModelSpec:
        no_room = is_none(self.rollout.max_surge) and any(role.fewest == 1 for role in self.workers)
        if self.rollout.canary is not None and no_room:
            raise ValueError(f"rollout {_NO_ROOM}")
        return self

    @model_validator(mode="after")
    def _can_scale(self) -> InferenceModelSpec:
        modes, budget = {role.scaling.mode for role in self.workers}, self.autoscaling.gpu_budget
        if self.slo is None and "SLO" in modes:
            raise ValueError(f"slo {_NO_SLO}")
        if self.rollout.canary is not None and "External" in modes:
            raise ValueError(f"rollout.canary {_NO_TRIAL}")
        if is_none(self.rollout.max_unavailable) and "External" in modes:
            raise ValueError(f"rollout.maxUnavailable {_NO_LOSS}")
        if budget is not None and sum(role.fewest * role.num_gpus for role in self.workers) > budget:
            raise ValueError(f"autoscaling.gpuBudget {_TOO_SMALL}")
        return self

    @model_validator(mode="after")
    def _fits_engine(self) -> InferenceModelSpec:
        refusal = find_refusal(self)
        if refusal is not None:
            raise ValueError(refusal)
        return self

    @model_validator(mode="after")
    def _can_keep_blocks(self) -> InferenceModelSpec:
        if self.kv.disk is not None and any(role.parallelism.for_launch().num_ranks > 1 for role in self.workers):
            raise ValueError(f"kv.disk {_LONE_DISK}")
        if self.kv.store is not None and any(role.parallelism.for_launch().num_ranks > 1 for role in self.workers):
            raise ValueError(f"kv.store {_LONE_STORE}")
        return self

    @model_validator(mode="after")
    def _can_draft(self) -> InferenceModelSpec:
        draft = self.engine.speculative.draft
        if draft is not None and any(role.parallelism.for_launch().num_ranks > 1 for role in self.workers):
            raise ValueError(f"engine.speculative.draft {_LONE_HEAD}")
        return self

    @model_validator(mode="after")
    def _can_rest(self) -> InferenceModelSpec:
        standby = None if self.autoscaling.scale_to_zero is None else self.autoscaling.scale_to_zero.standby
        if standby is None:
            return self
        if any(role.scaling.mode == "SLO" and standby.replicas > role.scaling.min for role in self.workers):
            raise ValueError(f"autoscaling.scaleToZero.standby.replicas {_IDLE_STANDBY}")
        if any(role.num_gpus > 1 for role in self.workers):
            raise ValueError(f"autoscaling.scaleToZero.standby {_LONE_STANDBY}")
        return self

    @model_validator(mode="after")
    def _can_sleep(self) -> InferenceModelSpec:
        modes, queue = {role.scaling.mode for role in self.workers}, self.gateway.queue
        if self.autoscaling.scale_to_zero is None or modes == {"Static"}:
            return self
        if modes != {"SLO"}:
            raise ValueError(f"autoscaling.scaleToZero {_SLEEPS_WHOLE}")
        if self.gateway.replicas == 0:
            raise ValueError(f"gateway.replicas {_NO_WAKER}")
        if queue.max == 0:
            raise ValueError(f"gateway.queue.max {_NOBODY_WAITS.format('1 or more')}")
        if queue.ttl is not None and parse_duration(queue.ttl) < parse_duration(SHORTEST_TTL):
            raise ValueError(f"gateway.queue.ttl {_NOBODY_WAITS.format(f'{SHORTEST_TTL} or more')}")
        return self

    @property
    def scale_to_zero(self) -> ScaleToZero | None:
        """When the model sleeps; None: never."""
        modes = {role.scaling.mode for role in self.workers}
        return self.autoscaling.scale_to_zero if modes == {"SLO"} else None

    @property
    def standby(self) -> int:
        """Replicas of each role that stay while the model sleeps."""
        rest = self.scale_to_zero
        return 0 if rest is None or rest.standby is None else rest.standby.replicas

    @property
    def queue_ttl(self) -> str:
        """How long a request may wait in a gateway."""
        return self.gateway.queue.ttl or ("30s" if self.scale_to_zero is None else "10m")

    @property
    def workers(self) -> list[WorkerRole]:
        """The worker roles that there are."""
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]


class RoleStatus(Wire):
    """Counts of replicas: groups of `nodesPerReplica` pods, single pods where that is 1."""

    replicas: int = 0
    """Replicas of which any pod exists."""
    ready: int = 0
    """Replicas of which every pod is ready."""
    updated: int = 0
    """Replicas of which every pod is of the newest template."""
    standby: int | None = None
    """Replicas on standby, of a model that sleeps: all is loaded but weights."""
    promised: int | None = None
    """Replicas that `Ready` promises: those the spec asks for, once they have all been there. While a role grows it is
    the number from before."""
    summary: str = ""
    """`ready/desired`, for the printer columns."""


class ModelStatus(Wire):
    """Which weights workers load. Absent for models that are no `hf://` repository."""

    uri: str
    revision: str
    """Branch, tag or commit that the spec names."""
    commit: str | None = None
    """What it was when it was resolved: workers load this. Absent while each of them resolves the revision itself."""
    resolved_at: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    latest_commit: str | None = None
    """What the revision is by now, where that is another commit."""
    request: str | None = None
    """Value of the annotation `tandem.dev/resolve-model` that `commit` answers."""


class ImagesStatus(Wire):
    """Images of a release that a model has which names none."""

    worker: str | None = None
    gateway: str | None = None
    engine: str | None = None
    """Kind of the engine that `worker` is of."""


class CanaryFigures(Wire):
    """What gateways have counted of some workers since a step began."""

    requests: int = 0
    failures: int = 0
    prefill_requests: int = 0
    """Prompts that prefill workers were named for."""
    prefill_failures: int = 0
    ttft_counts: list[int] = Field(default_factory=list[int])
    """Requests by seconds to the first token, in the buckets of the gateways' `/fleet`."""


class CanaryStatus(Wire):
    """A revision on trial, or one that failed."""

    revision: int
    """Its number."""
    step: int = 1
    """Which of the steps, from 1."""
    weight: int = 0
    """Percent of new requests that go to it: less than the step's while its workers start."""
    since: Annotated[str, Field(json_schema_extra={"format": "date-time"})] = ""
    """When the step's workers were ready, or when the wait for them began."""
    ready: bool = False
    """The step's workers are ready, so its time counts."""
    figures: CanaryFigures | None = None
    """What its workers did, in this step."""
    stable_figures: CanaryFigures | None = None
    """What the other workers did, in this step."""
    reason: str | None = None
    """Why it failed, in one CamelCase word."""
    message: str | None = None
    """What it waits for, or why it failed."""


class RolloutStatus(Wire):
    """Which revision the workers run, and how far a change has come."""

    phase: Literal["Complete", "Progressing", "Preparing", "Canary", "RolledBack"] = "Complete"
    """`Progressing`: workers are replaced. `Preparing`: they are brought to one revision before a canary begins.
    `RolledBack`: a canary failed."""
    revision: int
    """Number of the revision that is wanted."""
    digest: str
    """Hash of that revision's content."""
    stable_revision: int
    """Number of the revision that all workers but those of a canary have or are being given."""
    complete_revision: int | None = None
    """Number of the last revision that all workers had."""
    since: Annotated[str, Field(json_schema_extra={"format": "date-time"})] = ""
    """When the phase began, or a turn was given."""
    waiting: bool = False
    """It waits for its turn, because as many models roll as may at a time."""
    canary: CanaryStatus | None = None
    retry: str | None = None
    """The wish to try again that was last followed."""


class RoleScalingStatus(Wire):
    """What is decided about the number of a role's replicas."""

    mode: ScalingMode
    """The mode that it was decided in."""
    desired: int
    """Replicas that the role is given: what was decided last, or what something else has set."""
    observed: int | None = None
    """Replicas that it had when that was told."""
    required: int | None = None
    """Replicas that demand alone asks for, without bounds, budget and patience."""
    limit: str | None = None
    """What decides: a target, a bound, the budget, patience."""
    pending: bool | None = None
    """The role is yet to be given this number before something else may change it: the model is suspended, or the
    number was another one a moment ago."""


class StartFigures(Wire):
    """What the last starts of a role took."""

    median_seconds: float
    p90_seconds: float
    """Nine of ten took no longer."""
    count: int
    """How many these were: 20 at most."""


class StartStatus(Wire):
    """What it takes until a replica serves, as workers measured it, from the creation of the pod."""

    prefill: StartFigures | None = None
    decode: StartFigures | None = None
    prefill_wake: StartFigures | None = None
    """Starts of workers on standby, from the order to wake up."""
    decode_wake: StartFigures | None = None


class ScalingStatus(Wire):
    """Scaling of the roles that have another mode than `Static`. What does not change in substance is told again every
    half a minute at most."""

    prefill: RoleScalingStatus | None = None
    decode: RoleScalingStatus | None = None
    message: str = ""
    """The decision in a sentence, with the figures that it was made of."""
    decided_at: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """When the message was written."""
    last_scale_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """When a role was last given another number of replicas."""
    start: StartStatus | None = None
    """What starts of the last replicas took."""
    asleep_since: Annotated[str, Field(json_schema_extra={"format": "date-time"})] | None = None
    """When the model was scaled to zero because nobody used it; absent while it is awake."""


class Condition(Wire):
    """A Kubernetes condition; kstatus reads `Ready`, `Reconciling` and `Stalled`."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    """One CamelCase word for programs."""
    message: str
    """One sentence for people."""
    observed_generation: int | None = None
    """The `metadata.generation` it was concluded from."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})] = ""


class OperatorClaim(Wire):
    """An operator that serves a model."""

    lease: str
    """NAMESPACE/NAME of its Lease."""
    managed_by: str | None = None
    """What the model's `managedBy` was: another one makes the claim void."""


class InferenceModelStatus(Wire):
    observed_generation: int = -1
    """The `metadata.generation` that the rest of the status describes; -1 before the operator has seen the object."""
    operator: OperatorClaim | None = None
    """Which operator serves this model. Others leave it alone while its Lease is renewed."""
    url: str | None = None
    """Base URL of the OpenAI API inside the cluster."""
    revision: str | None = None
    """Revision that new worker pods get."""
    model: ModelStatus | None = None
    """The weights, by commit."""
    images: ImagesStatus | None = None
    """What stands in for images that the spec does not name. A release of the operator brings others, and they come
    when `rollout.followImage` or the chart says so."""
    routing: GatewayRouting | None = None
    """What the gateways follow at present: the names they serve and where requests go."""
    rollout: RolloutStatus | None = None
    scaling: ScalingStatus | None = None
    prefill: RoleStatus | None = None
    decode: RoleStatus | None = None
    gateway: RoleStatus | None = None
    updated: str = ""
    """`updated/present` replicas of the worker roles together, for the printer columns."""
    conditions: list[Condition] = Field(
        default_factory=list[Condition],
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Ready and Available sum up; Reconciling and Stalled are present only while true; the others tell more."""


class ObjectMeta(Wire):
    """What Tandem reads of an object's metadata."""

    name: str
    namespace: str
    uid: str = ""
    generation: int = 0
    deletion_timestamp: str | None = None
    annotations: dict[str, str] = Field(default_factory=dict[str, str])

    @model_validator(mode="after")
    def _fits(self) -> ObjectMeta:
        if len(self.name) > MODEL_NAME_MAX:
            raise ValueError(f"metadata.name has {len(self.name)} characters; use at most {MODEL_NAME_MAX}")
        return self


ROOT_RULES = [
    rule(
        f"size(self.metadata.name) <= {MODEL_NAME_MAX}",
        f"metadata.name must have at most {MODEL_NAME_MAX} characters, because pods append their role and number",
    ),
    rule(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name becomes the name of a Service: use lower-case letters, digits and '-', beginning with a letter",
    ),
]
"""Rules about the whole object: CEL sees only `metadata.name` and `metadata.generateName` of the metadata."""


class InferenceModel(Wire):
    metadata: ObjectMeta
    spec: InferenceModelSpec
    status: InferenceModelStatus = Field(default_factory=InferenceModelStatus)

    @property
    def served_name(self) -> str:
        return self.spec.model.served_name or self.metadata.name
