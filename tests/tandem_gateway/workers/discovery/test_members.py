"""Pods become workers: single ones when they are ready, groups when all of them are."""

from __future__ import annotations

from typing import Any

import pytest
from discovery_pods import make_pod
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.names import CONDITION_ADMITTED, LABEL_ENGINE, LABEL_NODES_PER_REPLICA, Role
from tandem_gateway.scheduling import Worker
from tandem_gateway.workers.discovery.members import read_member, select_workers


def selected(*pods: dict[str, Any]) -> list[str]:
    return [worker.name for worker in select_workers(filter(None, map(read_member, pods)))]


def pods_of_a_set(count: int, nodes: int, *, name: str = "toy-decode", **fields: Any) -> list[dict[str, Any]]:
    return [make_pod(f"{name}-{number}", nodes=nodes, **fields) for number in range(count)]


def test_a_ready_pod_is_a_worker() -> None:
    (worker,) = select_workers(filter(None, [read_member(make_pod("a"))]))
    assert worker == Worker(
        name="a", address="10.0.0.1:8000", kv_address="10.0.0.1:7000", status_address="10.0.0.1:9090",
        role=Role.DECODE, revision="r1",
    )  # fmt: skip


def test_a_named_port_and_an_ipv6_address_are_used() -> None:
    ports = [{"name": "metrics", "containerPort": 1}, {"name": "http", "containerPort": 8123}]
    pod = make_pod("a", ip="fd00::1", spec_containers=[{"name": "sidecar"}, {"name": "worker", "ports": ports}])
    member = read_member(pod)
    assert member is not None
    assert member.worker.address == "[fd00::1]:8123"
    assert member.worker.status_address == "[fd00::1]:1"


@pytest.mark.parametrize(
    ("engine", "role", "needs"),
    [("VLLM", "decode", False), ("SGLang", "decode", True), ("SGLang", "prefill", False), ("SGLang", "unified", False)],
)
def test_a_worker_of_another_engine_says_so(engine: str, role: str, needs: bool) -> None:
    pod = make_pod("a", role=role)
    pod["metadata"]["labels"][LABEL_ENGINE] = engine
    member = read_member(pod)
    assert member is not None
    assert (member.worker.engine, member.worker.needs_prefill, member.worker.status_address) == (engine, needs, "")


def test_a_worker_of_an_unknown_engine_is_none(caplog: pytest.LogCaptureFixture) -> None:
    pod = make_pod("a")
    pod["metadata"]["labels"][LABEL_ENGINE] = "Another"
    assert read_member(pod) is None
    assert "does not know its engine" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "gateway"},
        {"role": ""},
        {"status_conditions": [{"type": "Ready", "status": "False"}]},
        {"status_conditions": [{"type": "ContainersReady", "status": "True"}]},
        {"status_conditions": None},
        {"status_podIP": None},
        {"metadata_deletionTimestamp": "2026-01-01T00:00:00Z"},
        {"metadata_labels": None},
    ],
)
def test_other_pods_are_none(changes: dict[str, Any]) -> None:
    assert read_member(make_pod("a", **changes)) is None


GATED: dict[str, Any] = {"spec_readinessGates": [{"conditionType": CONDITION_ADMITTED}]}
OTHER: dict[str, Any] = {
    "spec_readinessGates": [{"conditionType": CONDITION_ADMITTED}, {"conditionType": "example.com/warm"}]
}
UNGATED = {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"}


@pytest.mark.parametrize(
    ("fields", "up", "ready", "is_worker"),
    [
        (GATED, "True", UNGATED, True),
        (GATED, "False", UNGATED, False),
        (GATED, "True", {"type": "Ready", "status": "True"}, True),
        (GATED, "True", {"type": "Ready", "status": "False"}, False),  # what a lost node's pods are given
        (OTHER, "True", UNGATED, False),
        ({}, "True", UNGATED, False),
    ],
)
def test_a_worker_need_not_wait_for_the_gate_that_waits_for_gateways(
    fields: dict[str, Any], up: str, ready: dict[str, str], is_worker: bool
) -> None:
    conditions = [{"type": "ContainersReady", "status": up}, ready]
    member = read_member(make_pod("a", status_conditions=conditions, **fields))
    assert (member is not None) == is_worker


def test_another_gate_that_is_open_keeps_nobody_out() -> None:
    conditions = [UNGATED, *({"type": kind, "status": "True"} for kind in ("ContainersReady", "example.com/warm"))]
    assert read_member(make_pod("a", status_conditions=conditions, **OTHER)) is not None


@given(replicas=st.integers(1, 4), nodes=st.integers(1, 4), data=st.data())
def test_leaders_of_whole_groups_are_workers(replicas: int, nodes: int, data: st.DataObject) -> None:
    pods = pods_of_a_set(replicas * nodes, nodes)
    up = data.draw(st.sets(st.integers(0, replicas * nodes - 1)))
    shuffled = data.draw(st.permutations([pods[number] for number in up]))
    whole = [index for index in range(replicas) if set(range(index * nodes, (index + 1) * nodes)) <= up]
    assert set(selected(*shuffled)) == {f"toy-decode-{index * nodes}" for index in whole}


def test_groups_of_two_roles_do_not_complete_each_other() -> None:
    leader, _ = pods_of_a_set(2, 2)
    _, follower = pods_of_a_set(2, 2, name="toy-prefill", role="prefill")
    assert selected(leader, follower) == []


def test_pods_of_two_configurations_form_no_group() -> None:
    leader, _ = pods_of_a_set(2, 2)
    _, follower = pods_of_a_set(2, 2, config="c2")
    assert selected(leader, follower) == []


def test_while_groups_grow_the_single_pods_of_before_serve_on() -> None:
    before, new = pods_of_a_set(3, 1), pods_of_a_set(6, 2)
    assert selected(*before, *new[3:]) == ["toy-decode-0", "toy-decode-1", "toy-decode-2", "toy-decode-4"]


@pytest.mark.parametrize(("name", "size"), [("toy-decode", "2"), ("toy-decode-0", "two"), ("toy-decode-x", "2")])
def test_a_pod_without_a_place_is_no_worker(name: str, size: str) -> None:
    pod = make_pod(name)
    pod["metadata"]["labels"][LABEL_NODES_PER_REPLICA] = size
    assert selected(pod) == []
