"""The store that workers share blocks through: its master, a holder beside every worker, who reaches whom, and what is
told of it."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from operator_objects import blueprint
from pydantic import ValidationError
from tandem_api import names
from tandem_api.names import Role
from tandem_api.quantities import parse_quantity
from tandem_api.telemetry import TierTelemetry
from tandem_operator.gateways.tiers import store_condition
from tandem_operator.objects.manifests import ChildKey, Manifest
from tandem_operator.observe.causes import pod_problem
from tandem_operator.observe.roles import pods_of
from tandem_operator.workloads import Blueprint, build_children
from tandem_operator.workloads.configs import worker_config
from tandem_worker.tiers.mooncake.program import parse

STORE = {"memory": "1Gi"}


def with_store(store: dict[str, Any] | None = None, **spec: Any) -> Blueprint:
    return blueprint(kv={"store": STORE if store is None else store}, **spec)


def child(plan: Blueprint, kind: str, suffix: str) -> Manifest:
    found = [c for c in build_children(plan) if (c["kind"], c["metadata"]["name"]) == (kind, f"{plan.name}{suffix}")]
    assert len(found) == 1, (kind, suffix)
    return found[0]


def holder(plan: Blueprint, suffix: str) -> Manifest:
    (container,) = child(plan, "StatefulSet", suffix)["spec"]["template"]["spec"]["initContainers"]
    return container


def test_every_worker_has_a_holder_that_starts_before_it_and_ends_after_it() -> None:
    plan = with_store(prefill={})
    for suffix in ("-prefill", "-decode"):
        container = holder(plan, suffix)
        assert container["restartPolicy"] == "Always"
        assert container["image"] == plan.worker_image
        assert "--global_segment_size=1024 MB" in container["args"]
        assert (
            f"--master_server_address={plan.name}-store.{plan.model.metadata.namespace}.svc:50051" in container["args"]
        )
        assert container["resources"]["limits"]["memory"] == str((1024 + 512) << 20)
    for role in plan.worker_roles:
        store = worker_config(plan, role).kv.store
        assert store is not None
        assert store.given_bytes == 1024 << 20
        assert f"--port={store.port}" in holder(plan, f"-{role.value}")["args"]


def test_a_model_gets_one_master_of_its_own() -> None:
    plan = with_store()
    master = child(plan, "Deployment", "-store")
    assert master["spec"]["replicas"] == 1
    assert master["spec"]["strategy"] == {"type": "Recreate"}
    service = child(plan, "Service", "-store")
    assert service["spec"]["selector"] == master["spec"]["selector"]["matchLabels"]
    assert child(with_store(suspend=True), "Deployment", "-store")["spec"]["replicas"] == 0


def test_the_masters_image_is_pulled_and_placed_as_the_workers_is() -> None:
    tolerations = [{"key": "gpu", "operator": "Exists"}]
    decode = {
        "imagePullSecrets": [{"name": "ours"}], "tolerations": tolerations, "nodeSelector": {"pool": "a"},
        "priorityClassName": "high", "affinity": {"podAntiAffinity": {}},
        "podTemplate": {
            "spec": {
                "imagePullSecrets": [{"name": "more"}],
                "containers": [{"name": "worker", "image": "mirror/worker:1"}],
            }
        },
    }  # fmt: skip
    plan = with_store(prefill={}, decode=decode)
    pod = child(plan, "Deployment", "-store")["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == holder(plan, "-decode")["image"] == "mirror/worker:1"
    assert pod["imagePullSecrets"] == [{"name": "ours"}, {"name": "more"}]
    assert (pod["tolerations"], pod["nodeSelector"], pod["priorityClassName"]) == (tolerations, {"pool": "a"}, "high")
    assert "affinity" not in pod
    assert "imagePullSecrets" not in child(with_store(), "Deployment", "-store")["spec"]["template"]["spec"]


def test_a_shared_master_is_joined_and_none_is_made() -> None:
    plan = with_store({"memory": "1Gi", "master": "mooncake.kv.svc:6000"})
    names_of = [c["metadata"]["name"] for c in build_children(plan)]
    assert f"{plan.name}-store" not in names_of
    assert "--master_server_address=mooncake.kv.svc:6000" in holder(plan, "-decode")["args"]


def test_masters_that_stand_by_for_each_other_are_found_by_their_etcd() -> None:
    plan = with_store({"memory": "1Gi", "master": "etcd://etcd-0.etcd.kv.svc:2379;10.0.0.7:2479"})
    master = "--master_server_address=etcd://etcd-0.etcd.kv.svc:2379;10.0.0.7:2479"
    assert master in holder(plan, "-decode")["args"]
    egress = child(plan, "NetworkPolicy", "-decode")["spec"]["egress"]
    open_to_all = {port["port"] for rule in egress if "to" not in rule for port in rule["ports"]}
    assert {2379, 2479, names.STORE_MASTER_PORT} <= open_to_all


def test_a_disk_is_a_volume_of_the_pod_and_one_file_fills_it() -> None:
    plan = with_store({"memory": "1Gi", "disk": "64Gi"}, prefill={})
    assert (
        "--enable_offload=true"
        in child(plan, "Deployment", "-store")["spec"]["template"]["spec"]["containers"][0]["args"]
    )
    for suffix in ("-prefill", "-decode"):
        container = holder(plan, suffix)
        pod = child(plan, "StatefulSet", suffix)["spec"]["template"]["spec"]
        (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == names.STORE_DISK_PATH]
        (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
        assert volume["emptyDir"] == {"sizeLimit": "64Gi"}
        assert not [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == mount["name"]]
        environment = {each["name"]: each.get("value") for each in container["env"]}
        file = int(environment["MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES"])
        assert (60 << 30) <= file < (64 << 30)
        assert environment["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] == names.STORE_DISK_PATH
        options = parse(container["args"])
        assert options.disk is not None
        assert (str(options.disk), options.disk_bytes) == (names.STORE_DISK_PATH, file)
        assert options.settle_seconds > 5  # after so many the master has forgotten a holder that is gone
        assert options.command[0] == "mooncake_client"
        assert "--enable_offload=true" in options.command
        assert int(container["resources"]["limits"]["memory"]) > (1024 + 512) << 20


def test_a_holders_disk_is_asked_at_a_port_that_the_kernel_chooses() -> None:
    with_disk = with_store({"memory": "1Gi", "disk": "64Gi"})
    for plan, there in ((with_store(), False), (with_disk, True)):
        rules = child(plan, "NetworkPolicy", "-decode")["spec"]
        for peers, key in ((rules["ingress"], "from"), (rules["egress"], "to")):
            assert (32768 in ports(peers, key, "decode")) is there


def test_a_model_without_a_disk_reads_its_blocks_from_the_disks_of_who_shares_its_master() -> None:
    """Mooncake puts a block into anybody's memory, and its holder moves it on to its own disk."""
    shared = {"memory": "1Gi", "master": "mooncake.kv.svc:6000"}
    plain, with_disk = with_store(shared), with_store({**shared, "disk": "64Gi"})
    for plan, opens in ((plain, False), (with_disk, True)):
        rules = child(plan, "NetworkPolicy", "-decode")["spec"]
        for peers, key, there in ((rules["ingress"], "from", opens), (rules["egress"], "to", True)):
            (rule,) = [each for each in peers if 14000 in [port.get("port") for port in each.get("ports", [])]]
            assert (32768 in [port["port"] for port in rule["ports"]]) is there, (opens, key)


