"""Who may connect to whom: NetworkPolicies evaluated as Kubernetes does it, over pods with the labels they get."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_objects import RELEASE, blueprint
from tandem_api import names
from tandem_api.launch import TracingConfig
from tandem_operator.objects.manifests import Manifest
from tandem_operator.workloads import Blueprint, build_children
from tandem_operator.workloads.release import NetworkSettings, Release


@dataclass(frozen=True)
class Peer:
    """A pod, or an address outside the cluster (no labels, no namespace)."""

    name: str
    namespace: str | None = "n"
    labels: tuple[tuple[str, str], ...] = ()


NAMESPACES: dict[str, dict[str, str]] = {
    "n": {"kubernetes.io/metadata.name": "n"},
    "monitoring": {"kubernetes.io/metadata.name": "monitoring", "tandem.dev/metrics": "allowed"},
    "mirror": {"kubernetes.io/metadata.name": "mirror"},
    "strangers": {"kubernetes.io/metadata.name": "strangers", "tandem.dev/metrics": "no"},
}
STRANGER = Peer("stranger", "strangers")
NEIGHBOUR = Peer("neighbour", "n", (("tandem.dev/model", "other"), ("app.kubernetes.io/component", "gateway")))
SCRAPER = Peer("scraper", "monitoring")
MIRROR = Peer("mirror", "mirror")
INTERNET = Peer("internet", None)
HTTP, LINK, METRICS, KV, GROUP, EPHEMERAL, FILES = 8000, 8001, 9090, 7000, 6900, 40000, 6800
PORTS = (22, 53, 80, 443, 6443, 6800, 6900, 7000, 7001, 7007, 8000, 8001, 8080, 8443, 9090, 32767, 32768, 60999, 61000)


def pods(plan: Blueprint) -> dict[str, Peer]:
    """One pod of each workload, by component; two where they form groups does not differ."""
    found = {}
    for child in build_children(plan):
        if child["kind"] in ("StatefulSet", "Deployment"):
            labels = child["spec"]["template"]["metadata"]["labels"]
            component = labels["app.kubernetes.io/component"]
            found[component] = Peer(component, "n", tuple(sorted(labels.items())))
    return found


def policies(plan: Blueprint) -> list[Manifest]:
    """Built once for each plan, and asked for each of its pods and ports."""
    if not _built or _built[0] is not plan:
        _built[:] = [plan, [child["spec"] for child in build_children(plan) if child["kind"] == "NetworkPolicy"]]
    return _built[1]


_built: list[Any] = []
"""The plan that was asked for last, and its policies."""


def connects(plan: Blueprint, source: Peer, target: Peer, port: int, protocol: str = "TCP") -> bool:
    """Both ends must agree: what selects the source must let it out, what selects the target must let it in."""
    return _passes(plan, source, target, port, protocol, "Egress") and _passes(
        plan, target, source, port, protocol, "Ingress"
    )


def _passes(plan: Blueprint, subject: Peer, other: Peer, port: int, protocol: str, direction: str) -> bool:
    if subject.namespace != "n":
        return True  # the model's policies are in its namespace
    chosen = [
        policy for policy in policies(plan)
        if direction in policy["policyTypes"] and _selects(policy["podSelector"], dict(subject.labels))
    ]  # fmt: skip
    key, side = ("egress", "to") if direction == "Egress" else ("ingress", "from")
    return not chosen or any(
        _ports_match(rule, port, protocol) and (side not in rule or any(_is_peer(peer, other) for peer in rule[side]))
        for policy in chosen
        for rule in policy[key]
    )


def _ports_match(rule: Manifest, port: int, protocol: str) -> bool:
    return "ports" not in rule or any(
        entry["protocol"] == protocol and entry["port"] <= port <= entry.get("endPort", entry["port"])
        for entry in rule["ports"]
    )


def _is_peer(selector: Manifest, other: Peer) -> bool:
    if other.namespace is None:
        return False
    if "namespaceSelector" in selector:
        if not _selects(selector["namespaceSelector"], NAMESPACES[other.namespace]):
            return False
    elif other.namespace != "n":
        return False
    return "podSelector" not in selector or _selects(selector["podSelector"], dict(other.labels))


def _selects(selector: Manifest, labels: dict[str, str]) -> bool:
    assert selector.keys() <= {"matchLabels"}, "what this reading of policies knows"
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def reachable(plan: Blueprint, source: Peer, target: Peer) -> set[int]:
    return {port for port in PORTS if connects(plan, source, target, port)}


def split(**more: Any) -> Blueprint:
    return blueprint(prefill={}, **more)


def test_a_stranger_reaches_the_gateways_api_alone() -> None:
    plan = split()
    inside = pods(plan)
    for source in (STRANGER, NEIGHBOUR, INTERNET):
        assert reachable(plan, source, inside["gateway"]) == {8080}
        assert reachable(plan, source, inside["decode"]) == set()
        assert reachable(plan, source, inside["prefill"]) == set()


def test_the_metrics_label_opens_the_metrics_ports_alone() -> None:
    plan = split()
    inside = pods(plan)
    assert reachable(plan, SCRAPER, inside["decode"]) == {METRICS}
    assert reachable(plan, SCRAPER, inside["prefill"]) == {METRICS}
    assert reachable(plan, SCRAPER, inside["gateway"]) == {METRICS, 8080}


def test_gateways_ask_decode_workers_and_decode_workers_prefill_workers() -> None:
    """And gateways read the telemetry of both."""
    plan = split()
    inside = pods(plan)
    assert reachable(plan, inside["gateway"], inside["decode"]) == {HTTP, METRICS}
    assert reachable(plan, inside["gateway"], inside["prefill"]) == {METRICS}
    assert reachable(plan, inside["decode"], inside["prefill"]) == {KV}
    for pair in (("prefill", "decode"), ("decode", "decode"), ("prefill", "prefill"), ("decode", "gateway")):
        assert not reachable(plan, inside[pair[0]], inside[pair[1]]) - {8080}, pair


def test_workers_reach_each_others_files_where_that_is_switched_on_and_nobody_else_does() -> None:
    workers = ("prefill", "decode")
    plan = split(model={"uri": "hf://a/b", "cache": {"peers": True}})
    inside = pods(plan)
    for name in workers:
        assert all(FILES in reachable(plan, inside[name], inside[other]) for other in workers)
        for source in (STRANGER, NEIGHBOUR, INTERNET, SCRAPER, inside["gateway"]):
            assert FILES not in reachable(plan, source, inside[name])
    for model in (
        {"uri": "hf://a/b"},
        {"uri": "hf://a/b", "cache": {"persistentVolumeClaim": "c"}},
        {"uri": "pvc://models/x", "cache": {"peers": True}},
    ):
        other = split(model=model)
        inside = pods(other)
        assert all(FILES not in reachable(other, inside[name], inside[to]) for name in workers for to in workers)


def test_without_prefill_workers_nobody_moves_blocks() -> None:
    plan = blueprint()
    inside = pods(plan)
    assert reachable(plan, inside["gateway"], inside["decode"]) == {HTTP, METRICS}
    assert reachable(plan, inside["decode"], inside["decode"]) == set()


def test_where_workers_give_each_other_their_blocks_all_reach_each_others_kv_ports_and_nobody_else_does() -> None:
    plan = split(kv={"peers": "Auto"})
    inside = pods(plan)
    for name in ("prefill", "decode"):
        assert all(reachable(plan, inside[name], inside[other]) == {KV} for other in ("prefill", "decode"))
        for source in (STRANGER, NEIGHBOUR, INTERNET, SCRAPER, inside["gateway"]):
            assert KV not in reachable(plan, source, inside[name])
    plan = blueprint(kv={"peers": "Auto"})
    inside = pods(plan)
    assert reachable(plan, inside["decode"], inside["decode"]) == {KV}
    assert KV not in reachable(plan, inside["gateway"], inside["decode"])


def test_workers_of_several_ranks_neither_give_nor_take() -> None:
    plan = split(kv={"peers": "Auto"}, decode={"parallelism": {"tensor": 2}})
    inside = pods(plan)
    assert reachable(plan, inside["prefill"], inside["prefill"]) == {KV}
    assert reachable(plan, inside["decode"], inside["prefill"]) == {KV}
    assert KV not in reachable(plan, inside["prefill"], inside["decode"])
    assert KV not in reachable(plan, inside["decode"], inside["decode"])


def test_every_rank_of_a_prefill_pod_is_reached() -> None:
    plan = blueprint(prefill={"parallelism": {"tensor": 8}})
    inside = pods(plan)
    assert reachable(plan, inside["decode"], inside["prefill"]) == {7000, 7001, 7007}


@given(prefill=st.booleans(), spread=st.sampled_from([("prefill",), ("decode",), ("prefill", "decode")]))
def test_pods_of_one_replica_reach_each_other_and_nobody_else(prefill: bool, spread: tuple[str, ...]) -> None:
    group = {"nodesPerReplica": 2, "parallelism": {"pipeline": 2}}
    spec: dict[str, Any] = {role: group for role in spread if prefill or role == "decode"}
    plan = blueprint(**({"prefill": {}} if prefill else {}) | spec)
    inside = pods(plan)
    for role, pod in inside.items():
        wanted = {GROUP, 32768, 60999} if role in spec else set()
        assert {GROUP, 32768, 60999} & reachable(plan, pod, pod) == wanted
        for other in (*(p for name, p in inside.items() if name != role), STRANGER, NEIGHBOUR, SCRAPER):
            assert not {GROUP, 32767, 32768, 60999} & reachable(plan, other, pod)


def test_pods_find_names_and_leave_the_cluster_only_where_they_must() -> None:
    hub, claim = split(), split(model={"uri": "pvc://models/x"})
    for plan in (hub, claim):
        for pod in pods(plan).values():
            assert connects(plan, pod, INTERNET, 53, "UDP")
            assert connects(plan, pod, INTERNET, 53, "TCP")
    assert reachable(hub, pods(hub)["decode"], INTERNET) == {53, 443}
    assert reachable(claim, pods(claim)["decode"], INTERNET) == {53}
    assert reachable(claim, pods(claim)["gateway"], INTERNET) == {53, 443, 6443}, "the API server has no labels"
    assert reachable(claim, pods(claim)["decode"], STRANGER) == {53}


@pytest.mark.parametrize(
    ("endpoint", "anywhere", "mirror"),
    [
        (None, {53, 443}, {53, 443}),
        ("https://hub.example.com", {53, 443}, {53, 443}),
        ("http://hub.example.com:8443/base", {53, 443, 8443}, {53, 443, 8443}),
        ("http://hub.mirror.svc", {53, 80, 443}, set(PORTS)),
        ("http://hub.mirror.svc.cluster.local:8000", {53, 443, 8000}, set(PORTS)),
        ("http://[::1]:8000", {53, 443, 8000}, {53, 443, 8000}),
    ],
)
def test_the_hub_decides_what_is_open(endpoint: str | None, anywhere: set[int], mirror: set[int]) -> None:
    release = Release(worker_image="w", gateway_image="g", hub_endpoint=endpoint)
    plan = split(release=release)
    decode = pods(plan)["decode"]
    assert reachable(plan, decode, INTERNET) == anywhere
    assert reachable(plan, decode, MIRROR) == mirror, "a Service's pods listen where they like"
    assert reachable(plan, decode, STRANGER) == anywhere


def test_spans_may_leave_where_there_is_a_collector() -> None:
    """From every pod; named by the model, or by the release for models that say nothing."""
    mine = {"tracing": {"endpoint": "http://collector.mirror.svc:4318"}}
    release = dataclasses.replace(RELEASE, tracing=TracingConfig(endpoint="http://collector.mirror:8443"))
    named, usual, left = (
        split(observability=mine),
        split(release=release),
        split(release=release, observability={"tracing": {"enabled": False}}),
    )
    for name in ("gateway", "prefill", "decode"):
        assert reachable(named, pods(named)[name], MIRROR) == set(PORTS), "a Service's pods listen where they like"
        assert 8443 in reachable(usual, pods(usual)[name], INTERNET)
        assert 8443 not in reachable(left, pods(left)[name], INTERNET)
        assert reachable(left, pods(left)[name], MIRROR) == reachable(split(), pods(split())[name], MIRROR)


def test_the_release_can_switch_policies_off() -> None:
    off = Release(worker_image="w", gateway_image="g", network=NetworkSettings(enabled=False))
    assert policies(split(release=off)) == []
    inbound = Release(worker_image="w", gateway_image="g", network=NetworkSettings(egress=False))
    plan = split(release=inbound)
    assert reachable(plan, pods(plan)["decode"], INTERNET) == set(PORTS)
    assert reachable(plan, STRANGER, pods(plan)["decode"]) == set()
    other = Release(worker_image="w", gateway_image="g", network=NetworkSettings(api_server_ports=(8443,)))
    plan = split(release=other)
    assert reachable(plan, pods(plan)["gateway"], INTERNET) == {53, 8443}


def test_policies_are_named_after_what_they_guard() -> None:
    children = build_children(split(release=RELEASE))
    found = {child["metadata"]["name"] for child in children if child["kind"] == "NetworkPolicy"}
    assert found == {
        names.workload_name("m", role) for role in (names.Role.PREFILL, names.Role.DECODE, names.Role.GATEWAY)
    }


def test_the_operator_reads_what_gateways_report_and_nothing_else() -> None:
    plan = split(
        release=Release(worker_image="w", gateway_image="g", network=NetworkSettings(operator_namespace="mirror"))
    )
    inside = pods(plan)
    assert reachable(plan, MIRROR, inside["gateway"]) == {METRICS, 8080}
    assert reachable(plan, MIRROR, inside["decode"]) == set()
    assert reachable(plan, STRANGER, inside["gateway"]) == {8080}


@pytest.mark.parametrize("egress", [False, True])
@pytest.mark.parametrize("transport", ["Auto", "TCP", "Mooncake"])
def test_mooncakes_engines_are_reached_by_prefill_pods_alone(transport: str, egress: bool) -> None:
    """They ask nobody who he is."""
    network = dataclasses.replace(RELEASE.network, egress=egress)
    plan = blueprint(prefill={}, kv={"transport": transport}, release=dataclasses.replace(RELEASE, network=network))
    found = pods(plan)
    for port in (15000, 16000, 17000):
        for source in (*found.values(), STRANGER, NEIGHBOUR, SCRAPER, INTERNET):
            open_ = transport == "Mooncake" and source.name == "prefill"
            assert connects(plan, source, found["decode"], port) is open_
        assert not connects(plan, found["decode"], found["prefill"], port)
    assert not connects(plan, found["prefill"], found["decode"], 14999)
    assert not connects(plan, found["prefill"], found["decode"], 17001)


@pytest.mark.parametrize("store", [{"memory": "1Gi"}, {"memory": "1Gi", "master": "master.kv:50051"}])
def test_a_store_opens_no_port_of_mooncakes_engines(store: dict[str, str]) -> None:
    plan = blueprint(prefill={}, kv={"transport": "Mooncake", "store": store})
    found = pods(plan)
    first, last = names.STORE_DATA_PORTS
    for source in (found["prefill"], found["decode"]):
        assert connects(plan, source, found["decode"], first)
        assert connects(plan, source, found["decode"], last)
    for source in (found["decode"], found["gateway"], NEIGHBOUR):
        for port in (15000, 15007, 15015, 16000, 17000):
            assert not connects(plan, source, found["decode"], port), (source.name, port)


@pytest.mark.parametrize(
    ("model", "head", "opens"),
    [
        ("pvc://claim/model", "hf://org/head", True),
        ("pvc://claim/model", "pvc://claim/head", False),
        ("pvc://claim/model", None, False),
        ("hf://org/model", "pvc://claim/head", True),
    ],
)
def test_workers_reach_the_hub_for_a_draft_head_too(model: str, head: str | None, opens: bool) -> None:
    for method in ("Auto", "Off"):
        engine = {"speculative": {"method": method} | ({} if head is None else {"draft": {"uri": head}})}
        plan = blueprint(model={"uri": model}, engine=engine)
        wanted = opens and (method == "Auto" or model.startswith("hf://"))
        assert connects(plan, pods(plan)["decode"], INTERNET, 443) is wanted, method
