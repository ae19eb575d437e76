"""Worker processes that are started to be measured, or killed."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tests.ports import free_port

LIMIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What one start took; seconds since exec."""

    first_token: float
    cpu: float
    """Seconds of processor time until then, that of children that have ended not included."""
    resident_bytes: int
    """Held a second after the first token, when nobody asks for anything."""
    steps: dict[str, float]
    """Seconds that each step took, as the worker tells them."""


def run(tree: Path, model: Path, cache: Path) -> Start:
    """Start a worker of `tree`, ask it for one token, end it. Raises RuntimeError when it does not get there."""
    port = free_port()
    document = describe(model, cache, port)
    with running(tree, document) as (process, log):
        began = time.monotonic()
        while not ask(port):
            if process.poll() is not None or time.monotonic() - began > LIMIT_SECONDS:
                raise RuntimeError(f"the worker did not answer:\n{log.read_text()[-3000:]}")
            time.sleep(0.01)
        first = time.monotonic() - began
        cpu = read_cpu_seconds(process.pid)
        time.sleep(1.0)
        return Start(
            first_token=first, cpu=cpu, resident_bytes=read_resident_bytes(process.pid), steps=_read_steps(log)
        )


def describe(model: Path, cache: Path, port: int) -> dict[str, object]:
    """The configuration of a worker that does both roles, everything at its defaults."""
    return {
        "modelName": "bench",
        "servedName": "bench",
        "role": "unified",
        "revision": "bench",
        "model": {"uri": f"file://{model}", "cacheDir": str(cache)},
        "httpPort": port,
        "metricsPort": free_port(),
        "drainTimeoutSeconds": 1,
    }


@contextmanager
def running(
    tree: Path,
    document: dict[str, object],
    environment: Mapping[str, str] = MappingProxyType({}),
    *,
    module: str = "tandem_worker",
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The worker of `tree`, and its log; `environment` is what it has beyond this process's. `module` runs it."""
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder, "config.json"), Path(folder, "log")
        config.write_text(json.dumps(document))
        paths = [f"{tree / 'worker' / 'src'}", f"{tree / 'api' / 'src'}", os.environ.get("PYTHONPATH", "")]
        own = {"POD_NAME": "bench", "POD_IP": "127.0.0.1", "PYTHONPATH": ":".join(filter(None, paths))}
        command = [sys.executable, "-m", module, "--config", str(config), "--host", "127.0.0.1"]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, env={**os.environ, **own, **environment}, stdout=sink, stderr=sink)
        try:
            yield process, log
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ask(port: int, num_tokens: int = 1) -> bytes:
    """The body of the answer to one prompt, once the worker gives one; until then nothing.

    By hand, for an HTTP client's imports cost as much as a start.
    """
    options = {"model": "bench", "prompt": "The capital of France", "max_tokens": num_tokens, "temperature": 0}
    body = json.dumps(options | {"ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_SECONDS) as connection:
            connection.sendall(head.encode() + body)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
    except ConnectionError:
        return b""
    return answer.partition(b"\r\n\r\n")[2] if answer.startswith(b"HTTP/1.1 200") else b""


def read_cpu_seconds(pid: int) -> float:
    """Processor time of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def read_resident_bytes(pid: int) -> int:
    """Of a process's memory, what is in the machine's."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def _read_steps(log: Path) -> dict[str, float]:
    for line in log.read_text().splitlines():
        if '"seconds"' in line:
            found: dict[str, float] = json.loads(line).get("seconds", {})
            return found
    return {}
