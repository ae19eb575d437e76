"""Fields for pods, the Service and the route: what they become, and who wins where several say the same."""

from __future__ import annotations

from typing import Any

import pytest
from operator_objects import blueprint
from tandem_operator.objects.manifests import Manifest
from tandem_operator.workloads import Blueprint, build_children
from tandem_operator.workloads.configs import gateway_config

HOST, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
GPU_TAINT = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
AFFINITY: dict[str, Any] = {
    "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": []}]}}
}
FIELDS: dict[str, Any] = {
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [GPU_TAINT],
    "affinity": AFFINITY,
    "topologySpreadConstraints": [{"topologyKey": ZONE, "whenUnsatisfiable": "DoNotSchedule"}],
    "priorityClassName": "serving",
    "runtimeClassName": "nvidia",
    "imagePullSecrets": [{"name": "registry"}],
    "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "one-gpu"}],
}


def child(plan: Blueprint, kind: str, name: str) -> Manifest:
    (found,) = [c for c in build_children(plan) if (c["kind"], c["metadata"]["name"]) == (kind, name)]
    return found


def pod(plan: Blueprint, component: str) -> Manifest:
    kind, name = ("Deployment", "m") if component == "gateway" else ("StatefulSet", f"m-{component}")
    return child(plan, kind, name)["spec"]["template"]["spec"]


@pytest.mark.parametrize("component", ["prefill", "decode", "gateway"])
def test_fields_reach_the_pods_of_their_role_alone(component: str) -> None:
    plan = blueprint(**{"prefill": {}} | {component: FIELDS})
    spec = pod(plan, component)
    own = {"tandem.dev/model": "m", "app.kubernetes.io/component": component}
    (constraint,) = spec["topologySpreadConstraints"]
    assert constraint == {
        "topologyKey": ZONE, "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 1, "labelSelector": {"matchLabels": own}
    }  # fmt: skip
    for field in FIELDS.keys() - {"topologySpreadConstraints"}:
        assert spec[field] == FIELDS[field]
    for other in {"prefill", "decode", "gateway"} - {component}:
        assert not pod(plan, other).keys() & (FIELDS.keys() - {"topologySpreadConstraints"})


@pytest.mark.parametrize("component", ["prefill", "decode", "gateway"])
def test_pods_spread_where_nothing_is_said(component: str) -> None:
    def spread(**fields: Any) -> list[tuple[str, str]]:
        constraints = pod(blueprint(**{"prefill": {}} | {component: fields}), component).get(
            "topologySpreadConstraints", []
        )
        return [(c["topologyKey"], c["whenUnsatisfiable"]) for c in constraints]

    everywhere = [HOST, ZONE] if component == "gateway" else [HOST]
    assert spread() == [(key, "ScheduleAnyway") for key in everywhere], "a preference: nothing stays pending for it"
    assert spread(topologySpreadConstraints=[]) == []
    overlay = {"spec": {"topologySpreadConstraints": [{"topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"}]}}
    assert spread(podTemplate=overlay) == [("rack", "ScheduleAnyway")], "as before there was a default"


