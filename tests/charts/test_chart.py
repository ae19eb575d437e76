"""The chart's values, without Helm. With Helm on the PATH (or in HELM) also what it renders."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from functools import reduce
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tandem_api.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "tandem"
HELM = os.environ.get("HELM") or shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="needs helm")


def schema() -> dict[str, Any]:
    return json.loads((CHART / "values.schema.json").read_text())


def values() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] == kind]


def render(*arguments: str, chart: Path = CHART) -> list[dict[str, Any]]:
    assert HELM is not None
    command = [HELM, "template", "tandem", str(chart), "--namespace", "ns", "--kube-version", "1.35.0", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [document for document in yaml.safe_load_all(run.stdout) if document]


def test_the_default_values_are_valid_and_every_one_is_declared() -> None:
    jsonschema.validate(values(), schema())
    assert values().keys() == schema()["properties"].keys()


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica": 1},
        {"replicas": "1"},
        {"logLevel": "loud"},
        {"images": {"wroker": "x"}},
        {"hub": {"endpoint": "x"}},
        {"hub": {"resolve": "no"}},
        {"hub": {"pollSeconds": 0}},
        {"keys": {"rotateAfter": "90d"}},
        {"keys": {"settleSeconds": 0}},
        {"networkPolicies": {"apiServerPorts": []}},
        {"networkPolicies": {"enable": True}},
        {"podTemplatePolicy": {"actions": []}},
        {"podTemplatePolicy": {"actions": ["Deny", "Warn"]}},
        {"podTemplatePolicy": {"allowedCapabilities": ["ipc_lock'"]}},
        {"metrics": {"rules": {"errorShare": 5}}},
        {"metrics": {"podMonitors": {"interval": "30"}}},
        {"extraArgs": ["log-level=debug"]},
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
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep", "tandem.dev/version": VERSION}
    assert not [d for d in render("--set", "crds.install=false") if d["kind"] == "CustomResourceDefinition"]


@needs_helm
def test_with_named_namespaces_there_is_no_cluster_wide_permission_on_children() -> None:
    documents = render("--set-json", 'watchNamespaces=["a","b"]')
    roles = [d for d in documents if d["kind"] == "Role" and d["metadata"]["namespace"] in ("a", "b")]
    assert len(roles) == 2
    assert not [d for d in documents if d["kind"] == "ClusterRoleBinding"]
    for role in roles:
        assert any(rule["resources"] == ["resourcequotas"] for rule in role["rules"]), "the GPU quota of a namespace"
    (deployment,) = [d for d in documents if d["kind"] == "Deployment"]
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--namespace=a", "--namespace=b"} <= set(arguments)


@needs_helm
def test_nobody_may_do_everything() -> None:
    for document in render():
        for rule in document.get("rules") or []:
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
            assert not {"escalate", "impersonate"} & set(rule["verbs"])
            if "bind" in rule["verbs"]:
                assert (rule["resources"], rule["resourceNames"]) == (["clusterroles"], ["tandem-ns-gateway"])
            if "roles" in rule["resources"]:
                assert not {"create", "update", "patch"} & set(rule["verbs"]), "nobody writes roles"
            if "resourcequotas" in rule["resources"]:
                assert (rule["resources"], rule["verbs"]) == (["resourcequotas"], ["list"]), "they are read, no more"
            if "secrets" in rule["resources"]:
                assert rule["resources"] == ["secrets"]
                assert set(rule["verbs"]) == {"get", "create", "update"}, "by name: nothing is listed or watched"


@needs_helm
def test_the_operators_arguments_are_understood() -> None:
    from tandem_operator.process.settings import parse_settings

    documents = render(
        "--set", "hub.endpoint=http://mirror", "--set", "images.worker=w:1", "--set", "hub.resolve=false",
        "--set", "hub.pollSeconds=60",
    )  # fmt: skip
    (deployment,) = [d for d in documents if d["kind"] == "Deployment"]
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    settings = parse_settings([*arguments, "--lease-namespace=ns"])
    assert (settings.release.worker_image, settings.release.hub_endpoint) == ("w:1", "http://mirror")
    assert (settings.hub.resolve, settings.hub.poll_seconds) == (False, 60.0)
    assert settings.release.gateway_image == "ghcr.io/tandem-dev/tandem-gateway:0.1.0"


@needs_helm
def test_keys_and_network_policies_reach_the_operator() -> None:
    from tandem_operator.process.settings import parse_settings

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


@needs_helm
@pytest.mark.parametrize("arguments", [(), ("--set-json", 'watchNamespaces=["a","b"]')])
def test_gateways_are_bound_to_a_role_that_outlives_the_release(arguments: tuple[str, ...]) -> None:
    documents = render(*arguments)
    (deployment,) = of_kind(documents, "Deployment")
    given = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--gateway-cluster-role=tandem-ns-gateway" in given
    (role,) = [d for d in of_kind(documents, "ClusterRole") if d["metadata"]["name"] == "tandem-ns-gateway"]
    assert role["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}, "models outlive it too"
    assert {(*rule["resources"],): rule["verbs"] for rule in role["rules"]} == {
        ("pods",): ["get", "list", "watch"], ("inferencemodels",): ["get", "list", "watch"]
    }  # fmt: skip
    rules = [rule for d in documents if d["metadata"]["name"] in ("tandem", "tandem-ns") for rule in d.get("rules", [])]
    assert sum("bind" in rule["verbs"] for rule in rules) == (2 if arguments else 1), "in each namespace it serves"


PROMETHEUS = ("monitoring.coreos.com/v1/PodMonitor", "monitoring.coreos.com/v1/PrometheusRule")
INSTALLED = tuple(part for version in PROMETHEUS for part in ("--api-versions", version))


@needs_helm
def test_monitors_and_rules_are_made_where_their_types_are() -> None:
    assert not {"PodMonitor", "PrometheusRule"} & {d["kind"] for d in render()}
    there = render(*INSTALLED, "--set", "metrics.podMonitors.labels.release=prometheus")
    monitors = {d["metadata"]["name"]: d for d in of_kind(there, "PodMonitor")}
    assert monitors.keys() == {"tandem-gateways", "tandem-workers", "tandem-operator"}
    assert all(d["metadata"]["labels"]["release"] == "prometheus" for d in monitors.values())
    assert monitors["tandem-workers"]["spec"]["namespaceSelector"] == {"any": True}
    assert len(of_kind(there, "PrometheusRule")) == 1
    off = render(*INSTALLED, "--set", "metrics.podMonitors.enabled=false,metrics.rules.enabled=false")
    assert not {"PodMonitor", "PrometheusRule"} & {d["kind"] for d in off}
    named = render(*INSTALLED, "--set-json", 'watchNamespaces=["a"]')
    (workers,) = [d for d in of_kind(named, "PodMonitor") if d["metadata"]["name"] == "tandem-workers"]
    assert workers["spec"]["namespaceSelector"] == {"matchNames": ["a"]}


def test_monitors_select_what_pods_carry() -> None:
    """Ports and labels of the pods that the operator makes."""
    from tandem_api.crd.resource import InferenceModel
    from tandem_operator.workloads import Blueprint, build_children
    from tandem_operator.workloads.release import Release

    model = {"metadata": {"name": "m", "namespace": "n"}, "spec": {"model": {"uri": "hf://a/b"}, "prefill": {}}}
    release = Release(worker_image="w", gateway_image="g")
    text = (CHART / "templates" / "monitoring.yaml").read_text()
    for child in build_children(Blueprint(model=InferenceModel.model_validate(model), release=release)):
        if child["kind"] in ("StatefulSet", "Deployment"):
            template = child["spec"]["template"]
            labels = template["metadata"]["labels"]
            assert labels["app.kubernetes.io/managed-by"] == "tandem-operator"
            assert re.search(rf"\[[a-z, ]*\b{labels['app.kubernetes.io/component']}\b[a-z, ]*\]", text)
            assert "metrics" in [port["name"] for port in template["spec"]["containers"][0]["ports"]]
            assert {"tandem.dev/model", "tandem.dev/role"} <= labels.keys()


def known_metrics() -> set[str]:
    """Every series that a part of Tandem has."""
    from prometheus_client import REGISTRY
    from tandem_api.telemetry import Metric
    from tandem_operator.runtime import metrics

    assert metrics
    declared = {value for name, value in vars(Metric).items() if not name.startswith("_")}
    operator = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in REGISTRY.collect()
        if family.name.startswith("tandem_operator_")
    }
    histograms = {name for name in declared | operator if name.endswith("_seconds")}
    return declared | operator | {name + end for name in histograms for end in ("_bucket", "_sum", "_count")}


def test_alerts_ask_for_metrics_that_there_are() -> None:
    text = (CHART / "templates" / "monitoring.yaml").read_text()
    asked = set(re.findall(r"\btandem_(?:operator|gateway|worker)_[a-z_]+", text))
    assert len(asked) >= 12
    assert asked <= known_metrics()


@needs_helm
def test_every_alert_says_what_and_how_bad() -> None:
    (rules,) = of_kind(render(*INSTALLED), "PrometheusRule")
    alerts = [rule for group in rules["spec"]["groups"] for rule in group["rules"]]
    assert len({alert["alert"] for alert in alerts}) == len(alerts)
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert "{{" not in alert["expr"]


@needs_helm
@pytest.mark.parametrize(
    ("endpoint", "ports", "namespace"),
    [
        ("", [443], None),
        ("https://hub.example.com", [443], None),
        ("http://hub.example.com:8080/api", [443, 8080], None),
        ("http://mirror.tandem-mirror.svc", [443, 80], "tandem-mirror"),
        ("http://mirror.hub.svc.cluster.local:9000", [443, 9000], "hub"),
        ("http://mirror", [443, 80], "ns"),
    ],
)
def test_the_operator_may_connect_to_what_it_needs(endpoint: str, ports: list[int], namespace: str | None) -> None:
    (policy,) = of_kind(render("--set", f"hub.endpoint={endpoint}"), "NetworkPolicy")
    egress = policy["spec"]["egress"]
    opened = [[port["port"] for port in rule["ports"]] for rule in egress if "ports" in rule]
    assert opened == [[53, 53, 5353, 5353], [443, 6443], [9090], ports]
    names = [
        peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for rule in egress
        if "ports" not in rule
        for peer in rule["to"]
    ]
    assert names == ([] if namespace is None else [namespace])
    for off in ("operator", "enabled"):
        assert not of_kind(render("--set", f"networkPolicies.{off}=false"), "NetworkPolicy")
    (ingress,) = of_kind(render("--set", "networkPolicies.egress=false"), "NetworkPolicy")
    assert ingress["spec"]["policyTypes"] == ["Ingress"]


@needs_helm
def test_the_policy_about_pod_templates_is_on_unless_switched_off() -> None:
    documents = render()
    (policy,) = of_kind(documents, "ValidatingAdmissionPolicy")
    (binding,) = of_kind(documents, "ValidatingAdmissionPolicyBinding")
    assert policy["spec"]["failurePolicy"] == "Fail"
    assert binding["spec"]["policyName"] == policy["metadata"]["name"] == "tandem-ns-pod-templates"
    assert binding["spec"] == {"policyName": "tandem-ns-pod-templates", "validationActions": ["Deny"]}
    off = render("--set", "podTemplatePolicy.enabled=false")
    assert not [d for d in off if d["kind"].startswith("ValidatingAdmissionPolicy")]
    selector = {"matchExpressions": [{"key": "trusted", "operator": "DoesNotExist"}]}
    policy_values = {"namespaceSelector": selector, "allowedCapabilities": ["IPC_LOCK", "SYS_NICE"]}
    other = render("--set-json", f"podTemplatePolicy={json.dumps(policy_values)}")
    (binding,) = of_kind(other, "ValidatingAdmissionPolicyBinding")
    assert binding["spec"]["matchResources"] == {"namespaceSelector": selector}
    (policy,) = of_kind(other, "ValidatingAdmissionPolicy")
    privileges = next(v["expression"] for v in policy["spec"]["variables"] if v["name"] == "privileges")
    assert "a in ['IPC_LOCK', 'SYS_NICE']" in privileges
    assert "must be empty, but for IPC_LOCK, SYS_NICE'" in privileges


@needs_helm
def test_the_operators_pod_takes_what_is_added() -> None:
    environment = [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}]
    mount = {"name": "ca", "mountPath": "/etc/ssl/company", "readOnly": True}
    volume = {"name": "ca", "configMap": {"name": "company-ca"}}
    given = (
        "--set-json", f"extraEnv={json.dumps(environment)}", "--set-json", f"extraVolumes={json.dumps([volume])}",
        "--set-json", f"extraVolumeMounts={json.dumps([mount])}", "--set", "extraArgs={--identity=x}",
    )  # fmt: skip
    (deployment,) = of_kind(render(*given), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert environment[0] in container["env"]
    assert (pod["volumes"][-1], container["volumeMounts"][-1]) == (volume, mount)
    assert container["args"][-1] == "--identity=x"
    (spread,) = pod["topologySpreadConstraints"]
    assert (
        spread["labelSelector"]["matchLabels"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    )
    own = [{"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}]
    (deployment,) = of_kind(render("--set-json", f"topologySpreadConstraints={json.dumps(own)}"), "Deployment")
    assert deployment["spec"]["template"]["spec"]["topologySpreadConstraints"] == own


GROUPS = [group for group, content in values().items() if isinstance(content, dict)]
INNER = [
    f"{group}.{key}"
    for group, content in values().items()
    if isinstance(content, dict) and group not in {"resources", "metrics"}  # whoever removes a limit means it
    for key in content
] + [f"metrics.{part}.{key}" for part, content in values()["metrics"].items() for key in content]


@needs_helm
@pytest.mark.parametrize("missing", [*([each] for each in GROUPS), [*values()], INNER], ids=lambda found: found[0])
def test_values_of_an_earlier_release_may_lack_anything(missing: list[str], tmp_path: Path) -> None:
    """`helm upgrade --reuse-values` has the earlier chart's values alone. A key that is null is one that is absent."""
    kinds = ("PodMonitor", "PrometheusRule")
    types = [f"--api-versions=monitoring.coreos.com/v1/{kind}" for kind in kinds]
    without: dict[str, Any] = {}
    for each in missing:
        *groups, key = each.split(".")
        reduce(lambda inner, group: inner.setdefault(group, {}), groups, without)[key] = None
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(without))
    assert render(*types, "--values", str(file)) == render(*types)


