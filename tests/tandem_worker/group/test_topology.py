"""Who a pod is in its group, and which groups cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from tandem_api.launch import GroupConfig, Parallelism
from tandem_worker.group.topology import check_model, count_experts, plan_node
from tandem_worker.host.errors import StartupError


def group(num_nodes: int = 1, service: str = "svc", **parallelism: int) -> GroupConfig:
    return GroupConfig(parallelism=Parallelism(**parallelism), num_nodes=num_nodes, service=service, port=6900)


@pytest.mark.parametrize(
    ("config", "pod", "node", "ranks", "leader"),
    [
        (group(), "m-decode-3", 0, range(1), "127.0.0.1"),
        (group(tensor=4), "workstation", 0, range(4), "127.0.0.1"),
        (group(2, tensor=2), "m-decode-0", 0, range(1), "m-decode-0.svc"),
        (group(2, tensor=2), "m-decode-1", 1, range(1, 2), "m-decode-0.svc"),
        (group(2, tensor=8, pipeline=2), "m-decode-5", 1, range(8, 16), "m-decode-4.svc"),
        (group(3, pipeline=3, data=2), "a-1-11", 2, range(4, 6), "a-1-9.svc"),
    ],
)
def test_places(config: GroupConfig, pod: str, node: int, ranks: range, leader: str) -> None:
    place = plan_node(config, pod)
    assert (place.node, place.ranks, place.leader_host, place.leads) == (node, ranks, leader, node == 0)


@pytest.mark.parametrize(
    ("config", "pod", "words"),
    [
        (group(3, tensor=4), "m-0", "4 ranks (tensor 4) cannot be spread evenly over 3 pods"),
        (group(2, tensor=2), "laptop", "called 'laptop'"),
        (group(2, service="", tensor=2), "m-0", "set group.service"),
        (group(tensor=0), "m-0", "tensor is 0"),
        (group(0), "m-0", "num_nodes is 0"),
    ],
)
def test_impossible_groups(config: GroupConfig, pod: str, words: str) -> None:
    with pytest.raises(StartupError) as error:
        plan_node(config, pod)
    assert error.value.reason == "GroupInvalid"
    assert words in str(error.value)


FIGURES: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "num_layers": 4, "num_experts": 0}


@pytest.mark.parametrize(
    ("parallelism", "changes", "words"),
    [
        ({"tensor": 3}, {}, "8 attention heads"),
        ({"tensor": 4}, {"num_kv_heads": 3, "num_heads": 12}, "3 KV heads"),
        ({"pipeline": 5}, {}, "4 layers"),
        ({"expert": 2}, {}, "no experts"),
        ({"expert": 4}, {"num_experts": 6}, "6 experts"),
    ],
)
def test_models_that_cannot_be_split(parallelism: dict[str, int], changes: dict[str, int], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        check_model(Parallelism(**parallelism), **(FIGURES | changes))


def test_models_that_can() -> None:
    check_model(Parallelism(tensor=4, pipeline=4), **FIGURES)
    check_model(Parallelism(tensor=2, expert=3), **(FIGURES | {"num_experts": 6}))


@pytest.mark.parametrize(
    ("raw", "count"), [({}, 0), ({"n_routed_experts": 8}, 8), ({"num_local_experts": 4}, 4), ({"num_experts": None}, 0)]
)
def test_experts_are_counted_whatever_they_are_called(raw: dict[str, Any], count: int) -> None:
    assert count_experts(raw) == count
