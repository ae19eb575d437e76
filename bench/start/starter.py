"""What a worker does until the model is there, and then serves of it: `python -m bench.start.starter FACTS`.

It prints one line when the model is there, and runs until it is killed. `FACTS` is the JSON of `Facts`.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem_api.keys import KeyRing
from tandem_api.launch import FileSharing, ModelSource
from tandem_worker.host.files.exchange import FileExchange
from tandem_worker.host.files.server import FileAnswer
from tandem_worker.host.files.share import SharedFiles
from tandem_worker.host.files.wire import ReplyHeader
from tandem_worker.host.vitals import Vitals
from tandem_worker.model.sources import lease
from tandem_worker.model.sources.resolve import resolve_model
from xxhash import xxh3_128_digest

REPOSITORY = "org/model"
CONTENT = "model.safetensors"
Answer = Callable[[FileExchange, SharedFiles, int], FileAnswer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    port: int
    """Where it serves files."""
    peers: list[str]
    key: str
    """Hexadecimal."""
    cache: str
    hub: str
    vice: str = ""
    """`stall`: it answers no question for a chunk. `lie`: its bytes are not what their sum says. `forge`: the sum fits
    its wrong bytes."""
    held: bool = False
    """Begin when a line comes on standard input; one on standard output tells that everything is imported."""


def main(facts: Facts) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    # A killed process's lease is waited for in every cache that is written to again: half a minute tells nothing here.
    lease.acquire = functools.partial(lease.acquire, stale_seconds=0.5, poll_seconds=0.05)
    if facts.vice:
        answer, vice = FileExchange._answer_chunk, facts.vice

        def answer_spoiled(self: FileExchange, share: SharedFiles, index: int) -> FileAnswer:
            return _spoil(self, answer, vice, share, index)

        FileExchange._answer_chunk = answer_spoiled
    ring = KeyRing(primary="a", keys={"a": bytes.fromhex(facts.key)})
    sharing = FileSharing(enabled=True, port=facts.port, peers=facts.peers)
    exchange = FileExchange(sharing, facts.peers, lambda: ring, Vitals())
    exchange.open("127.0.0.1")
    source = ModelSource(uri=f"hf://{REPOSITORY}", cache_dir=facts.cache, hub_endpoint=facts.hub, sharing=sharing)
    if facts.held:
        import huggingface_hub.hf_api  # noqa: F401
        import tandem_worker.model.sources.swarm.shared  # noqa: F401

        print("held", flush=True)
        sys.stdin.readline()
    path = resolve_model(source, None, exchange)
    print(json.dumps([str(path), dict(exchange.received), dict(exchange.faults)]), flush=True)
    threading.Event().wait()


def _spoil(self: FileExchange, answer: Answer, vice: str, share: SharedFiles, index: int) -> FileAnswer:
    if vice == "stall":
        time.sleep(60)
    got = answer(self, share, index)
    if not got.size or vice == "stall":
        return got
    data = bytearray(os.pread(got.fd, got.size, got.offset))
    data[len(data) // 2] ^= 1
    told = got.header.sum if vice == "lie" else xxh3_128_digest(data).hex()
    return FileAnswer(ReplyHeader(source=self.id, sum=told), bytes(data))


def content_of(path: str) -> Path:
    """The weights in the folder that a starter printed."""
    return Path(path, CONTENT)


if __name__ == "__main__":
    main(Facts(**json.loads(sys.argv[1])))
