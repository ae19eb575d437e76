"""What a model's workers are told to move key-value blocks by. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tandem_api.launch import WantedKVTransport
from tandem_api.names import Role

from tandem_operator.workloads.blueprint import Blueprint
from tandem_operator.workloads.engines import is_foreign

_RDMA_WORDS = ("rdma", "infiniband", "roce")
"""In names of resources and claims: device plugins are free to choose theirs, and all known ones have one of these."""


def transport_of(blueprint: Blueprint) -> WantedKVTransport:
    """`Auto` is told only to workers that move blocks and could find an RDMA device: for all others it means TCP."""
    wanted = blueprint.model.spec.kv.transport
    return "TCP" if wanted == "Auto" and not (_moves_blocks(blueprint) and _asks_for_rdma(blueprint)) else wanted


def may_use_mooncake(blueprint: Blueprint) -> bool:
    """Prefill workers may have to reach the engines of decode workers."""
    return _moves_blocks(blueprint) and transport_of(blueprint) != "TCP"


def _moves_blocks(blueprint: Blueprint) -> bool:
    return not is_foreign(blueprint) and Role.PREFILL in blueprint.worker_roles


def _asks_for_rdma(blueprint: Blueprint) -> bool:
    """Both kinds of workers do: one end alone has nobody to talk to."""
    return all(_names_rdma(_devices(blueprint, role)) for role in blueprint.worker_roles)


def _devices(blueprint: Blueprint, role: Role) -> Iterable[str]:
    worker = blueprint.worker_spec(role)
    yield from (worker.resources.limits or {})
    yield from (worker.resources.requests or {})
    for claim in worker.resource_claims:
        yield from filter(None, (claim.name, claim.resource_claim_name, claim.resource_claim_template_name))


def _names_rdma(names: Iterable[str]) -> bool:
    return any(word in name.lower() for name in names for word in _RDMA_WORDS)
