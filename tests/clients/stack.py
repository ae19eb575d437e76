"""A prefill worker, a decode worker and a gateway on loopback, with the demo's model.

`python -m tests.clients.stack` starts them, prints the URL to export for a script, and ends with Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem_api.launch import GatewayConfig, StoreLimits

from e2e.model import find_model
from tests.tandem_worker.process.conftest import WorkerProcess, await_ready, eventually, run_worker

MODEL = "smollm2"
URL_VARIABLE = "TANDEM_URL"
"""Environment variable in which the scripts find the gateway."""


@dataclass(frozen=True, slots=True)
class Stack:
    url: str
    """Of the gateway."""
    workers: dict[str, WorkerProcess]
    """By role."""


@contextlib.contextmanager
def run_stack(
    folder: Path, *, roles: Sequence[str] = ("prefill", "decode"), worker: dict[str, Any] | None = None, **gateway: Any
) -> Iterator[Stack]:
    """A worker of each role and the gateway, once they are ready. The rest changes their launch configurations."""
    told = {
        "modelName": MODEL, "servedName": MODEL, "kv": {"memoryBytes": 256 << 20}, "maxModelLen": 2048,
        "dtype": "Auto", "scheduler": {"localPrefillMaxTokens": 0}, "drainTimeoutSeconds": 1,
    } | (worker or {})  # fmt: skip
    with contextlib.ExitStack() as started:
        model = find_model()
        workers = {role: started.enter_context(run_worker(folder, role, model, **told)) for role in roles}
        flags: list[str] = []
        for role, process in workers.items():
            await_ready(process)
            flags += ["--worker", f"role={role},url={process.url},kv={process.kv},revision=r1,name={role}-0"]
        gateway = {"disaggregated": "prefill" in roles} | gateway
        yield Stack(started.enter_context(run_gateway(folder, flags, **gateway)), workers)


@contextlib.contextmanager
def run_gateway(folder: Path, flags: list[str], **changes: Any) -> Iterator[str]:
    """A gateway process, once it listens; gives its URL. `changes` are of its launch configuration."""
    config, log = folder / "gateway.json", folder / "gateway.log"
    fixed: dict[str, Any] = {
        "model_name": MODEL, "served_name": MODEL, "namespace": "default", "http_port": 0, "metrics_port": 0,
    }  # fmt: skip
    config.write_text(GatewayConfig(**(fixed | changes)).to_json())
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem_gateway", "--config", str(config), "--host", "127.0.0.1", *flags],
            stdout=sink, stderr=sink,
        )  # fmt: skip
    try:
        eventually(lambda: _find_port(log) is not None, 20, f"the gateway listens: {log.read_text()}")
        yield f"http://127.0.0.1:{_find_port(log)}"
    finally:
        process.kill()
        process.wait(10)


def _find_port(log: Path) -> int | None:
    lines = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return next((line["http_port"] for line in lines if line["message"] == "listening"), None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.clients.stack", description=__doc__)
    parser.add_argument("--served-name", default=MODEL)
    parser.add_argument("--port", type=int, default=0, help="of the gateway; 0 takes a free one")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--tools", default="Auto", help="spec.engine.tools")
    parser.add_argument("--free-form-grammars", action="store_true", help="spec.engine.freeFormGrammars")
    parser.add_argument("--request-chat-templates", action="store_true", help="spec.engine.requestChatTemplates")
    parser.add_argument("--response-store", action="store_true", help="spec.gateway.responseStore, of 64 MiB")
    parser.add_argument("--unified", action="store_true", help="one worker that does both")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the workers would outlive it
    roles = ("unified",) if told.unified else ("prefill", "decode")
    worker = {
        "servedName": told.served_name,
        "maxModelLen": told.max_model_len,
        "tools": told.tools,
        "freeFormGrammars": told.free_form_grammars,
        "requestChatTemplates": told.request_chat_templates,
    }
    gateway = {
        "served_name": told.served_name,
        "http_port": told.port,
        "response_store": StoreLimits(max_bytes=64 << 20) if told.response_store else None,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        run_stack(Path(folder), roles=roles, worker=worker, **gateway) as stack,
    ):
        print(f"export {URL_VARIABLE}={stack.url}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
