"""From the order to wake up to the first token of SmolLM2: workers on standby, with and without a prepared copy.

    python -m bench.start.standby [--rounds 5]

Each round starts a worker on standby whose cache folder is empty, and one that finds there what an earlier one
prepared, and wakes each by one order at its inference port, whose answer is followed by a request for one token. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.start.__main__ import HERE
from bench.start.process import LIMIT_SECONDS, ask, describe, read_cpu_seconds, read_resident_bytes, running
from e2e.model import find_model
from tests.ports import free_port

GOAL = 1.5
"""Seconds from the order to the first token."""
_SETTLED_SECONDS = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="workers of each kind; default 5")
    rounds = parser.parse_args().rounds
    model = find_model()
    model.read_bytes()  # into the page cache
    found: dict[str, list[tuple[float, float, int]]] = {"unprepared": [], "prepared": []}
    with tempfile.TemporaryDirectory() as folder:
        wake(model, Path(folder, "kept"), prepares=True)
        for number in range(rounds):
            found["unprepared"].append(wake(model, Path(folder, f"fresh-{number}")))
            found["prepared"].append(wake(model, Path(folder, "kept")))
    rows: dict[str, dict[str, object]] = {}
    for kind, woken in found.items():
        seconds, cpu, held = ([one[place] for one in woken] for place in range(3))
        value, bytes_held = round(statistics.median(seconds), 2), int(statistics.median(held))
        rows[kind] = {"value": value, "goal": GOAL, "met": value <= GOAL, "standby bytes": bytes_held}
        print(
            f"{kind:12} {value:7.2f} {min(seconds):7.2f} {max(seconds):7.2f} s (median, least, most),"
            f" {statistics.median(cpu):.2f} CPU seconds; {bytes_held / 1e6:.0f} MB held on standby"
        )
    print(json.dumps({"cores": len(os.sched_getaffinity(0)), "seconds from the order to the first token": rows}))


def wake(model: Path, cache: Path, *, prepares: bool = False) -> tuple[float, float, int]:
    """Seconds from the order to the first token, those of processor time, and the bytes that were held until then.
    `prepares`: wait for the copy."""
    document = describe(model, cache, port := free_port()) | {"standby": True}
    with running(HERE, document) as (process, log):
        _await_started(int(str(document["metricsPort"])), process.poll, log)
        time.sleep(_SETTLED_SECONDS)
        held = read_resident_bytes(process.pid)
        began, before = time.monotonic(), read_cpu_seconds(process.pid)
        _post(port, "/wake")
        while not ask(port):
            if process.poll() is not None or time.monotonic() - began > LIMIT_SECONDS:
                raise RuntimeError(f"the worker did not answer:\n{log.read_text()[-3000:]}")
        seconds, cpu = time.monotonic() - began, read_cpu_seconds(process.pid) - before
        if prepares:
            time.sleep(10 * _SETTLED_SECONDS)
        return seconds, cpu, held


def _await_started(port: int, ended: Callable[[], int | None], log: Path) -> None:
    began = time.monotonic()
    while not _answers(port, "GET", "/startz"):
        if ended() is not None or time.monotonic() - began > LIMIT_SECONDS:
            raise RuntimeError(f"the worker did not come to be on standby:\n{log.read_text()[-3000:]}")
        time.sleep(0.05)


def _post(port: int, path: str) -> None:
    if not _answers(port, "POST", path):
        raise RuntimeError(f"the worker does not take {path}")


def _answers(port: int, method: str, path: str) -> bool:
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_SECONDS) as connection:
            connection.sendall(head.encode())
            return connection.recv(65536).startswith(b"HTTP/1.1 200")
    except ConnectionError:
        return False


if __name__ == "__main__":
    main()