def test_there_is_memory_for_all_that_disks_can_have() -> None:
    """A holder takes 1.1 KB for each block on its disk, however small blocks are, and a master 1.7 KB for each."""
    seen = {}
    for disk in ("2Gi", "200Gi"):
        container = holder(with_store({"memory": "1Gi", "disk": disk}), "-decode")
        (nodes,) = [int(each["value"]) for each in container["env"] if each["name"].endswith("CAPACITY_NODES")]
        asked, most = (int(container["resources"][key]["memory"]) for key in ("requests", "limits"))
        assert (1024 + 512) << 20 < asked <= most
        assert most - ((1024 + 512) << 20) > 1100 * nodes
        seen[disk] = nodes
    master = child(with_store({"memory": "1Gi", "disk": "200Gi"}), "Deployment", "-store")
    (container,) = master["spec"]["template"]["spec"]["containers"]
    assert parse_quantity(container["resources"]["limits"]["memory"]) > 8 * 1700 * seen["200Gi"]


def test_how_many_workers_there_are_is_nothing_to_the_master() -> None:
    """Started again it forgets what is in memory."""
    few, many = (child(with_store(decode={"replicas": count}), "Deployment", "-store") for count in (1, 64))
    assert few == many


def test_without_a_disk_nothing_is_said_of_one() -> None:
    container = holder(with_store(), "-decode")
    assert not [each for each in container["env"] if "OFFLOAD" in each["name"] or "OFFSET" in each["name"]]
    assert not [each for each in container["args"] if "offload" in each or "disk" in each]


