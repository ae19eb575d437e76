"""A model on a real API server with the real controllers of workloads, without nodes (`e2e.realapi`)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e.realapi import ControlPlane, Nodes, start
from e2e.suite.fleet import Fleet, Object, until

DECODE = "m-decode"
LOAD_SECONDS = 0.5


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with start(Path(tmp_path_factory.mktemp("plane"))) as made:
        made.start_operator()
        yield made


@pytest.fixture(scope="module")
def nodes(plane: ControlPlane) -> Iterator[Nodes]:
    with Nodes(plane.kubernetes, load_seconds=LOAD_SECONDS) as made:
        yield made


@dataclass(frozen=True)
class Space(Fleet):
    """A namespace without nodes."""

    nodes: Nodes

    @property
    def model(self) -> Object:
        return self.get("inferencemodels", "m")

    @property
    def workload(self) -> Object:
        return self.get("statefulsets", DECODE)

    @property
    def ready(self) -> list[Object]:
        return self.nodes.ready(self.namespace, DECODE)

    @property
    def workers(self) -> dict[str, str]:
        return {p["metadata"]["name"]: p["metadata"]["uid"] for p in self.nodes.of(self.namespace, DECODE)}

    def told(self, kind: str) -> Object | None:
        return next((c for c in self.model["status"].get("conditions", []) if c["type"] == kind), None)

    def mark(self, name: str, text: str | None) -> None:
        body = {"metadata": {"annotations": {name: text}}}
        self.kubernetes.request("PATCH", self.path("inferencemodels", "m"), body, MERGE)

    def write_template(self, template: Object, workload: str = DECODE) -> None:
        """As `kubectl rollout restart` and `kubectl patch` do."""
        body = {"spec": {"template": template}}
        path = self.path("statefulsets", workload)
        self.kubernetes.request("PATCH", path, body, "application/strategic-merge-patch+json")

    def settled(self, replicas: int) -> bool:
        rollout = self.model["status"]["rollout"]
        assert rollout["phase"] == "Complete", rollout
        assert len(self.ready) == len(self.workers) == replicas, (len(self.ready), len(self.workers))
        assert self.workload["spec"]["replicas"] == replicas
        assert self.told("Reconciling") is None, self.told("Reconciling")
        return True

    def wait_settled(self, replicas: int, *, within: float = 180) -> None:
        until("the workers to be settled", lambda: self.settled(replicas), within=within)


MERGE = "application/merge-patch+json"
PROMISE = {"maxSurge": 3, "maxUnavailable": 0}


@contextmanager
def made_space(plane: ControlPlane, nodes: Nodes) -> Iterator[Space]:
    name = f"others-{uuid.uuid4().hex[:6]}"
    plane.kubernetes.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    made = Space(plane, plane.kubernetes, name, nodes)
    yield made
    if made.find("inferencemodels"):
        plane.kubernetes.request("DELETE", made.path("inferencemodels", "m"))
    plane.kubernetes.request("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
def space(plane: ControlPlane, nodes: Nodes) -> Iterator[Space]:
    with made_space(plane, nodes) as made:
        yield made


def make(space: Space, spec: Object) -> None:
    """The model, as a person applies it."""
    kind = {"apiVersion": "tandem.dev/v1alpha1", "kind": "InferenceModel"}
    metadata = {"name": "m", "namespace": space.namespace}
    space.apply(kind | {"metadata": metadata, "spec": {"model": {"uri": "hf://org/repo"}} | spec})


def serve(space: Space, replicas: int, *, image: str | None = "worker:1", **rollout: Any) -> dict[str, str]:
    """A model whose workers are all ready. Returns their uids."""
    spec = {
        "decode": {"replicas": replicas},
        "engine": {} if image is None else {"image": image},
        "rollout": PROMISE | rollout,
    }
    make(space, spec)
    space.wait_settled(replicas)
    return space.workers


def stays(space: Space, before: dict[str, str], *, seconds: float = 2.0) -> None:
    """Nobody is taken away for as long as a rollout would have needed to begin."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        now = space.workers
        assert {name: now.get(name) for name in before} == before
        time.sleep(0.2)


def rolled(space: Space, before: dict[str, str], replicas: int) -> Callable[[], None]:
    def wait() -> None:
        def all_new() -> bool:
            kept = set(before.values()) & set(space.workers.values())
            assert not kept, f"{len(kept)} of before"
            return space.settled(replicas)

        until("all workers to be new", all_new, within=240)

    return wait


def restarted_at(text: str) -> Object:
    return {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": text}}}


def policy(plane: ControlPlane, namespace: str, patch: str) -> Callable[[], None]:
    """A policy that applies a JSON patch to every StatefulSet that is written in a namespace. Returns its end."""
    name, base = f"rewrite-{namespace}", "/apis/admissionregistration.k8s.io/v1beta1"
    version = {"apiVersion": "admissionregistration.k8s.io/v1beta1"}
    rules = [{"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"],
              "resources": ["statefulsets"]}]  # fmt: skip
    spec = {
        "failurePolicy": "Fail", "reinvocationPolicy": "Never", "matchConstraints": {"resourceRules": rules},
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": patch}}],
    }  # fmt: skip
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    bound = {"policyName": name, "matchResources": {"namespaceSelector": selector}}
    for plural, kind, body in (
        ("mutatingadmissionpolicies", "MutatingAdmissionPolicy", spec),
        ("mutatingadmissionpolicybindings", "MutatingAdmissionPolicyBinding", bound),
    ):
        made = version | {"kind": kind, "metadata": {"name": name}, "spec": body}
        plane.kubernetes.request("POST", f"{base}/{plural}", made)

    def end() -> None:
        for plural in ("mutatingadmissionpolicybindings", "mutatingadmissionpolicies"):
            plane.kubernetes.request("DELETE", f"{base}/{plural}/{name}")

    return end


def images(space: Space, *, ready: bool = True) -> set[str]:
    found = space.ready if ready else space.nodes.of(space.namespace, DECODE)
    return {p["spec"]["containers"][0]["image"] for p in found}
