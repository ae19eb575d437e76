"""Prefill and decode workers: how many, and how they scale."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from tandem_api.changes import Change
from tandem_api.crd.authored import Authored
from tandem_api.crd.fields import RANKS_PER_POD_MAX, Quantity
from tandem_api.crd.pods import RoleParallelism, Workload
from tandem_api.validation import RULES_KEY, rule

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
                    server_only=True,
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
                    server_only=True,
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

    replicas: Annotated[int, Field(ge=0, le=1000), Change.OPERATOR] = 1
    """Replicas of this role: each serves by itself and consists of `nodesPerReplica` pods. With another
    `scaling.mode` than `Static` a new StatefulSet begins with so many, and later it is not looked at."""
    scaling: Annotated[RoleScaling, Change.OPERATOR] = Field(default_factory=RoleScaling)
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

    @property
    def num_gpus(self) -> int:
        """Devices of one replica: one for each rank."""
        return self.parallelism.for_launch().num_ranks

    @property
    def fewest(self) -> int:
        """Replicas that there are at least, as far as the spec tells: one of a role that something else scales."""
        return {"Static": self.replicas, "SLO": self.scaling.min, "External": 1}[self.scaling.mode]
