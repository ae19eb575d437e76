"""Worker processes on loopback with a tiny random model, and a client that looks at the wire."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.ports import free_port
from tests.tandem_worker.process.forking import Forked, Forker

START_SECONDS = 150
MODEL = "tiny"
TOP_P = 0.97
"""What the model's makers recommend."""


def eventually(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Seconds until the condition came true."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - started


@dataclass
class WorkerProcess:
    process: subprocess.Popen[bytes] | Forked
    url: str
    metrics_url: str
    kv: str
    log: Path
    headers: dict[str, str] = field(default_factory=dict)
    """Shown with every request."""

    def get(self, path: str) -> httpx.Response:
        """From the metrics port, often: so no certificates are read, which plain HTTP has no use for."""
        return httpx.get(self.metrics_url + path, timeout=60, verify=False)

    def complete(
        self, prompt: Any, *, prefill: str | None = None, source: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """`source`: who has a part of the prompt."""
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8} | options
        headers = self.headers | ({"x-tandem-prefill": prefill} if prefill else {})
        headers |= {"x-tandem-kv-source": source} if source else {}
        response = httpx.post(self.url + "/v1/completions", json=body, headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        return response.json() | {"headers": response.headers}

    def metric(self, name: str, **labels: str) -> float:
        for line in self.get("/metrics").text.splitlines():
            found = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
                return float(found[2])
        raise AssertionError(f"there is no {name} with {labels}")

    def logged(self, text: str) -> bool:
        return text in self.log.read_text()


def build_model(folder: Path) -> Path:
    """A Llama of 4 layers with random weights, and a tokenizer that reads bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|im_end|>": 0} | {letter: index + 1 for index, letter in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, eos_token_id=0, bos_token_id=None,
        initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "top_p": TOP_P}))
    return folder


@contextmanager
def run_worker(
    folder: Path,
    role: str,
    model: Path,
    *,
    environment: dict[str, str] | None = None,
    forker: Forker | None = None,
    **changes: Any,
) -> Iterator[WorkerProcess]:
    """A worker process; not necessarily ready yet. Killed at the end if it has not ended by itself.

    With a `forker` imports are not waited for, unless the interpreter starts in an `environment` of its own.
    """
    port, metrics_port = free_port(), free_port()
    kv_port = free_port(neighbours=7)  # a group takes the ports after the KV port too
    document = {
        "modelName": MODEL, "servedName": MODEL, "role": role, "revision": "r1", "httpPort": port,
        "metricsPort": metrics_port,
        "model": {"uri": f"file://{model}", "cacheDir": str(folder / "cache")}, "device": "CPU", "dtype": "Float32",
        "kv": {"memoryBytes": 32 << 20, "port": kv_port}, "drainTimeoutSeconds": 10,
        "scheduler": {"maxBatchTokens": 128},
    } | changes  # fmt: skip
    document["kv"] = {"port": kv_port} | document["kv"]
    config, log, termination = (folder / f"{role}-{port}.{kind}" for kind in ("json", "log", "termination"))
    config.write_text(json.dumps(document))
    termination.touch()
    variables = (
        os.environ
        | {
            "POD_NAME": f"{role}-0",
            "POD_IP": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "TERMINATION_MESSAGE_PATH": str(termination),
        }
        | (environment or {})
    )
    arguments = ["--config", str(config), "--host", "127.0.0.1"]
    if forker is not None and environment is None:
        process = forker.start(arguments, variables, log)
    else:
        command = [sys.executable, "-m", "tandem_worker", *arguments]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, env=variables, stdout=sink, stderr=sink)
    try:
        urls = (f"http://127.0.0.1:{number}" for number in (port, metrics_port))
        yield WorkerProcess(process, *urls, f"127.0.0.1:{kv_port}", log)
    finally:
        process.kill()
        process.wait(60)


def await_ready(worker: WorkerProcess) -> WorkerProcess:
    def ready() -> bool:
        assert worker.process.poll() is None, worker.log.read_text()
        try:
            return worker.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    try:
        eventually(ready, START_SECONDS, "the worker is ready")
    except AssertionError as error:
        error.add_note(worker.log.read_text())
        raise
    return worker


def end(worker: WorkerProcess, number: int = signal.SIGTERM) -> None:
    worker.process.send_signal(number)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def workers(forker: Forker) -> SimpleNamespace:
    """How tests start workers of their own."""
    return SimpleNamespace(
        run=partial(run_worker, forker=forker),
        await_ready=await_ready,
        end=end,
        eventually=eventually,
        free_port=free_port,
    )


@pytest.fixture(scope="module")
def pair(
    workers: SimpleNamespace, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SimpleNamespace]:
    """A prefill and a decode worker, ready."""
    folder = tmp_path_factory.mktemp("pair")
    with workers.run(folder, "prefill", tiny_model) as prefill, workers.run(folder, "decode", tiny_model) as decode:
        yield SimpleNamespace(prefill=await_ready(prefill), decode=await_ready(decode), folder=folder, model=tiny_model)
