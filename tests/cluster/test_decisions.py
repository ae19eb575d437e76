"""Small decisions: backend, settings, disk, volumes, mirrors, artifacts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster import choose, mirror
from e2e.cluster.artifacts import list_containers
from e2e.cluster.binaries.api import is_node_ready
from e2e.cluster.choose import choose_backend, choose_name
from e2e.cluster.connection import recorded_settings
from e2e.cluster.disk import judge
from e2e.cluster.errors import ClusterError, CommandFailed
from e2e.cluster.existing import ExistingBackend
from e2e.cluster.images.base_image import parse_mirror
from e2e.cluster.kind import build_config
from e2e.cluster.settings import find_ca_bundle, read_settings
from e2e.cluster.storage import POOL_SIZE, plan_pool, volume_names


@pytest.mark.parametrize(
    ("asked", "docker", "name"),
    [(None, True, "kind"), (None, False, "binaries"), ("existing", True, "existing"), ("binaries", True, "binaries")],
)
def test_the_backend_is_the_asked_one_or_what_the_machine_can(asked: str | None, docker: bool, name: str) -> None:
    assert choose_name(asked, docker=docker) == name


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"KUBECONFIG": "/home/me/.kube/config"}, "existing"),
        ({"KUBECONFIG": "/home/me/.kube/config", "TANDEM_CLUSTER": "binaries"}, "binaries"),
        ({"KUBECONFIG": "CHECKOUT/.cache/cluster/pki/admin.kubeconfig", "TANDEM_CLUSTER": ""}, "binaries"),
        ({}, "binaries"),
    ],
)  # fmt: skip
def test_kubeconfig_alone_chooses_the_users_cluster(
    environment: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the demo of this checkout says to export is no cluster of the user's."""
    monkeypatch.setattr(choose, "docker_answers", lambda: False)
    environment = {key: value.replace("CHECKOUT", str(tmp_path)) for key, value in environment.items()}
    assert choose_backend(read_settings(environment, tmp_path)).name == name


def test_without_a_registry_the_users_cluster_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    access = tmp_path / "config"
    access.touch()
    backend = ExistingBackend(read_settings({"KUBECONFIG": str(access)}, tmp_path))
    with pytest.raises(ClusterError, match=r"TANDEM_REGISTRY to a registry .* unset KUBECONFIG"):
        backend.check()
    ExistingBackend(read_settings({"KUBECONFIG": str(access), "TANDEM_REGISTRY": "r"}, tmp_path)).check()


def test_a_misspelled_backend_is_answered_with_the_choices() -> None:
    with pytest.raises(ClusterError, match="kind, binaries, existing"):
        choose_name("minikube", docker=False)


def test_empty_variables_count_as_unset(tmp_path: Path) -> None:
    settings = read_settings({"TANDEM_CACHE": "", "TANDEM_CLUSTER": "", "KUBECONFIG": ""}, tmp_path)
    assert (settings.cache, settings.backend, settings.kubeconfig) == (tmp_path / ".cache", None, None)


def test_a_shared_cache_leaves_the_state_in_the_checkout(tmp_path: Path) -> None:
    settings = read_settings({"TANDEM_CACHE": str(tmp_path / "shared")}, tmp_path / "checkout")
    assert settings.cache == tmp_path / "shared"
    assert settings.state == tmp_path / "checkout" / ".cache" / "cluster"


def test_two_checkouts_have_clusters_of_different_names(tmp_path: Path) -> None:
    assert read_settings({}, tmp_path / "a").id != read_settings({}, tmp_path / "b").id


def test_the_named_certificate_bundle_wins(tmp_path: Path) -> None:
    bundle = tmp_path / "own.crt"
    bundle.touch()
    assert find_ca_bundle({"SSL_CERT_FILE": str(bundle)}) == bundle


@pytest.mark.parametrize(
    ("free", "ahead", "go_on", "says"),
    [(100, "cold", True, False), (25, "cold", True, True), (15, "cold", False, True), (15, "images", True, False),
     (10, "images", False, True), (10, "warm", True, False), (1, "warm", False, True)],
)  # fmt: skip
def test_disk_is_judged_before_the_start(free: float, ahead: str, go_on: bool, says: bool) -> None:
    verdict, message = judge(free, ahead)
    assert verdict is go_on
    assert (message is not None) is says


def volume(name: str, phase: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"phase": phase}}


