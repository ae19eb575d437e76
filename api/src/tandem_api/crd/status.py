"""What the operator says of a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem_api.base import Wire
from tandem_api.crd.roles import ScalingMode
from tandem_api.launch import GatewayRouting


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
    weights: str | None = None
    """Form in which its workers keep the model's matrices, `plain` or `lossless`, and why: what `engine.weights` has
    come to. Absent until a worker has told."""


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
    draft: ModelStatus | None = None
    """Those of the draft head. What it was resolved to stays until the spec names another head or revision."""
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
