"""Golden manifests, and what must hold for every model. `UPDATE_GOLDEN=1 pytest ...` rewrites the golden files."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from operator_objects import RELEASE, blueprint, cases, foreign_cases
from tandem_api import names
from tandem_api.launch import GatewayConfig, SpeculativeConfig, WorkerConfig
from tandem_api.names import Role
from tandem_operator.objects.errors import InvalidOverlayError
from tandem_operator.objects.manifests import Manifest, child_key
from tandem_operator.workloads import Blueprint, build_children
from tandem_operator.workloads.configs import gateway_config, worker_config
from tandem_operator.workloads.release import Release
from tandem_operator.workloads.workers import source_volumes, token_env

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = cases() | foreign_cases()

parallelism = st.fixed_dictionaries(
    {axis: st.integers(1, 3) for axis in ("tensor", "pipeline", "expert", "data")}
).flatmap(
    lambda spread: st.fixed_dictionaries(
        {
            "parallelism": st.just(spread),
            "nodesPerReplica": st.sampled_from([n for n in range(1, 9) if math.prod(spread.values()) % n == 0]),
            "replicas": st.integers(0, 5),
        }
    )
)
specs = st.fixed_dictionaries(
    {
        "prefill": st.none() | parallelism,
        "decode": parallelism,
        "gateway": st.fixed_dictionaries({"replicas": st.integers(0, 3)}),
        "suspend": st.booleans(),
        "model": st.sampled_from([{"uri": uri} for uri in ("hf://a/b", "pvc://c/d", "file:///e")]),
    }
)


class PlainDumper(yaml.SafeDumper):
    """Writes repeated parts out."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Go's readers take `n` and `y` for booleans too."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if text.lower() in ("n", "y") else None)


PlainDumper.add_representer(str, _represent_text)


def text_of(children: list[Manifest]) -> str:
    return yaml.dump_all(children, Dumper=PlainDumper, sort_keys=False, width=120)


def of_kind(plan: Blueprint, kind: str) -> list[Manifest]:
    return [child for child in build_children(plan) if child["kind"] == kind]


@pytest.mark.parametrize("name", sorted(CASES))
def test_golden(name: str) -> None:
    text = text_of(build_children(blueprint(**CASES[name])))
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


@given(spec=specs)
def test_children_are_owned_named_apart_and_stable(spec: dict[str, Any]) -> None:
    plan = blueprint(**spec)
    made = build_children(plan)
    assert len({child_key(child) for child in made}) == len(made)
    assert made == build_children(plan)
    for child in made:
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["controller"], owner["uid"]) == (True, plan.model.metadata.uid)
        assert child["metadata"]["labels"]["tandem.dev/model"] == "m"
        assert len(child["metadata"]["name"]) <= 63


@given(spec=specs)
def test_pods_meet_the_restricted_standard(spec: dict[str, Any]) -> None:
    for child in build_children(blueprint(**spec)):
        if child["kind"] not in ("StatefulSet", "Deployment"):
            continue
        pod = child["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not any("hostPath" in volume for volume in pod["volumes"])
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}


@given(spec=specs)
def test_both_roles_share_the_revision_and_suspension_takes_every_pod(spec: dict[str, Any]) -> None:
    plan = blueprint(**spec)
    for child in of_kind(plan, "StatefulSet"):
        assert child["spec"]["template"]["metadata"]["labels"]["tandem.dev/revision"] == plan.revision
        assert not plan.model.spec.suspend or child["spec"]["replicas"] == 0
    for child in of_kind(plan, "Deployment"):
        assert not plan.model.spec.suspend or child["spec"]["replicas"] == 0


