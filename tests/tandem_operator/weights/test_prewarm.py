"""The Job that fills a claim: what it is made of, when there is one, and what is told of it."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from operator_objects import UID, blueprint, children
from pydantic import ValidationError
from tandem_api.crd.spec import InferenceModelSpec
from tandem_api.launch import WorkerConfig
from tandem_api.names import Role
from tandem_operator.objects.manifests import ChildKey, Manifest, child_key
from tandem_operator.weights.prewarm import CONDITION, PREWARMING, PrewarmPlan, plan_prewarm
from tandem_operator.workloads import Blueprint
from tandem_operator.workloads.configs import worker_config
from tandem_operator.workloads.policies import build_prewarm_policy
from tandem_operator.workloads.prewarm import build_prewarm_job, prewarm_name
from test_workloads import text_of

CACHE = {"persistentVolumeClaim": "models", "prewarm": True}
GPU = {"limits": {"cpu": 4, "memory": "8Gi", "nvidia.com/gpu": 1}}


def wanting(**spec: Any) -> Blueprint:
    whole: dict[str, Any] = {"model": {"uri": "hf://org/repo", "cache": CACHE}} | spec
    return blueprint(**whole)


def pod_of(job: Manifest, *, phase: str = "Running", **status: Any) -> dict[ChildKey, Manifest]:
    name = f"{job['metadata']['name']}-x{status.pop('number', 0)}"
    owner = {"kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"], "controller": True}
    metadata = {"name": name, "namespace": "n", "ownerReferences": [owner], "creationTimestamp": status.pop("made", "")}
    return {ChildKey("Pod", name): {"kind": "Pod", "metadata": metadata, "status": {"phase": phase, **status}}}


def made(plan: Blueprint, **status: Any) -> Manifest:
    job = copy.deepcopy(build_prewarm_job(plan))
    job["metadata"]["uid"] = "job-uid"
    return job | {"status": status}


def ended(kind: str, **more: str) -> dict[str, Any]:
    return {"conditions": [{"type": kind, "status": "True"} | more]}


def look(plan: Blueprint, job: Manifest | None, pods: dict[ChildKey, Manifest] | None = None) -> PrewarmPlan:
    """With the policy of the Job's pod, where there is a Job."""
    policy = build_prewarm_policy(plan)
    assert policy is not None
    live = children(plan) | (pods or {}) | ({} if job is None else {child_key(each): each for each in (job, policy)})
    return plan_prewarm(plan, live)


def said(*, container: str = "worker", reason: str = "ModelNotFound", message: str = "There is none.") -> Manifest:
    state = {"terminated": {"exitCode": 1, "message": json.dumps({"reason": reason, "message": message})}}
    return {"initContainerStatuses": [{"name": container, "state": state}]}


def test_without_the_field_there_is_no_job_and_what_was_there_goes() -> None:
    job = made(wanting(), active=1)
    plan = look(blueprint(model={"uri": "hf://org/repo", "cache": {"persistentVolumeClaim": "models"}}), job)
    assert (plan.hold, plan.make, plan.condition) == (False, (), [])
    assert plan.delete == (child_key(job), ChildKey("NetworkPolicy", "m-prewarm"))


def test_a_new_model_waits_for_its_job() -> None:
    plan = look(wanting(), None)
    assert plan.hold
    assert [each["kind"] for each in plan.make] == ["NetworkPolicy", "Job"]
    assert plan.problem is not None
    assert (plan.problem.reason, plan.problem.stalled) == (PREWARMING, False)
    assert [(c.type, c.status) for c in plan.condition] == [(CONDITION, "False")]


