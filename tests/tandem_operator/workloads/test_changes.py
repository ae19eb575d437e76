"""What each field of the spec declares of a change, against the pods that are made of two specs."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from operator_objects import blueprint
from pydantic import ValidationError
from tandem_api.changes import Change, change_of, followed_fields
from tandem_api.crd.spec import InferenceModelSpec
from tandem_api.launch import GatewayConfig, GatewayRouting
from tandem_api.schema import Schema, structural_schema
from tandem_operator.rollout.revisions import content_of, digest_of
from tandem_operator.workloads import build_children

SPEC = structural_schema(InferenceModelSpec)
Path = tuple[str, ...]
ROLE = {"scaling": {"mode": "SLO", "min": 2, "max": 4}}
FULL: dict[str, Any] = {
    "model": {"uri": "hf://org/repo", "secretRef": {"name": "s"}, "cache": {"persistentVolumeClaim": "c"}},
    "metadata": {"labels": {"example.com/a": "a"}},
    "prefill": ROLE | {"metadata": {"labels": {"example.com/b": "b"}}, "podTemplate": {"spec": {"hostname": "a"}}},
    "decode": ROLE | {"affinity": {"nodeAffinity": {"a": 1}}},
    "engine": {"speculative": {"method": "Auto", "draft": {"uri": "hf://org/head", "secretRef": {"name": "s"}}}},
    "kv": {"disk": {"size": "100Gi"}, "store": {"memory": "1Gi"}, "transport": "Mooncake"},
    "gateway": {
        "service": {"type": "LoadBalancer"}, "httpRoute": {"parentRefs": [{"name": "g"}]}, "queue": {"ttl": "5m"},
        "cors": {"allowOrigins": ["https://a.b"]}, "tls": {"secretName": "t"}, "responseStore": {"maxBytes": "2Mi"},
    },
    "slo": {"ttft": {"seconds": 1}, "tpot": {"seconds": 0.1}},
    "autoscaling": {"scaleToZero": {"standby": {}}, "roleRatio": {"max": 5}},
    "rollout": {"canary": {"steps": [{"weight": 3, "duration": "1m"}], "maxTTFT": {"factor": 2}}},
    "observability": {"tracing": {"endpoint": "http://c:1"}},
}  # fmt: skip
"""Everything is there that fields can be within."""
PLAIN: dict[str, Any] = {"model": {"uri": "hf://org/repo"}, "prefill": {}, "gateway": {"queue": {}}}
PLAINLY = (
    "nodesPerReplica", "parallelism", "scaling", "downloadSizeLimit", "engine.kind", "kv.memory", "gateway.replicas",
    "rollout.type", "autoscaling.gpuBudget",
)  # fmt: skip
"""Fields that do not go, or say nothing, beside what `FULL` has."""
BESIDE: dict[str, dict[str, Any]] = {
    "nodesPerReplica": {"parallelism": {"tensor": 2}},
    "engine.args": {"kind": "VLLM"},
}
"""What a field needs beside it, in both specs."""
NEEDED = ("slo", "decode", "decode.scaling", "prefill.scaling")
"""Parts that other parts of `FULL` ask for."""
VALUES: dict[str, Any] = {
    "model.uri": "hf://org/other", "revision": "v2", "servedName": "x", "name": "other", "key": "other",
    "persistentVolumeClaim": "d", "labels": {"example.com/c": "d"}, "annotations": {"example.com/c": "d"},
    "requests": {"cpu": "2"}, "limits": {"cpu": "3"}, "claims": [{"name": "g"}],
    "resourceClaims": [{"name": "g", "resourceClaimName": "h"}], "nodeSelector": {"a": "b"},
    "tolerations": [{"operator": "Exists"}], "nodeAffinity": {"x": 1}, "podAffinity": {"x": 1},
    "podAntiAffinity": {"x": 1}, "topologySpreadConstraints": [], "priorityClassName": "p", "runtimeClassName": "r",
    "imagePullSecrets": [{"name": "p"}], "podTemplate.metadata": {"labels": {"a": "b"}},
    "podTemplate.spec": {"hostname": "x"}, "image": "other:2", "engine.args": ["--enforce-eager"],
    "draft.uri": "hf://org/other-head", "kv.memory": "2Gi", "hostMemory": "3Gi", "master": "m:1", "history": "1Mi",
    "maxBytes": "3Mi",
    "parentRefs": [{"name": "h"}], "hostnames": ["a.b"], "allowOrigins": ["https://c.d"], "allowHeaders": ["x"],
    "secretName": "t2", "loadBalancerClass": "l", "nodePort": 30000, "endpoint": "http://d:1",
    "steps": [{"weight": 4, "duration": "1m"}], "maxSurge": "2", "maxUnavailable": "2", "managedBy": "x",
    "minPriority": -1, "max": 9, "scaling.mode": "External", "gpuBudget": 99, "rollout.revision": 2,
}  # fmt: skip
"""Another value, by the end of a path; where it is none of these, by its type."""


INSTEAD = {"rollout.canary.maxTTFT.duration": "factor"}
"""Fields that stand instead of another one."""


def fields(schema: Schema, path: Path = ()) -> Iterator[tuple[Path, Schema]]:
    """Objects and what stands in them; what is in lists and maps is as these are."""
    for name, field in schema["properties"].items():
        yield (*path, name), field
        if "properties" in field:
            yield from fields(field, (*path, name))


LEAVES = {".".join(path): field for path, field in fields(SPEC) if "properties" not in field}
OBJECTS = [".".join(path) for path, field in fields(SPEC) if "properties" in field]


def by_end(table: dict[str, Any], name: str) -> Any:
    """The entry of the longest key that `name` ends with."""
    ends = [key for key in table if name == key or name.endswith(f".{key}")]
    return table[max(ends, key=len)] if ends else None


def other_value(name: str, field: Schema, present: Any) -> Any:
    said = by_end(VALUES, name)
    present = field.get("default") if present is None else present
    if said is not None:
        return said
    if "enum" in field:
        return next((each for each in field["enum"] if each != present), None)
    match field.get("type"):
        case "boolean":
            return not present
        case "integer" | "number":
            return (field.get("minimum", 1) if present is None else present) + (
                1 if field["type"] == "integer" else 0.5
            )
        case "string" | None:
            choices = ("150Gi", "140Gi") if "x-kubernetes-int-or-string" in field else ("7m", "8m")
            return next(each for each in choices if each != present)
    raise AssertionError(f"{name} wants another value in VALUES")


def at(spec: dict[str, Any], path: list[str]) -> Any:
    for step in path:
        spec = spec.get(step, {}) if isinstance(spec, dict) else {}
    return spec or None


def put(spec: dict[str, Any], path: list[str], value: Any) -> None:
    for step in path[:-1]:
        spec = spec.setdefault(step, {})
    if value is None:
        del spec[path[-1]]
    else:
        spec[path[-1]] = value


def templates(spec: dict[str, Any]) -> dict[str, str]:
    """Pod templates of workers and gateways, and the digest of the revision."""
    return made_from(json.dumps(spec))


@cache
def made_from(spec: str) -> dict[str, str]:
    plan = blueprint(**json.loads(spec))
    made = {
        child["metadata"]["name"]: json.dumps(child["spec"]["template"], sort_keys=True)
        for child in build_children(plan)
        if child["kind"] in ("StatefulSet", "Deployment")
    }
    return made | {"revision": digest_of(content_of(plan))}


def replaced(one: dict[str, Any], other: dict[str, Any]) -> tuple[bool, bool]:
    """Whether workers are, and whether gateways are."""
    before, after = templates(one), templates(other)
    differs = {name for name in before if before[name] != after.get(name)}
    return bool(differs & {"m-prefill", "m-decode"}), "m" in differs


HONOURED = ("engine.image", "engine.args", "engine.device", "engine.dtype", "engine.maxModelLen")
"""Fields of `engine` and `kv` that workers of another engine go by."""
REPLACES = {
    Change.WORKERS: (True, False), Change.GATEWAYS: (False, True), Change.BOTH: (True, True),
    Change.FOLLOWED: (False, False), Change.OPERATOR: (False, False),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAVES)
def test_a_field_replaces_the_pods_that_it_declares(name: str) -> None:
    path = name.split(".")
    one = copy.deepcopy(PLAIN if any(f"{each}." in f"{name}." for each in (*PLAINLY, *BESIDE)) else FULL)
    for key, value in (by_end(BESIDE, name) or {}).items():
        put(one, [*path[:-1], key], value)
    value = other_value(name, LEAVES[name], at(one, path))
    if value is None:
        assert len(LEAVES[name]["enum"]) == 1, "one choice alone cannot change"
        return
    other = copy.deepcopy(one)
    put(other, path, value)
    if name in INSTEAD:
        put(other, [*path[:-1], INSTEAD[name]], None)
    declared = change_of(InferenceModelSpec, path)
    assert declared is not None, "nobody says what a change of it comes to"
    assert replaced(one, other) == REPLACES[declared]


@pytest.mark.parametrize("name", [each for each in OBJECTS if at(FULL, each.split(".")) is not None])
def test_a_part_that_is_taken_out_replaces_the_pods_that_it_declares(name: str) -> None:
    path = name.split(".")
    one, required = copy.deepcopy(FULL), SPEC
    for step in path[:-1]:
        required = required["properties"][step]
    if path[-1] in required.get("required", ()) or name in NEEDED:
        return
    if name in ("autoscaling", "autoscaling.scaleToZero"):  # its `standby` is another matter
        del one["autoscaling"]["scaleToZero"]["standby"]
    other = copy.deepcopy(one)
    put(other, path, None)
    assert replaced(one, other) == REPLACES[change_of(InferenceModelSpec, path) or Change.OPERATOR]


def test_a_field_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError, match=r"kv\.dsk is no field"):
        change_of(InferenceModelSpec, ("kv", "dsk", "size"))


def test_what_gateways_follow_comes_again_while_they_run() -> None:
    found = followed_fields(GatewayConfig) - {"disaggregated", "served_name"}  # by the pods there are; `served_names`
    assert found <= set(GatewayRouting.model_fields)


def test_what_workers_follow_makes_no_revision() -> None:
    quiet = {"model": {"uri": "hf://org/repo", "servedName": "other"}, "engine": {"stepTimeout": "9s"}}
    busy = quiet | {"decode": {"replicas": 3}, "drain": {"timeout": "9s"}, "gateway": {"minPriority": -1}}
    before, after, other = (
        templates(PLAIN | spec)["revision"] for spec in ({}, busy, busy | {"kv": {"verify": False}})
    )
    assert before == after != other


@pytest.mark.parametrize("name", [each for each in LEAVES if each.startswith(("engine.", "kv."))])
def test_another_engine_honours_a_field_or_refuses_it(name: str) -> None:
    """What workers of another engine do not read must not be taken in silence."""
    path = name.split(".")
    one = PLAIN | {"engine": {"kind": "VLLM"}, "kv": {}}
    other, value = copy.deepcopy(one), other_value(name, LEAVES[name], None)
    if value is None or name == "engine.kind":
        return
    if (whole := at(FULL, path[:-1])) is not None and len(path) > 2:
        put(other, path[:-1], copy.deepcopy(whole))  # what is required beside it
    put(other, path, value)
    if name not in HONOURED:
        with pytest.raises(ValidationError, match=r"engine|is for kv\.transport Mooncake"):
            replaced(one, other)
    else:
        assert replaced(one, other) == (True, False)
