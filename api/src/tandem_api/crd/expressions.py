"""CEL that rules of the whole spec are made of."""

from __future__ import annotations


def has_mode(role: str, mode: str) -> str:
    scaling = f"self.{role}.scaling"
    has = f"has(self.{role}) && " if role == "prefill" else ""
    return f"({has}has({scaling}) && has({scaling}.mode) && {scaling}.mode == '{mode}')"


def either(mode: str) -> str:
    return f"({has_mode('prefill', mode)} || {has_mode('decode', mode)})"


AXES = ("tensor", "pipeline", "expert", "data")
SHORTEST_TTL = "1m"
"""For requests that may wait for a start."""
SAYS_QUEUE = "!has(self.gateway) || !has(self.gateway.queue) || !has(self.gateway.queue."
SLEEPS = f"(has(self.autoscaling) && has(self.autoscaling.scaleToZero) && {either('SLO')})"


def fewest(role: str) -> str:
    external = f"{has_mode(role, 'External')} ? 1 : self.{role}.replicas"
    return f"({has_mode(role, 'SLO')} ? self.{role}.scaling.min : ({external}))"


def fewest_gpus(role: str) -> str:
    axes = " * ".join(f"self.{role}.parallelism.{axis}" for axis in AXES)
    return f"{fewest(role)} * {axes}"


BATCH_RANKS = " && ".join(
    f"self.{role}.parallelism.{axis} == 1" for role in ("prefill", "decode") for axis in ("expert", "data")
)


RESTS = "has(self.autoscaling) && has(self.autoscaling.scaleToZero) && has(self.autoscaling.scaleToZero.standby)"
STANDBY_PATH = ".autoscaling.scaleToZero.standby"


def rests_less(role: str) -> str:
    return f"(!{has_mode(role, 'SLO')} || self{STANDBY_PATH}.replicas <= self.{role}.scaling.min)"


def holds_host_memory(role: str) -> str:
    """Whether the memory limit of a role's pods, where there is one, is above the host memory of their ranks."""
    limits, memory = f"self.{role}.resources.limits", f"self.{role}.resources.limits['memory']"
    ranks = " * ".join(f"self.{role}.parallelism.{axis}" for axis in AXES)
    there = f"!has(self.{role}) || " if role == "prefill" else ""
    return (
        f"({there}!has(self.{role}.resources) || !has({limits}) || !('memory' in {limits})"
        f" || !isQuantity(string({memory})) || !isQuantity(string(self.kv.hostMemory))"
        f" || quantity(string({memory})).asApproximateFloat()"
        f" > quantity(string(self.kv.hostMemory)).asApproximateFloat() * double({ranks} / self.{role}.nodesPerReplica))"
    )


def is_lone(role: str) -> str:
    lone = " && ".join(f"self.{role}.parallelism.{axis} == 1" for axis in AXES)
    return f"(!has(self.prefill) || {lone})" if role == "prefill" else lone
