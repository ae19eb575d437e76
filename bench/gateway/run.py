"""CPU, latency and memory of the gateway beside other gateways and a bare relay, in turns. See README.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.gateway.load import Load, RequestShape
from bench.gateway.peers import PEERS, Engines, Peer
from tests.ports import free_port

STUB = Path(__file__).with_name("stub.py")
TICKS = os.sysconf("SC_CLK_TCK")
START_SECONDS = 60.0
DIRECT = "no gateway"
OURS = "tandem"
OURS_PAIRS = "tandem, PD"

HERE_ONLY = {
    "HF_HUB_OFFLINE": "1",
    "HF_ENDPOINT": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1",
}
"""Some routers ask a hub for the model's tokenizer: there is none, and nothing leaves this machine."""

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    port: int
    session: int
    """All its processes are of this session."""


@dataclass(frozen=True, slots=True)
class Closed:
    """So many requests in flight at all times: CPU per request or chunk."""

    in_flight: int
    shape: RequestShape
    unit: str
    """What CPU is counted per: 1k requests or 1M chunks."""


CLOSED = {
    "req": Closed(16, RequestShape(1, 0, 200), "1k requests"),
    "paced": Closed(32, RequestShape(100, 10_000, 200), "1M chunks"),
    "steps": Closed(32, RequestShape(100, 10_000, 200, steps=True), "1M chunks"),
    "long": Closed(8, RequestShape(1, 0, 32_000), "1k requests"),
}
HALF, SLOW = "half", "slow"
SLOW_STREAMS, SLOW_SHARE = 2_000, 10
SLOW_SHAPE = RequestShape(60, 1_000_000, 200)
UNREAD_SHAPE = RequestShape(10_000, 0, 200)
"""2 MB at once."""