@pytest.mark.parametrize(
    ("status", "pod", "reason", "words", "stalled"),
    [
        ({}, None, PREWARMING, "attempt 1 of 5: its pod is being made", False),
        ({"active": 1}, {"phase": "Pending"}, PREWARMING, "its pod is starting", False),
        (
            {"active": 1},
            {"initContainerStatuses": [{"name": "fetch", "state": {"running": {"startedAt": "T"}}}]},
            PREWARMING, "downloading and verifying since T", False,
        ),
        (
            {"active": 1, "failed": 2},
            {"containerStatuses": [{"name": "worker", "state": {"running": {"startedAt": "T"}}, "started": True}]},
            PREWARMING, "attempt 3 of 5: preparing since T", False,
        ),
        (
            {"failed": 1}, {"phase": "Failed", **said()},
            PREWARMING, "that); the attempt before: Pod m-prewarm-", False,
        ),
        (
            {"active": 1},
            {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
             "message": 'persistentvolumeclaim "models" not found'}]},
            "VolumeClaimNotFound", "create it", True,
        ),
        (
            ended("Failed", reason="BackoffLimitExceeded", message="too often"), {"phase": "Failed", **said()},
            "ModelNotFound", "There is none.. Workers wait for it", True,
        ),
        (
            ended("Failed", reason="BackoffLimitExceeded", message="too often"), None,
            "PrewarmFailed", "could not fill the cache: too often", True,
        ),
    ],
)  # fmt: skip
def test_what_is_told_while_workers_wait(
    status: Manifest, pod: Manifest | None, reason: str, words: str, stalled: bool
) -> None:
    job = made(wanting(), **status)
    plan = look(wanting(), job, None if pod is None else pod_of(job, **pod))
    assert plan.hold
    assert plan.make == ()
    assert plan.problem is not None
    assert (plan.problem.reason, plan.problem.stalled) == (reason, stalled)
    assert words in plan.problem.message
    assert plan.condition[0].message == plan.problem.message


def test_a_job_that_failed_says_how_it_is_made_anew() -> None:
    job = made(wanting(), **ended("Failed"))
    problem = look(wanting(), job).problem
    assert problem is not None
    assert f"kubectl delete job {job['metadata']['name']}" in problem.message


def test_a_filled_claim_holds_nothing_up() -> None:
    plan = look(wanting(), made(wanting(), **ended("Complete")))
    assert (plan.hold, plan.make, plan.problem, plan.delete) == (False, (), None, ())
    assert [(c.status, c.reason) for c in plan.condition] == [("True", "Prewarmed")]


def test_the_newest_pod_counts() -> None:
    job = made(wanting(), failed=1, active=1)
    pods = pod_of(job, number=1, made="2026-01-01T00:00:00Z", phase="Failed", **said())
    pods |= pod_of(job, number=0, made="2026-01-01T00:01:00Z", phase="Pending")
    problem = look(wanting(), job, pods).problem
    assert problem is not None
    assert "attempt 2 of 5: its pod is starting; the attempt before: " in problem.message
    assert problem.message.endswith("There is none.")


@pytest.mark.parametrize(
    ("spec", "hold", "make"),
    [
        ({"suspend": True}, False, False),
        ({"rollout": {"revision": 3}}, False, True),
        ({"decode": {"podTemplate": {"spec": {"containers": "no list"}}}}, False, False),
    ],
)
def test_nobody_waits_where_nobody_needs_it(spec: Manifest, hold: bool, make: bool) -> None:
    """Suspended; going back to what has served; a template that fits nothing, which is told elsewhere."""
    plan = plan_prewarm(wanting(**spec), {})
    assert (plan.hold, bool(plan.make)) == (hold, make)


def test_another_revision_has_another_job_and_what_the_last_one_did_is_forgotten() -> None:
    old, new = wanting(), wanting(model={"uri": "hf://org/repo", "revision": "v2", "cache": CACHE})
    plan = look(new, made(old, **ended("Complete")))
    assert plan.hold
    assert child_key(plan.make[-1]) == child_key(build_prewarm_job(new))
    assert plan.delete == (child_key(build_prewarm_job(old)),)