@needs_helm
def test_what_users_leave_out_stays_left_out() -> None:
    (deployment,) = of_kind(render("--set", "resources.limits=null"), "Deployment")
    assert "limits" not in deployment["spec"]["template"]["spec"]["containers"][0]["resources"]
    (deployment,) = of_kind(
        render("--set", "crds.install=false,networkPolicies.enabled=false,replicas=0"), "Deployment"
    )
    assert deployment["spec"]["replicas"] == 0
    assert not of_kind(render("--set", "crds.install=false"), "CustomResourceDefinition")


def list_images(*arguments: str) -> list[str]:
    (deployment,) = of_kind(render(*arguments), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    told = [each.partition("=")[2] for each in container["args"] if re.match(r"--(worker|gateway)-image=", each)]
    return [container["image"], *told]


@needs_helm
@pytest.mark.parametrize(
    ("registry", "place"),
    [("", "ghcr.io/tandem-dev"), ("registry.example.com", "registry.example.com/tandem-dev"),
     ("registry:5000/mirror/", "registry:5000/mirror/tandem-dev")],
)  # fmt: skip
def test_one_value_moves_all_images_to_another_registry(registry: str, place: str) -> None:
    wanted = [f"{place}/tandem-{part}:{VERSION}" for part in ("operator", "worker", "gateway")]
    assert list_images("--set", f"global.imageRegistry={registry}") == wanted
    named = list_images("--set", f"global.imageRegistry={registry},images.gateway=own/gateway:1")
    assert named == [*wanted[:2], "own/gateway:1"]
