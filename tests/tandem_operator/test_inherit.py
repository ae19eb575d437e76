"""An operator of a newer release, or another time to drain, leaves running pods alone.

`released/VERSION/` has the manifests that a release wrote. They are never regenerated: a new release adds a folder.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_objects import blueprint, cases
from pydantic import Field
from tandem_api.launch import ModelSource, WorkerConfig
from tandem_api.names import CONDITION_ADMITTED, Role
from tandem_operator.inherit import keep_what_runs
from tandem_operator.manifests import ChildKey, Manifest, child_key
from tandem_operator.matching import satisfies
from tandem_operator.planner import plan_children
from tandem_operator.workloads import Blueprint, build_children
from tandem_operator.workloads.blueprint import sign
from tandem_operator.workloads.configs import start_hash, worker_config

RELEASED = Path(__file__).parent / "released"
START_HASHES = {
    "aggregated": {"unified": "c43fe3ce"},
    "disaggregated": {"prefill": "c6bc73b6", "decode": "984e1bba"},
    "everything": {"prefill": "77d6b9c0", "decode": "92f364ac"},
    "groups": {"prefill": "c6bc73b6", "decode": "b0dcb85e"},
    "claim-suspended": {"unified": "ef3ba05f"},
}
"""Of this release, by case and role. A release that changes one restarts every such worker."""


def released(version: str, case: str) -> dict[ChildKey, Manifest]:
    documents = yaml.safe_load_all((RELEASED / version / f"{case}.yaml").read_text())
    return {child_key(document): document for document in documents}


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
    assert {role.value: start_hash(worker_config(plan, role)) for role in plan.worker_roles} == START_HASHES[case]


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
    for key, workload in workloads(after).items():
        if key.kind == "StatefulSet":
            assert workload == live[key]
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
    live |= copy.deepcopy(upgraded(plan, live))
    again = upgraded(plan, live)
    assert all(satisfies(live[key], child) for key, child in again.items())
    done = plan_children(again.values(), live, owner_uid=plan.model.metadata.uid)
    assert (done.apply, done.delete) == ((), ())


def without_gates(plan: Blueprint) -> dict[ChildKey, Manifest]:
    """Children as a release before the readiness gate signed them."""
    children = {child_key(child): child for child in build_children(plan)}
    for key, child in workloads(children).items():
        child["spec"]["template"]["spec"].pop("readinessGates", None)
        children[key] = sign(child)
    return children


def test_the_gate_restarts_nobody_and_comes_with_the_next_template() -> None:
    plan = blueprint(prefill={})
    live = without_gates(plan)
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