def test_what_makes_blocks_incompatible_changes_the_revision() -> None:
    base = blueprint().revision
    assert blueprint(decode={"replicas": 7}, drain={"timeout": "1s"}).revision == base
    others = [
        blueprint(model={"uri": "hf://org/other"}),
        blueprint(model={"uri": "hf://org/repo", "revision": "v2"}),
        blueprint(engine={"dtype": "Float16"}),
        blueprint(engine={"image": "other:1"}),
        blueprint(release=Release(worker_image="worker:2", gateway_image="gateway:1")),
    ]
    assert len({base, *(other.revision for other in others)}) == 6


def test_an_image_given_through_a_pod_template_is_another_build() -> None:
    overlay = {"spec": {"containers": [{"name": "worker", "image": "patched:1"}, {"name": "side", "image": "x"}]}}
    plan = blueprint(prefill={}, decode={"podTemplate": overlay})
    assert plan.revision_of(Role.DECODE) == blueprint(engine={"image": "patched:1"}).revision
    assert plan.revision_of(Role.PREFILL) == blueprint().revision
    for workload in of_kind(plan, "StatefulSet"):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert labels["tandem.dev/revision"] == plan.revision_of(Role(labels["tandem.dev/role"]))


@given(spec=specs)
def test_replicas_are_whole_groups_and_every_rank_has_its_ports(spec: dict[str, Any]) -> None:
    plan = blueprint(**spec)
    for role, workload in zip(plan.worker_roles, sorted(of_kind(plan, "StatefulSet"), key=by_component), strict=True):
        wanted = plan.worker_spec(role)
        size, template = wanted.nodes_per_replica, workload["spec"]["template"]
        assert template["metadata"]["labels"]["tandem.dev/nodes-per-replica"] == str(size)
        assert workload["spec"]["replicas"] == (0 if plan.model.spec.suspend else wanted.replicas * size)
        assert workload["spec"]["podManagementPolicy"] == "Parallel"
        group = worker_config(plan, role).group
        assert (group.num_nodes, group.ranks_per_node) == (size, wanted.ranks_per_pod)
        services = {c["metadata"]["name"]: c["spec"] for c in of_kind(plan, "Service")}
        assert services[group.service]["clusterIP"] == "None"
        assert services[group.service]["publishNotReadyAddresses"], "ranks meet before they are ready"
        assert workload["spec"]["serviceName"] == group.service
        (container,) = template["spec"]["containers"]
        numbers = [port["containerPort"] for port in container["ports"]]
        assert len(set(numbers)) == len(numbers)
        assert all(len(port["name"]) <= 15 for port in container["ports"])
        ranks = range(names.WORKER_KV_PORT, names.WORKER_KV_PORT + group.ranks_per_node)
        assert set(ranks) <= set(numbers)
        shared = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
        assert bool(shared) == (group.ranks_per_node > 1)


def by_component(child: Manifest) -> bool:
    return child["metadata"]["name"] != "m-prefill"


def test_parallelism_rolls_its_own_role_and_leaves_the_revision() -> None:
    """Blocks mean the same however a worker is spread, so the other role serves on."""

    def templates(plan: Blueprint) -> dict[str, str]:
        return {
            c["metadata"]["name"]: c["spec"]["template"]["metadata"]["annotations"]["tandem.dev/config-hash"]
            for c in of_kind(plan, "StatefulSet")
        }

    single = blueprint(prefill={})
    spread = blueprint(prefill={}, decode={"parallelism": {"tensor": 2}})
    assert spread.revision == single.revision
    assert templates(spread)["m-prefill"] == templates(single)["m-prefill"]
    assert templates(spread)["m-decode"] != templates(single)["m-decode"]


def test_ranks_of_a_pod_share_its_cpu_limit() -> None:
    def threads(**decode: Any) -> str:
        (workload,) = of_kind(blueprint(decode={"resources": {"limits": {"cpu": 8}}} | decode), "StatefulSet")
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        return next(entry["value"] for entry in container["env"] if entry["name"] == "OMP_NUM_THREADS")

    assert threads() == "8"
    assert threads(parallelism={"tensor": 3}) == "3"
    assert threads(parallelism={"tensor": 4}, nodesPerReplica=4) == "8"