def start(stack: ExitStack, core: int, log: Path, *arguments: object) -> int:
    """Start a process on one core in a session of its own, to be ended with the stack; returns its id."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *map(str, arguments)],
            stdout=out,
            stderr=out,
            env=os.environ | HERE_ONLY,
            start_new_session=True,
        )
    stack.callback(process.wait)
    stack.callback(_end, process)
    return process.pid


def _end(process: subprocess.Popen[bytes]) -> None:
    for pid, fields in _processes(process.pid):
        if fields[0] != "Z":
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue


def start_targets(stack: ExitStack, flags: list[str], *, peers: bool) -> list[Target]:
    load_core, router_core = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {load_core})
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    first, second, *prefill = (free_port() for _ in range(4))
    engines = Engines((first, second), (prefill[0], prefill[1]))
    for port in engines.aggregated:
        start(stack, load_core, folder / f"engine-{port}.log", sys.executable, STUB, "engine", port)
    for port in engines.prefill:
        start(stack, load_core, folder / f"prefill-{port}.log", sys.executable, STUB, "prefill", port)
    targets = [Target(DIRECT, first, 0)]

    def add(name: str, build: Callable[[int, int], Sequence[object]]) -> None:
        port, metrics = free_port(), free_port()
        log = folder / f"{name.replace(', ', '-')}.log"
        targets.append(Target(name, port, start(stack, router_core, log, *build(port, metrics))))

    def add_peer(peer: Peer, executable: Path) -> None:
        home = folder / f"{peer.name.replace(', ', '-')}-files"
        home.mkdir()
        add(peer.name, lambda port, metrics: [executable, *peer.arguments(port, metrics, engines, home)])

    add("relay", lambda port, _: [sys.executable, STUB, "relay", port, first])
    for peer in PEERS if peers else ():
        executable = peer.executable()
        if executable is None:
            print(f"{peer.name} is not installed and left out: python -m bench.gateway.peers", file=sys.stderr)
            continue
        add_peer(peer, executable)
    gateway = [sys.executable, "-m", "tandem_gateway", "--host", "127.0.0.1", "--served-name", "m", *flags]
    decode = [f"--worker=role=decode,url=127.0.0.1:{port}" for port in engines.aggregated]
    prefills = [f"--worker=role=prefill,url=127.0.0.1:{port}" for port in engines.prefill]
    add(OURS, lambda port, metrics: [*gateway, *decode, "--port", port, "--metrics-port", metrics])
    add(OURS_PAIRS, lambda port, metrics: [*gateway, *decode, *prefills, "--port", port, "--metrics-port", metrics])
    return targets


def _processes(session: int) -> list[tuple[int, list[str]]]:
    found: list[tuple[int, list[str]]] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == session:
                found.append((int(folder.name), fields))
    return found


def cpu_seconds(target: Target) -> float:
    """User and system time of all its processes."""
    return sum(int(fields[11]) + int(fields[12]) for _, fields in _processes(target.session)) / TICKS


def memory_mib(target: Target) -> float:
    """Resident memory of all its processes."""
    pages = sum(int(fields[21]) for _, fields in _processes(target.session))
    return pages * resource.getpagesize() / 2**20


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure_closed(target: Target, scenario: Closed, seconds: float) -> Figures:
    load = Load(target.port, scenario.shape)
    await load.connect(scenario.in_flight)
    load.keep_busy()
    await asyncio.sleep(1.0)
    load.counts.clear()
    cpu, began = cpu_seconds(target), time.perf_counter()
    await asyncio.sleep(seconds)
    cpu, took = cpu_seconds(target) - cpu, time.perf_counter() - began
    counts, latency = load.counts, _latency(load, target)
    per = counts.chunks / 1e6 if scenario.unit == "1M chunks" else counts.requests / 1e3
    figures = {"cpu": cpu / per, "rate": counts.requests / took, **latency}
    load.close()
    await asyncio.sleep(0.2)
    return figures


async def measure_half(target: Target, rate: float, seconds: float) -> Figures:
    """Time to first token at a steady rate."""
    load = Load(target.port, CLOSED["req"].shape)
    await load.connect(8)
    await load.arrive(rate, 1.0)
    load.counts.clear()
    await load.arrive(rate, seconds)
    await asyncio.sleep(0.2)
    figures = _latency(load, target)
    load.close()
    return figures


async def measure_slow(target: Target, seconds: float) -> Figures:
    """Many streams at an even pace, alone and then beside others whose clients ask for much and read nothing."""
    load = Load(target.port, SLOW_SHAPE)
    await load.connect(SLOW_STREAMS - SLOW_STREAMS // SLOW_SHARE)
    load.keep_busy()
    await asyncio.sleep(5.0)
    load.counts.clear()
    await asyncio.sleep(seconds)
    figures = {"before_ms": percentile(load.counts.gaps, 0.99) * 1e3, "before_mib": memory_mib(target)}
    unread = Load(target.port, UNREAD_SHAPE)
    await unread.connect(SLOW_STREAMS // SLOW_SHARE)
    for client in unread.clients:
        client.transport.pause_reading()
    unread.keep_busy()
    await asyncio.sleep(2.0)
    load.counts.clear()
    await asyncio.sleep(seconds)
    figures |= {"gap_p99_ms": percentile(load.counts.gaps, 0.99) * 1e3, "errors": load.counts.errors}
    figures |= {"memory_mib": memory_mib(target)}
    for each in (unread, load):
        each.close()
    await asyncio.sleep(1.0)
    return figures


def _latency(load: Load, target: Target) -> Figures:
    counts = load.counts
    if counts.errors or not counts.ttft:
        raise SystemExit(f"{target.name}: {counts.errors} errors, {len(counts.ttft)} answers")
    return {"ttft_p50_us": statistics.median(counts.ttft) * 1e6, "ttft_p99_us": percentile(counts.ttft, 0.99) * 1e6}


async def run(targets: list[Target], names: list[str], rounds: int, seconds: float) -> dict[str, dict[str, Figures]]:
    for target in targets:
        await wait_for(target)
    results: dict[str, dict[str, Figures]] = {}
    for name in names:
        taken: dict[str, list[Figures]] = {target.name: [] for target in targets}
        for number in range(rounds):
            for target in random.Random(number).sample(targets, len(targets)):
                if name in CLOSED:
                    taken[target.name].append(await measure_closed(target, CLOSED[name], seconds))
                elif name == HALF and target.name in (DIRECT, "relay", "nginx", OURS, OURS_PAIRS):
                    taken[target.name].append(await measure_half(target, _half_rate(results), seconds))
                elif name == SLOW and target.name in (OURS, DIRECT, "nginx"):
                    taken[target.name].append(await measure_slow(target, 10.0))
        results[name] = {target: summarize(each) for target, each in taken.items() if each}
        show(name, results[name], rounds)
    return results


def _half_rate(results: dict[str, dict[str, Figures]]) -> float:
    """Of the requests that our gateway answers on one core."""
    if "req" not in results:
        raise SystemExit("half needs req: half of its rate is the load")
    return results["req"][OURS]["rate"] / 2


def summarize(taken: list[Figures]) -> Figures:
    """Medians of the rounds, and the lowest and highest CPU time."""
    figures = {key: statistics.median(each[key] for each in taken) for key in taken[0]}
    if "cpu" in figures:
        figures |= {"cpu_min": min(each["cpu"] for each in taken), "cpu_max": max(each["cpu"] for each in taken)}
    return figures


def show(name: str, results: dict[str, Figures], rounds: int) -> None:
    scenario = CLOSED.get(name)
    if scenario is not None:
        print(f"\n{name}: CPU seconds per {scenario.unit}, median of {rounds} (lowest to highest)")
        reference = "nginx" if "nginx" in results else "relay"
        for target, got in results.items():
            if target == DIRECT:
                print(f"  {target:20s} {'':26s} {'':14s}   TTFT p50 {got['ttft_p50_us']:6.0f} us")
                continue
            print(
                f"  {target:20s} {got['cpu']:8.3f} ({got['cpu_min']:.3f} to {got['cpu_max']:.3f})"
                f"  {got['cpu'] / results[reference]['cpu']:5.2f} x {reference}"
                f"   TTFT p50 {got['ttft_p50_us']:6.0f} us   {got['rate']:7.0f} req/s"
            )
    elif name == HALF:
        print(f"\n{name}: time to first token, and what the gateway adds to it, in microseconds")
        direct = results[DIRECT]
        for target, got in results.items():
            added = {key: got[key] - direct[key] for key in ("ttft_p50_us", "ttft_p99_us")}
            print(
                f"  {target:20s} p50 {got['ttft_p50_us']:7.0f} (+{added['ttft_p50_us']:.0f})"
                f"   p99 {got['ttft_p99_us']:7.0f} (+{added['ttft_p99_us']:.0f})"
            )
    else:
        print(
            f"\n{name}: {SLOW_STREAMS} streams, one token a second; then one in {SLOW_SHARE} is 2 MB that nobody reads"
        )
        for target, got in results.items():
            print(
                f"  {target:20s} p99 between tokens {got['before_ms']:6.0f} ms, then {got['gap_p99_ms']:6.0f} ms"
                f"   {got['before_mib']:6.0f} MiB, then {got['memory_mib']:6.0f} MiB   {got['errors']:.0f} errors"
            )


async def wait_for(target: Target) -> None:
    """Until it answers a request.

    Raises:
        SystemExit: it did not in time.
    """
    request = RequestShape(1, 0, 10).build(0)
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
            writer.write(request)
            async with asyncio.timeout(5.0):
                answer = await reader.readline()
            writer.close()
        except (OSError, TimeoutError):
            answer = b""
        if b" 200 " in answer:
            return
        await asyncio.sleep(0.5)
    raise SystemExit(f"{target.name} did not answer within {START_SECONDS:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[*CLOSED, HALF, SLOW], action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--no-peers", action="store_true", help="the gateway and the relay alone")
    parser.add_argument("--access-log", action="store_true", help="with the access log, which is off otherwise")
    parser.add_argument("--record", type=Path, help="folder for the results")
    options = parser.parse_args()
    with ExitStack() as stack:
        targets = start_targets(stack, [] if options.access_log else ["--no-access-log"], peers=not options.no_peers)
        names = options.only or [*CLOSED, HALF, SLOW]
        results = uvloop.run(run(targets, names, options.rounds, options.seconds))
    summary = {"bench": "gateway", "machine": platform.machine(), "rounds": options.rounds, "results": results}
    text = json.dumps(summary)
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
        name = f"gateway-{platform.machine()}-{os.cpu_count()}cores-{time.strftime('%Y-%m-%d')}.json"
        (options.record / name).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
