"""The main container of workers that run an engine of another project: its command, environment, probes and end.

Arguments are those that vLLM (https://docs.vllm.ai/en/stable/cli/serve/) and SGLang
(https://docs.sglang.io/docs/advanced_features/server_arguments.md) document. Key-value blocks go by NIXL in both.
"""

from __future__ import annotations

import json

from tandem_api import names
from tandem_api.engines import FOREIGN_ENGINES
from tandem_api.names import Role

from tandem_operator.objects.manifests import Manifest
from tandem_operator.workloads.blueprint import Blueprint
from tandem_operator.workloads.pods import http_probe

HEALTH = "/health"
HEALTH_SECONDS = 25
"""SGLang's answer to a probe may be one of its model's, which it gives itself 20 seconds for."""
_LOADING_SECONDS = 6 * 3600
_LOOK_SECONDS = 5
_DTYPES = {"BFloat16": "bfloat16", "Float16": "float16", "Float32": "float32"}
_KV_TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}

DRAIN = r"""
import json, os, re, sys, time, urllib.request
host, port, config = os.environ["POD_IP"], sys.argv[1], sys.argv[2]
host = f"[{host}]" if ":" in host else host
names = "vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs"
with open(config) as file:
    seconds = json.load(file).get("drainTimeoutSeconds", 60)
end, idle = time.monotonic() + seconds, 0
while idle < 5 and time.monotonic() < end:
    time.sleep(1)
    try:
        text = urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=5).read().decode()
    except OSError as error:
        print(f"no metrics, so nothing to wait for: {error}")
        break
    busy = [float(value) for value in re.findall(rf"^(?:{names})(?:{{.*}})? (\S+)", text, re.MULTILINE)]
    idle = 0 if sum(busy) else idle + 1
"""
"""Run before an engine is told to stop: it waits until the engine has had nothing to do for five seconds, in which
gateways learn that the pod goes and decode workers fetch what it has computed, or until `drain.timeout`."""


def is_foreign(blueprint: Blueprint) -> bool:
    """Whether workers run an engine of another project."""
    return blueprint.model.spec.engine.kind in FOREIGN_ENGINES


def foreign_ports(blueprint: Blueprint, role: Role) -> list[tuple[str, int]]:
    """Names and numbers: inference, probes and metrics on one, and where blocks are asked for."""
    kind = blueprint.model.spec.engine.kind
    meets = role is Role.PREFILL or (role is Role.DECODE and kind == "VLLM")
    return [("http", names.WORKER_HTTP_PORT), *([("kv", FOREIGN_ENGINES[kind].kv_port)] if meets else [])]


def foreign_container(blueprint: Blueprint, role: Role) -> Manifest:
    """What differs from the container of a Tandem worker."""
    command = _vllm_command(blueprint) if _kind(blueprint) == "VLLM" else _sglang_command(blueprint)
    config = names.CONFIG_PATH
    drain = ["python3", "-c", DRAIN, str(names.WORKER_HTTP_PORT), config]
    return {
        "command": command,
        "args": [*_arguments(blueprint, role), *blueprint.model.spec.engine.args],
        "lifecycle": {"preStop": {"exec": {"command": drain}}},
        "startupProbe": http_probe(
            HEALTH, "http", period=_LOOK_SECONDS, failures=_LOADING_SECONDS // _LOOK_SECONDS, timeout=HEALTH_SECONDS
        ),
        "readinessProbe": http_probe(HEALTH, "http", period=_LOOK_SECONDS, failures=2, timeout=HEALTH_SECONDS),
        "livenessProbe": http_probe(HEALTH, "http", period=10, failures=6, timeout=HEALTH_SECONDS),
    }


def foreign_env(blueprint: Blueprint, role: Role) -> list[Manifest]:
    """Environment variables that the engines read; `POD_IP` stands before them."""
    env = {"HF_HOME": names.MODEL_CACHE_PATH} if blueprint.model.spec.model.uri.startswith("hf://") else {}
    if env and blueprint.release.hub_endpoint is not None:
        env["HF_ENDPOINT"] = blueprint.release.hub_endpoint
    if _kind(blueprint) == "VLLM":
        env["VLLM_HOST_IP"] = "$(POD_IP)"
        if role is not Role.UNIFIED:
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "$(POD_IP)"
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(FOREIGN_ENGINES["VLLM"].kv_port)
    else:
        env["SGLANG_HOST_IP"] = "$(POD_IP)"
    return [{"name": name, "value": value} for name, value in env.items()]


def _kind(blueprint: Blueprint) -> str:
    return blueprint.model.spec.engine.kind


def _vllm_command(blueprint: Blueprint) -> list[str]:
    return ["vllm", "serve", _model_path(blueprint)]


def _sglang_command(blueprint: Blueprint) -> list[str]:
    return ["python3", "-m", "sglang.launch_server", f"--model-path={_model_path(blueprint)}"]


def _model_path(blueprint: Blueprint) -> str:
    """The model as both engines name it: a repository of the hub, or a folder."""
    scheme, _, rest = blueprint.model.spec.model.uri.partition("://")
    return {"hf": rest, "pvc": f"{names.MODEL_CLAIMS_PATH}/{rest}", "file": rest}[scheme]


def _arguments(blueprint: Blueprint, role: Role) -> list[str]:
    """Those that the spec's fields stand for. The served name is the object's, and gateways translate it: renaming what
    clients see restarts nothing."""
    spec, axes, is_vllm = blueprint.model.spec, blueprint.worker_spec(role).parallelism, _kind(blueprint) == "VLLM"
    given: dict[str, object] = {
        "--host": "$(POD_IP)",
        "--port": names.WORKER_HTTP_PORT,
        "--served-model-name": blueprint.name,
    }
    if spec.model.uri.startswith("hf://"):
        given["--revision"] = blueprint.weights_revision
    if spec.engine.dtype != "Auto":
        given["--dtype"] = _DTYPES[spec.engine.dtype]
    if spec.engine.max_model_len is not None:
        given["--max-model-len" if is_vllm else "--context-length"] = spec.engine.max_model_len
    if axes.tensor > 1:
        given["--tensor-parallel-size" if is_vllm else "--tp-size"] = axes.tensor
    if axes.pipeline > 1:
        given["--pipeline-parallel-size" if is_vllm else "--pp-size"] = axes.pipeline
    arguments = [f"{name}={value}" for name, value in given.items()]
    return [*arguments, *(_vllm_switches(role) if is_vllm else _sglang_switches(role))]


def _vllm_switches(role: Role) -> list[str]:
    transfer = [] if role is Role.UNIFIED else [f"--kv-transfer-config={json.dumps(_KV_TRANSFER)}"]
    return ["--enable-prompt-tokens-details", *transfer]


def _sglang_switches(role: Role) -> list[str]:
    switches = ["--enable-cache-report", "--enable-metrics"]
    if role is Role.UNIFIED:
        return switches
    switches += [f"--disaggregation-mode={role.value}", "--disaggregation-transfer-backend=nixl"]
    port = FOREIGN_ENGINES["SGLang"].kv_port
    return [*switches, f"--disaggregation-bootstrap-port={port}"] if role is Role.PREFILL else switches
