"""What was created counts as applied before it is applied."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tandem_operator.kube.ownership import claim, updates


def entry(operation: str, *fields: str, manager: str = "tandem-operator", **more: str) -> dict[str, Any]:
    told = {"f:spec": {f"f:{field}": {} for field in fields}}
    return {"manager": manager, "operation": operation, "apiVersion": "v1", "fieldsV1": told, **more}


def owned(managed: list[dict[str, Any]]) -> dict[tuple[str, str, str], set[str]]:
    """Fields by manager, operation and subresource."""
    return {(e["manager"], e["operation"], e.get("subresource", "")): set(e["fieldsV1"]["f:spec"]) for e in managed}


def test_what_was_created_is_applied_from_now_on() -> None:
    kubectl = entry("Update", "b", manager="kubectl-edit")
    scaled = entry("Update", "replicas", subresource="scale")
    claimed = claim([entry("Update", "a", time="2026-01-01T00:00:00Z"), kubectl, scaled])
    assert claimed == [kubectl, scaled, entry("Apply", "a")]
    assert not updates({"metadata": {"managedFields": claimed}})


def test_what_was_scaled_beside_an_apply_joins_it() -> None:
    (only,) = claim([entry("Apply", "a", "b"), entry("Update", "replicas", "a")])
    assert only == entry("Apply", "a", "b", "replicas")


def test_nothing_changes_where_nothing_was_created() -> None:
    managed = [entry("Apply", "a"), entry("Update", "b", manager="kubectl")]
    assert claim(managed) == managed
    assert not updates({"metadata": {"managedFields": managed}})
    assert not updates({"metadata": {}})


ENTRIES = st.lists(
    st.builds(
        lambda manager, operation, subresource, fields: entry(
            operation, *fields, manager=manager, **({"subresource": subresource} if subresource else {})
        ),
        st.sampled_from(["tandem-operator", "kubectl"]),
        st.sampled_from(["Apply", "Update"]),
        st.sampled_from(["", "status"]),
        st.frozensets(st.sampled_from("abcd")),
    ),
    unique_by=lambda e: (e["manager"], e["operation"], e.get("subresource")),
)


@given(ENTRIES)
def test_no_field_is_lost_or_taken_from_others(managed: list[dict[str, Any]]) -> None:
    before, after = owned(managed), owned(claim(managed))
    own = [("tandem-operator", operation, "") for operation in ("Apply", "Update")]
    assert set(itertools.chain(*(before.get(key, ()) for key in own))) == after.get(own[0], set())
    assert own[1] not in after
    assert {k: v for k, v in before.items() if k not in own} == {k: v for k, v in after.items() if k not in own}
    assert claim(claim(managed)) == claim(managed)
