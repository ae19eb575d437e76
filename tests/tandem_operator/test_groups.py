"""The arithmetic of groups, and the walk that replaces them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from operator_objects import READY, container, pod
from tandem_operator.groups import Group, describe_pod, group_pods, group_size, plan_replacement
from tandem_operator.manifests import Manifest

sizes = st.integers(1, 5)


def member(number: int, *, revision: str = "new", state: str = "ready", leaving: bool = False) -> Manifest:
    fields: dict[str, Any] = {"ready": READY, "unready": container(started=True), "starting": container()}[state]
    metadata = {"deletionTimestamp": "2026-01-01T00:00:00Z"} if leaving else {}
    return pod(f"m-decode-{number}", labels={"controller-revision-hash": revision}, metadata=metadata, **fields)


def ordinals(pods: list[Manifest]) -> list[int]:
    return [int(entry["metadata"]["name"].rsplit("-", 1)[1]) for entry in pods]


@given(size=sizes, replicas=st.integers(0, 30), data=st.data())
def test_every_pod_is_in_one_group_and_only_whole_groups_are_complete(
    size: int, replicas: int, data: st.DataObject
) -> None:
    present = data.draw(st.sets(st.integers(0, max(0, replicas * size - 1))) if replicas else st.just(set()))
    groups = group_pods([member(number) for number in data.draw(st.permutations(sorted(present)))], size)
    assert [number for group in groups for number in ordinals(list(group.pods))] == sorted(present)
    for group in groups:
        whole = set(range(group.index * size, (group.index + 1) * size))
        assert set(ordinals(list(group.pods))) <= whole
        assert group.is_complete == group.is_ready == (whole <= present)


@given(size=sizes, before=st.integers(0, 6), after=st.integers(0, 6))
def test_scaling_takes_and_gives_whole_groups(size: int, before: int, after: int) -> None:
    """A StatefulSet adds and removes at its end."""
    pods = [member(number) for number in range(min(before, after) * size)]
    groups = group_pods(pods, size)
    assert len(groups) == min(before, after)
    assert all(group.is_ready for group in groups)


def test_a_group_with_a_pod_on_its_way_out_is_not_ready() -> None:
    (group,) = group_pods([member(0), member(1, leaving=True)], 2)
    assert not group.is_ready
    assert group.is_of("new")


def test_pods_without_the_label_are_replicas_by_themselves() -> None:
    assert group_size({}) == 1
    assert describe_pod(member(3)) == "Pod m-decode-3"


states = st.fixed_dictionaries(
    {
        "revision": st.sampled_from(["old", "new"]),
        "state": st.sampled_from(["ready", "unready", "starting"]),
        "leaving": st.booleans(),
    }
)


def replaced(groups: list[Group], *, replicas: int) -> dict[int, list[int]]:
    chosen = ordinals(plan_replacement(groups, replicas=replicas, revision="new"))
    found: dict[int, list[int]] = {}
    for number in chosen:
        found.setdefault(number // groups[0].size, []).append(number)
    return found


@given(size=st.integers(1, 3), replicas=st.integers(1, 4), data=st.data())
def test_at_most_one_group_that_may_serve_goes_and_only_while_all_others_are_ready(
    size: int, replicas: int, data: st.DataObject
) -> None:
    pods = [member(number, **data.draw(states)) for number in range(replicas * size) if data.draw(st.booleans())]
    groups = group_pods(pods, size)
    by_index = {group.index: group for group in groups}
    chosen = replaced(groups, replicas=replicas) if groups else {}
    for index, numbers in chosen.items():
        assert numbers == ordinals(by_index[index].outdated("new")), "all that is old of a group goes together"
        if not by_index[index].is_broken:
            assert len(chosen) == 1
            assert all(other in by_index and by_index[other].is_ready for other in set(range(replicas)) - {index})
    for index, group in by_index.items():
        if group.outdated("new") and group.is_broken:
            assert index in chosen, "what cannot be serving does not wait"


def test_a_node_that_is_out_of_reach_does_not_cost_the_pods_that_may_be_serving_there() -> None:
    """The control plane calls all of its pods unready, whatever they do."""
    unreachable = [member(number, revision="old", state="unready") for number in range(3)]
    assert replaced(group_pods([*unreachable, member(3, revision="old")], 1), replicas=4) == {}
    assert replaced(group_pods([unreachable[0], member(1, revision="old")], 1), replicas=2) == {0: [0]}


def test_pods_beyond_the_wanted_replicas_are_left_to_their_stateful_set() -> None:
    assert replaced(group_pods([member(0), member(1, revision="old")], 1), replicas=1) == {}


@given(size=st.integers(1, 3), replicas=st.integers(1, 4))
def test_the_walk_replaces_every_group_one_after_another(size: int, replicas: int) -> None:
    revisions = dict.fromkeys(range(replicas * size), "old")
    walked: list[int] = []
    for _ in range(replicas):
        groups = group_pods([member(number, revision=revision) for number, revision in revisions.items()], size)
        (index,) = (chosen := replaced(groups, replicas=replicas))
        missing = [entry for entry in groups if entry.index != index]
        assert replaced(missing, replicas=replicas) == {} if missing else True
        revisions |= dict.fromkeys(chosen[index], "new")
        walked.append(index)
    assert walked == list(reversed(range(replicas)))
    assert set(revisions.values()) == {"new"}