def test_an_empty_cluster_gets_the_whole_pool() -> None:
    assert plan_pool([]) == ([], volume_names())


def test_released_volumes_are_made_anew_and_bound_ones_left_alone() -> None:
    phases = ["Bound", "Released"] + ["Available"] * (POOL_SIZE - 2)
    existing = [volume(name, phase) for name, phase in zip(volume_names(), phases, strict=True)]
    assert plan_pool(existing) == ([volume_names()[1]], [volume_names()[1]])


def test_volumes_of_others_are_left_alone() -> None:
    released, wanted = plan_pool([volume("theirs", "Released")])
    assert "theirs" not in released + wanted


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("Types: deb\nURIs: http://mirror.example/debian\nSuites: bookworm\n", "http://mirror.example/debian"),
        ("deb [signed-by=/x.gpg] https://mirror.example/debian/ bookworm main\n", "https://mirror.example/debian/"),
        ("deb https://other.example/node nodistro main\n", None),
        ("# deb http://commented.example/debian bookworm main\n", None),
    ],
)
def test_the_machines_own_debian_mirror_is_found(text: str, address: str | None) -> None:
    assert parse_mirror(text) == address


def test_the_mirrors_manifest_gets_its_image() -> None:
    objects = mirror.build_objects(mirror.MANIFEST.read_text(), "registry/mirror:1")
    (deployment,) = (o for o in objects if o["kind"] == "Deployment")
    assert [c["image"] for c in deployment["spec"]["template"]["spec"]["containers"]] == ["registry/mirror:1"]
    assert "IMAGE" not in yaml.safe_dump_all(objects).split()


def container(name: str, state: str, restarts: int) -> dict[str, Any]:
    return {"name": name, "state": {state: {}}, "restartCount": restarts}


@pytest.mark.parametrize(
    ("state", "restarts", "runs"),
    [("running", 0, [False]), ("running", 2, [False, True]), ("waiting", 0, []), ("waiting", 1, [False, True])],
)
def test_logs_are_collected_of_all_runs_there_were(state: str, restarts: int, runs: list[bool]) -> None:
    pod = {
        "metadata": {"namespace": "n", "name": "p"},
        "status": {"containerStatuses": [container("c", state, restarts)]},
    }
    assert list(list_containers(pod)) == [("n", "p", "c", previous) for previous in runs]


@pytest.mark.parametrize(
    ("status", "taints", "ready"), [("True", [], True), ("True", [{"key": "not-ready"}], False), ("False", [], False)]
)
def test_a_node_is_ready_once_pods_may_go_there(status: str, taints: list[Any], ready: bool) -> None:
    node = {"spec": {"taints": taints}, "status": {"conditions": [{"type": "Ready", "status": status}]}}
    assert is_node_ready(node) is ready


def test_a_failed_command_tells_what_the_program_said() -> None:
    assert "no such container" in str(CommandFailed(["ctr", "x"], 1, "line\nno such container\n"))


def test_another_backend_than_the_running_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".cache" / "cluster").mkdir(parents=True)
    record = {"backend": "binaries", "kubeconfig": "/k", "registry": None}
    settings = read_settings({"TANDEM_CLUSTER": "kind"}, tmp_path)
    settings.record_file.write_text(json.dumps(record))
    with pytest.raises(ClusterError, match="the cluster that is up is `binaries`"):
        recorded_settings(settings)


def test_later_commands_need_no_variables(tmp_path: Path) -> None:
    (tmp_path / ".cache" / "cluster").mkdir(parents=True)
    settings = read_settings({}, tmp_path)
    settings.record_file.write_text(json.dumps({"backend": "existing", "kubeconfig": "/k", "registry": "r"}))
    recorded = recorded_settings(settings)
    assert (recorded.backend, recorded.kubeconfig, recorded.registry) == ("existing", Path("/k"), "r")


@pytest.mark.parametrize("given", [{}, {"TANDEM_NODE_IMAGE": "registry.example.com/node:v1"}])
def test_kinds_node_is_kinds_own_unless_another_is_named(given: dict[str, str], tmp_path: Path) -> None:
    config = build_config(tmp_path, read_settings(given, tmp_path).node_image)
    (node,) = config["nodes"]
    assert node.get("image") == given.get("TANDEM_NODE_IMAGE")
    (patch,) = config["kubeadmConfigPatches"]
    assert json.loads(patch)["kind"] == "KubeletConfiguration"