def test_a_job_of_somebody_else_is_left_alone() -> None:
    job = made(wanting(), **ended("Complete"))
    job["metadata"]["ownerReferences"][0] |= {"uid": "another", "name": "other"}
    plan = look(wanting(), job)
    assert (plan.hold, plan.make, plan.delete) == (True, (), ())
    assert plan.problem is not None
    assert (plan.problem.reason, plan.problem.stalled) == ("ChildNameTaken", True)


@pytest.mark.parametrize(
    ("spec", "another"),
    [
        ({"drain": {"timeout": "90s"}}, False),
        ({"decode": {"replicas": 5}}, False),
        ({"engine": {"dtype": "Float32"}}, True),
        ({"engine": {"weights": "Lossless"}}, True),
        ({"engine": {"image": "worker:2"}}, True),
        ({"model": {"uri": "hf://org/repo", "cache": CACHE | {"persistentVolumeClaim": "other"}}}, True),
        ({"model": {"uri": "hf://org/repo", "cache": CACHE | {"pack": "Archive"}}}, True),
        ({"model": {"uri": "hf://org/repo", "cache": CACHE | {"pack": "None"}}}, False),
        ({"model": {"uri": "hf://org/another", "cache": CACHE}}, True),
        ({"decode": {"resources": GPU}}, True),
    ],
)
def test_it_is_named_after_what_it_leaves_in_the_claim(spec: Manifest, another: bool) -> None:
    assert (prewarm_name(wanting(**spec)) != prewarm_name(wanting())) == another


def test_a_commit_has_a_job_of_its_own() -> None:
    plan = wanting()
    assert prewarm_name(dataclasses.replace(plan, commit="c" * 40)) != prewarm_name(plan)


OVERLAY = {
    "metadata": {"annotations": {"example.com/team": "search"}, "labels": {"example.com/cost": "7"}},
    "spec": {
        "nodeSelector": {"disk": "fast"},
        "containers": [
            {"name": "worker", "env": [{"name": "A", "value": "b"}], "resources": {"limits": {"amd.com/gpu": 1}}},
            {"name": "sidecar", "image": "sidecar:1"},
        ],
    },
}


def test_while_the_commit_is_not_known_nothing_is_decided() -> None:
    job = made(wanting(), active=1)
    plan = plan_prewarm(wanting(), {child_key(job): job}, known=False)
    assert plan == PrewarmPlan(own=frozenset({child_key(job)}))


def test_golden() -> None:
    """`UPDATE_GOLDEN=1 pytest ...` rewrites it; linters read it beside the children of models."""
    path = Path(__file__).parents[1] / "golden" / "prewarm.yaml"
    resources = {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "2Gi"}}
    text = text_of(list(plan_prewarm(wanting(engine={"device": "CPU"}, decode={"resources": resources}), {}).make))
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


def test_its_pod_is_a_workers_without_what_serves() -> None:
    plan = wanting(decode={"resources": GPU, "podTemplate": OVERLAY})
    template = build_prewarm_job(plan)["spec"]["template"]
    spec, metadata = template["spec"], template["metadata"]
    (fetch,), (prepare,) = spec["initContainers"], spec["containers"]
    assert (fetch["args"], prepare["args"]) == (["--prewarm", "files"], ["--prewarm", "files"])
    for container in (fetch, prepare):
        assert container["resources"] == {"limits": {"cpu": "4", "memory": "8Gi"}}, "no GPU waits for a disk"
        assert {"name": "A", "value": "b"} in container["env"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert not container.keys() & {"ports", "livenessProbe", "readinessProbe", "startupProbe"}
        assert any(mount["name"] == "models" for mount in container["volumeMounts"])
    assert spec["restartPolicy"] == "Never"
    assert spec["nodeSelector"] == {"disk": "fast"}
    assert spec["securityContext"]["runAsNonRoot"]
    assert not spec.keys() & {"readinessGates", "topologySpreadConstraints"}
    assert metadata["labels"]["example.com/cost"] == "7"
    assert metadata["labels"]["app.kubernetes.io/component"] == "prewarm"
    assert "tandem.dev/role" not in metadata["labels"], "gateways would take it for a worker"
    assert {"example.com/team": "search"}.items() <= metadata["annotations"].items()
    mounted = {mount["name"] for container in (fetch, prepare) for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ({"engine": {"device": "CPU"}}, "weights"),
        ({}, "weights"),
        ({"engine": {"device": "CUDA"}}, "files"),
        ({"decode": {"resources": GPU}}, "files"),
        ({"decode": {"parallelism": {"tensor": 2}}}, "files"),
    ],
)
def test_weights_are_prepared_where_one_rank_of_a_cpu_reads_them(spec: Manifest, part: str) -> None:
    (container,) = build_prewarm_job(wanting(**spec))["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--prewarm", part]


