"""Whether the disks work that workers keep blocks on, and the store that they share, as they say themselves. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tandem_api.crd.status import Condition
from tandem_api.telemetry import TierTelemetry

from tandem_operator.workloads.blueprint import Blueprint

CONDITION, STORE_CONDITION = "KVTiersReady", "KVStoreReady"
STARTING = "Starting"
"""What a worker says while it looks at its volume."""
_NAMED = 3


def tiers_condition(blueprint: Blueprint, tiers: Mapping[str, TierTelemetry]) -> list[Condition]:
    """The condition of the workers' disks, from what each worker said last, by pod; nothing where no disk is asked for,
    or where nobody serves."""
    if blueprint.model.spec.kv.disk is None or blueprint.model.spec.suspend:
        return []
    off = _describe_off(tiers, "workers have switched off the disk that spec.kv.disk gives them, and compute")
    if off is not None:
        return [Condition(type=CONDITION, status="False", reason=off[0], message=off[1])]
    if not tiers or any(tier.reason is not None for tier in tiers.values()):
        text = "no worker has told yet of the disk that spec.kv.disk gives it"
        if tiers:
            text = "some workers are still looking at the disk that spec.kv.disk gives them"
        return [Condition(type=CONDITION, status="Unknown", reason="DisksNotSeen", message=text)]
    text = f"the disks of {len(tiers)} workers are in use"
    return [Condition(type=CONDITION, status="True", reason="DisksInUse", message=text)]


def store_condition(blueprint: Blueprint, stores: Mapping[str, TierTelemetry]) -> list[Condition]:
    """The condition of the store that workers share blocks through, as `tiers_condition`."""
    if blueprint.model.spec.kv.store is None or blueprint.model.spec.suspend:
        return []
    off = _describe_off(stores, "workers do without the store of spec.kv.store, and compute")
    if off is not None:
        return [Condition(type=STORE_CONDITION, status="False", reason=off[0], message=off[1])]
    if not stores or any(tier.reason is not None for tier in stores.values()):
        text = "no worker has told yet of the store of spec.kv.store"
        if stores:
            text = "some workers are still reaching for the store of spec.kv.store"
        return [Condition(type=STORE_CONDITION, status="Unknown", reason="StoreNotSeen", message=text)]
    text = f"{len(stores)} workers have written to the store and read from it"
    return [Condition(type=STORE_CONDITION, status="True", reason="StoreInUse", message=text)]


def _describe_off(tiers: Mapping[str, TierTelemetry], what: str) -> tuple[str, str] | None:
    """The first one's reason, and the words of some; None where none is off."""
    off = {name: tier for name, tier in sorted(tiers.items()) if tier.reason not in (None, STARTING)}
    if not off:
        return None
    named = "; ".join(f"{name}: {tier.message}" for name, tier in list(off.items())[:_NAMED])
    rest = f" and {len(off) - _NAMED} more" if len(off) > _NAMED else ""
    text = f"{len(off)} of {len(tiers)} {what} what they would find there: {named}{rest}"
    return str(next(iter(off.values())).reason), text
