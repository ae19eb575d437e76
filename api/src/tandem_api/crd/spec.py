"""The spec as a whole, with the rules that hold between its parts."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from tandem_api.changes import Change
from tandem_api.crd.authored import Authored
from tandem_api.crd.engine import KV, Engine
from tandem_api.crd.expressions import (
    BATCH_RANKS,
    RESTS,
    SAYS_QUEUE,
    SHORTEST_TTL,
    SLEEPS,
    STANDBY_PATH,
    either,
    fewest,
    fewest_gpus,
    has_mode,
    holds_host_memory,
    is_lone,
    rests_less,
)
from tandem_api.crd.fields import is_some
from tandem_api.crd.gateway import Gateway
from tandem_api.crd.model import Model
from tandem_api.crd.observability import Observability
from tandem_api.crd.pods import Metadata
from tandem_api.crd.roles import WorkerRole
from tandem_api.crd.rollout import NO_ROOM, Drain, Rollout
from tandem_api.crd.scaling import SLO, Autoscaling, ScaleToZero
from tandem_api.engines import find_nameless, foreign_rules
from tandem_api.validation import RULES_KEY, rule

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
_HOST_ON_CPU = (
    "is for workers on GPUs, because a CPU's blocks are in the host's memory already: remove it, and raise kv.memory"
)
_HOST_BEYOND_LIMIT = (
    "must be less than the memory limit of each worker role, for every rank of a pod: lower it, or raise"
    " resources.limits.memory"
)
_LONE_STORE = (
    "needs workers of one rank, because the ranks of a group share no blocks through a store yet: leave store out, or"
    " leave parallelism at 1"
)
_TOO_SMALL = "is less than what the fewest replicas of both roles take: raise it, or lower scaling.min or replicas"


class InferenceModelSpec(Authored):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    f"!has(self.prefill) || ({BATCH_RANKS})",
                    "needs expert and data ranks of both roles to be 1, because blocks are not yet moved between them:"
                    " leave prefill out, or use tensor and pipeline ranks",
                    path=".prefill",
                    server_only=True,
                ),
                rule(
                    "!has(self.rollout) || !has(self.rollout.canary) || !has(self.rollout.maxSurge)"
                    f" || {is_some('self.rollout.maxSurge')}"
                    f" || {fewest('decode')} != 1 && (!has(self.prefill) || {fewest('prefill')} != 1)",
                    NO_ROOM,
                    path=".rollout",
                ),
                rule(f"has(self.slo) || !{either('SLO')}", _NO_SLO, path=".slo"),
                rule(
                    f"!has(self.rollout) || !has(self.rollout.canary) || !{either('External')}",
                    _NO_TRIAL,
                    path=".rollout.canary",
                ),
                rule(
                    f"!has(self.rollout) || !has(self.rollout.maxUnavailable) || !{either('External')}"
                    f" || {is_some('self.rollout.maxUnavailable')}",
                    _NO_LOSS,
                    path=".rollout.maxUnavailable",
                ),
                rule(
                    "!has(self.autoscaling) || !has(self.autoscaling.gpuBudget)"
                    f" || {fewest_gpus('decode')} + (has(self.prefill) ? {fewest_gpus('prefill')} : 0)"
                    " <= self.autoscaling.gpuBudget",
                    _TOO_SMALL,
                    path=".autoscaling.gpuBudget",
                ),
                rule(
                    "!has(self.autoscaling) || !has(self.autoscaling.scaleToZero)"
                    f" || {has_mode('decode', 'SLO')} && (!has(self.prefill) || {has_mode('prefill', 'SLO')})"
                    f" || !{either('SLO')} && !{either('External')}",
                    _SLEEPS_WHOLE,
                    path=".autoscaling.scaleToZero",
                ),
                rule(
                    f"!{SLEEPS} || !has(self.gateway) || !has(self.gateway.replicas) || self.gateway.replicas > 0",
                    _NO_WAKER,
                    path=".gateway.replicas",
                ),
                rule(
                    f"!{SLEEPS} || {SAYS_QUEUE}max) || self.gateway.queue.max > 0",
                    _NOBODY_WAITS.format("1 or more"),
                    path=".gateway.queue.max",
                ),
                rule(
                    f"!{SLEEPS} || {SAYS_QUEUE}ttl) || !self.gateway.queue.ttl.matches('^([0-9]+[hms])+$')"
                    f" || duration(self.gateway.queue.ttl) >= duration('{SHORTEST_TTL}')",
                    _NOBODY_WAITS.format(f"{SHORTEST_TTL} or more"),
                    path=".gateway.queue.ttl",
                ),
                rule(
                    f"!({RESTS}) || {rests_less('decode')} && {rests_less('prefill')}",
                    _IDLE_STANDBY,
                    path=f"{STANDBY_PATH}.replicas",
                ),
                rule(
                    f"!({RESTS}) || {is_lone('decode')} && {is_lone('prefill')}",
                    _LONE_STANDBY,
                    path=STANDBY_PATH,
                ),
                rule(
                    f"!has(self.kv) || !has(self.kv.disk) || {is_lone('decode')} && {is_lone('prefill')}",
                    _LONE_DISK,
                    path=".kv.disk",
                ),
                rule(
                    "!has(self.kv) || !has(self.kv.hostMemory) || !has(self.engine) || !has(self.engine.device)"
                    " || self.engine.device != 'CPU'",
                    _HOST_ON_CPU,
                    path=".kv.hostMemory",
                ),
                rule(
                    "!has(self.kv) || !has(self.kv.hostMemory)"
                    f" || {holds_host_memory('decode')} && {holds_host_memory('prefill')}",
                    _HOST_BEYOND_LIMIT,
                    path=".kv.hostMemory",
                ),
                rule(
                    f"!has(self.kv) || !has(self.kv.store) || {is_lone('decode')} && {is_lone('prefill')}",
                    _LONE_STORE,
                    path=".kv.store",
                ),
                *foreign_rules(),
            ]
        }
    )

    model: Annotated[Model, Change.WORKERS]
    """What is served."""
    metadata: Annotated[Metadata | None, Change.BOTH] = None
    """Added to the StatefulSets, the Deployment, their pods and their Services."""
    prefill: Annotated[WorkerRole | None, Change.WORKERS] = None
    """Workers that compute prompts. Leave it out for aggregated serving: decode workers then do both."""
    decode: Annotated[WorkerRole, Change.WORKERS] = Field(default_factory=WorkerRole)
    """Workers that generate tokens."""
    engine: Annotated[Engine, Change.WORKERS] = Field(default_factory=Engine)
    """How the workers compute."""
    kv: Annotated[KV, Change.WORKERS] = Field(default_factory=KV)
    """The key-value cache and how it moves from prefill to decode workers."""
    gateway: Annotated[Gateway, Change.GATEWAYS] = Field(default_factory=Gateway)
    """The OpenAI-compatible endpoint."""
    slo: Annotated[SLO | None, Change.FOLLOWED] = None
    """What clients are to get. Roles with `scaling.mode: SLO` are scaled for it."""
    autoscaling: Annotated[Autoscaling, Change.OPERATOR] = Field(default_factory=Autoscaling)
    """How roles with `scaling.mode: SLO` are scaled."""
    observability: Annotated[Observability, Change.FOLLOWED] = Field(default_factory=Observability)
    """What is told about requests."""
    drain: Annotated[Drain, Change.FOLLOWED] = Field(default_factory=Drain)
    """How pods leave."""
    rollout: Annotated[Rollout, Change.OPERATOR] = Field(default_factory=Rollout)
    """How workers are replaced when something changes that they read at start."""
    managed_by: Annotated[Annotated[str, Field(min_length=1, max_length=63)] | None, Change.OPERATOR] = None
    """Which operator serves this model, where there are several: the one whose chart has the same `managedBy`. Without
    it that is one whose chart has none."""
    suspend: Annotated[bool, Change.OPERATOR] = False
    """Scale every pod of this model to zero and keep the object; set it back to resume."""

    @model_validator(mode="after")
    def _names_arguments(self) -> InferenceModelSpec:
        if (sentence := find_nameless(self.engine.args)) is not None:
            raise ValueError(sentence)
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
