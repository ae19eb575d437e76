"""Who a process is within its group: pure functions of the configuration and the pod's name. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tandem_api.base import Wire
from tandem_api.launch import GroupConfig, Parallelism, WorkerConfig
from tandem_api.names import Role

from tandem_worker.host.errors import StartupError

_ORDINAL = re.compile(r"(.+)-(\d+)")
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """One pod's place in its group."""

    node: int
    """This pod's number within the group; 0 leads."""
    ranks: range
    """Ranks of the processes in this pod."""
    leader_pod: str
    leader_host: str
    """Address at which this pod reaches the leader."""
    port: int
    """0: any; the processes of a single pod are told which one it became."""

    @property
    def leads(self) -> bool:
        """Whether this is the pod of rank 0."""
        return self.node == 0


def plan_node(group: GroupConfig, pod: str) -> NodePlace:
    """Tell where the pod named `pod` stands. Raises StartupError for shapes that no group can have."""
    _check_shape(group)
    share = group.ranks_per_node
    if group.num_nodes == 1:
        return NodePlace(node=0, ranks=range(share), leader_pod=pod, leader_host="127.0.0.1", port=0)
    match = _ORDINAL.fullmatch(pod)
    if match is None:
        raise StartupError(
            "GroupInvalid",
            f"A group of {group.num_nodes} pods needs pods numbered by a StatefulSet, as in NAME-0, "
            f"but this one is called {pod!r}: set POD_NAME to the pod's name.",
        )
    if not group.service:
        raise StartupError(
            "GroupInvalid",
            f"A group of {group.num_nodes} pods meets under a headless Service: set group.service to its name.",
        )
    ordinal = int(match[2])
    node = ordinal % group.num_nodes
    leader_pod = f"{match[1]}-{ordinal - node}"
    return NodePlace(
        node=node,
        ranks=range(node * share, (node + 1) * share),
        leader_pod=leader_pod,
        leader_host=f"{leader_pod}.{group.service}",
        port=group.port,
    )


def plan_rank_address(group: GroupConfig, host: str, pod_ip: str) -> str:
    """Address at which a pod's ranks take the connections of other ranks, where the process listens on `host`."""
    if host not in {"0.0.0.0", "::"}:
        return host
    return "127.0.0.1" if group.num_nodes == 1 else pod_ip


def _check_shape(group: GroupConfig) -> None:
    for name, value in {**group.parallelism.model_dump(), "num_nodes": group.num_nodes}.items():
        if value < 1:
            raise StartupError("GroupInvalid", f"group: {name} is {value}; it must be at least 1.")
    num_ranks = group.parallelism.num_ranks
    if num_ranks % group.num_nodes:
        raise StartupError(
            "GroupInvalid",
            f"{num_ranks} ranks ({describe_parallelism(group.parallelism)}) cannot be spread evenly over "
            f"{group.num_nodes} pods: choose a number of pods that divides {num_ranks}.",
        )


def check_support(config: WorkerConfig) -> None:
    """Raises StartupError for groups that are well-formed but that this worker cannot run."""
    parallelism = config.group.parallelism
    if parallelism.num_ranks > 1 and config.kv.disk is not None:
        raise StartupError(
            "GroupUnsupported",
            f"A worker of {parallelism.num_ranks} ranks cannot keep blocks on a disk yet: leave out kv.disk.",
        )
    if parallelism.num_ranks > 1 and config.kv.store is not None:
        raise StartupError(
            "GroupUnsupported",
            f"A worker of {parallelism.num_ranks} ranks cannot share blocks through a store yet: leave out kv.store.",
        )
    if config.role is not Role.UNIFIED and parallelism.expert * parallelism.data > 1:
        raise StartupError(
            "GroupUnsupported",
            f"A {config.role.value} worker cannot move key-value blocks of expert and data ranks yet: leave out "
            "spec.prefill, so that one unified pool serves the model, or use tensor and pipeline ranks only.",
        )


def check_model(
    parallelism: Parallelism, *, num_heads: int, num_kv_heads: int, num_layers: int, num_experts: int
) -> None:
    """Raises StartupError when a model with these figures cannot be split this way."""
    tensor, pipeline, expert = parallelism.tensor, parallelism.pipeline, parallelism.expert
    if num_heads % tensor:
        raise StartupError(
            "ParallelismInvalid",
            f"The model has {num_heads} attention heads, which cannot be split over {tensor} tensor ranks: "
            f"choose a divisor of {num_heads}.",
        )
    if num_kv_heads % tensor and tensor % num_kv_heads:
        raise StartupError(
            "ParallelismInvalid",
            f"The model has {num_kv_heads} KV heads: the number of tensor ranks must divide or be a multiple of it, "
            f"but is {tensor}.",
        )
    if pipeline > num_layers:
        raise StartupError(
            "ParallelismInvalid", f"The model has {num_layers} layers, too few for {pipeline} pipeline stages."
        )
    if expert > 1 and not num_experts:
        raise StartupError(
            "ParallelismInvalid", f"The model has no experts to split over {expert} expert ranks: use tensor ranks."
        )
    if num_experts % expert:
        raise StartupError(
            "ParallelismInvalid",
            f"The model has {num_experts} experts, which cannot be split over {expert} expert ranks: "
            f"choose a divisor of {num_experts}.",
        )


def count_experts(raw: object) -> int:
    """Routed experts that a model's `config.json` (its text part) names; 0 for dense models."""
    get = getattr(raw, "get", None)
    if get is None:
        return 0
    return next((int(value) for name in _EXPERT_COUNTS if (value := get(name))), 0)


def describe_parallelism(parallelism: Parallelism) -> str:
    """For people: the axes that have more than one rank."""
    axes = {name: size for name, size in parallelism.model_dump().items() if size != 1}
    return " x ".join(f"{name} {size}" for name, size in axes.items()) or "a single rank"


def describe_identity(config: WorkerConfig) -> str:
    """What processes that meet must agree on."""
    group = config.group
    return (
        f"{config.model_name} ({config.role.value}), revision {config.revision}, "
        f"{describe_parallelism(group.parallelism)} over {group.num_nodes} pods"
    )


class RankOrder(Wire):
    """Which rank a process is, and where it finds the others."""

    config: WorkerConfig
    rank: int
    local_rank: int
    """Among the ranks of the pod; on CUDA, which device is this rank's."""
    leader_host: str
    leader_port: int
    host: str
    """Address that the rank opens its ports at."""
