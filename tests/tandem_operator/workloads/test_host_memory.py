"""Host memory of GPUs: what workers are told, what their pods ask for, and what is refused at apply."""

from __future__ import annotations

from typing import Any

import pytest
from operator_objects import blueprint
from pydantic import ValidationError
from tandem_api.names import Role
from tandem_operator.objects.manifests import Manifest
from tandem_operator.workloads import Blueprint, build_children
from tandem_operator.workloads.configs import worker_config


def resources(plan: Blueprint) -> Manifest:
    (workload,) = [child for child in build_children(plan) if child["kind"] == "StatefulSet"]
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return container["resources"]


def test_workers_are_told_and_others_are_not() -> None:
    assert worker_config(blueprint(kv={"hostMemory": "64Gi"}), Role.UNIFIED).kv.host_memory_bytes == 64 << 30
    assert worker_config(blueprint(), Role.UNIFIED).kv.host_memory_bytes == 0


@pytest.mark.parametrize(
    ("asked", "memory"),
    [
        ({}, str(64 << 30)),
        ({"requests": {"cpu": "4"}}, str(64 << 30)),
        ({"requests": {"memory": "16Gi"}}, str(64 << 30)),
        ({"requests": {"memory": "16Gi"}, "limits": {"memory": "80Gi"}}, str(64 << 30)),
        ({"requests": {"memory": "70Gi"}}, "70Gi"),
        ({"limits": {"memory": "80Gi"}}, None),  # which is what such a pod asks for
    ],
)
def test_pods_ask_for_the_memory_that_is_pinned(asked: dict[str, Any], memory: str | None) -> None:
    plan = blueprint(kv={"hostMemory": "64Gi"}, decode={"resources": asked})
    found = resources(plan)
    assert found.get("requests", {}).get("memory") == memory
    assert found.get("requests", {}).get("cpu") == asked.get("requests", {}).get("cpu")
    assert found.get("limits") == asked.get("limits")


def test_every_rank_of_a_pod_pins_its_own() -> None:
    decode = {"parallelism": {"tensor": 4}, "nodesPerReplica": 2, "resources": {"requests": {"memory": "100Gi"}}}
    assert resources(blueprint(kv={"hostMemory": "64Gi"}, decode=decode))["requests"]["memory"] == str(128 << 30)


@pytest.mark.parametrize("asked", [{}, {"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}}])
def test_without_it_nothing_is_added(asked: dict[str, Any]) -> None:
    assert resources(blueprint(decode={"resources": asked})) == asked


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kv": {"hostMemory": "64Gi"}, "engine": {"device": "CPU"}}, "kv.hostMemory is for workers on GPUs"),
        ({"kv": {"hostMemory": "64Gi"}, "engine": {"kind": "VLLM"}}, "kv.hostMemory is of Tandem's own engine"),
        ({"kv": {"hostMemory": "lots"}}, "quantity"),
        ({"kv": {"hostMemory": "64Gi", "disk": {"size": "64Gi"}}}, "must be larger than kv.hostMemory"),
        (
            {"kv": {"hostMemory": "64Gi"}, "decode": {"resources": {"limits": {"memory": "64Gi"}}}},
            "less than the memory limit",
        ),
        (
            {
                "kv": {"hostMemory": "64Gi"},
                "prefill": {"parallelism": {"tensor": 2}, "resources": {"limits": {"memory": "100Gi"}}},
            },
            "less than the memory limit",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        blueprint(**spec)


def test_what_fits_is_taken() -> None:
    blueprint(kv={"hostMemory": "64Gi", "disk": {"size": "65Gi"}}, decode={"resources": {"limits": {"memory": "65Gi"}}})
    blueprint(kv={"hostMemory": "64Gi"}, engine={"device": "Auto"}, decode={"parallelism": {"tensor": 2}})