@pytest.mark.parametrize("suffix", ["-store", "-decode"])
def test_a_program_is_watched_by_the_process_above_it_and_that_by_the_kubelet(suffix: str) -> None:
    plan = with_store()
    pod = child(plan, "Deployment" if suffix == "-store" else "StatefulSet", suffix)["spec"]["template"]["spec"]
    container = pod["containers"][0] if suffix == "-store" else pod["initContainers"][0]
    options = parse(container["args"])
    assert options.alive_port == names.STORE_HEALTH_PORT
    assert any(f"port={names.STORE_HEALTH_PORT}" in each for each in options.command)
    assert options.notes is not None
    assert str(options.notes.alive_path) in container["livenessProbe"]["exec"]["command"][-1]
    assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
    if suffix == "-decode":
        store = worker_config(plan, Role.UNIFIED).kv.store
        assert store is not None
        assert str(options.notes.alive_path.parent) == store.notes_path
        assert {"name": "tmp", "mountPath": "/tmp"} in pod["containers"][0]["volumeMounts"]
        assert "readinessProbe" not in container  # a pod without its store serves


@pytest.mark.parametrize(("age", "lives"), [(0, True), (30, True), (300, False), (None, False)])
def test_the_kubelet_sees_whether_the_process_above_looks(tmp_path: Path, age: int | None, lives: bool) -> None:
    command = holder(with_store(), "-decode")["livenessProbe"]["exec"]["command"]
    if age is not None:
        (tmp_path / "alive").touch()
        then = time.time() - age
        os.utime(tmp_path / "alive", (then, then))
    here = [each.replace(names.STORE_NOTES_PATH, str(tmp_path)) for each in command]
    assert (subprocess.run(here, capture_output=True, check=False).returncode == 0) is lives


@pytest.mark.parametrize("suffix", ["-store", "-decode"])
def test_pods_meet_the_restricted_standard(suffix: str) -> None:
    kind = "Deployment" if suffix == "-store" else "StatefulSet"
    pod = child(with_store(), kind, suffix)["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def ports(rules: list[Manifest], key: str, component: str) -> set[int]:
    """What rules allow from or to the pods of one component."""
    return {
        port["port"]
        for rule in rules
        for peer in rule.get(key, [])
        if peer.get("podSelector", {}).get("matchLabels", {}).get("app.kubernetes.io/component") == component
        for port in rule["ports"]
    }


def test_only_the_models_workers_reach_its_holders_and_its_master() -> None:
    plan = with_store(prefill={})
    first = names.STORE_DATA_PORTS[0]
    for suffix in ("-prefill", "-decode"):
        spec = child(plan, "NetworkPolicy", suffix)["spec"]
        for component in ("prefill", "decode"):
            assert first in ports(spec["ingress"], "from", component)
            assert first in ports(spec["egress"], "to", component)
        assert ports(spec["egress"], "to", "store") == {names.STORE_MASTER_PORT}
    spec = child(plan, "NetworkPolicy", "-store")["spec"]
    assert ports(spec["ingress"], "from", "prefill") == ports(spec["ingress"], "from", "decode") == {50051}
    assert len(spec["ingress"]) == 2
    assert spec["egress"] == []


def test_holders_of_a_shared_master_meet_within_their_namespace() -> None:
    spec = child(with_store({"memory": "1Gi", "master": "mooncake.kv.svc:6000"}), "NetworkPolicy", "-decode")["spec"]
    tandem = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": "tandem"}}}
    assert any(rule.get("from") == [tandem] for rule in spec["ingress"])
    assert any(6000 in [port["port"] for port in rule.get("ports", [])] for rule in spec["egress"])


def test_without_a_store_nothing_is_as_it_was_not() -> None:
    plan = blueprint()
    assert worker_config(plan, Role.UNIFIED).kv.store is None
    assert not [c for c in build_children(plan) if c["metadata"]["name"].endswith("-store")]
    assert "initContainers" not in child(plan, "StatefulSet", "-decode")["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kv": {"store": STORE}, "decode": {"parallelism": {"tensor": 2}}}, "kv.store needs workers of one rank"),
        ({"kv": {"store": STORE}, "engine": {"kind": "VLLM"}}, "kv.store is of Tandem's own engine"),
        ({"kv": {"store": {}}}, "memory"),
        ({"kv": {"store": STORE | {"kind": "Redis"}}}, "Mooncake"),
        ({"kv": {"store": STORE | {"disk": "1Gi"}}}, "disk must be larger than kv.store.memory"),
        ({"kv": {"store": STORE | {"disk": {"size": "1Ti"}}}}, "disk"),
        ({"kv": {"store": STORE | {"master": "mooncake.kv:70000"}}}, "must be host:port"),
        ({"kv": {"store": STORE | {"master": "mooncake.kv:0"}}}, "must be host:port"),
        ({"kv": {"store": STORE | {"master": "http://mooncake.kv:80"}}}, "must be host:port"),
        ({"kv": {"store": STORE | {"master": "mooncake.kv"}}}, "must be host:port"),
        ({"kv": {"store": STORE | {"master": "etcd://etcd.kv:2379,etcd.kv:2380"}}}, "must be host:port"),
        ({"kv": {"store": STORE | {"master": "etcd://"}}}, "must be host:port"),
        ({"kv": {"store": STORE | {"master": "redis://redis.kv:6379"}}}, "knows no Redis"),
        ({"kv": {"store": STORE | {"master": "k8s://kv/mooncake"}}}, "no Lease of Kubernetes"),
    ],
)
def test_what_makes_no_sense_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        blueprint(**spec)


