"""Whether the disks work that workers keep blocks on, whether they get those of each other, and whether the store works
that they share, as they say themselves. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tandem_api.crd.status import Condition
from tandem_api.telemetry import TierTelemetry
from tandem_api.wording import name_some

from tandem_operator.workloads.blueprint import Blueprint, gives_blocks

CONDITION, STORE_CONDITION = "KVTiersReady", "KVStoreReady"
STARTING = "Starting"
"""What a worker says while it looks at its volume."""
_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """What one kind of tier is called in its condition."""

    condition: str
    off: str
    unheard: str
    looking: str
    used: str
    not_seen: str
    in_use: str


_DISKS = _Words(
    condition=CONDITION,
    off="workers have switched off the disk of spec.kv.disk, or try it again, and compute what it does not bring",
    unheard="no worker has told yet of the disk that spec.kv.disk gives it",
    looking="some workers are still looking at the disk that spec.kv.disk gives them",
    used="the disks of {count} workers are in use",
    not_seen="DisksNotSeen",
    in_use="DisksInUse",
)
_PEERS = _Words(
    condition=CONDITION,
    off="workers get nothing of the workers that they ask for blocks, and compute what they would find there",
    unheard="no worker has told yet whether it gets blocks of others",
    looking="some workers have not told yet whether they get blocks of others",
    used="{count} workers give each other blocks",
    not_seen="PeersNotSeen",
    in_use="PeersInUse",
)
_STORE = _Words(
    condition=STORE_CONDITION,
    off="workers do without the store of spec.kv.store, or try it again, and compute what it does not bring",
    unheard="no worker has told yet of the store of spec.kv.store",
    looking="some workers are still reaching for the store of spec.kv.store",
    used="{count} workers have written to the store and read from it",
    not_seen="StoreNotSeen",
    in_use="StoreInUse",
)


def has_tiers(blueprint: Blueprint) -> bool:
    """Whether a condition here tells of anything."""
    spec = blueprint.model.spec
    kv = spec.kv
    return not spec.suspend and (kv.store is not None or kv.disk is not None or _has_peers(blueprint))


def tiers_condition(
    blueprint: Blueprint, disks: Mapping[str, TierTelemetry], peers: Mapping[str, TierTelemetry]
) -> list[Condition]:
    """The condition of the workers' disks, and of the blocks that they get of each other, from what each worker said
    last, by pod; nothing where neither is asked for, or where nobody serves. The worse of both has the reason, and both
    their words."""
    if blueprint.model.spec.suspend:
        return []
    parts = [_judge(_DISKS, disks)] if blueprint.model.spec.kv.disk is not None else []
    if _has_peers(blueprint):
        parts.append(_judge(_PEERS, peers))
    for status in ("False", "Unknown", "True"):
        told = [part for part in parts if part.status == status]
        if told:
            text = "; ".join(part.message for part in told)
            return [told[0].model_copy(update={"message": text})]
    return []


def store_condition(blueprint: Blueprint, stores: Mapping[str, TierTelemetry]) -> list[Condition]:
    """The condition of the store that workers share blocks through, as `tiers_condition`."""
    if blueprint.model.spec.kv.store is None or blueprint.model.spec.suspend:
        return []
    return [_judge(_STORE, stores)]


def forget_gone(peers: Mapping[str, TierTelemetry], hosts: Collection[str]) -> dict[str, TierTelemetry]:
    """What workers tell of each other, of those that are at one of these hosts. A worker cannot know that one which it
    asked has gone: nobody names that to it any more, so it never gives anything."""
    return {name: _forget_gone(tier, hosts) for name, tier in peers.items()}


def _forget_gone(tier: TierTelemetry, hosts: Collection[str]) -> TierTelemetry:
    here = [each for each in tier.failing if each.rpartition(":")[0].strip("[]") in hosts]
    if here == tier.failing:
        return tier
    # Its own words are of those that have gone too, and may name no other.
    words = {"message": name_some(here, _NAMED, "; ")} if here else {"message": "", "reason": None}
    return tier.model_copy(update={"failing": here, **words})


def summarize_peers(peers: Mapping[str, TierTelemetry]) -> dict[str, tuple[str | None, list[str] | str]]:
    """What a change of makes a model be looked at again: of whom nothing comes, not what they failed with last. Workers
    and gateways of earlier releases have both in one sentence."""
    return {name: (tier.reason, tier.failing or tier.message) for name, tier in peers.items()}


def _has_peers(blueprint: Blueprint) -> bool:
    return any(gives_blocks(blueprint, role) for role in blueprint.worker_roles)


def _describe_partly(tiers: Mapping[str, TierTelemetry]) -> str:
    """What workers say whose tier is in use, but not with everybody."""
    named = [f"{name} gets nothing of {tier.message}" for name, tier in sorted(tiers.items()) if tier.message]
    return f"; {name_some(named, _NAMED, '; ')}" if named else ""


def _judge(words: _Words, tiers: Mapping[str, TierTelemetry]) -> Condition:
    off = _describe_off(tiers, words.off)
    if off is not None:
        return Condition(type=words.condition, status="False", reason=off[0], message=off[1])
    if not tiers or any(tier.reason is not None for tier in tiers.values()):
        text = words.looking if tiers else words.unheard
        return Condition(type=words.condition, status="Unknown", reason=words.not_seen, message=text)
    text = words.used.format(count=len(tiers)) + _describe_partly(tiers)
    return Condition(type=words.condition, status="True", reason=words.in_use, message=text)


def _describe_off(tiers: Mapping[str, TierTelemetry], what: str) -> tuple[str, str] | None:
    """The first one's reason, and the words of some; None where none is off."""
    off = {name: tier for name, tier in sorted(tiers.items()) if tier.reason not in (None, STARTING)}
    if not off:
        return None
    named = name_some([f"{name}: {tier.message}" for name, tier in off.items()], _NAMED, "; ")
    text = f"{len(off)} of {len(tiers)} {what}: {named}"
    return str(next(iter(off.values())).reason), text
