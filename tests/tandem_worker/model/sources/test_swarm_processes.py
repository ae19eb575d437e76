"""Starters as real processes on loopback, with a hub that is slow: what they end with, and what the hub gave."""

from __future__ import annotations

import hashlib
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tandem_api.keys import KEY_BYTES

from e2e.mirror.server import Handler, MirrorServer

MB = 1_000_000
MODEL_BYTES = 16 * MB
HUB_RATE = 6 * MB
STARTER = """
from xxhash import xxh3_128_digest
import functools, json, logging, os, sys, threading, time
from tandem_api.keys import KeyRing
from tandem_api.launch import FileSharing, ModelSource
from tandem_worker.host.files import exchange as files
from tandem_worker.host.vitals import Vitals
from tandem_worker.model.sources import huggingface
from tandem_worker.model.sources.resolve import resolve_model
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
port, peers, key, cache, hub, vice = json.loads(sys.argv[1])
lease = huggingface.lease
lease.acquire = functools.partial(lease.acquire, stale_seconds=0.5, poll_seconds=0.05)
if vice:
    answer = files.FileExchange._answer_chunk
    def spoil(self, share, index):
        if vice == "stall":
            time.sleep(60)
        got = answer(self, share, index)
        if not got.size or vice == "stall":
            return got
        data = bytearray(os.pread(got.fd, got.size, got.offset))
        data[len(data) // 2] ^= 1
        told = got.header.sum if vice == "lie" else xxh3_128_digest(data).hex()
        return files.Answer(files.Header(source=self.id, sum=told), bytes(data))
    files.FileExchange._answer_chunk = spoil
ring = KeyRing(primary="a", keys={"a": bytes.fromhex(key)})
sharing = FileSharing(enabled=True, port=port, peers=peers)
exchange = files.FileExchange(sharing, peers, lambda: ring, Vitals())
exchange.open("127.0.0.1")
source = ModelSource(uri="hf://org/model", cache_dir=cache, hub_endpoint=hub, sharing=sharing)
path = resolve_model(source, None, exchange)
print(json.dumps([str(path), dict(exchange.received), dict(exchange.faults)]), flush=True)
threading.Event().wait()
"""


class SlowHandler(Handler):
    """Sends at `HUB_RATE` over all connections together, and counts what it sends of files."""

    server: Any

    def setup(self) -> None:
        super().setup()
        write = self.wfile.write

        def slow(data: Any) -> int:
            view = memoryview(data)
            for start in range(0, len(view), 65536):
                piece = view[start : start + 65536]
                with self.server.turn:
                    time.sleep(len(piece) / HUB_RATE)
                    self.server.sent += len(piece)
                write(piece)
            return len(view)

        self.wfile.write = slow  # type: ignore[method-assign]

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Fleet:
    def __init__(self, home: Path) -> None:
        root = home / "mirror" / "org" / "model"
        root.mkdir(parents=True)
        self.home = home
        content = random.Random(7).randbytes(MODEL_BYTES)
        (root / "model.safetensors").write_bytes(content)
        (root / "config.json").write_bytes(b"{}")
        (root / "tokenizer.json").write_bytes(b"[]")
        self.digest = hashlib.sha256(content).hexdigest()
        self.key = random.Random(8).randbytes(KEY_BYTES).hex()
        self.hub: Any = MirrorServer(("127.0.0.1", 0), home / "mirror")
        self.hub.RequestHandlerClass = SlowHandler
        self.hub.turn, self.hub.sent = threading.Lock(), 0
        threading.Thread(target=self.hub.serve_forever, args=(0.01,), daemon=True).start()
        self.ports = _free_ports(4)
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, number: int, vice: str = "") -> None:
        peers = [f"127.0.0.1:{port}" for port in self.ports]
        url = f"http://127.0.0.1:{self.hub.server_address[1]}"
        facts = [self.ports[number], peers, self.key, str(self.home / f"cache{number}"), url, vice]
        log = (self.home / f"{number}.log").open("w")
        self.processes[number] = subprocess.Popen(
            [sys.executable, "-c", STARTER, json.dumps(facts)], stdout=subprocess.PIPE, stderr=log, text=True
        )
        log.close()

    def finish(self, number: int) -> tuple[dict[str, int], dict[str, int]]:
        """Wait for the start's end; its bytes by source and its faults. The model is the hub's."""
        out = self.processes[number].stdout
        assert out is not None
        line = out.readline()
        assert line, (self.home / f"{number}.log").read_text()[-3000:]
        path, received, faults = json.loads(line)
        assert hashlib.sha256(Path(path, "model.safetensors").read_bytes()).hexdigest() == self.digest
        return received, faults

    def kill(self, number: int) -> None:
        process = self.processes.pop(number)
        process.kill()
        process.communicate()

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def close(self) -> None:
        for number in list(self.processes):
            self.kill(number)
        self.hub.shutdown()
        self.hub.server_close()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


def test_four_starters_ask_the_hub_for_little_more_than_one_model(fleet: Fleet) -> None:
    for number in range(4):
        fleet.start(number)
    got = [fleet.finish(number)[0] for number in range(4)]
    assert fleet.hub.sent <= 1.3 * MODEL_BYTES
    assert all(received["peer"] > 0 for received in got)


@pytest.mark.parametrize("vice", ["lie", "forge"])
def test_a_source_that_lies_is_never_believed_and_is_dropped(fleet: Fleet, vice: str) -> None:
    """`forge`: the sums that it tells fit its wrong bytes; the file's digest does not."""
    fleet.start(0, vice)
    fleet.finish(0)
    fleet.start(1)
    _, faults = fleet.finish(1)
    assert faults["wrong"] == 1


def test_a_source_that_stalls_does_not_hold_up_a_start(fleet: Fleet) -> None:
    fleet.start(0, "stall")
    fleet.finish(0)
    fleet.start(1)
    received, _ = fleet.finish(1)
    assert received["hub"] > 0.9 * MODEL_BYTES


def test_a_source_and_a_starter_are_killed_and_every_other_start_ends_right(fleet: Fleet) -> None:
    for number in range(4):
        fleet.start(number)
    fleet.wait(lambda: fleet.hub.sent > MODEL_BYTES // 3)
    fleet.kill(0)
    fleet.kill(1)
    for number in (2, 3):
        fleet.finish(number)
    before = fleet.hub.sent
    fleet.start(0)  # again, over what it left
    fleet.finish(0)
    assert fleet.hub.sent - before < MODEL_BYTES // 2
