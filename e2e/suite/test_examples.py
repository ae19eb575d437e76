"""Every example is taken by an API server with strict validation, and by the operator; what is malformed is refused.

On a real API server without nodes (`e2e.realapi`): what an example's pods then do is for the tests that have nodes.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from e2e.cluster.settings import ROOT
from e2e.realapi import ControlPlane, start
from e2e.suite.fleet import Fleet, Object, until

EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
FOREIGN = {"keda.sh/v1alpha1": "KEDA's ScaledObject: its CRD is not on this machine"}
FRAGMENTS = {"config-map.yaml": "values for another chart", "argocd-cm.yaml": "a part of Argo CD's own ConfigMap"}
MODELS = "/apis/tandem.dev/v1alpha1/namespaces/{}/inferencemodels"
QUERY = "?dryRun=All&fieldValidation=Strict"
NOT_UNDERSTOOD = ("InvalidSpec", "SpecUnderstood")
RESOURCES = {
    "Deployment": "/apis/apps/v1/namespaces/{}/deployments",
    "HorizontalPodAutoscaler": "/apis/autoscaling/v2/namespaces/{}/horizontalpodautoscalers",
    "InferenceModel": MODELS,
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "PersistentVolumeClaim": "/api/v1/namespaces/{}/persistentvolumeclaims",
    "ResourceQuota": "/api/v1/namespaces/{}/resourcequotas",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with start(Path(tmp_path_factory.mktemp("plane"))) as made:
        made.start_operator()
        yield made


def read(file: Path) -> list[Object]:
    return [each for each in yaml.safe_load_all(file.read_text()) if each]


def put(plane: ControlPlane, namespace: str, document: Object) -> Any:
    """As `kubectl apply --server-side` does it. Raises client.ApiException."""
    path = RESOURCES[document["kind"]].format(namespace) + "/" + document["metadata"]["name"]
    query = "?fieldManager=reader&fieldValidation=Strict"
    return plane.kubernetes.request("PATCH", path + query, document, "application/apply-patch+yaml")


def is_taken(fleet: Fleet, name: str, generation: int) -> bool:
    """The operator has looked, and its words are of pods alone: there are none without nodes."""
    status = fleet.get("inferencemodels", name).get("status", {})
    assert status.get("observedGeneration") == generation, status
    said = [f"{c['type']} {c['reason']}: {c['message']}" for c in status["conditions"] if c["reason"] in NOT_UNDERSTOOD]
    assert said == []
    return bool(fleet.get("statefulsets", f"{name}-decode"))


@pytest.mark.parametrize("file", EXAMPLES, ids=[file.name for file in EXAMPLES])
def test_an_example_is_taken(plane: ControlPlane, file: Path) -> None:
    documents = read(file)
    if file.name in FRAGMENTS:
        assert not any(each.get("kind") == "InferenceModel" for each in documents)
        return
    namespace = f"example-{uuid.uuid4().hex[:6]}"
    plane.kubernetes.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    fleet = Fleet(plane, plane.kubernetes, namespace)
    models: dict[str, int] = {}
    for document in documents:
        if document["apiVersion"] in FOREIGN:
            continue
        made = put(plane, namespace, document)
        if document["kind"] == "InferenceModel":
            models[made["metadata"]["name"]] = made["metadata"]["generation"]
    for name, generation in models.items():
        until(f"{file.name}: {name} to be taken", lambda n=name, g=generation: is_taken(fleet, n, g), within=120)
        plane.kubernetes.request("DELETE", fleet.path("inferencemodels", name))


def test_a_field_that_is_not_there_is_refused(plane: ControlPlane) -> None:
    """Else the test above could not fail."""
    document = read(ROOT / "examples" / "quickstart.yaml")[0]
    document["spec"]["decode"]["replica"] = 2
    with pytest.raises(client.ApiException, match=r"spec\.decode\.replica"):
        put(plane, "default", document)


MALFORMED = sorted((ROOT / "e2e" / "manifests" / "malformed").glob("*.yaml"))


def head(text: str, key: str) -> str:
    """What a comment at the beginning of a manifest states."""
    found = re.search(rf"^# {key}: (.+)$", text, re.MULTILINE)
    assert found is not None, key
    return found[1]


def test_malformed_manifests_are_refused_with_a_sentence(plane: ControlPlane) -> None:
    """Each file states the field and a part of the sentence."""
    assert len(MALFORMED) >= 90
    for path in MALFORMED:
        text = path.read_text()
        field, says = (head(text, key) for key in ("field", "says"))
        with pytest.raises(client.ApiException) as refused:
            plane.kubernetes.request("POST", MODELS.format("default") + QUERY, yaml.safe_load(text))
        assert refused.value.body is not None, refused.value
        message = refused.value.body.replace('\\"', '"')
        assert field in message, f"{path.name}: {message}"
        assert says in message, f"{path.name}: {message}"
