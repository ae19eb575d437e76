"""Measure CPU and latency of the gateway beside a bare relay. See README.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

STUB = Path(__file__).with_name("stub.py")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Scenario:
    in_flight: int
    tokens: int
    interval_us: int
    prompt_bytes: int
    unit: str
    """What CPU is counted per: 1,000 requests or 1,000,000 chunks."""


SCENARIOS = {
    "req": Scenario(16, 1, 0, 200, "1k requests"),
    "paced": Scenario(32, 100, 10_000, 200, "1M chunks"),
    "long": Scenario(8, 1, 0, 32_000, "1k requests"),
}


@dataclass(frozen=True)
class Target:
    name: str
    port: int
    pid: int


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(stack: ExitStack, core: int, *arguments: object) -> int:
    """Start a process on one core, to be ended with the stack; returns its id."""
    process = subprocess.Popen(
        ["taskset", "-c", str(core), *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process.pid


def start_targets(stack: ExitStack, flags: list[str]) -> list[Target]:
    load_core, router_core = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {load_core})
    engines = [free_port() for _ in range(4)]
    for port in engines:
        start(stack, load_core, sys.executable, STUB, "engine", port)
    relay, unified, pairs = free_port(), free_port(), free_port()
    gateway = [sys.executable, "-m", "tandem_gateway", "--host", "127.0.0.1", "--served-name", "m", *flags]
    decode = [f"--worker=role=decode,url=127.0.0.1:{port}" for port in engines[:2]]
    prefill = [f"--worker=role=prefill,url=127.0.0.1:{port}" for port in engines[2:]]
    return [
        Target("relay", relay, start(stack, router_core, sys.executable, STUB, "relay", relay, engines[0])),
        Target(
            "gateway",
            unified,
            start(stack, router_core, *gateway, *decode, "--port", unified, "--metrics-port", free_port()),
        ),
        Target(
            "gateway, prefill + decode",
            pairs,
            start(stack, router_core, *gateway, *decode, *prefill, "--port", pairs, "--metrics-port", free_port()),
        ),
    ]


def build_request(scenario: Scenario, number: int) -> bytes:
    shared = f"group {number % 16} ".ljust(scenario.prompt_bytes * 3 // 4, "s")
    content = shared + f"question {number} ".ljust(scenario.prompt_bytes // 4, "q")
    body = json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": content}],
            "stream": True,
            "max_tokens": scenario.tokens,
            "seed": scenario.interval_us,
        }
    ).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


class Client(asyncio.Protocol):
    """One connection that sends the next request as soon as an answer is complete."""

    def __init__(self, load: Load) -> None:
        self.load = load

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        self.waiting = True
        self.sent_at = time.perf_counter()
        self.transport.write(self.load.next_request())

    def data_received(self, data: bytes) -> None:
        load = self.load
        if self.waiting:
            self.waiting = False
            load.ttft.append(time.perf_counter() - self.sent_at)
            load.errors += not data.startswith(b"HTTP/1.1 200")
        load.chunks += data.count(b"token ")
        if data.endswith(b"0\r\n\r\n"):
            load.requests += 1
            self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        self.load.errors += not self.load.over


class Load:
    def __init__(self, scenario: Scenario) -> None:
        self.prepared = [build_request(scenario, number) for number in range(512)]
        self.number = self.requests = self.chunks = self.errors = 0
        self.over = False
        self.ttft: list[float] = []

    def next_request(self) -> bytes:
        self.number += 1
        return self.prepared[self.number % len(self.prepared)]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def measure(target: Target, scenario: Scenario, seconds: float) -> dict[str, float]:
    load = Load(scenario)
    loop = asyncio.get_running_loop()
    clients = [
        await loop.create_connection(lambda: Client(load), "127.0.0.1", target.port) for _ in range(scenario.in_flight)
    ]
    await asyncio.sleep(1.0)
    requests, chunks, cpu, began = load.requests, load.chunks, cpu_seconds(target.pid), time.perf_counter()
    load.ttft.clear()
    await asyncio.sleep(seconds)
    cpu, took = cpu_seconds(target.pid) - cpu, time.perf_counter() - began
    requests, chunks = load.requests - requests, load.chunks - chunks
    load.over = True
    for transport, _ in clients:
        transport.close()
    if load.errors or not load.ttft:
        raise SystemExit(f"{target.name}: {load.errors} errors, {len(load.ttft)} answers")
    per = chunks / 1e6 if scenario.unit == "1M chunks" else requests / 1e3
    return {"cpu": cpu / per, "ttft": statistics.median(load.ttft) * 1e6, "rate": requests / took}


async def run(targets: list[Target], names: list[str], rounds: int, seconds: float) -> None:
    for target in targets:
        await wait_for(target.port)
    for name in names:
        scenario = SCENARIOS[name]
        results: dict[str, list[dict[str, float]]] = {target.name: [] for target in targets}
        for _ in range(rounds):
            for target in targets:
                results[target.name].append(await measure(target, scenario, seconds))
                await asyncio.sleep(0.2)
        print(f"\n{name}: CPU seconds per {scenario.unit}, median of {rounds} (min to max)")
        floor = statistics.median(item["cpu"] for item in results["relay"])
        for target in targets:
            cpu = [item["cpu"] for item in results[target.name]]
            middle = statistics.median(cpu)
            ttft = statistics.median(item["ttft"] for item in results[target.name])
            print(
                f"  {target.name:26s} {middle:8.3f} ({min(cpu):.3f} to {max(cpu):.3f})   {middle / floor:4.1f} x relay"
                f"   TTFT p50 {ttft:6.0f} us   {statistics.median(i['rate'] for i in results[target.name]):7.0f} req/s"
            )


async def wait_for(port: int) -> None:
    async with asyncio.timeout(15):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                writer.close()
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SCENARIOS, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--access-log", action="store_true", help="with the access log, which is off otherwise")
    options = parser.parse_args()
    with ExitStack() as stack:
        targets = start_targets(stack, [] if options.access_log else ["--no-access-log"])
        uvloop.run(run(targets, options.only or list(SCENARIOS), options.rounds, options.seconds))


if __name__ == "__main__":
    main()
