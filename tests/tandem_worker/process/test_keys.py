"""Workers with keys: who is let in, where, and what strangers can do at every port."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tandem_api.keys import KEY_BYTES, KeyRing, bearer_token
from tandem_worker.host.errors import AuthenticationError
from tandem_worker.host.peers.dial import dial
from tandem_worker.host.peers.handshake import Purpose

BODY = {"model": "tiny", "prompt": "The quick brown fox jumps over the lazy dog. " * 3, "max_tokens": 2}
PROBES = ("/healthz", "/readyz", "/metrics", "/telemetry")


def make_ring(*names: str) -> KeyRing:
    """The first name is the primary key's."""
    return KeyRing(primary=names[0], keys={name: secrets.token_bytes(KEY_BYTES) for name in names})


class Keys:
    """A folder of keys as a pod has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.rings: dict[str, KeyRing] = {}
        for name in ("api", "peers"):
            self.write(name, make_ring("k1"))

    def write(self, name: str, ring: KeyRing) -> None:
        """In one step, as the kubelet does."""
        self.rings[name] = ring
        following = self.folder / f".{name}"
        following.write_text(ring.encode())
        following.rename(self.folder / f"{name}.json")

    @property
    def headers(self) -> dict[str, str]:
        return {"x-tandem-token": bearer_token(self.rings["api"])}


@pytest.fixture(scope="module")
def guarded(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, workers: SimpleNamespace
) -> Iterator[SimpleNamespace]:
    """A prefill and a decode worker with keys."""
    folder = tmp_path_factory.mktemp("guarded")
    keys = Keys(folder / "keys")
    options = {"keysPath": str(keys.folder)}
    with (
        workers.run(folder, "prefill", tiny_model, **options) as prefill,
        workers.run(folder, "decode", tiny_model, **options) as decode,
    ):
        for worker in (prefill, decode):
            workers.await_ready(worker).headers |= keys.headers
        yield SimpleNamespace(prefill=prefill, decode=decode, keys=keys)


def listening(worker: Any) -> dict[int, set[str]]:
    """Ports that a process listens at, with the addresses (hexadecimal, as the kernel shows them)."""
    inodes = {
        link.split("[")[1].rstrip("]")
        for entry in Path(f"/proc/{worker.process.pid}/fd").iterdir()
        if (link := os.readlink(entry)).startswith("socket:[")
    }
    found: dict[int, set[str]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.setdefault(int(port, 16), set()).add(address)
    return found


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_what_is_served_where(guarded: SimpleNamespace) -> None:
    decode = guarded.decode
    for path in PROBES:
        assert decode.get(path).status_code == 200
        assert httpx.get(decode.url + path, headers=decode.headers).status_code == 404
        assert httpx.get(decode.url + path).status_code == 401
    assert decode.get("/v1/models").status_code == 404
    assert httpx.get(decode.url + "/v1/models", headers=decode.headers).json()["data"][0]["id"] == "tiny"


def test_host_holds_for_every_port(guarded: SimpleNamespace) -> None:
    for worker in (guarded.prefill, guarded.decode):
        ports = listening(worker)
        assert {port_of(worker.url), port_of(worker.metrics_url)} <= set(ports)
        assert set().union(*ports.values()) == {"0100007F"}
    assert port_of(guarded.prefill.kv) in listening(guarded.prefill)


def test_strangers_and_wrong_keys_are_told_nothing(guarded: SimpleNamespace) -> None:
    decode = guarded.decode
    tokens = [{}, {"x-tandem-token": "k1"}, {"x-tandem-token": bearer_token(guarded.keys.rings["peers"])}]
    answers = [
        httpx.request(method, decode.url + path, headers=token | {"x-request-id": "a"}, json=BODY)
        for token in tokens
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/nothing"), ("PUT", "/"))
    ]
    assert {answer.status_code for answer in answers} == {401}
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].json()["error"]["type"] == "authentication_error"
    for ring, purpose in (
        (make_ring("k1"), Purpose.KV),
        (guarded.keys.rings["api"], Purpose.KV),
        (guarded.keys.rings["peers"], Purpose.GROUP),
    ):
        with pytest.raises(AuthenticationError):
            dial("127.0.0.1", port_of(guarded.prefill.kv), ring, purpose, seconds=60)
    refused = "tandem_worker_refused_connections_total"
    assert guarded.prefill.metric(refused, port="kv", reason="wrong_proof") >= 3
    assert decode.metric(refused, port="http", reason="no_token") >= 4
    assert decode.metric(refused, port="http", reason="wrong_token") >= 8


def test_workers_with_a_key_prefill_for_each_other(guarded: SimpleNamespace) -> None:
    before = guarded.decode.metric("tandem_worker_prefills_total", where="remote")
    answer = guarded.decode.complete(BODY["prompt"], prefill=guarded.prefill.kv)
    assert answer["headers"]["x-tandem-prefill-worker"] == "prefill-0"
    assert guarded.decode.metric("tandem_worker_prefills_total", where="remote") == before + 1


def memory(worker: Any) -> int:
    fields = Path(f"/proc/{worker.process.pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def test_strangers_on_every_port_cost_little_and_stop_nobody(guarded: SimpleNamespace) -> None:
    """Idle connections, garbage, greetings without an end; meanwhile requests are answered."""
    prefill, decode = guarded.prefill, guarded.decode
    ports = [port_of(url) for url in (prefill.kv, prefill.url, prefill.metrics_url, decode.url, decode.metrics_url)]
    decode.complete(BODY["prompt"], prefill=prefill.kv)
    before = [memory(worker) for worker in (prefill, decode)]
    crowd: list[socket.socket] = []
    garbage = [b"", b"GET /", secrets.token_bytes(1 << 16), b"\x00\x00\x00\x10" * 500, b"tandem\x00\x01k1" + bytes(40)]
    for port in ports:
        for index in range(200):
            sock = socket.create_connection(("127.0.0.1", port), 60)
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.send(garbage[index % len(garbage)])
            crowd.append(sock)
        answer = decode.complete(f"{port}: {BODY['prompt']}", prefill=prefill.kv, max_tokens=2)
        assert answer["headers"]["x-tandem-prefill-worker"] == "prefill-0"
    for worker, size in zip((prefill, decode), before, strict=True):
        assert worker.get("/healthz").text == "ok\n"
        assert memory(worker) - size < 50 << 20
    for sock in crowd:
        sock.close()


def test_keys_rotate_under_load_without_a_failed_request(guarded: SimpleNamespace) -> None:
    keys, decode, prefill = guarded.keys, guarded.decode, guarded.prefill
    stop, served = threading.Event(), []
    shown = dict(keys.headers)

    def load() -> None:
        while not stop.is_set():
            body = BODY | {"prompt": f"{secrets.token_hex(8)} {BODY['prompt']}"}
            headers = shown | {"x-tandem-prefill": prefill.kv}
            answer = httpx.post(decode.url + "/v1/completions", json=body, headers=headers, timeout=60)
            served.append((answer.status_code, answer.headers.get("x-tandem-prefill-worker")))

    clients = [threading.Thread(target=load) for _ in range(3)]
    for client in clients:
        client.start()
    olds = dict(keys.rings)
    news = {name: make_ring("k2") for name in olds}
    for primary in ("k1", "k2", None):
        for name, old in olds.items():
            both = {**old.keys, **news[name].keys}
            keys.write(name, news[name] if primary is None else KeyRing(primary=primary, keys=both))
        time.sleep(1.5)  # every process has read it by then
        shown = dict(keys.headers)
        count = len(served)
        while len(served) < count + 3 + len(clients):
            time.sleep(0.05)
    stop.set()
    for client in clients:
        client.join(60)
    assert set(served) == {(200, "prefill-0")}
    late = httpx.get(decode.url + "/v1/models", headers={"x-tandem-token": bearer_token(olds["api"])})
    assert late.status_code == 401
    for worker in (prefill, decode):
        worker.headers |= keys.headers


@pytest.mark.full
def test_a_group_with_keys(workers: SimpleNamespace, tiny_model: Path, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    options = {"keysPath": str(keys.folder), "group": {"parallelism": {"tensor": 2}}}
    with workers.run(tmp_path, "unified", tiny_model, **options) as worker:
        worker.headers |= keys.headers
        workers.await_ready(worker)
        http = {port_of(worker.url), port_of(worker.metrics_url)}
        ports = listening(worker)
        assert set().union(*ports.values()) == {"0100007F"}  # gloo's too
        for port in set(ports) - http:
            with socket.create_connection(("127.0.0.1", port), 60) as stranger:
                stranger.sendall(b"\x00\x00\x00\x30\x01" + json.dumps({"rank": 1}).encode())
            for ring in (make_ring("k1"), keys.rings["api"]):
                with pytest.raises((AuthenticationError, OSError)):
                    dial("127.0.0.1", port, ring, Purpose.GROUP, seconds=60)
        assert worker.complete("hello", max_tokens=4)["usage"]["completion_tokens"] == 4
        assert worker.metric("tandem_worker_refused_connections_total", port="group", reason="wrong_proof") == 2
        assert worker.get("/healthz").text == "ok\n"


@pytest.mark.parametrize(
    "damage",
    [lambda folder: (folder / "peers.json").unlink(), lambda folder: (folder / "api.json").write_text("{}")],
)
def test_unreadable_keys_are_told_to_the_operator(
    workers: SimpleNamespace, tiny_model: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    keys = Keys(tmp_path / "keys")
    damage(keys.folder)
    with workers.run(tmp_path, "unified", tiny_model, keysPath=str(keys.folder)) as worker:
        assert worker.process.wait(60) == 1
    message = json.loads(worker.log.with_suffix(".termination").read_text())
    assert message["reason"] == "KeysUnreadable"
    assert "delete the Secret" in message["message"]


def test_a_process_without_descriptors_says_so_and_recovers(guarded: SimpleNamespace, workers: SimpleNamespace) -> None:
    """The limit is set on the running process: a leak, as it looks from inside."""
    worker = guarded.prefill
    pid = worker.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    assert limits[0] == limits[1]  # raised at start
    crowd: list[socket.socket] = []
    with httpx.Client(base_url=worker.metrics_url, timeout=20) as watcher:
        assert watcher.get("/healthz").text == "ok\n"
        try:
            used = len(os.listdir(f"/proc/{pid}/fd"))
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 5, limits[1]))
            crowd += [socket.create_connection(("127.0.0.1", port_of(worker.kv)), 60) for _ in range(60)]
            workers.eventually(lambda: "connections are turned away" in watcher.get("/healthz").text, 60, "it is named")
            assert watcher.get("/readyz").status_code == 503
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
            for sock in crowd:
                sock.close()
        workers.eventually(lambda: watcher.get("/healthz").text == "ok\n", 60, "it recovers")
    answer = guarded.decode.complete(f"again: {BODY['prompt']}", prefill=worker.kv)
    assert answer["headers"]["x-tandem-prefill-worker"] == "prefill-0"
