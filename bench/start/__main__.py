"""From exec to the first token of SmolLM2, step by step: fresh processes, with and without a prepared copy.

    python -m bench.start [--rounds 10] [--against CHECKOUT] [--record bench/results]

Each round starts a worker whose cache folder is empty, one that finds there what an earlier start prepared, and, with
`--against`, one of another checkout (whose CPU kernels are built) with the same model: in turns, everything at its
defaults, the model's files in the page cache. A client asks for one token until it gets one. The machine should be
idle: there are as many cores in a start as it is given. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.engine.server import free_port
from e2e.model import find_model

HERE = Path(__file__).parents[2]
LIMIT_SECONDS = 120.0
GOALS = {"prepared": 2.0, "unprepared": 2.4}
"""Seconds from exec to the first token, two idle cores."""
RESIDENT_GOAL_BYTES = 1.3e9


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
    document = {
        "modelName": "bench",
        "servedName": "bench",
        "role": "unified",
        "revision": "bench",
        "model": {"uri": f"file://{model}", "cacheDir": str(cache)},
        "httpPort": port,
        "metricsPort": free_port(),
        "drainTimeoutSeconds": 1,
    }
    with _process(tree, document) as (process, log):
        began = time.monotonic()
        while not _ask(port):
            if process.poll() is not None or time.monotonic() - began > LIMIT_SECONDS:
                raise RuntimeError(f"the worker did not answer:\n{log.read_text()[-3000:]}")
            time.sleep(0.01)
        first = time.monotonic() - began
        cpu = _cpu_seconds(process.pid)
        time.sleep(1.0)
        return Start(first_token=first, cpu=cpu, resident_bytes=_resident_bytes(process.pid), steps=_read_steps(log))


@contextmanager
def _process(tree: Path, document: dict[str, object]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder, "config.json"), Path(folder, "log")
        config.write_text(json.dumps(document))
        environment = os.environ | {"POD_NAME": "bench", "POD_IP": "127.0.0.1"}
        environment["PYTHONPATH"] = f"{tree / 'worker' / 'src'}:{tree / 'api' / 'src'}"
        command = [sys.executable, "-m", "tandem_worker", "--config", str(config), "--host", "127.0.0.1"]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink)
        try:
            yield process, log
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ask(port: int) -> bool:
    """Whether the worker has answered with a token; by hand, for an HTTP client's imports cost as much as a start."""
    body = b'{"model": "bench", "prompt": "Hello", "max_tokens": 1}'
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_SECONDS) as connection:
            connection.sendall(head.encode() + body)
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except ConnectionError:
        return False


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def _read_steps(log: Path) -> dict[str, float]:
    for line in log.read_text().splitlines():
        if '"seconds"' in line:
            found: dict[str, float] = json.loads(line).get("seconds", {})
            return found
    return {}


def _describe(values: Sequence[float]) -> str:
    return f"{statistics.median(values):7.2f} {min(values):7.2f} {max(values):7.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="starts of each kind; default 10")
    parser.add_argument("--against", type=Path, help="checkout of another version")
    parser.add_argument("--record", type=Path, help="folder for the figures")
    options = parser.parse_args()
    model = find_model()
    model.read_bytes()  # into the page cache
    found: dict[str, list[Start]] = {"unprepared": [], "prepared": []}
    if options.against:
        found["other"] = []
    with tempfile.TemporaryDirectory() as folder:
        kept, other = Path(folder, "kept"), Path(folder, "other")
        run(HERE, model, kept)  # prepares, and brings the libraries into the page cache
        for number in range(options.rounds):
            fresh = Path(folder, f"fresh-{number}")
            found["unprepared"].append(run(HERE, model, fresh))
            found["prepared"].append(run(HERE, model, kept))
            if options.against:
                found["other"].append(run(options.against.resolve(), model, other))
            shutil.rmtree(fresh, ignore_errors=True)
    _report(found, options.record)


def _report(found: dict[str, list[Start]], record: Path | None) -> None:
    print(f"{'':12} {'first token':>23}   {'CPU seconds':>23}   resident GB   (median, least, most of each)")
    rows: dict[str, dict[str, object]] = {}
    for kind, starts in found.items():
        first, cpu = [one.first_token for one in starts], [one.cpu for one in starts]
        resident = statistics.median(one.resident_bytes for one in starts)
        print(f"{kind:12} {_describe(first)}   {_describe(cpu)}   {resident / 1e9:11.2f}")
        steps = {name: statistics.median(one.steps.get(name, 0.0) for one in starts) for name in starts[-1].steps}
        value, goal = round(statistics.median(first), 2), GOALS.get(kind)
        rows[kind] = {"value": value, "goal": goal, "met": goal is None or value <= goal, "steps": steps}
        if goal is not None:
            rows[f"{kind} resident bytes"] = {
                "value": int(resident), "goal": int(RESIDENT_GOAL_BYTES), "met": resident <= RESIDENT_GOAL_BYTES,
            }  # fmt: skip
    for kind, row in rows.items():
        for name, seconds in dict(row.get("steps") or {}).items():  # type: ignore[call-overload]
            print(f"  {kind:12} {name:24} {seconds:7.3f}")
    line = json.dumps({"cores": len(os.sched_getaffinity(0)), "seconds from exec to the first token": rows})
    if record is not None:
        record.mkdir(parents=True, exist_ok=True)
        Path(record, f"start-{datetime.now(UTC):%Y-%m-%d}.json").write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