def test_a_pod_template_wins_over_the_fields_as_its_rules_say() -> None:
    overlay: dict[str, Any] = {
        "nodeSelector": {"pool": "big", "disk": "fast"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "priorityClassName": "batch",
        "imagePullSecrets": [{"name": "mirror"}],
        "resourceClaims": [{"name": "gpus", "resourceClaimName": "shared"}],
        "topologySpreadConstraints": [{"topologyKey": ZONE, "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 3}],
        "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "3Gi"}}],
    }
    spec = pod(blueprint(decode=FIELDS | {"tmpSizeLimit": "1Gi", "podTemplate": {"spec": overlay}}), "decode")
    assert spec["nodeSelector"] == {"pool": "big", "disk": "fast"}, "maps merge"
    assert spec["tolerations"] == overlay["tolerations"], "lists without a key are replaced"
    assert spec["priorityClassName"] == "batch"
    assert spec["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror"}], "others merge by it"
    assert [c["maxSkew"] for c in spec["topologySpreadConstraints"]] == [3]
    assert {"name": "tmp", "emptyDir": {"sizeLimit": "3Gi"}} in spec["volumes"]
    assert spec["runtimeClassName"] == "nvidia", "what it does not name stays"


def test_devices_are_claimed_by_the_pod_and_used_by_its_main_container() -> None:
    claim = {"name": "gpus", "request": "first"}
    spec = pod(blueprint(decode=FIELDS | {"resources": {"claims": [claim]}}), "decode")
    assert spec["containers"][0]["resources"] == {"claims": [claim]}


def test_volumes_of_pods_have_the_sizes_that_are_asked_for() -> None:
    def volumes(**decode: Any) -> dict[str, Any]:
        found = pod(blueprint(decode=decode), "decode")["volumes"]
        return {v["name"]: v["emptyDir"] for v in found if "emptyDir" in v}

    assert volumes() == {"tmp": {}, "models": {}}
    assert volumes(tmpSizeLimit="1Gi", downloadSizeLimit="40Gi", sharedMemorySizeLimit="8Gi") == {
        "tmp": {"sizeLimit": "1Gi"},
        "models": {"sizeLimit": "40Gi"},
        "shared-memory": {"medium": "Memory", "sizeLimit": "8Gi"},
    }
    shared = volumes(parallelism={"tensor": 2})["shared-memory"]
    assert shared == {"medium": "Memory"}


def test_gateways_have_requests_and_a_limit_of_memory_unless_something_is_said() -> None:
    def resources(**gateway: Any) -> Any:
        return pod(blueprint(gateway=gateway), "gateway")["containers"][0]["resources"]

    assert resources() == {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    assert resources(resources={"requests": {"cpu": 2}}) == {"requests": {"cpu": "2"}}
    small = {"limits": {"memory": "64Mi"}}
    overlay = {"spec": {"containers": [{"name": "gateway", "resources": small}]}}
    assert resources(podTemplate=overlay) == small, "less than the default requests"


def test_the_service_is_as_asked() -> None:
    def service(**fields: Any) -> Manifest:
        return child(blueprint(gateway={"service": fields}), "Service", "m")

    plain = child(blueprint(), "Service", "m")
    assert plain["spec"]["type"] == "ClusterIP"
    balanced = service(
        type="LoadBalancer", loadBalancerClass="example.com/lb", nodePort=30080, externalTrafficPolicy="Local",
        annotations={"example.com/internal": "true"}, labels={"team": "search"},
    )  # fmt: skip
    assert balanced["spec"] == plain["spec"] | {
        "type": "LoadBalancer",
        "loadBalancerClass": "example.com/lb",
        "externalTrafficPolicy": "Local",
        "ports": [plain["spec"]["ports"][0] | {"nodePort": 30080}],
    }
    assert balanced["metadata"]["labels"] == plain["metadata"]["labels"] | {"team": "search"}
    annotations = balanced["metadata"]["annotations"]
    assert annotations["example.com/internal"] == "true"
    without = service(type="LoadBalancer")["metadata"]["annotations"]
    assert annotations["tandem.dev/spec-hash"] != without["tandem.dev/spec-hash"], "one that is removed is noticed"
    own = service(labels={"tandem.dev/model": "x"}, annotations={"tandem.dev/spec-hash": "x"})
    assert own["metadata"]["labels"]["tandem.dev/model"] == "m"
    assert own["metadata"]["annotations"]["tandem.dev/spec-hash"] != "x"


def test_the_route_leads_to_the_service_and_cuts_no_stream() -> None:
    wanted = {
        "parentRefs": [{"name": "public", "namespace": "infra", "sectionName": "https"}],
        "hostnames": ["llm.example.com"],
        "annotations": {"example.com/team": "search"},
    }
    route = child(blueprint(gateway={"httpRoute": wanted}), "HTTPRoute", "m")
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    assert route["spec"]["parentRefs"] == wanted["parentRefs"]
    assert route["spec"]["hostnames"] == ["llm.example.com"]
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "m", "port": 80}]
    assert rule["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    assert route["metadata"]["annotations"]["example.com/team"] == "search"
    unset = child(blueprint(gateway={"httpRoute": wanted | {"timeouts": "Unset"}}), "HTTPRoute", "m")
    assert "timeouts" not in unset["spec"]["rules"][0]
    assert "HTTPRoute" not in {c["kind"] for c in build_children(blueprint())}


TLS = {"secretName": "cert"}


@pytest.mark.parametrize("plain", [False, True])
def test_tls_is_served_at_443_and_plain_http_only_where_it_is_asked_for(plain: bool) -> None:
    plan = blueprint(gateway={"tls": TLS | {"plainHttp": plain}, "service": {"type": "NodePort", "nodePort": 30443}})
    https = {"name": "https", "port": 443, "targetPort": "https", "protocol": "TCP", "appProtocol": "https"}
    http = {"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}
    ports = child(plan, "Service", "m")["spec"]["ports"]
    assert ports == [https | {"nodePort": 30443}, *([http] if plain else [])]
    gateway = pod(plan, "gateway")
    (container,) = gateway["containers"]
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert named == {"https": 8443, "metrics": 9090} | ({"http": 8080} if plain else {})
    assert {container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")} == {
        "metrics"
    }
    (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == "/etc/tandem/tls"]
    (volume,) = [each for each in gateway["volumes"] if each["name"] == mount["name"]]
    assert "subPath" not in mount, "a file that is mounted by itself never changes"
    assert volume["secret"]["secretName"] == "cert"
    assert {item["key"] for item in volume["secret"]["items"]} == {"tls.crt", "tls.key"}
    told = gateway_config(plan).tls
    assert told is not None
    assert (told.path, told.port, told.plain_http) == ("/etc/tandem/tls", 8443, plain)
    policy = child(plan, "NetworkPolicy", "m")["spec"]["ingress"][0]
    assert {port["port"] for port in policy["ports"]} == ({8443, 8080} if plain else {8443})
    for role in ("prefill", "decode"):
        names = {volume["name"] for volume in pod(blueprint(gateway={"tls": TLS}, prefill={}), role)["volumes"]}
        assert names == {volume["name"] for volume in pod(blueprint(prefill={}), role)["volumes"]}


@pytest.mark.parametrize(("plain", "port"), [(False, 443), (True, 80)])
def test_a_route_takes_the_plain_port_where_there_is_one(plain: bool, port: int) -> None:
    plan = blueprint(gateway={"tls": TLS | {"plainHttp": plain}, "httpRoute": {"parentRefs": [{"name": "public"}]}})
    assert child(plan, "HTTPRoute", "m")["spec"]["rules"][0]["backendRefs"] == [{"name": "m", "port": port}]