def tell(reason: str | None, message: str = "") -> TierTelemetry:
    return TierTelemetry(tier="store", reason=reason, message=message)


@pytest.mark.parametrize(
    ("stores", "status", "reason", "words"),
    [
        ({}, "Unknown", "StoreNotSeen", "no worker has told"),
        ({"a": tell("Starting"), "b": tell(None)}, "Unknown", "StoreNotSeen", "still reaching"),
        ({"a": tell(None), "b": tell(None)}, "True", "StoreInUse", "2 workers"),
        (
            {"a": tell(None), "b": tell("StoreUnreachable", "the master does not answer")},
            "False",
            "StoreUnreachable",
            "1 of 2 workers do without the store .* b: the master does not answer",
        ),
    ],
)
def test_the_condition_says_what_workers_say(
    stores: dict[str, TierTelemetry], status: str, reason: str, words: str
) -> None:
    (condition,) = store_condition(with_store(), stores)
    assert (condition.type, condition.status, condition.reason) == ("KVStoreReady", status, reason)
    assert re.search(words, condition.message)
    assert store_condition(blueprint(), stores) == []
    assert store_condition(with_store(suspend=True), stores) == []


def test_an_image_of_the_holder_that_is_missing_is_named() -> None:
    """One that `podTemplate` asks for; else it is the worker's."""
    waits = {"waiting": {"reason": "ImagePullBackOff", "message": "mirror/holder:1 not found"}}
    status = {"initContainerStatuses": [{"name": "store", "image": "mirror/holder:1", "state": waits}]}
    found = pod_problem({"metadata": {"name": "m-decode-0"}, "status": status})
    assert found is not None
    assert (found.reason, found.stalled) == ("ImagePullFailed", True)
    assert "mirror/holder:1" in found.message


def test_pods_of_the_master_are_not_the_gateways() -> None:
    def pod(name: str, owner: str) -> Manifest:
        return {
            "metadata": {"name": name, "ownerReferences": [{"kind": "ReplicaSet", "name": owner, "controller": True}]}
        }

    plan = with_store()
    gateway = pod(f"{plan.name}-7d9f-x1", f"{plan.name}-7d9f")
    master = pod(f"{plan.name}-store-5c4b-x2", f"{plan.name}-store-5c4b")
    live = {ChildKey("Pod", each["metadata"]["name"]): each for each in (gateway, master)}
    assert pods_of(ChildKey("Deployment", plan.name), live) == [gateway]
    assert pods_of(ChildKey("Deployment", f"{plan.name}-store"), live) == [master]
