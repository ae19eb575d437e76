"""Command lines and files of the cluster of plain binaries."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.cluster.binaries.backend import PROGRAMS, plan_key
from e2e.cluster.binaries.components import REGISTRY_HOST, ClusterPlan, commands, files
from e2e.cluster.binaries.network import Addresses
from e2e.cluster.binaries.pki import plan_certificates


@pytest.fixture
def plan() -> ClusterPlan:
    return ClusterPlan(
        state=Path("/state"),
        addresses=Addresses(slot=3),
        programs={name: Path("/bin") / name for name in (*PROGRAMS, "containerd")},
        containerd_root=Path("/cache/containerd"),
        registry_storage=Path("/cache/registry"),
        cni_plugins=Path("/usr/lib/cni"),
        snapshotter="overlayfs",
        can_lower_oom_score=False,
        cgroup_root="/tandem-abc",
    )


def test_every_component_starts_its_own_program(plan: ClusterPlan) -> None:
    assert {name: command[0] for name, command in commands(plan).items()} == {
        name: f"/bin/{name}" for name in (*PROGRAMS, "containerd") if name not in {"pause", "pull"}
    }


def test_json_files_are_json_and_toml_files_toml(plan: ClusterPlan) -> None:
    for path, text in files(plan).items():
        if path.suffix in {".json", ".conflist"}:
            json.loads(text)
        elif path.suffix == ".toml":
            tomllib.loads(text)


@pytest.mark.parametrize("allowed", [True, False])
def test_oom_scores_are_left_alone_without_the_capability(plan: ClusterPlan, allowed: bool) -> None:
    config = files(replace(plan, can_lower_oom_score=allowed))[Path("/state/containerd/config.toml")]
    cri = tomllib.loads(config)["plugins"]["io.containerd.grpc.v1.cri"]
    assert cri["restrict_oom_score_adj"] is not allowed


def test_only_the_local_registry_is_reached(plan: ClusterPlan) -> None:
    folder = Path("/state/containerd/certs.d")
    hosts = {path.parent.name: tomllib.loads(text) for path, text in files(plan).items() if folder in path.parents}
    assert hosts[REGISTRY_HOST]["server"] == "http://10.88.3.2:5000"
    assert hosts["_default"]["server"] == "http://127.0.0.1:1"
    assert set(hosts) == {REGISTRY_HOST, "_default"}


def test_the_kubelet_keeps_to_its_own_control_group(plan: ClusterPlan) -> None:
    config = json.loads(files(plan)[Path("/state/kubelet.json")])
    assert config["cgroupRoot"] == "/tandem-abc"
    assert config["failCgroupV1"] is False


@pytest.mark.parametrize("change", [{"addresses": Addresses(slot=4)}, {"snapshotter": "native"}])
def test_the_key_changes_with_the_plan(plan: ClusterPlan, change: dict[str, object]) -> None:
    assert plan_key(replace(plan, **change)) != plan_key(plan)


def test_the_api_server_is_known_by_every_address_clients_use() -> None:
    addresses = Addresses(slot=3)
    (certificate,) = (c for c in plan_certificates(addresses) if c.name == "apiserver")
    assert {f"IP:{addresses.node}", f"IP:{addresses.api_service}", "DNS:kubernetes.default.svc"} <= set(
        certificate.names
    )


def test_servers_behind_the_api_server_believe_it_alone(plan: ClusterPlan) -> None:
    """Whoever the authority of `--requestheader-client-ca-file` has signed may speak as anybody."""
    flags = dict(flag.split("=", 1) for flag in commands(plan)["kube-apiserver"][1:] if "=" in flag)
    authority = Path(flags["--requestheader-client-ca-file"]).stem
    assert flags["--client-ca-file"] != flags["--requestheader-client-ca-file"]
    signed = [c for c in plan_certificates(Addresses(slot=3)) if c.authority == authority]
    assert [f"/CN={flags['--requestheader-allowed-names']}"] == [c.subject for c in signed]
    assert [Path(flags["--proxy-client-cert-file"]).stem] == [c.name for c in signed]
