"""Whether the disks work that workers keep blocks on, as they say themselves. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tandem_api.inferencemodel import Condition
from tandem_api.telemetry import TierTelemetry

from tandem_operator.workloads.blueprint import Blueprint

CONDITION = "KVTiersReady"
STARTING = "Starting"
"""What a worker says while it looks at its volume."""
_NAMED = 3


def tiers_condition(blueprint: Blueprint, tiers: Mapping[str, TierTelemetry]) -> list[Condition]:
    """The condition of the workers' disks, from what each worker said last, by pod; nothing where no disk is asked for,
    or where nobody serves."""
    if blueprint.model.spec.kv.disk is None or blueprint.model.spec.suspend:
        return []
    off = {name: tier for name, tier in sorted(tiers.items()) if tier.reason not in (None, STARTING)}
    if off:
        first = next(iter(off.values()))
        named = "; ".join(f"{name}: {tier.message}" for name, tier in list(off.items())[:_NAMED])
        rest = f" and {len(off) - _NAMED} more" if len(off) > _NAMED else ""
        text = (
            f"{len(off)} of {len(tiers)} workers have switched off the disk that spec.kv.disk gives them, and compute"
            f" what they would find there: {named}{rest}"
        )
        return [Condition(type=CONDITION, status="False", reason=str(first.reason), message=text)]
    if not tiers or any(tier.reason is not None for tier in tiers.values()):
        text = "no worker has told yet of the disk that spec.kv.disk gives it"
        if tiers:
            text = "some workers are still looking at the disk that spec.kv.disk gives them"
        return [Condition(type=CONDITION, status="Unknown", reason="DisksNotSeen", message=text)]
    text = f"the disks of {len(tiers)} workers are in use"
    return [Condition(type=CONDITION, status="True", reason="DisksInUse", message=text)]
