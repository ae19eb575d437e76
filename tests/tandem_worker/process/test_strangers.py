"""A minute of strangers, and of peers with the key that went mad, at every port: what it costs, and whom it harms."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tandem_api.keys import KEY_BYTES, OPEN_RING, KeyRing, bearer_token
from tandem_worker.host.peers.handshake import GREETING_BYTES, PROOF_BYTES, Acceptor, Purpose
from tandem_worker.transfer import protocol
from tandem_worker.transfer.contract import Identity
from tandem_worker.transfer.protocol import FrameKind

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
SECONDS = 60.0
MOST_BYTES = 50 << 20
TEXT = "The quick brown fox jumps over the lazy dog. " * 4
RESOLVER = """
import socket
known = socket.getaddrinfo
socket.getaddrinfo = lambda host, *rest, **kw: known("127.0.0.1" if host == "m-0.svc" else host, *rest, **kw)
"""
"""Stands in for the cluster's DNS: both pods are on this machine's loopback."""


class Keys:
    """A folder of keys as a pod has it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.rings = {}
        for name in ("api", "peers"):
            self.rings[name] = KeyRing(primary="k1", keys={"k1": secrets.token_bytes(KEY_BYTES)})
            (folder / f"{name}.json").write_text(self.rings[name].encode())

    @property
    def token(self) -> str:
        return bearer_token(self.rings["api"])


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def memory(worker: Any) -> dict[str, int]:
    """Bytes of its process and of those that it has started; pages that several share are shared out.

    Pages of files are not counted: the kernel takes them back when it likes, and a worker's share of its libraries is
    as large as others that run here make it.
    """
    processes = [worker.process.pid]
    for process in processes:
        for thread in Path(f"/proc/{process}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # threads end meanwhile
                processes += [int(child) for child in thread.read_text().split()]
    found: Counter[str] = Counter()
    for index, process in enumerate(processes):
        with contextlib.suppress(OSError):  # ended meanwhile
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            pss = sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
            found["others" if index else "itself"] += pss << 10
    return dict(found)


@contextmanager
def fake_prefill(ring: KeyRing, play: Any) -> Iterator[str]:
    """A prefill worker that has the key: `play(sock, hello)` for each connection that is made to it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, EOFError):
            acceptor = Acceptor(ring, Purpose.KV)
            sock.sendall(acceptor.challenge(read_exact(sock, GREETING_BYTES)))
            sock.sendall(acceptor.accept(read_exact(sock, PROOF_BYTES)))
            header = protocol.decode_header(read_exact(sock, protocol.HEADER_BYTES), frozenset(FrameKind))
            play(sock, protocol.decode_hello(read_exact(sock, header.length)))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def read_exact(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def learn_identity(decode: Any, ring: KeyRing) -> Identity:
    """What a peer with the key hears from a decode worker."""
    heard: list[Identity] = []
    with fake_prefill(ring, lambda sock, hello: heard.append(hello)) as endpoint:
        decode.complete(f"{secrets.token_hex(4)} {TEXT}", prefill=endpoint, max_tokens=1)
    return replace(heard[0], worker="mad", shard=None, ranks=())


def attack_and_watch(watched: dict[str, Any], warm: list[Any], targets: list[dict[str, Any]], serve: Any) -> None:
    """`serve()` asks for something sound and checks the answer; it is asked all the time."""
    # What a worker needs when it works at all is not counted: every block, and the process for large requests.
    for worker in warm:
        for length in [8000, *[1000] * 26]:
            worker.complete([1 + (length + secrets.randbelow(200)) % 250 for _ in range(length)], max_tokens=1)
        too_long = {"model": "tiny", "prompt": "x" * 100_000}
        httpx.post(worker.url + "/v1/completions", json=too_long, headers=worker.headers, timeout=60)
    for _ in range(20):
        serve()
    control = sorted(timed(serve) for _ in range(20))
    before = {name: memory(worker) for name, worker in watched.items()}
    script = Path(__file__).with_name("strangers.py")
    order = json.dumps({"seconds": SECONDS, "targets": targets})
    took: list[float] = []
    most = dict.fromkeys(watched, 0)

    def growth(name: str) -> int:
        return sum(memory(watched[name]).values()) - sum(before[name].values())

    with subprocess.Popen([sys.executable, str(script), order], stdout=subprocess.PIPE) as process:
        while process.poll() is None:
            took.append(timed(serve))
            for name, worker in watched.items():
                most[name] = max(most[name], growth(name))
                assert worker.get("/healthz").text == "ok\n", name
            time.sleep(0.1)
        assert process.stdout is not None
        made = json.loads(process.stdout.read())
    assert process.returncode == 0
    at_end = {name: growth(name) for name in watched}
    began = time.monotonic()
    while max(map(growth, watched)) > MOST_BYTES and time.monotonic() - began < SECONDS:
        time.sleep(1.0)  # bodies that were never completed are given up, connections are gone
        serve()
    after = {name: growth(name) for name in watched}
    print(f"{time.monotonic() - began:.0f} s after the last of them:")
    took.sort()
    print(f"\nconnections made: {made}")
    print(f"sound requests: {len(took)}, median {1e3 * took[len(took) // 2]:.0f} ms, longest {1e3 * took[-1]:.0f} ms; "
          f"alone {1e3 * control[len(control) // 2]:.0f} and {1e3 * control[-1]:.0f} ms")  # fmt: skip
    for name, worker in watched.items():
        figures = (after[name], at_end[name], most[name])
        grown = "{:+.1f} MiB, {:+.1f} at their end, {:+.1f} at most".format(*(each / 2**20 for each in figures))
        shares = [{part: size >> 20 for part, size in each.items()} for each in (before[name], memory(worker))]
        print(f"memory of {name}: {grown}; {shares[0]} before, {shares[1]} after")
    assert all(made.get(target["kind"], 0) > 100 for target in targets), made
    for name, worker in watched.items():
        assert worker.process.poll() is None, name
        assert worker.get("/healthz").text == "ok\n", name
    serve()
    assert all(grown < MOST_BYTES for grown in after.values()), after


def timed(call: Any) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def http_targets(*workers: Any, token: str) -> list[dict[str, Any]]:
    found = []
    for worker in workers:
        found += [{"kind": "any", "port": port_of(url)} for url in (worker.url, worker.metrics_url)]
        found.append({"kind": "http", "port": port_of(worker.url), "token": token})
    return found


@pytest.mark.parametrize("with_keys", [True, False], ids=["keys", "no-keys"])
def test_a_minute_at_a_pair(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path, with_keys: bool) -> None:
    keys = Keys(tmp_path / "keys")
    options = {"keysPath": str(keys.folder)} if with_keys else {}
    with (
        workers.run(tmp_path, "prefill", tiny_model, **options) as prefill,
        workers.run(tmp_path, "decode", tiny_model, **options) as decode,
    ):
        for worker in (prefill, decode):
            worker.headers |= {"x-tandem-token": keys.token}
            workers.await_ready(worker)
        mad = learn_identity(decode, keys.rings["peers"] if with_keys else OPEN_RING)
        peers = str(keys.folder / "peers.json") if with_keys else None
        kv = port_of(prefill.kv)
        targets = [
            *http_targets(prefill, decode, token=keys.token), {"kind": "any", "port": kv},
            {"kind": "kv", "port": kv, "keys": peers, "hello": protocol.encode_hello(mad).hex()},
        ]  # fmt: skip
        served: list[str] = []

        def serve() -> None:
            answer = decode.complete(
                f"{secrets.token_hex(4)} {TEXT}", prefill=prefill.kv, max_tokens=4, ignore_eos=True
            )
            assert answer["usage"]["completion_tokens"] == 4
            served.append(answer["headers"]["x-tandem-prefill-worker"])

        attack_and_watch({"prefill": prefill, "decode": decode}, [prefill, decode], targets, serve)
        print(f"prefilled remotely: {served.count('prefill-0')} of {len(served)}")
        assert served.count("prefill-0") > 0.8 * len(served)
        workers.eventually(lambda: prefill.metric("tandem_worker_kv_blocks_used") == 0, 90, "no block is kept")


@pytest.mark.parametrize("with_keys", [True, False], ids=["keys", "no-keys"])
def test_a_minute_at_a_groups_port(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path, with_keys: bool) -> None:
    keys, port = Keys(tmp_path / "keys"), workers.free_port()
    group = {"parallelism": {"pipeline": 2}, "numNodes": 2, "service": "svc", "port": port}
    options: dict[str, Any] = {"group": group} | ({"keysPath": str(keys.folder)} if with_keys else {})
    (tmp_path / "sitecustomize.py").write_text(RESOLVER)

    def start(ordinal: int) -> Any:
        environment = {"POD_NAME": f"m-{ordinal}", "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
        return workers.run(tmp_path, "unified", tiny_model, environment=environment, **options)

    with start(0) as leader, start(1) as follower:
        for worker in (leader, follower):
            worker.headers |= {"x-tandem-token": keys.token}
        workers.await_ready(leader)
        peers = str(keys.folder / "peers.json") if with_keys else None
        targets = [
            *http_targets(leader, follower, token=keys.token), {"kind": "any", "port": port},
            {"kind": "group", "port": port, "keys": peers},
        ]  # fmt: skip

        def serve() -> None:
            answer = leader.complete(f"{secrets.token_hex(4)} {TEXT}", max_tokens=4, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 4

        attack_and_watch({"leader": leader, "follower": follower}, [leader], targets, serve)


def test_orders_that_heartbeat_for_ever_keep_no_blocks(
    workers: SimpleNamespace, tiny_model: Path, tmp_path: Path
) -> None:
    """Forty orders once held 4,000 of 4,095 blocks for as long as the mad prefill worker went on."""
    orders, used = 40, "tandem_worker_kv_blocks_used"
    keys = Keys(tmp_path / "keys")
    stop = threading.Event()
    begun: list[int] = []

    def go_mad(sock: socket.socket, hello: Identity) -> None:
        """Takes every order, begins with half of them, counts on, and sends nothing else."""
        sock.sendall(protocol.encode_hello(replace(hello, worker="mad", shard=None, ranks=())))
        sock.settimeout(0.2)
        step = 0
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                header = protocol.decode_header(read_exact(sock, protocol.HEADER_BYTES), frozenset(FrameKind))
                sock.settimeout(10)
                read_exact(sock, header.length)
                sock.settimeout(0.2)
                if header.kind is FrameKind.PREFILL:
                    begun.append(header.transfer)
                    if len(begun) % 2:
                        sock.sendall(protocol.encode_start(header.transfer))
            step += 1
            sock.sendall(protocol.encode_heartbeat(step))

    options = {"keysPath": str(keys.folder), "kv": {"memoryBytes": 64 << 20, "port": workers.free_port()}}
    with (
        workers.run(tmp_path, "decode", tiny_model, **options) as decode,
        fake_prefill(keys.rings["peers"], go_mad) as mad,
    ):
        decode.headers |= {"x-tandem-token": keys.token}
        workers.await_ready(decode)
        total = decode.metric("tandem_worker_kv_blocks_total")
        each = int(0.98 * total) // orders * 16
        prompts = [[1 + (17 * number + 7 * place) % 250 for place in range(each)] for number in range(orders)]
        answers: list[tuple[int, float]] = []

        def order(prompt: list[int]) -> None:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
            headers = decode.headers | {"x-tandem-prefill": mad}
            response = httpx.post(decode.url + "/v1/completions", json=body, headers=headers, timeout=300)
            answers.append((response.status_code, time.monotonic() - began))

        began = time.monotonic()
        clients = [threading.Thread(target=order, args=(prompt,)) for prompt in prompts]
        for client in clients:
            client.start()
        workers.eventually(lambda: len(begun) == orders, 60, "all orders are at the mad worker")
        held = decode.metric(used)
        print(f"\n{held:.0f} of {total:.0f} blocks are held by {orders} orders")
        assert held > 0.9 * total
        neighbour = timed(lambda: decode.complete("n " + TEXT * 4, max_tokens=4, ignore_eos=True))
        large = timed(lambda: decode.complete([9] * (each * 2), max_tokens=4, ignore_eos=True))
        for client in clients:
            client.join(300)
        took = sorted(seconds for _, seconds in answers)
        print(f"a small neighbour was served after {neighbour:.1f} s, one of {each // 8} blocks after {large:.1f} s; "
              f"the orders' own clients after {took[0]:.1f} to {took[-1]:.1f} s")  # fmt: skip
        assert [status for status, _ in answers] == [200] * orders
        assert neighbour < 15
        assert large < 60
        assert took[-1] < 180
        stop.set()
        workers.eventually(lambda: decode.metric(used) == 0, 5, "no block is held")
        assert decode.get("/healthz").text == "ok\n"
