"""Attacks a worker's ports for a while, from a process of its own: `python strangers.py ORDER`, which is JSON.

    {"seconds": 60, "targets": [{"kind": ..., "port": ..., "keys": PATH or null, "token": TEXT, "hello": HEX}]}

Kinds: `any` (a stranger at whatever port), `http` (with the token), `kv` and `group` (with the key). Every target has
addresses of its own (127.0.1.N), as strangers have. Loops are paced, so that what is measured is the worker and not
how many processes share a core. Prints how many connections of each kind were made.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import socket
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

from tandem_api.keys import OPEN_RING, parse_key_ring
from tandem_worker.host.errors import AuthenticationError
from tandem_worker.host.peers.handshake import ACCEPTANCE_BYTES, CHALLENGE_BYTES, Initiator, Purpose
from tandem_worker.transfer import protocol
from tandem_worker.transfer.protocol import BlockRange, FrameKind

PAUSE_SECONDS = 0.03
MOST_OPEN = 400
GARBAGE = [
    b"", b"GET /", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n{", bytes(1 << 16),
    b"\x00\x00\x00\x10" * 500, b"tandem\x00\x01k1" + bytes(40), b"tandem\x00\x01" + bytes(48), b"\xff" * 4096,
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000, secrets.token_bytes(1 << 17),
]  # fmt: skip
made: Counter[str] = Counter()


class Crowd:
    """Connections that stay open until so many younger ones are."""

    def __init__(self, port: int, source: str) -> None:
        self._port, self._source = port, source
        self._open: deque[socket.socket] = deque()

    def connect(self) -> socket.socket:
        while len(self._open) >= MOST_OPEN:
            self._open.popleft().close()
        sock = socket.create_connection(("127.0.0.1", self._port), 60, source_address=(self._source, 0))
        self._open.append(sock)
        sock.settimeout(1.0)
        return sock


def bother(target: dict[str, Any], crowd: Crowd, turn: int, rng: random.Random) -> None:
    sock = crowd.connect()
    match target["kind"]:
        case "any":
            sock.setblocking(False)
            sock.send(rng.choice(GARBAGE))
        case "http":
            ask(sock, target["token"], turn, rng)
        case "kv" | "group":
            purpose = Purpose(target["kind"])
            ring = OPEN_RING if target["keys"] is None else parse_key_ring(Path(target["keys"]).read_bytes())
            ours = Initiator(ring, purpose)
            sock.sendall(ours.greeting)
            sock.sendall(ours.prove(read_exact(sock, CHALLENGE_BYTES)))
            ours.check(read_exact(sock, ACCEPTANCE_BYTES))
            (go_mad_at_kv if purpose is Purpose.KV else go_mad_at_group)(sock, target, turn, rng)


def read_exact(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data


def ask(sock: socket.socket, token: str, turn: int, rng: random.Random) -> None:
    """Requests that are not complete, not sound, or whose answers nobody reads."""
    body = [
        b"[" * 30_000, b'{"model": "tiny", "prompt": "x", "max_tokens": 4000, "ignore_eos": true, "stream": true}',
        b'{"model": "tiny", "prompt": "x", "n": 4, "max_tokens": 8, "logprobs": 20}', bytes(30_000),
        b'{"model": "tiny", "prompt": "' + b"x" * 200_000 + b'"}',
    ][turn % 5]  # fmt: skip
    length = len(body) + (100_000 if rng.random() < 0.3 else 0)
    sock.sendall(
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-tandem-token: {token}\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n".encode()
        + body
    )
    if turn % 5 == 1:  # it runs for as long as its client stays
        time.sleep(0.2)
        sock.close()


def go_mad_at_kv(sock: socket.socket, target: dict[str, Any], turn: int, rng: random.Random) -> None:
    sock.sendall(bytes.fromhex(target["hello"]))
    transfer = rng.getrandbits(63)
    tokens = [7] * rng.choice([8, 400, 3000])
    if turn % 6 == 0:  # the longest frames there are, announced and begun
        sock.sendall(protocol.encode_header(FrameKind.PREFILL, 1, 1 << 20) + bytes(4096))
    elif turn % 6 == 1:  # orders, and nothing is ever taken
        sock.sendall(b"".join(order(transfer + index, tokens) for index in range(50)))
    elif turn % 6 == 2:  # order, cancel, order, cancel
        pairs = (
            order(transfer + index, tokens[:8]) + protocol.encode_cancel(transfer + index) for index in range(2000)
        )
        sock.sendall(b"".join(pairs))
    elif turn % 6 == 3:
        sock.sendall(b"".join(protocol.encode_release(rng.getrandbits(60)) for _ in range(3000)))
    elif turn % 6 == 4:
        sock.sendall(b"".join(protocol.encode_attach(transfer + index, 1 << 15) for index in range(2000)))
    else:
        sock.sendall(order(transfer, tokens) + protocol.encode_resend(transfer, [BlockRange(0, 0, 1)] * 500))
    sock.sendall(secrets.token_bytes(rng.randrange(64)))


def order(transfer: int, tokens: list[int]) -> bytes:
    from tandem_worker.engine.contract import RemotePrefill

    return protocol.encode_prefill(
        transfer,
        RemotePrefill(
            request_id="mad", generation=1, token_ids=tuple(tokens), num_cached_tokens=0, block_ids=(), endpoints=(),
            cache_salt=str(transfer), priority=0, prompt_name=bytes(16),
        ),
    )  # fmt: skip


def go_mad_at_group(sock: socket.socket, target: dict[str, Any], turn: int, rng: random.Random) -> None:
    """Frames of every kind and any length, and impostors."""
    hello = json.dumps({"rank": 1, "model": "tiny", "revision": "r1"}).encode()
    frames = [
        (1 << 28).to_bytes(4, "big") + bytes([rng.randrange(20)]) + bytes(50_000),
        (len(hello) + 1).to_bytes(4, "big") + b"\x01" + hello,
        b"".join((1).to_bytes(4, "big") + bytes([rng.randrange(20)]) for _ in range(500)),
        secrets.token_bytes(5000),
    ]
    sock.sendall(frames[turn % len(frames)])


def attack(target: dict[str, Any], number: int, until: float) -> None:
    rng = random.Random(number)
    crowd = Crowd(target["port"], f"127.0.1.{number + 1}")
    turn = 0
    while time.monotonic() < until:
        turn += 1
        with contextlib.suppress(OSError, AuthenticationError):
            bother(target, crowd, turn, rng)
            made[target["kind"]] += 1
        time.sleep(PAUSE_SECONDS)


def main() -> None:
    wanted = json.loads(sys.argv[1])
    until = time.monotonic() + wanted["seconds"]
    threads = [
        threading.Thread(target=attack, args=(target, number, until)) for number, target in enumerate(wanted["targets"])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(made))


if __name__ == "__main__":
    main()
