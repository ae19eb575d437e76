"""The chart's values, without Helm. With Helm on the PATH (or in HELM) also what it renders."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "tandem"
HELM = os.environ.get("HELM") or shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="needs helm")


def schema() -> dict[str, Any]:
    return json.loads((CHART / "values.schema.json").read_text())


def values() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def render(*arguments: str) -> list[dict[str, Any]]:
    assert HELM is not None
    command = [HELM, "template", "tandem", str(CHART), "--namespace", "ns", "--kube-version", "1.35.0", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [document for document in yaml.safe_load_all(run.stdout) if document]


def test_the_default_values_are_valid_and_every_one_is_declared() -> None:
    jsonschema.validate(values(), schema())
    assert values().keys() == schema()["properties"].keys() - {"global"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica": 1},
        {"replicas": "1"},
        {"logLevel": "loud"},
        {"images": {"wroker": "x"}},
        {"hub": {"endpoint": "x"}},
        {"keys": {"rotateAfter": "90d"}},
        {"keys": {"settleSeconds": 0}},
        {"networkPolicies": {"apiServerPorts": []}},
        {"networkPolicies": {"enable": True}},
        {"rollouts": {"maxConcurrent": -1}},
        {"rollouts": {"maxConcurrent": "1"}},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values() | wrong, schema())


def test_every_value_is_explained() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    bare = [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if re.match(r"\s*\w+: *(\S.*)?$", line) and re.search(r": +\S", line) and not before.strip().startswith("#")
    ]
    assert bare == ["  requests: {cpu: 50m, memory: 128Mi}", "  limits: {memory: 512Mi}"], (
        "the comment above covers both"
    )


@needs_helm
def test_lint() -> None:
    assert HELM is not None
    run = subprocess.run([HELM, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


@needs_helm
def test_the_crd_outlives_the_release() -> None:
    (crd,) = [d for d in render() if d["kind"] == "CustomResourceDefinition"]
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert not [d for d in render("--set", "crds.install=false") if d["kind"] == "CustomResourceDefinition"]


@needs_helm
def test_with_named_namespaces_there_is_no_cluster_wide_permission_on_children() -> None:
    documents = render("--set-json", 'watchNamespaces=["a","b"]')
    roles = [d for d in documents if d["kind"] == "Role" and d["metadata"]["namespace"] in ("a", "b")]
    assert len(roles) == 2
    assert not [d for d in documents if d["kind"] == "ClusterRoleBinding"]
    (deployment,) = [d for d in documents if d["kind"] == "Deployment"]
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--namespace=a", "--namespace=b"} <= set(arguments)


@needs_helm
def test_nobody_may_do_everything() -> None:
    for document in render():
        for rule in document.get("rules") or []:
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
            assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"])
            if "secrets" in rule["resources"]:
                assert rule["resources"] == ["secrets"]
                assert set(rule["verbs"]) == {"get", "create", "update"}, "by name: nothing is listed or watched"


@needs_helm
def test_the_operators_arguments_are_understood() -> None:
    from tandem_operator.settings import parse_settings

    documents = render("--set", "hub.endpoint=http://mirror", "--set", "images.worker=w:1")
    (deployment,) = [d for d in documents if d["kind"] == "Deployment"]
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    settings = parse_settings([*arguments, "--lease-namespace=ns"])
    assert (settings.release.worker_image, settings.release.hub_endpoint) == ("w:1", "http://mirror")
    assert settings.release.gateway_image == "ghcr.io/tandem-dev/tandem-gateway:0.1.0"


@needs_helm
def test_keys_and_network_policies_reach_the_operator() -> None:
    from tandem_operator.settings import parse_settings

    def told(*arguments: str) -> Any:
        (deployment,) = [d for d in render(*arguments) if d["kind"] == "Deployment"]
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        return parse_settings([*container["args"], "--lease-namespace=ns"])

    plain = told()
    assert (plain.keys.settle_seconds, plain.keys.rotate_after_seconds) == (180, None)
    assert (plain.release.network.enabled, plain.release.network.egress) == (True, True)
    assert plain.release.network.api_server_ports == (443, 6443)
    other = told("--set", "keys.settleSeconds=100,keys.rotateAfter=2160h,networkPolicies.apiServerPorts={16443}")
    assert (other.keys.settle_seconds, other.keys.rotate_after_seconds) == (100, 2160 * 3600)
    assert other.release.network.api_server_ports == (16443,)
    assert not told("--set", "networkPolicies.egress=false").release.network.egress
    assert not told("--set", "networkPolicies.enabled=false").release.network.enabled
