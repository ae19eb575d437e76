"""The InferenceModel resource, `inferencemodels.tandem.dev/v1alpha1`.

These classes are the one definition: the CRD's schema, the operator's parser and the reference in `docs/` come from
them. Only what works is in here; a field that is not here is refused by the API server's strict validation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tandem_api.base import Authored, Wire
from tandem_api.launch import Device, DType
from tandem_api.quantities import DURATION_PATTERN, QUANTITY_PATTERN

MODEL_NAME_MAX = 40
"""Child names append a role, an ordinal and a controller hash, and Pod labels end at 63 characters."""
URI_PATTERN = r"^(hf://[A-Za-z0-9][\w.-]*/[\w.-]+|pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?/\S*|file:///\S+)$"

Quantity = Annotated[str, Field(pattern=QUANTITY_PATTERN, max_length=32)]
Duration = Annotated[str, Field(pattern=DURATION_PATTERN, min_length=2, max_length=16)]
DNSName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)]
PreserveUnknown = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]


class SecretKey(Authored):
    name: DNSName
    """Name of a Secret in the model's namespace."""
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)] = "token"
    """Key inside the Secret that holds the access token."""


class ModelCache(Authored):
    persistent_volume_claim: DNSName
    """A claim that the workers share: one of them downloads, the others wait and reuse. It must be ReadWriteMany, or
    ReadWriteOnce on a single node."""


class Model(Authored):
    uri: Annotated[str, Field(pattern=URI_PATTERN, max_length=1024)]
    """Where the weights are: `hf://ORG/REPOSITORY`, `pvc://CLAIM/path`, or `file:///path/in/container`. The folder
    holds safetensors files with a `config.json`, or a GGUF file."""
    revision: Annotated[str, Field(pattern=r"^[\w./-]+$", max_length=128)] = "main"
    """Branch, tag or commit of an `hf://` repository."""
    served_name: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """What clients pass as `model`. Defaults to the object's name."""
    secret_ref: SecretKey | None = None
    """Access token for a private `hf://` repository."""
    cache: ModelCache | None = None
    """Where downloads are kept. Without it every pod downloads into a volume of its own."""


class Resources(Authored):
    """Kubernetes resource requests and limits of the main container."""

    requests: dict[str, Quantity] = Field(default_factory=dict)
    limits: dict[str, Quantity] = Field(default_factory=dict)


class Workload(Authored):
    """What can be said of any group of pods."""

    resources: Resources = Field(default_factory=Resources)
    pod_template: PreserveUnknown | None = None
    """Strategic overlay on the generated pod template (`metadata` and `spec`), for what has no field of its own:
    node selectors, tolerations, environment variables, sidecars. Containers merge by name; the main one is `worker`
    or `gateway`."""


class WorkerRole(Workload):
    """A group of worker pods. `prefill` and `decode` are the same type."""

    replicas: Annotated[int, Field(ge=0, le=1000)] = 1


class Engine(Authored):
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Worker image. Defaults to the one of the operator's release."""
    device: Device = "Auto"
    """`Auto` uses CUDA when the container sees a GPU."""
    dtype: DType = "Auto"
    """`Auto` is the checkpoint's type on a GPU, and BFloat16 on a CPU that has instructions for it (else Float32)."""
    max_model_len: Annotated[int, Field(ge=16, le=10_485_760)] | None = None
    """Prompt plus output tokens of one request. Defaults to what the model supports."""
    max_batch_tokens: Annotated[int, Field(ge=16, le=1_048_576)] = 2048
    """Tokens computed in one engine step: longer prompts are prefilled in chunks of this size."""
    max_running_requests: Annotated[int, Field(ge=1, le=4096)] = 256
    """Requests that one worker computes at a time; more wait in its queue."""


class KV(Authored):
    transport: Literal["Auto", "TCP"] = "Auto"
    """How blocks move from prefill to decode workers."""
    memory: Quantity | None = None
    """Size of each worker's block space, for example `2Gi`. Defaults to a share of what is free after loading."""
    verify: bool = True
    """Checksum every received block; a bad one is sent again, then recomputed."""


class Timeouts(Authored):
    first_token: Duration = "300s"
    """How long a client may wait for the first token."""
    idle: Duration = "60s"
    """How long a worker may be silent inside an answer."""


class Gateway(Workload):
    replicas: Annotated[int, Field(ge=0, le=100)] = 1
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    """Gateway image. Defaults to the one of the operator's release."""
    timeouts: Timeouts = Field(default_factory=Timeouts)


class Drain(Authored):
    timeout: Duration = "60s"
    """How long a pod that is being removed may finish what it runs."""


class InferenceModelSpec(Authored):
    model: Model
    prefill: WorkerRole | None = None
    """Workers that compute prompts. Leave it out for aggregated serving: decode workers then do both."""
    decode: WorkerRole = Field(default_factory=WorkerRole)
    """Workers that generate tokens."""
    engine: Engine = Field(default_factory=Engine)
    kv: KV = Field(default_factory=KV)
    gateway: Gateway = Field(default_factory=Gateway)
    drain: Drain = Field(default_factory=Drain)
    suspend: bool = False
    """Scale every pod of this model to zero and keep the object; set it back to resume."""


class RoleStatus(Wire):
    replicas: int = 0
    ready: int = 0
    updated: int = 0
    summary: str = ""
    """`ready/desired`, for the printer columns."""


class Condition(Wire):
    """A Kubernetes condition; kstatus reads `Ready`, `Reconciling` and `Stalled`."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    observed_generation: int | None = None
    last_transition_time: str = ""


class InferenceModelStatus(Wire):
    observed_generation: int = 0
    url: str | None = None
    revision: str | None = None
    """Revision that new worker pods get."""
    prefill: RoleStatus | None = None
    decode: RoleStatus | None = None
    gateway: RoleStatus | None = None
    conditions: list[Condition] = Field(default_factory=list)


class ObjectMeta(Wire):
    """What Tandem reads of an object's metadata."""

    name: str
    namespace: str
    uid: str = ""
    generation: int = 0
    deletion_timestamp: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> ObjectMeta:
        if len(self.name) > MODEL_NAME_MAX:
            raise ValueError(f"metadata.name has {len(self.name)} characters; use at most {MODEL_NAME_MAX}")
        return self


class InferenceModel(Wire):
    metadata: ObjectMeta
    spec: InferenceModelSpec
    status: InferenceModelStatus = Field(default_factory=InferenceModelStatus)

    @property
    def served_name(self) -> str:
        return self.spec.model.served_name or self.metadata.name