def test_selectors_never_change_when_prefill_comes_or_goes() -> None:
    def selectors(plan: Blueprint) -> dict[str, Any]:
        return {child["metadata"]["name"]: child["spec"]["selector"] for child in of_kind(plan, "StatefulSet")}

    assert selectors(blueprint())["m-decode"] == selectors(blueprint(prefill={}))["m-decode"]


def test_configurations_read_back_and_roll_the_pods() -> None:
    def config_and_template(plan: Blueprint, name: str) -> tuple[str, str]:
        (workload,) = [
            c
            for c in build_children(plan)
            if c["kind"] != "Service" and c["metadata"]["name"] == name and "template" in c.get("spec", {})
        ]
        template = workload["spec"]["template"]
        volume = template["spec"]["volumes"][0]["configMap"]["name"]
        (text,) = [c["data"]["config.json"] for c in of_kind(plan, "ConfigMap") if c["metadata"]["name"] == volume]
        return text, template["metadata"]["annotations"]["tandem.dev/config-hash"]

    worker, before = config_and_template(blueprint(prefill={}), "m-decode")
    assert WorkerConfig.model_validate_json(worker).role == "decode"
    assert config_and_template(blueprint(prefill={}, engine={"maxBatchTokens": 64}), "m-decode")[1] != before
    unified, _ = config_and_template(blueprint(), "m-decode")
    assert WorkerConfig.model_validate_json(unified).role == "unified"
    gateway, _ = config_and_template(blueprint(prefill={}), "m")
    assert GatewayConfig.model_validate_json(gateway).disaggregated