def test_it_reads_what_workers_read_but_asks_nobody_and_serves_nobody() -> None:
    model = {"uri": "hf://org/repo", "cache": CACHE | {"peers": True}}
    plan = dataclasses.replace(wanting(model=model), commit="c" * 40)
    template = build_prewarm_job(plan)["spec"]["template"]
    (volume,) = (v for v in template["spec"]["volumes"] if v["name"] == "config")
    (item,) = volume["downwardAPI"]["items"]
    name = item["fieldRef"]["fieldPath"].partition("'")[2].rstrip("']")
    config = WorkerConfig.model_validate_json(template["metadata"]["annotations"][name])
    assert (config.model.uri, config.model.revision, config.model.sharing) == ("hf://org/repo", "c" * 40, None)
    assert config.keys_path is None


def test_no_service_budget_or_policy_of_workers_takes_its_pod_for_one() -> None:
    plan = wanting(prefill={"replicas": 1})
    labels = build_prewarm_job(plan)["spec"]["template"]["metadata"]["labels"]
    for key, child in children(plan).items():
        spec = child.get("spec", {})
        selector = spec.get("podSelector", spec.get("selector", {}))
        selector = selector.get("matchLabels", selector)
        if key.kind in {"Service", "PodDisruptionBudget", "StatefulSet", "NetworkPolicy"} and selector:
            assert not selector.items() <= labels.items(), key


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"model": {"uri": "hf://a/b", "cache": {"prewarm": True}}}, "prewarm fills a PersistentVolumeClaim"),
        ({"model": {"uri": "hf://a/b", "cache": {"pack": "Fixed"}}}, "packs what is kept in a PersistentVolumeClaim"),
        (
            {"model": {"uri": "hf://a/b", "cache": CACHE}, "engine": {"kind": "VLLM"}},
            "model.cache.prewarm is of Tandem",
        ),
        (
            {
                "model": {"uri": "hf://a/b", "cache": {"persistentVolumeClaim": "models", "pack": "Archive"}},
                "engine": {"kind": "VLLM"},
            },
            "model.cache.pack is of Tandem",
        ),
    ],
)
def test_a_model_whose_cache_cannot_be_filled_so_is_refused(spec: Manifest, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        InferenceModelSpec.model_validate(spec)


def test_workers_are_told_how_the_claim_keeps_the_model() -> None:
    """And do not offer files to each other that are not there any more."""
    for cache, pack, shares in (
        ({"pack": "Archive"}, "Archive", False),
        ({"pack": "Fixed", "peers": True}, "Fixed", False),
        ({"pack": "None", "peers": True}, None, True),
        ({}, None, False),
    ):
        model = {"uri": "hf://org/repo", "cache": {"persistentVolumeClaim": "models", **cache}}
        source = worker_config(blueprint(model=model), Role.DECODE).model
        assert (source.pack, source.sharing is not None) == (pack, shares)


def test_the_job_belongs_to_the_model() -> None:
    (owner,) = build_prewarm_job(wanting())["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (UID, True)
