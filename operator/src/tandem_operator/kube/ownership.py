"""Makes what the operator has created its own by server-side apply too. Pure.

An object is created by POST: that costs the API server less than an apply, and never touches an object that is there
already. The API server then notes the operator as one that updates. Before such an object is first applied, the note is
changed to one of an apply; else a field that is applied no longer would stay for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from tandem_api.names import FIELD_MANAGER

from tandem_operator.objects.manifests import Manifest, dig, dig_list

HANDOVER_MANAGER = f"{FIELD_MANAGER}-handover"
"""Holds a number of replicas between the operator, which applies it no longer, and whoever is to scale from then on: a
field that its only manager applies no longer falls back to its default."""
_UPDATE, _APPLY = "Update", "Apply"


def updates(manifest: Manifest) -> list[Manifest]:
    """The notes of `manifest` about fields that the operator set otherwise than by applying."""
    return [entry for entry in dig_list(manifest, "metadata", "managedFields") if _is_own(entry, _UPDATE)]


def claim(managed: Sequence[Manifest]) -> list[Manifest]:
    """`managedFields` in which all that the operator has set, but for subresources, is applied by it."""
    own = [entry for entry in managed if _is_own(entry, _UPDATE) or _is_own(entry, _APPLY)]
    if not any(entry["operation"] == _UPDATE for entry in own):
        return list(managed)
    fields: Manifest = {}
    for entry in own:
        fields = _union(fields, entry.get("fieldsV1") or {})
    kept = {key: value for key, value in own[-1].items() if key != "time"}
    return [*(entry for entry in managed if entry not in own), kept | {"operation": _APPLY, "fieldsV1": fields}]


def holds_replicas(manifest: Manifest) -> bool:
    """Whether a manager other than the operator itself has set `spec.replicas`: then it stays without the operator."""
    return any(
        dig(entry, "fieldsV1", "f:spec", "f:replicas") is not None
        for entry in dig_list(manifest, "metadata", "managedFields")
        if not (_is_own(entry, _UPDATE) or _is_own(entry, _APPLY))
    )


def _is_own(entry: Manifest, operation: str) -> bool:
    return (entry.get("manager"), entry.get("operation"), entry.get("subresource") or "") == (
        FIELD_MANAGER,
        operation,
        "",
    )


def _union(one: Manifest, other: Manifest) -> Manifest:
    """Sets of fields are written as trees of maps."""
    merged = dict(one)
    for key, value in other.items():
        have: Any = merged.get(key)
        merged[key] = _union(cast(Manifest, have), value) if isinstance(have, dict) else value
    return merged
