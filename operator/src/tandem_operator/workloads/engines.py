"""The main container of workers that run an engine of another project: its command, environment, probes and end.

Arguments are those that vLLM (https://docs.vllm.ai/en/stable/cli/serve/) and SGLang
(https://docs.sglang.io/docs/advanced_features/server_arguments.md) document. Key-value blocks go by NIXL in both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

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


class Dialect(Protocol):
    """How an engine of another project is started. One more engine is one more of these, and a line in `DIALECTS`."""

    max_model_len: str
    """Name of its argument for the longest text."""
    tensor_parallel: str
    pipeline_parallel: str

    def command(self, model: str) -> list[str]:
        """What begins its server. `model` is a repository of the hub, or a folder."""
        ...

    def env(self, role: Role) -> dict[str, str]:
        """Environment variables that it reads."""
        ...

    def switches(self, role: Role) -> list[str]:
        """Arguments that stand for no field of the spec."""
        ...


class _VLLM:
    max_model_len, tensor_parallel, pipeline_parallel = (
        "--max-model-len", "--tensor-parallel-size", "--pipeline-parallel-size"
    )  # fmt: skip

    def command(self, model: str) -> list[str]:
        return ["vllm", "serve", model]

    def env(self, role: Role) -> dict[str, str]:
        env = {"VLLM_HOST_IP": "$(POD_IP)"}
        if role is not Role.UNIFIED:
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "$(POD_IP)"
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(FOREIGN_ENGINES["VLLM"].kv_port)
        return env

    def switches(self, role: Role) -> list[str]:
        transfer = [] if role is Role.UNIFIED else [f"--kv-transfer-config={json.dumps(_KV_TRANSFER)}"]
        return ["--enable-prompt-tokens-details", *transfer]


class _SGLang:
    max_model_len, tensor_parallel, pipeline_parallel = "--context-length", "--tp-size", "--pp-size"

    def command(self, model: str) -> list[str]:
        return ["python3", "-m", "sglang.launch_server", f"--model-path={model}"]

    def env(self, role: Role) -> dict[str, str]:
        return {"SGLANG_HOST_IP": "$(POD_IP)"}

    def switches(self, role: Role) -> list[str]:
        switches = ["--enable-cache-report", "--enable-metrics"]
        if role is Role.UNIFIED:
            return switches
        switches += [f"--disaggregation-mode={role.value}", "--disaggregation-transfer-backend=nixl"]
        port = FOREIGN_ENGINES["SGLang"].kv_port
        return [*switches, f"--disaggregation-bootstrap-port={port}"] if role is Role.PREFILL else switches


DIALECTS: Mapping[str, Dialect] = {"VLLM": _VLLM(), "SGLang": _SGLang()}
"""One for each of `FOREIGN_ENGINES`."""


def is_foreign(blueprint: Blueprint) -> bool:
    """Whether workers run an engine of another project."""
    return blueprint.model.spec.engine.kind in FOREIGN_ENGINES


def foreign_ports(blueprint: Blueprint, role: Role) -> list[tuple[str, int]]:
    """Names and numbers: inference, probes and metrics on one, and where blocks are asked for."""
    engine = FOREIGN_ENGINES[blueprint.model.spec.engine.kind]
    return [("http", names.WORKER_HTTP_PORT), *([("kv", engine.kv_port)] if role in engine.kv_roles else [])]


def foreign_container(blueprint: Blueprint, role: Role) -> Manifest:
    """What differs from the container of a Tandem worker."""
    config = names.CONFIG_PATH
    drain = ["python3", "-c", DRAIN, str(names.WORKER_HTTP_PORT), config]
    return {
        "command": _dialect(blueprint).command(_model_path(blueprint)),
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
    return [{"name": name, "value": value} for name, value in (env | _dialect(blueprint).env(role)).items()]


def _dialect(blueprint: Blueprint) -> Dialect:
    return DIALECTS[blueprint.model.spec.engine.kind]


def _model_path(blueprint: Blueprint) -> str:
    """The model as engines name it: a repository of the hub, or a folder."""
    scheme, _, rest = blueprint.model.spec.model.uri.partition("://")
    return {"hf": rest, "pvc": f"{names.MODEL_CLAIMS_PATH}/{rest}", "file": rest}[scheme]


def _arguments(blueprint: Blueprint, role: Role) -> list[str]:
    """Those that the spec's fields stand for. The served name is the object's, and gateways translate it: renaming what
    clients see restarts nothing."""
    spec, axes, dialect = blueprint.model.spec, blueprint.worker_spec(role).parallelism, _dialect(blueprint)
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
        given[dialect.max_model_len] = spec.engine.max_model_len
    if axes.tensor > 1:
        given[dialect.tensor_parallel] = axes.tensor
    if axes.pipeline > 1:
        given[dialect.pipeline_parallel] = axes.pipeline
    arguments = [f"{name}={value}" for name, value in given.items()]
    return [*arguments, *dialect.switches(role)]
