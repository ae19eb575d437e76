"""InferenceModels and live objects for the operator's tests."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import yaml
from tandem_api.crd.resource import InferenceModel
from tandem_operator.objects.manifests import ChildKey, Manifest, child_key
from tandem_operator.workloads import Blueprint, build_children
from tandem_operator.workloads.release import Release

RELEASED = Path(__file__).parent / "released"
RELEASE = Release(worker_image="worker:1", gateway_image="gateway:1")
UID = "11111111-2222-3333-4444-555555555555"


def raw_model(name: str = "m", **spec: Any) -> Manifest:
    metadata = {"name": name, "namespace": "n", "uid": UID, "generation": 1}
    return {"metadata": metadata, "spec": {"model": {"uri": "hf://org/repo"}} | spec}


def blueprint(name: str = "m", *, release: Release = RELEASE, **spec: Any) -> Blueprint:
    return Blueprint(model=InferenceModel.model_validate(raw_model(name, **spec)), release=release)


def copied(found: Any) -> Any:
    """As `copy.deepcopy`, of what is read out of JSON: in a fifth of its time."""
    return pickle.loads(pickle.dumps(found, pickle.HIGHEST_PROTOCOL))


def children(plan: Blueprint) -> dict[ChildKey, Manifest]:
    """The model's children as they are right after they were made."""
    return {child_key(child): copied(child) for child in build_children(plan)}


def released(version: str, case: str) -> dict[ChildKey, Manifest]:
    """Children of the golden spec `case`, as an earlier release wrote them."""
    documents = yaml.safe_load_all((RELEASED / version / f"{case}.yaml").read_text())
    return {child_key(document): document for document in documents}


def pod(name: str, *, owner: str = "sts-uid", component: str = "decode", **fields: Any) -> Manifest:
    """A live pod of a StatefulSet."""
    labels = {"app.kubernetes.io/component": component, "tandem.dev/model": "m", "controller-revision-hash": "new"}
    metadata = {
        "name": name, "namespace": "n", "uid": f"uid-{name}", "labels": labels | fields.pop("labels", {}),
        "ownerReferences": [{"kind": "StatefulSet", "name": name.rpartition("-")[0], "uid": owner, "controller": True}],
        "annotations": fields.pop("annotations", {}),
    }  # fmt: skip
    return {"kind": "Pod", "metadata": metadata | fields.pop("metadata", {}), "status": fields}


def container(**fields: Any) -> Manifest:
    return {"containerStatuses": [{"name": "worker", "image": "worker:1", "started": False} | fields]}


def stateful_set(*, nodes: int = 1, **fields: Any) -> Manifest:
    """A live StatefulSet whose newest template is `new`."""
    labels = {"tandem.dev/nodes-per-replica": str(nodes)}
    return {
        "kind": "StatefulSet",
        "metadata": {"name": "m-decode", "namespace": "n", "uid": "sts-uid", "generation": 2},
        "spec": {"template": {"metadata": {"labels": labels}}} | fields,
        "status": {"observedGeneration": 2, "updateRevision": "new", "currentRevision": "new"},
    }


READY = {"conditions": [{"type": "Ready", "status": "True"}], **container(started=True)}


def settled(plan: Blueprint) -> dict[ChildKey, Manifest]:
    """Children whose controllers have done all they should; workers have not loaded this revision."""
    live = children(plan)
    for key, child in list(live.items()):
        if (count := child.get("spec", {}).get("replicas")) is None:
            continue
        child["metadata"] |= {"generation": 1, "uid": f"uid-{key.name}"}
        child["status"] = {"observedGeneration": 1}
        if key.kind == "Deployment":
            child["status"] |= {"replicas": count, "readyReplicas": count, "updatedReplicas": count}
            continue
        child["status"] |= {"updateRevision": "new", "currentRevision": "new"}
        template = child["spec"]["template"]["metadata"]["labels"]
        for number in range(count):
            name = f"{key.name}-{number}"
            component = template["app.kubernetes.io/component"]
            owner = child["metadata"]["uid"]
            live[ChildKey("Pod", name)] = pod(name, owner=owner, component=component, labels=template, **READY)
    return live


def cases() -> dict[str, dict[str, Any]]:
    """Specs that the golden manifests are made of."""
    return {
        "disaggregated": {"prefill": {"replicas": 1}, "decode": {"replicas": 2}},
        "aggregated": {"decode": {"replicas": 1}},
        "everything": {
            "model": {
                "uri": "hf://org/repo", "revision": "v2", "servedName": "served",
                "secretRef": {"name": "hub-token"}, "cache": {"persistentVolumeClaim": "cache"},
            },
            "prefill": {
                "replicas": 3,
                "resources": {"requests": {"cpu": 2}, "limits": {"cpu": "2500m", "nvidia.com/gpu": 1}},
                "podTemplate": {
                    "metadata": {"annotations": {"example.com/team": "search"}},
                    "spec": {
                        "nodeSelector": {"gpu": "yes"},
                        "containers": [
                            {"name": "worker", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]},
                            {"name": "sidecar", "image": "sidecar:1"},
                        ],
                    },
                },
            },
            "engine": {"image": "own-worker:2", "device": "CUDA", "dtype": "BFloat16", "maxModelLen": 4096},
            "kv": {"memory": "2Gi", "verify": False},
            "gateway": {"replicas": 2, "timeouts": {"firstToken": "10s", "idle": "5s"}},
            "drain": {"timeout": "90s"},
        },
        "groups": {
            "prefill": {"replicas": 1},
            "decode": {
                "replicas": 2,
                "nodesPerReplica": 2,
                "parallelism": {"tensor": 2, "pipeline": 2},
                "resources": {"limits": {"cpu": 8, "nvidia.com/gpu": 2}},
            },
        },
        "claim-suspended": {"model": {"uri": "pvc://models/llama"}, "suspend": True},
    }  # fmt: skip


def foreign_cases() -> dict[str, dict[str, Any]]:
    """The same, of engines that earlier releases did not have."""
    return {
        "vllm": {
            "engine": {"kind": "VLLM", "dtype": "BFloat16", "maxModelLen": 4096, "args": ["--enforce-eager"]},
            "prefill": {"replicas": 1, "resources": {"limits": {"nvidia.com/gpu": 1}}},
            "decode": {"parallelism": {"tensor": 2}, "resources": {"limits": {"nvidia.com/gpu": 2}}},
        },
        "vllm-aggregated": {
            "model": {"uri": "pvc://models/llama"},
            "engine": {"kind": "VLLM"},
            "decode": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
        },
        "sglang": {
            "model": {"uri": "hf://org/repo", "servedName": "served", "secretRef": {"name": "hub-token"}},
            "engine": {"kind": "SGLang", "maxModelLen": 4096, "args": ["--mem-fraction-static=0.8"]},
            "prefill": {"replicas": 1, "resources": {"limits": {"nvidia.com/gpu": 1}}},
            "decode": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
        },
        "sglang-aggregated": {"engine": {"kind": "SGLang"}, "model": {"uri": "file:///models/llama"}},
    }  # fmt: skip
