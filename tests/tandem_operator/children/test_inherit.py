"""An operator of a newer release, or another time to drain, leaves running pods alone.

`released/VERSION/` has the manifests that a release wrote. They are never regenerated: a new release adds a folder.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from operator_objects import RELEASED, blueprint, cases, copied, released
from pydantic import Field
from tandem_api.launch import ModelSource, WorkerConfig
from tandem_api.names import CONDITION_ADMITTED, Role
from tandem_operator.children.inherit import keep_what_runs
from tandem_operator.children.matching import satisfies
from tandem_operator.children.plan import plan_children
from tandem_operator.objects.manifests import ChildKey, Manifest, child_key
from tandem_operator.workloads import Blueprint, build_children
from tandem_operator.workloads.configs import gateway_config, start_hash, worker_config

START_HASHES = {
    "aggregated": {"unified": "b7be8608", "gateway": "621f8b81"},
    "disaggregated": {"prefill": "4ed51685", "decode": "9f0308c1", "gateway": "621f8b81"},
    "everything": {"prefill": "29957ee5", "decode": "c9a53d0c", "gateway": "621f8b81"},
    "groups": {"prefill": "4ed51685", "decode": "6945054e", "gateway": "621f8b81"},
    "claim-suspended": {"unified": "daacf21f", "gateway": "621f8b81"},
}
"""Of this release, by case and role. A release that changes one keeps what runs under the former name (`inherit`)."""
DECODE, GATEWAY = ChildKey("StatefulSet", "m-decode"), ChildKey("Deployment", "m")


def upgraded(plan: Blueprint, live: dict[ChildKey, Manifest]) -> dict[ChildKey, Manifest]:
    return {child_key(child): child for child in keep_what_runs(plan, build_children(plan), live)}


def workloads(children: dict[ChildKey, Manifest]) -> dict[ChildKey, Manifest]:
    return {key: child for key, child in children.items() if key.kind in ("StatefulSet", "Deployment")}


@pytest.mark.parametrize("version", sorted(path.name for path in RELEASED.iterdir()))
@pytest.mark.parametrize("case", sorted(START_HASHES))
def test_an_upgrade_of_the_operator_restarts_nobody(version: str, case: str) -> None:
    live = released(version, case)
    after = upgraded(blueprint(**cases()[case]), live)
    for key, workload in workloads(after).items():
        assert workload["spec"]["template"] == live[key]["spec"]["template"], "to the byte"
    config_maps = {key for key in after if key.kind == "ConfigMap"}
    assert config_maps == {key for key in live if key.kind == "ConfigMap"}, "what they start from stays"
    assert all(after[key]["data"] == live[key]["data"] for key in config_maps)


@pytest.mark.parametrize("case", sorted(START_HASHES))
def test_start_hashes_of_this_release(case: str) -> None:
    plan = blueprint(**cases()[case])
    workers = {role.value: start_hash(worker_config(plan, role)) for role in plan.worker_roles}
    assert workers | {"gateway": start_hash(gateway_config(plan))} == START_HASHES[case]


def test_a_gateway_stays_when_prefill_workers_come_or_go() -> None:
    apart = cases()["disaggregated"]
    alone = {key: value for key, value in apart.items() if key != "prefill"}
    with_prefill, without = ({child_key(c): c for c in build_children(blueprint(**case))} for case in (apart, alone))
    assert with_prefill[GATEWAY]["spec"]["template"] == without[GATEWAY]["spec"]["template"]


def spread_of(workload: Manifest) -> list[str]:
    return [c["topologyKey"] for c in workload["spec"]["template"]["spec"].get("topologySpreadConstraints", [])]


@pytest.mark.parametrize("version", ["0.1.0", "0.1.0-rollouts"])
def test_defaults_of_this_release_come_with_the_next_change_and_stay(version: str) -> None:
    """What an earlier release started runs on without them; what is replaced anyway gets them."""
    live = released(version, "disaggregated")
    case: dict[str, Any] = cases()["disaggregated"]
    live |= copied(upgraded(blueprint(**case), live))
    assert {str(key): spread_of(w) for key, w in workloads(live).items()} == {
        "StatefulSet m-prefill": [], "StatefulSet m-decode": [], "Deployment m": []
    }  # fmt: skip
    changed = case | {"engine": {"image": "w:2"}, "gateway": {"image": "g:2"}}
    live |= copied(upgraded(blueprint(**changed), live))
    decode, gateway = live[ChildKey("StatefulSet", "m-decode")], live[ChildKey("Deployment", "m")]
    assert spread_of(decode) == ["kubernetes.io/hostname"]
    assert spread_of(gateway) == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    assert gateway["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {"memory": "1Gi"}
    assert workloads(upgraded(blueprint(**changed), live)) == workloads(live), "and they are kept"


def test_a_wish_for_what_is_the_default_is_followed_at_once() -> None:
    live = released("0.1.0-rollouts", "aggregated")
    wish = [{"topologyKey": "kubernetes.io/hostname"}]
    after = upgraded(blueprint(decode={"replicas": 1, "topologySpreadConstraints": wish}), live)
    assert spread_of(after[ChildKey("StatefulSet", "m-decode")]) == ["kubernetes.io/hostname"]
    assert spread_of(after[ChildKey("Deployment", "m")]) == [], "nobody asked for this one"


def test_a_later_release_with_an_added_default_says_the_same() -> None:
    class LaterSource(ModelSource):
        mirrors: tuple[str, ...] = ()

    class LaterConfig(WorkerConfig):
        model: LaterSource  # pyright: ignore[reportIncompatibleVariableOverride]
        speculative_tokens: int = 4
        buckets: list[int] = Field(default_factory=lambda: [1, 2, 4])

    config = worker_config(blueprint(), Role.UNIFIED)
    later = LaterConfig.model_validate_json(config.set_json())
    assert later.speculative_tokens == 4
    assert start_hash(later) == start_hash(config)
    assert start_hash(later.model_copy(update={"speculative_tokens": 5})) != start_hash(config)


def test_another_time_to_drain_restarts_no_worker_and_is_there_to_be_read() -> None:
    live = {child_key(child): child for child in build_children(blueprint(prefill={}))}
    after = upgraded(blueprint(prefill={}, drain={"timeout": "90s"}), live)
    assert workloads(after) == workloads(live)
    configs = [json.loads(after[key]["data"]["config.json"]) for key in after if key.kind == "ConfigMap"]
    assert {config["drainTimeoutSeconds"] for config in configs} == {90.0}
    assert not any("immutable" in child for child in after.values()), "it changes in place"


@pytest.mark.parametrize(("timeout", "restarts"), [("30s", False), ("580s", False), ("30m", True)])
def test_only_a_longer_time_than_pods_were_left_needs_new_ones(timeout: str, restarts: bool) -> None:
    live = {child_key(child): child for child in build_children(blueprint())}
    key = ChildKey("StatefulSet", "m-decode")
    after = upgraded(blueprint(drain={"timeout": timeout}), live)
    assert (after[key]["spec"]["template"] != live[key]["spec"]["template"]) == restarts


def test_what_must_restart_does() -> None:
    live = released("0.1.0", "disaggregated")
    case: dict[str, Any] = cases()["disaggregated"]
    key = ChildKey("StatefulSet", "m-decode")
    for change in ({"engine": {"maxModelLen": 64}}, {"engine": {"image": "w:2"}}, {"kv": {"verify": False}}):
        after = upgraded(blueprint(**case | change), live)
        assert after[key]["spec"]["template"] != live[key]["spec"]["template"]


def test_a_pod_template_decides_its_own_time_to_end() -> None:
    overlay = {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 30}}}
    live = {child_key(child): child for child in build_children(blueprint())}
    after = upgraded(blueprint(decode=overlay), live)
    key = ChildKey("StatefulSet", "m-decode")
    assert after[key]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 30


def test_a_second_look_after_an_upgrade_writes_nothing() -> None:
    plan = blueprint(**cases()["disaggregated"])
    live = released("0.1.0", "disaggregated")
    live |= copied(upgraded(plan, live))
    again = upgraded(plan, live)
    assert all(satisfies(live[key], child) for key, child in again.items())
    done = plan_children(again.values(), live, owner_uid=plan.model.metadata.uid)
    assert done.apply == ()
    assert done.delete == (ChildKey("Role", "m-gateway"), ChildKey("RoleBinding", "m-gateway")), (
        "a ClusterRole is bound"
    )


def test_another_name_and_other_timeouts_restart_nobody() -> None:
    live = {child_key(child): child for child in build_children(blueprint(prefill={}))}
    gateway = {"timeouts": {"firstToken": "9s"}, "queue": {"max": 7, "ttl": "2m"}}
    renamed = {"model": {"uri": "hf://org/repo", "servedName": "new"}, "gateway": gateway}
    after = upgraded(blueprint(prefill={}, **renamed), live)
    assert workloads(after) == workloads(live)
    configs = [json.loads(after[key]["data"]["config.json"]) for key in after if key.kind == "ConfigMap"]
    assert {config["servedName"] for config in configs} == {"new"}, "what starts from now on is told"
    assert {"maxRequests": 7, "ttlSeconds": 120.0} in [config.get("queue") for config in configs]


@pytest.mark.parametrize("version", ["0.1.0", "0.1.0-rollouts"])
def test_pods_of_releases_that_follow_no_name_are_replaced_for_another_one_and_then_no_more(version: str) -> None:
    live = released(version, "disaggregated")
    case: dict[str, Any] = cases()["disaggregated"]
    renamed = {"model": {"uri": "hf://org/repo", "servedName": "new"}}
    after = upgraded(blueprint(**case | renamed), live)
    for key in (DECODE, GATEWAY):
        assert after[key]["spec"]["template"] != live[key]["spec"]["template"]
    again = upgraded(blueprint(**case | {"model": {"uri": "hf://org/repo", "servedName": "newer"}}), after)
    assert workloads(again) == workloads(after)


def test_gateways_of_a_release_that_follows_nothing_are_replaced_for_other_timeouts() -> None:
    live = released("0.1.0-rollouts", "disaggregated")
    case: dict[str, Any] = cases()["disaggregated"]
    after = upgraded(blueprint(**case | {"gateway": {"timeouts": {"idle": "9s"}}}), live)
    assert after[GATEWAY]["spec"]["template"] != live[GATEWAY]["spec"]["template"]
    assert after[DECODE]["spec"]["template"] == live[DECODE]["spec"]["template"]


def test_workers_of_an_earlier_release_read_another_time_to_drain_from_where_they_look() -> None:
    live = released("0.1.0-rollouts", "disaggregated")
    after = upgraded(blueprint(**cases()["disaggregated"], drain={"timeout": "90s"}), live)
    assert after[DECODE]["spec"]["template"] == live[DECODE]["spec"]["template"]
    volumes = after[DECODE]["spec"]["template"]["spec"]["volumes"]
    (mounted,) = (volume["configMap"]["name"] for volume in volumes if volume["name"] == "config")
    assert json.loads(after[ChildKey("ConfigMap", mounted)]["data"]["config.json"])["drainTimeoutSeconds"] == 90.0


@pytest.mark.parametrize("version", sorted(path.name for path in RELEASED.iterdir()))
def test_pods_that_are_replaced_anyway_follow_from_then_on(version: str) -> None:
    live = released(version, "disaggregated")
    case: dict[str, Any] = cases()["disaggregated"] | {"engine": {"image": "w:2"}, "gateway": {"image": "g:2"}}
    after = upgraded(blueprint(**case), live)
    renamed = upgraded(blueprint(**case | {"model": {"uri": "hf://org/repo", "servedName": "new"}}), after)
    assert workloads(renamed) == workloads(after)


def without_defaults(plan: Blueprint) -> dict[ChildKey, Manifest]:
    """Children as a release before the readiness gate and the spread signed them."""
    return {child_key(child): child for child in build_children(dataclasses.replace(plan, pod_defaults=False))}


def test_the_gate_restarts_nobody_and_comes_with_the_next_template() -> None:
    plan = blueprint(prefill={})
    live = without_defaults(plan)
    key = ChildKey("StatefulSet", "m-decode")
    after = upgraded(plan, live)
    assert after[key] == live[key], "to the digest"
    changed = upgraded(blueprint(prefill={}, engine={"maxBatchTokens": 64}), live)
    assert changed[key]["spec"]["template"]["spec"]["readinessGates"] == [{"conditionType": CONDITION_ADMITTED}]
    assert upgraded(plan, {child_key(c): c for c in changed.values()})[key]["spec"]["template"]["spec"][
        "readinessGates"
    ]


def test_a_pod_template_may_do_without_the_gate() -> None:
    plan = blueprint(decode={"podTemplate": {"spec": {"readinessGates": []}}})
    (workload,) = (child for child in build_children(plan) if child["kind"] == "StatefulSet")
    assert workload["spec"]["template"]["spec"]["readinessGates"] == []


def test_another_step_timeout_restarts_no_worker_and_is_there_to_be_read() -> None:
    live = {child_key(child): child for child in build_children(blueprint(prefill={}))}
    after = upgraded(blueprint(prefill={}, engine={"stepTimeout": "0s"}), live)
    for key, workload in workloads(after).items():
        assert workload == live[key]
    configs = [json.loads(after[key]["data"]["config.json"]) for key in after if key.kind == "ConfigMap"]
    assert [config.get("stepTimeoutSeconds") for config in configs if "role" in config] == [0.0, 0.0]


RDMA = {"resources": {"limits": {"rdma/hca": "1"}}}


def transports(children: dict[ChildKey, Manifest]) -> dict[str, str]:
    """What workers are told to move blocks by, by role."""
    told = [WorkerConfig.model_validate_json(c["data"]["config.json"]) for k, c in children.items()
            if k.kind == "ConfigMap" and "role" in json.loads(c["data"]["config.json"])]  # fmt: skip
    return {config.role.value: config.kv.wanted_transport for config in told}


def test_workers_with_an_rdma_device_are_not_replaced_for_a_transport_that_may_be_faster() -> None:
    """Releases before Mooncake told nobody of a transport: all moved blocks by TCP."""
    plan = blueprint(prefill=RDMA, decode=RDMA)
    live = {child_key(c): c for c in build_children(blueprint(prefill=RDMA, decode=RDMA, kv={"transport": "TCP"}))}
    after = upgraded(plan, live)
    assert workloads(after) == workloads(live)
    assert {key for key in after if key.kind == "ConfigMap"} == {key for key in live if key.kind == "ConfigMap"}
    assert transports(after) == {"prefill": "TCP", "decode": "TCP"}
    assert upgraded(plan, after) == after
    later = upgraded(blueprint(prefill=RDMA, decode=RDMA, drain={"timeout": "5m"}), after)
    assert {k: w["spec"]["template"] for k, w in workloads(later).items()} == {
        k: w["spec"]["template"] for k, w in workloads(live).items()
    }
    assert {json.loads(c["data"]["config.json"]).get("drainTimeoutSeconds") for k, c in later.items()
            if k.kind == "ConfigMap"} == {300.0}  # fmt: skip
    replaced = upgraded(blueprint(prefill=RDMA, decode=RDMA, engine={"maxBatchTokens": 64}), after)
    assert transports(replaced) == {"prefill": "Auto", "decode": "Auto"}
    assert transports(upgraded(blueprint(prefill=RDMA, decode=RDMA, engine={"maxBatchTokens": 64}), replaced)) == {
        "prefill": "Auto",
        "decode": "Auto",
    }
