"""Gateways are never without their rights while one release's way of giving them replaces another's."""

from __future__ import annotations

import copy
from pathlib import Path

import yaml
from hypothesis import given
from hypothesis import strategies as st
from operator_objects import RELEASE, UID, blueprint, children
from tandem_operator.children.plan import plan_children
from tandem_operator.objects.manifests import ChildKey, Manifest, child_key
from tandem_operator.workloads import Blueprint, build_children
from tandem_operator.workloads.release import Release

OTHER = Release(worker_image="worker:1", gateway_image="gateway:1", gateway_cluster_role="other-gateway")
RELEASED = Path(__file__).parents[1] / "released" / "0.1.0"


def bindings(found: dict[ChildKey, Manifest]) -> set[str]:
    """What the gateway's account may do, by the name of the role. A binding to a role that is gone gives nothing."""
    roles = {key.name for key in found if key.kind == "Role"}
    return {
        ref["name"]
        for child in found.values()
        if child["kind"] == "RoleBinding" and child["subjects"][0]["name"] == "m-gateway"
        for ref in [child["roleRef"]]
        if ref["kind"] == "ClusterRole" or ref["name"] in roles
    }


def look(plan: Blueprint, live: dict[ChildKey, Manifest], *, fails: bool) -> list[dict[ChildKey, Manifest]]:
    """Every state on the way of one look, in which writes may fail."""
    planned = plan_children(build_children(plan), live, owner_uid=UID)
    states, now = [], copy.deepcopy(live)
    for child in planned.apply:
        if not fails:
            now[child_key(child)] = child
        states.append(dict(now))
    for key in planned.delete:
        now.pop(key, None)
        states.append(dict(now))
    return [*states, now]


def test_the_role_of_an_earlier_release_goes_after_the_new_binding_was_seen() -> None:
    documents = yaml.safe_load_all((RELEASED / "disaggregated.yaml").read_text())
    live = {child_key(document): document for document in documents}
    plan = blueprint(prefill={"replicas": 1}, decode={"replicas": 2})
    (*_, first) = look(plan, live, fails=False)
    assert bindings(first) == {"m-gateway", "tandem-gateway"}, "nothing is deleted before the new one was seen"
    states = look(plan, first, fails=False)
    assert all(bindings(state) for state in states)
    assert bindings(states[-1]) == {"tandem-gateway"}
    assert not [key for key in states[-1] if key.kind == "Role"]


@given(looks=st.lists(st.tuples(st.sampled_from([RELEASE, OTHER]), st.booleans()), min_size=1, max_size=12))
def test_whatever_fails_gateways_keep_their_rights(looks: list[tuple[Release, bool]]) -> None:
    live = children(blueprint())
    for release, fails in looks:
        states = look(blueprint(release=release), live, fails=fails)
        assert all(bindings(state) for state in states)
        live = states[-1]
    for _ in range(2):
        (*_, live) = look(blueprint(), live, fails=False)
    assert bindings(live) == {"tandem-gateway"}


def test_the_operator_writes_no_roles() -> None:
    made = build_children(blueprint(prefill={}))
    assert "Role" not in {child["kind"] for child in made}
    (binding,) = [child for child in made if child["kind"] == "RoleBinding"]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("ClusterRole", "tandem-gateway")
    assert len(binding["metadata"]["name"]) <= 63
