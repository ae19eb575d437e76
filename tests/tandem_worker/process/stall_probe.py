"""Watches a worker from a process of its own: how long a stream pauses, how long `/healthz` takes.

    python stall_probe.py PORT METRICS_PORT MODEL PROCESS

Runs until its standard input ends, then prints JSON: `pauses`, `probes` and `late`, each a list of [when, seconds];
`when` is the end of it on the monotonic clock, which all processes share. `late` is how much later than asked for a
sleeping thread of this process was woken, and how long threads of the worker waited for a core that others had: what
the machine did to everybody. Raw sockets, because a client library's
own pauses would be counted.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from pathlib import Path

PROBE_SECONDS = 0.05
TICK_SECONDS = 0.005
SCHEDULE_SECONDS = 0.02
_TIMEOUT = 120.0

Samples = list[tuple[float, float]]


def watch_stream(port: int, model: str, ended: threading.Event, pauses: Samples) -> None:
    """One stream after another; what lies between two of them is not counted."""
    body = json.dumps({"model": model, "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n"
        "content-type: application/json\r\n\r\n"
    )
    while not ended.is_set():
        with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT) as sock:
            sock.sendall(head.encode() + body)
            sock.recv(1 << 16)
            last = time.monotonic()
            while not ended.is_set() and sock.recv(1 << 16):
                now = time.monotonic()
                pauses.append((now, now - last))
                last = now


def watch_health(port: int, ended: threading.Event, probes: Samples) -> None:
    """A new connection each time, as a kubelet does it."""
    while not ended.wait(PROBE_SECONDS):
        started = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT) as sock:
            sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = b""
            while part := sock.recv(4096):
                answer += part
        if b" 200 " not in answer[:15]:
            raise RuntimeError(f"not healthy: {answer!r}")
        now = time.monotonic()
        probes.append((now, now - started))


def watch_machine(ended: threading.Event, late: Samples) -> None:
    while not ended.is_set():
        started = time.monotonic()
        time.sleep(TICK_SECONDS)
        now = time.monotonic()
        if now - started > 2 * TICK_SECONDS:
            late.append((now, now - started - TICK_SECONDS))


def read_waiting(process: int) -> dict[str, int]:
    """Nanoseconds that each thread was ready to run and had no core, as the kernel counts them."""
    found: dict[str, int] = {}
    for thread in Path(f"/proc/{process}/task").iterdir():
        try:
            found[thread.name] = int((thread / "schedstat").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
    return found


def watch_worker(process: int, ended: threading.Event, late: Samples) -> None:
    before = read_waiting(process)
    while not ended.wait(SCHEDULE_SECONDS):
        waiting = read_waiting(process)
        seconds = 1e-9 * sum(waited - before.get(thread, 0) for thread, waited in waiting.items())
        before = waiting
        if seconds > TICK_SECONDS:
            late.append((time.monotonic(), seconds))


def main() -> None:
    port, metrics_port, model, process = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    ended = threading.Event()
    pauses: Samples = []
    probes: Samples = []
    late: Samples = []
    threads = [
        threading.Thread(target=watch_stream, args=(port, model, ended, pauses)),
        threading.Thread(target=watch_health, args=(metrics_port, ended, probes)),
        threading.Thread(target=watch_machine, args=(ended, late)),
        threading.Thread(target=watch_worker, args=(process, ended, late)),
    ]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join()
    print(json.dumps({"pauses": pauses, "probes": probes, "late": late}))


if __name__ == "__main__":
    main()
