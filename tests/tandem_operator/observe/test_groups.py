"""The arithmetic of groups."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from operator_objects import READY, container, pod
from tandem_operator.objects.manifests import Manifest
from tandem_operator.observe.groups import describe_pod, group_pods, group_size

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


def test_a_pod_without_an_ordinal_is_nobodys_replica() -> None:
    stray = pod("m-decode-debug", labels={"tandem.dev/nodes-per-replica": "many"}, **READY)
    (group,) = group_pods([stray, member(0)], 1)
    assert ordinals(list(group.pods)) == [0]
    assert describe_pod(stray) == "Pod m-decode-debug"