def test_workers_get_no_token() -> None:
    (workload,) = of_kind(blueprint(), "StatefulSet")
    assert workload["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


@given(spec=specs)
def test_pods_find_their_keys_and_probes_ask_the_port_that_wants_none(spec: dict[str, Any]) -> None:
    plan = blueprint(**spec)
    for workload in [*of_kind(plan, "StatefulSet"), *of_kind(plan, "Deployment")]:
        pod = workload["spec"]["template"]["spec"]
        (volume,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
        assert (volume["secretName"], volume["defaultMode"]) == ("m-keys", 0o440)
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"], "who may read mode 0440"
        files = [item["path"] for item in volume["items"]]
        assert files == (["api.json"] if workload["kind"] == "Deployment" else ["peers.json", "api.json"])
        (container,) = pod["containers"]
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "keys"]
        assert mount == {"name": "keys", "mountPath": "/etc/tandem/keys", "readOnly": True}, "the folder, never a file"
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["metrics"] == 9090
        probes = [container[name]["httpGet"]["port"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
        assert set(probes) == {"metrics"}
    for config_map in of_kind(plan, "ConfigMap"):
        assert json.loads(config_map["data"]["config.json"])["keysPath"] == "/etc/tandem/keys"


def test_the_release_is_not_in_a_model_that_names_its_own_images() -> None:
    plan = blueprint(engine={"image": "w:9"}, gateway={"image": "g:9"})
    assert RELEASE.worker_image not in text_of(build_children(plan))
    assert RELEASE.gateway_image not in text_of(build_children(plan))


def test_overlays_cannot_touch_what_selectors_rest_on() -> None:
    overlay = {"metadata": {"labels": {"tandem.dev/role": "prefill"}}}
    with pytest.raises(InvalidOverlayError, match=r"spec\.decode\.podTemplate\.metadata\.labels: tandem\.dev/role"):
        build_children(blueprint(decode={"podTemplate": overlay}))


@pytest.mark.parametrize(("limit", "held"), [(None, 512), ("4Gi", 512), ("256Mi", 128)])
def test_a_gateway_holds_no_more_than_its_memory_has_room_for(limit: str | None, held: int) -> None:
    gateway = {"resources": {"limits": {"memory": limit}}} if limit else {}
    assert gateway_config(blueprint(gateway=gateway)).max_held_bytes == held << 20


def test_workers_are_told_how_to_guess() -> None:
    asked = {"method": "Lookup", "maxTokens": 5, "adaptive": False, "history": "2Mi"}
    told = worker_config(blueprint(engine={"speculative": asked}), Role.UNIFIED).speculative
    assert (told.method, told.max_tokens, told.adaptive, told.history_bytes) == ("Lookup", 5, False, 2 << 20)
    silent = worker_config(blueprint(), Role.UNIFIED)
    assert silent.speculative == SpeculativeConfig()
    assert "speculative" not in silent.set_json(), "a release that adds the field restarts nobody"


def test_workers_are_told_where_the_head_is() -> None:
    asked = {"method": "Draft", "draft": {"uri": "hf://org/head", "revision": "abc"}}
    config = worker_config(blueprint(engine={"speculative": asked}), Role.UNIFIED)
    assert config.speculative.method == "Draft"
    assert config.speculative.head is not None
    assert (config.speculative.head.uri, config.speculative.head.revision) == ("hf://org/head", "abc")
    off = worker_config(blueprint(engine={"speculative": asked | {"method": "Off"}}), Role.UNIFIED)
    silent = worker_config(blueprint(engine={"speculative": {"method": "Off"}}), Role.UNIFIED)
    assert off.set_json() == silent.set_json()


def test_blocks_with_another_head_are_of_another_revision() -> None:
    def revision(**draft: str) -> str:
        asked = {"method": "Auto", "draft": draft} if draft else {"method": "Auto"}
        return blueprint(engine={"speculative": asked}).revision

    uri = "hf://org/head"
    revisions = [revision(), revision(uri=uri), revision(uri=uri, revision="b"), revision(uri="hf://org/c")]
    assert len(set(revisions)) == 4
    assert revisions[0] == blueprint().revision


@pytest.mark.parametrize("model", ["hf://a/b", "pvc://one/b"])
@pytest.mark.parametrize("own", [None, "heads"])
def test_a_private_head_has_a_token_whatever_the_model_comes_from(model: str, own: str | None) -> None:
    draft = {"uri": "hf://a/head"} | ({} if own is None else {"secretRef": {"name": own, "key": "it"}})
    source = {"uri": model} | ({"secretRef": {"name": "models"}} if model.startswith("hf") else {})
    told = token_env(blueprint(model=source, engine={"speculative": {"draft": draft}}))
    named = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in told}
    assert named.get("HF_TOKEN_DRAFT") == (None if own is None else {"name": "heads", "key": "it"})
    assert ("HF_TOKEN" in named) == ("secretRef" in source)
    assert not token_env(blueprint(engine={"speculative": {"method": "Off", "draft": draft}}))


@pytest.mark.parametrize(
    ("model", "draft", "mounted"),
    [
        ("hf://a/b", "hf://a/head", []),
        ("pvc://one/b", "hf://a/head", [("draft", names.MODEL_CACHE_PATH)]),
        ("file:///b", "hf://a/head", [("draft", names.MODEL_CACHE_PATH)]),
        ("pvc://one/b", "pvc://one/head", []),
        ("pvc://one/b", "pvc://two/head", [("draft", f"{names.MODEL_CLAIMS_PATH}/two")]),
        ("hf://a/b", "pvc://two/head", [("draft", f"{names.MODEL_CLAIMS_PATH}/two")]),
        ("hf://a/b", "file:///head", []),
    ],
)
def test_the_head_is_mounted_where_workers_look(model: str, draft: str, mounted: list[tuple[str, str]]) -> None:
    one = blueprint(model={"uri": model}, engine={"speculative": {"method": "Draft", "draft": {"uri": draft}}})
    volumes, mounts = source_volumes(one, one.worker_spec(Role.UNIFIED))
    assert [(each["name"], each["mountPath"]) for each in mounts if each["name"] == "draft"] == mounted
    assert [each["name"] for each in volumes] == [each["name"] for each in mounts]
