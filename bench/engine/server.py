"""Worker processes under measurement, and a client that costs them little: raw sockets, events counted, not parsed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port

START_LIMIT = 120


@dataclass(frozen=True, slots=True)
class Worker:
    port: int
    kv_port: int
    process: subprocess.Popen[bytes]
    metrics_port: int = 0

    def cpu_seconds(self) -> float:
        """User plus system time of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def worker(
    role: str,
    model: Path,
    dtype: str,
    threads: int,
    tree: Path | None = None,
    *,
    native: bool = True,
    weights: str = "Auto",
    kv: Mapping[str, Any] | None = None,
    drain_seconds: float = 1,
    speculative: dict[str, object] | None = None,
) -> Iterator[Worker]:
    """A ready worker process on loopback; ended with SIGTERM. `tree`: a checkout whose code it runs instead. Without
    `native` torch computes what the CPU kernels would; `weights` and `speculative` are those of `spec.engine`, without
    which there are no guesses: an event is a token. `kv` is more of the launch configuration's part of that name."""
    port, metrics_port, kv_port = free_port(), free_port(), free_port()
    document = {
        "modelName": "bench",
        "servedName": "bench",
        "role": role,
        "revision": "bench",
        "model": {"uri": f"file://{model}"},
        "device": "CPU",
        "dtype": dtype,
        "kv": {"memoryBytes": 2 << 30, "port": kv_port} | dict(kv or {}),
        "httpPort": port,
        "metricsPort": metrics_port,
        "drainTimeoutSeconds": drain_seconds,
    }
    if weights != "Auto":
        document["weights"] = weights
    if tree is None or "SpeculativeConfig" in (tree / "api/src/tandem_api/launch.py").read_text():
        document["speculative"] = speculative or {"method": "Off"}
    if tree is not None and "WORKER_METRICS_PORT" not in (tree / "api/src/tandem_api/launch.py").read_text():
        metrics_port = port  # versions whose probes are answered at the port of the API
        del document["metricsPort"]
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder, "config.json"), Path(folder, "log")
        config.write_text(json.dumps(document))
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "POD_NAME": role, "POD_IP": "127.0.0.1"}
        if not native:
            environment["TANDEM_NATIVE_KERNELS"] = "0"
        if tree is not None:
            environment["PYTHONPATH"] = f"{tree / 'worker' / 'src'}:{tree / 'api' / 'src'}"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "tandem_worker", "--config", str(config)],
                env=environment,
                stdout=sink,
                stderr=sink,
            )
        try:
            wait_ready(process, metrics_port, log)
            yield Worker(port, kv_port, process, metrics_port)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10 + drain_seconds)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_ready(process: subprocess.Popen[bytes], metrics_port: int, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the worker ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/readyz", timeout=1):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise RuntimeError(f"the worker was not ready within {START_LIMIT} s:\n{log.read_text()[-3000:]}")


@dataclass(frozen=True, slots=True)
class Stream:
    """Seconds from sending until the first token and until the end, and the counted tokens."""

    first: float
    total: float
    tokens: int


async def stream(
    port: int, prompt: list[int], new_tokens: int, prefill: str | None = None, source: str | None = None
) -> Stream:
    """One streamed completion of exactly `new_tokens`. `source`: KV port of a worker that has a part of the prompt.
    Raises RuntimeError when it is not answered in full."""
    body: dict[str, Any] = {
        "model": "bench", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True,
        "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    payload = json.dumps(body).encode()
    extra = f"x-tandem-prefill: {prefill}\r\n" if prefill else ""
    extra += f"x-tandem-kv-source: {source}\r\n" if source else ""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n{extra}"
        f"connection: close\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    started = time.perf_counter()
    writer.write(head.encode() + payload)
    received, first = bytearray(), 0.0
    while piece := await reader.read(1 << 16):
        received += piece
        if not first and b'"text"' in received:
            first = time.perf_counter() - started
    total = time.perf_counter() - started
    writer.close()
    if b"data: [DONE]" not in received:
        raise RuntimeError(f"the answer is incomplete: {bytes(received[-500:])!r}")
    usage = received[received.rindex(b'"completion_tokens":') + len(b'"completion_tokens":') :]
    return Stream(first, total, int(usage[: usage.index(b",")].strip(b" }")))


async def exchange(port: int, path: str, payload: bytes) -> bytes:
    """What a worker answers to a POST, head and all. Raises RuntimeError when a stream is not answered in full."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(head.encode() + payload)
    received = await reader.read()
    writer.close()
    if b"data: [DONE]" not in received:
        raise RuntimeError(f"the answer is incomplete: {received[-500:]!r}")
    return received


async def streams(port: int, prompts: list[list[int]], new_tokens: int) -> float:
    """Wall seconds until all prompts, sent at once, are answered in full."""
    started = time.perf_counter()
    results = await asyncio.gather(*(stream(port, prompt, new_tokens) for prompt in prompts))
    if any(result.tokens != new_tokens for result in results):
        raise RuntimeError(f"asked for {new_tokens} tokens, got {[result.tokens for result in results]}")
    return time.perf_counter() - started
