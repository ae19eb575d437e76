"""Workers that run vLLM and SGLang: arguments, doors, and how they end."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest
from operator_objects import blueprint
from tandem_api.engines import ENGINES, FOREIGN_ENGINES
from tandem_api.names import LABEL_ENGINE
from tandem_operator.objects.manifests import Manifest
from tandem_operator.workloads import build_children
from tandem_operator.workloads.configs import gateway_config
from tandem_operator.workloads.engines import DIALECTS, DRAIN
from tandem_operator.workloads.release import Release

KINDS = pytest.mark.parametrize("kind", sorted(FOREIGN_ENGINES))
PAIR: dict[str, Any] = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}


def workers(kind: str, **spec: Any) -> dict[str, Manifest]:
    """Main containers by component."""
    plan = blueprint(**spec | {"engine": {"kind": kind} | spec.get("engine", {})})
    sets = [child for child in build_children(plan) if child["kind"] == "StatefulSet"]
    return {
        item["metadata"]["labels"]["app.kubernetes.io/component"]: item["spec"]["template"]["spec"]["containers"][0]
        for item in sets
    }


def env_of(container: Manifest) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}


@KINDS
def test_no_argument_of_the_operators_may_be_given_twice(kind: str) -> None:
    spec = {"engine": {"dtype": "Float16", "maxModelLen": 99}, "decode": {"parallelism": {"tensor": 2, "pipeline": 2}}}
    for container in workers(kind, **PAIR | spec).values():
        written = {text.removeprefix("--").partition("=")[0] for text in container["args"] + container["command"]
                   if text.startswith("--")}  # fmt: skip
        free = {"disaggregation-transfer-backend"}  # a later argument wins
        assert written - free <= set(FOREIGN_ENGINES[kind].own_arguments)


@KINDS
def test_arguments_of_the_user_come_last(kind: str) -> None:
    container = workers(kind, engine={"args": ["--seed=1", "--seed=2"]})["decode"]
    assert container["args"][-2:] == ["--seed=1", "--seed=2"]
    assert container["image"] == FOREIGN_ENGINES[kind].image
    assert workers(kind, engine={"image": "own:1"})["decode"]["image"] == "own:1"


def test_vllm_pairs_have_a_connector_and_others_none() -> None:
    for container in workers("VLLM", **PAIR).values():
        (config,) = (text for text in container["args"] if text.startswith("--kv-transfer-config="))
        assert json.loads(config.partition("=")[2])["kv_connector"] == "NixlConnector"
        assert env_of(container)["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"
    alone = workers("VLLM")["decode"]
    assert not any("kv-transfer" in text for text in alone["args"])
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" not in env_of(alone)


def test_sglang_modes_and_the_bootstrap_port_that_gateways_find() -> None:
    pair = workers("SGLang", **PAIR)
    for component, container in pair.items():
        assert f"--disaggregation-mode={component}" in container["args"]
    ports = {port["name"]: port["containerPort"] for port in pair["prefill"]["ports"]}
    assert f"--disaggregation-bootstrap-port={ports['kv']}" in pair["prefill"]["args"]
    assert not any("disaggregation" in text for text in workers("SGLang")["decode"]["args"])


@KINDS
@pytest.mark.parametrize(
    ("uri", "path"),
    [("hf://org/repo", "org/repo"), ("pvc://claim/a/b", "/mnt/models/claim/a/b"), ("file:///srv/m", "/srv/m")],
)
def test_where_the_model_is(kind: str, uri: str, path: str) -> None:
    container = workers(kind, model={"uri": uri})["decode"]
    assert container["command"][-1].rpartition("=")[2] == path
    assert ("--revision=main" in container["args"]) is uri.startswith("hf://")
    assert ("HF_HOME" in env_of(container)) is uri.startswith("hf://")


@KINDS
def test_the_hub_and_its_token(kind: str) -> None:
    release = Release(worker_image="w", gateway_image="g", hub_endpoint="http://hub.example")
    plan = blueprint(release=release, engine={"kind": kind}, model={"uri": "hf://a/b", "secretRef": {"name": "s"}})
    (item,) = (child for child in build_children(plan) if child["kind"] == "StatefulSet")
    container = item["spec"]["template"]["spec"]["containers"][0]
    assert env_of(container)["HF_ENDPOINT"] == "http://hub.example"
    assert any(entry["name"] == "HF_TOKEN" for entry in container["env"])


@KINDS
def test_workers_hold_no_keys_and_say_what_they_run(kind: str) -> None:
    plan = blueprint(**PAIR, engine={"kind": kind})
    for child in build_children(plan):
        if child["kind"] == "StatefulSet":
            pod = child["spec"]["template"]["spec"]
            assert not any("secret" in volume for volume in pod["volumes"])
            assert child["spec"]["template"]["metadata"]["labels"][LABEL_ENGINE] == kind
    assert gateway_config(plan) == gateway_config(blueprint(**PAIR)), "gateways go by what each worker says"


@KINDS
def test_the_probes_are_the_engines_own(kind: str) -> None:
    container = workers(kind)["decode"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    start = container["startupProbe"]
    assert start["failureThreshold"] * start["periodSeconds"] >= 3600


@KINDS
def test_revisions_tell_what_blocks_mean(kind: str) -> None:
    plans = [
        blueprint(engine={"kind": kind}),
        blueprint(engine={"kind": kind}, **PAIR),
        blueprint(engine={"kind": kind, "args": ["--kv-cache-dtype=fp8"]}, **PAIR),
        blueprint(**PAIR),
    ]
    assert len({plan.revision for plan in plans}) == 4
    renamed = blueprint(engine={"kind": kind}, model={"uri": "hf://org/repo", "servedName": "other"}, **PAIR)
    same = {item["metadata"]["name"]: item["spec"]["template"] for item in build_children(plans[1])
            if item["kind"] == "StatefulSet"}  # fmt: skip
    for item in build_children(renamed):
        if item["kind"] == "StatefulSet":
            assert item["spec"]["template"] == same[item["metadata"]["name"]]


@KINDS
def test_doors(kind: str) -> None:
    """Gateways reach every worker, and the two roles each other at any port; nobody else does."""
    made = build_children(blueprint(**PAIR, engine={"kind": kind}))
    policies = {item["metadata"]["name"]: item["spec"] for item in made if item["kind"] == "NetworkPolicy"}
    for own, other in (("prefill", "decode"), ("decode", "prefill")):
        sources = {}
        for entry in policies[f"m-{own}"]["ingress"]:
            labels = entry["from"][0].get("podSelector", {}).get("matchLabels", {})
            sources[labels.get("app.kubernetes.io/component")] = [port["port"] for port in entry.get("ports", [])]
        assert sources == {None: [8000], "gateway": [8000], other: []}
    reached = [entry["ports"] for entry in policies["m"]["egress"] if "to" in entry]
    assert reached == [[{"port": 8000, "protocol": "TCP"}]] * 2


async def run_drain(port: int, config: Any) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRAIN, str(port), str(config), env={"POD_IP": "127.0.0.1"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, output.decode()


@KINDS
async def test_a_worker_ends_once_it_has_nothing_to_do(kind: str, tmp_path: Any) -> None:
    name = "vllm:num_requests_running" if kind == "VLLM" else "sglang:num_running_reqs"
    running, looks = [2.0, 1.0], 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal looks
        await reader.readuntil(b"\r\n\r\n")
        looks += 1
        value = running.pop(0) if running else 0.0
        text = f'# HELP {name} requests\n{name}{{model_name="a b"}} {value}\n{name}_total 9\n'.encode()
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    config = tmp_path / "config.json"
    config.write_text("{}")
    assert await run_drain(server.sockets[0].getsockname()[1], config) == (0, "")
    assert looks == 2 + 5
    server.close()
    code, words = await run_drain(1, config)
    assert (code, words.startswith("no metrics, so nothing to wait for")) == (0, True)


async def test_it_waits_no_longer_than_drain_timeout(tmp_path: Any) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nvllm:num_requests_running 1.0\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    config = tmp_path / "config.json"
    config.write_text('{"drainTimeoutSeconds": 2}')
    assert await run_drain(server.sockets[0].getsockname()[1], config) == (0, "")
    server.close()


def test_every_engine_is_known_to_all_parts() -> None:
    assert set(DIALECTS) == set(FOREIGN_ENGINES)
    assert set(ENGINES) == {"Tandem", *FOREIGN_ENGINES}
