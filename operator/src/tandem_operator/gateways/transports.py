"""What blocks move by between a model's workers, and how fast, as they say themselves. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from tandem_api.crd.status import Condition
from tandem_api.names import Role
from tandem_api.telemetry import KVTransportTelemetry
from tandem_api.wording import name_some

from tandem_operator.workloads.blueprint import Blueprint

CONDITION = "KVTransferReady"
_NAMED = 3


def transport_condition(blueprint: Blueprint, told: Mapping[str, KVTransportTelemetry]) -> list[Condition]:
    """The condition of the transport of blocks, from what each worker said last, by pod; nothing where no blocks move,
    and where nobody has said anything of a transport that was not asked for by name."""
    spec = blueprint.model.spec
    if Role.PREFILL not in blueprint.worker_roles or spec.suspend:
        return []
    wanted = spec.kv.transport
    # What is not asked for any more those lack who are about to be replaced.
    lacking = {name: each for name, each in sorted(told.items()) if each.fallback and wanted == "Mooncake"}
    if lacking:
        return [_fallback(lacking, len(told), allowed=spec.kv.allow_fallback)]
    used = {each.transport: each for each in told.values() if each.transport is not None}
    if not used:
        if wanted != "Mooncake":
            return []
        text = "no block has moved yet by the Mooncake that spec.kv.transport asks for"
        return [Condition(type=CONDITION, status="Unknown", reason="TransportNotSeen", message=text)]
    return [Condition(type=CONDITION, status="True", reason="BlocksMove", message=_describe(told))]


def _fallback(lacking: Mapping[str, KVTransportTelemetry], num_workers: int, *, allowed: bool) -> Condition:
    named = name_some([f"{name}: {each.fallback}" for name, each in lacking.items()], _NAMED, "; ")
    instead = (
        "TCP stands in, as spec.kv.allowFallback says"
        if allowed
        else "decode workers compute the prompts (spec.kv.allowFallback would let TCP stand in)"
    )
    text = (
        f"{len(lacking)} of {num_workers} workers cannot use the Mooncake that spec.kv.transport asks for; {instead}: "
        f"{named}"
    )
    return Condition(
        type=CONDITION, status="True" if allowed else "False", reason="TransportFallback", message=text[:32768]
    )


def _describe(told: Mapping[str, KVTransportTelemetry]) -> str:
    parts: list[str] = []
    for name in sorted({each.transport for each in told.values() if each.transport is not None}):
        users = [each for each in told.values() if each.transport == name]
        protocols = sorted({each.protocol for each in users if each.protocol is not None}) if name != "TCP" else []
        over = f" over {' and '.join(protocols)}" if protocols else ""
        speed = _round_rate(each.bytes_per_second for each in users)
        parts.append(f"{name}{over} at {len(users)} workers" + (f", about {speed}" if speed else ""))
    return f"blocks move by {'; '.join(parts)}"


def _round_rate(rates: Iterable[float | None]) -> str:
    """The median's order of size, in steps of a factor of 2: a status is not written for every change of a rate."""
    known = sorted(rate for rate in rates if rate)
    if not known:
        return ""
    megabytes = 2.0 ** round(math.log2(max(known[len(known) // 2] / 1e6, 1.0)))
    return f"{megabytes / 1000:.2g} GB/s" if megabytes >= 1000 else f"{megabytes:.0f} MB/s"


def summarize(told: Mapping[str, KVTransportTelemetry]) -> tuple[dict[str, str], str]:
    """What a change of makes a model be looked at again: what the condition says, not every worker's own rate."""
    return {name: each.fallback for name, each in told.items() if each.fallback}, _describe(told)
