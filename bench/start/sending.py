"""What streams of a worker notice while it sends its model to others: the time of a token, with and without readers.

    python -m bench.start.sending [--pairs 8] [--streams 4] [--tokens 96] [--rate MB/s] [--record bench/results]

One real worker of SmolLM2 with its defaults; four readers (`bench.start.reader`) ask it for chunks without a pause and
throw them away, at the lowest priority, as what they take would be taken of other machines. Sittings with and without
them take turns, the order alternating; a token's time is what lies between two events of a stream at its client, the
first token counts as none. On a machine that others use, these times say little. What the sending thread can add to a
token at most says more: its processor time meanwhile, as if the stream had waited for all of it, and what the rest of
the worker takes for a token, which grows where the two are in each other's way. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tandem_api import names
from tandem_api.keys import KEY_BYTES, KeyRing, bearer_token
from tandem_worker.host.files.layout import Layout, SharedFile

from bench.engine.server import wait_ready
from bench.start.process import describe, running
from bench.start.reader import ReaderFacts
from bench.start.starter import REPOSITORY
from bench.start.starters import MB, SlowHub
from e2e.model import find_model
from tests.ports import free_port

HERE = Path(__file__).parents[2]
READERS = 4
GOAL = 1.05
"""Times the 99th percentile without readers."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two tokens of a stream."""

    seconds: float
    sending: float
    """Seconds of processor time that the sending thread took meanwhile."""

    @property
    def share(self) -> float:
        return self.sending / self.seconds


@dataclass(frozen=True, slots=True)
class Sitting:
    gaps: list[Gap]
    cpu: float
    """Seconds of processor time of the worker per token, but for the thread that sends."""
    files_share: float
    """Of a core, taken by the thread that sends."""
    bytes_per_second: float


class Source:
    """A worker that serves streams and files, and its readers."""

    def __init__(self, process: subprocess.Popen[bytes], reader: subprocess.Popen[str], port: int, token: str) -> None:
        self._process, self._reader, self._port, self._token = process, reader, port, token
        self._random = random.Random(5)
        self._sender: Path | None = None

    def sit(self, streams: int, tokens: int, *, read: bool) -> Sitting:
        """All streams at once, from a prompt of their own each."""
        return asyncio.run(self._sit(streams, tokens, read=read))

    async def _sit(self, streams: int, tokens: int, *, read: bool) -> Sitting:
        if read:
            self._toggle()
        before, files_before = self._cpu_seconds(), self._files_seconds()
        began = time.monotonic()
        prompts = [[self._random.randrange(1000, 40_000) for _ in range(48)] for _ in range(streams)]
        gaps = await asyncio.gather(*(self._stream(prompt, tokens) for prompt in prompts))
        seconds = time.monotonic() - began
        cpu, files = self._cpu_seconds() - before, self._files_seconds() - files_before
        received = self._toggle() if read else 0
        return Sitting(
            gaps=[gap for each in gaps for gap in each],
            cpu=(cpu - files) / streams / tokens,
            files_share=files / seconds,
            bytes_per_second=received / seconds,
        )

    async def _stream(self, prompt: list[int], tokens: int) -> list[Gap]:
        options = {"model": "bench", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body = json.dumps(options | {"stream": True, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{names.HEADER_TOKEN}: {self._token}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        at: list[tuple[float, float]] = []
        whole = b""
        while piece := await reader.read(1 << 16):
            whole += piece
            if piece.count(b'"text"'):
                at.append((time.monotonic(), self._files_seconds()))
        writer.close()
        if b"data: [DONE]" not in whole:
            raise RuntimeError(f"the answer is incomplete: {whole[-500:]!r}")
        return [Gap(later[0] - earlier[0], later[1] - earlier[1]) for earlier, later in itertools.pairwise(at)]

    def _toggle(self) -> int:
        assert self._reader.stdin is not None
        assert self._reader.stdout is not None
        self._reader.stdin.write("\n")
        self._reader.stdin.flush()
        return int(self._reader.stdout.readline())

    def _cpu_seconds(self) -> float:
        return _stat_seconds(Path(f"/proc/{self._process.pid}/stat").read_text())

    def find_sender(self) -> None:
        """Of the threads that have its priority, the one that has worked most: after a sitting with readers."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        candidates = [t for t in tasks if (t / "stat").read_text().rsplit(")", 1)[1].split()[16] == "10"]
        self._sender = max(candidates, key=_run_seconds)

    def _files_seconds(self) -> float:
        return 0.0 if self._sender is None else _run_seconds(self._sender)


def _run_seconds(task: Path) -> float:
    return int((task / "schedstat").read_text().split()[0]) / 1e9


def _stat_seconds(text: str) -> float:
    fields = text.rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def source(folder: Path, rate: float | None) -> Iterator[Source]:
    """A worker that is ready, and readers that wait. `rate`: bytes per second that it sends beside streams."""
    root = folder / "mirror" / REPOSITORY
    root.mkdir(parents=True)
    model = find_model()
    (root / model.name).symlink_to(model)
    ring = KeyRing(primary="a", keys={"a": random.Random(8).randbytes(KEY_BYTES)})
    keys = folder / "keys"
    keys.mkdir()
    for name in (names.PEERS_KEY_FILE, names.API_KEY_FILE):
        (keys / name).write_text(ring.encode())
    hub, port, files_port = SlowHub(folder / "mirror", 1e9), free_port(), free_port()
    sharing: dict[str, Any] = {"enabled": True, "port": files_port, "peers": []}
    if rate is not None:
        sharing["busyBytesPerSecond"] = rate
    document = describe(model, folder / "cache", port)
    document["model"] = {
        "uri": f"hf://{REPOSITORY}", "cacheDir": str(folder / "cache"), "hubEndpoint": hub.url, "sharing": sharing,
    }  # fmt: skip
    document["keysPath"] = str(keys)
    with running(HERE, document) as (process, log):
        wait_ready(process, int(str(document["metricsPort"])), log)
        layout = _layout_of(folder / "cache")
        facts = ReaderFacts(
            port=files_port,
            key=ring.keys["a"].hex(),
            layout=layout.fingerprint,
            num_chunks=layout.num_chunks,
            count=READERS,
        )
        command = [sys.executable, "-m", "bench.start.reader", json.dumps(asdict(facts))]
        reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            yield Source(process, reader, port, bearer_token(ring))
        finally:
            reader.kill()
            reader.communicate()
    hub.close()


def _layout_of(cache: Path) -> Layout:
    from tandem_worker.model.sources.digest import MANIFEST

    (manifest,) = (cache / "hub").rglob(MANIFEST)
    told = json.loads(manifest.read_text())
    files = [SharedFile(path, (manifest.parent / path).stat().st_size, sum) for path, sum in told["files"].items()]
    return Layout(told["repository"], told["commit"], files)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def compare(sittings: list[tuple[Sitting, Sitting]]) -> dict[str, object]:
    """Rows of pairs: without readers, with them."""
    found: dict[str, object] = {}
    for name, share, goal in (("p99", 0.99, GOAL), ("p50", 0.5, None)):
        alone = [percentile([gap.seconds for gap in pair[0].gaps], share) for pair in sittings]
        read = [percentile([gap.seconds for gap in pair[1].gaps], share) for pair in sittings]
        ratios = [b / a for a, b in zip(alone, read, strict=True)]
        ratio = statistics.median(ratios)
        found[f"{name} token time, readers / none"] = {
            "value": round(ratio, 3), "goal": goal, "met": goal is None or ratio <= goal,
            "least": round(min(ratios), 3), "most": round(max(ratios), 3),
            "alone_ms": round(1000 * statistics.median(alone), 2), "read_ms": round(1000 * statistics.median(read), 2),
        }  # fmt: skip
    shares = [gap.share for pair in sittings for gap in pair[1].gaps]
    most = percentile(shares, 0.99)
    found["sending's processor time in a token's time, 99th percentile"] = {
        "value": round(most, 4), "goal": round(GOAL - 1, 3), "met": most <= GOAL - 1,
        "median": round(statistics.median(shares), 4),
    }  # fmt: skip
    cpu = [pair[1].cpu / pair[0].cpu for pair in sittings]
    found["other processor time per token, readers / none"] = {
        "value": round(statistics.median(cpu), 3), "least": round(min(cpu), 3), "most": round(max(cpu), 3),
    }  # fmt: skip
    found["share of a core that sends"] = {"value": round(statistics.median(p[1].files_share for p in sittings), 4)}
    found["megabytes per second"] = {"value": round(statistics.median(p[1].bytes_per_second for p in sittings) / MB, 1)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rate", type=float, help="megabytes per second beside streams; default: the worker's")
    parser.add_argument("--record", type=Path, help="folder for the figures")
    options = parser.parse_args()
    sittings: list[tuple[Sitting, Sitting]] = []
    with tempfile.TemporaryDirectory() as folder:
        rate = None if options.rate is None else options.rate * MB
        with source(Path(folder), rate) as serving:
            serving.sit(options.streams, options.tokens, read=True)  # warm
            serving.find_sender()
            for pair in range(options.pairs):
                order = (False, True) if pair % 2 else (True, False)
                done = {read: serving.sit(options.streams, options.tokens, read=read) for read in order}
                sittings.append((done[False], done[True]))
                p99 = [1000 * percentile([g.seconds for g in done[read].gaps], 0.99) for read in (False, True)]
                print(f"pair {pair}: p99 of a token {p99[0]:.1f} ms, with readers {p99[1]:.1f} ms", flush=True)
    told = json.dumps({"cores": os.cpu_count(), "readers": READERS, "streams": options.streams} | compare(sittings))
    if options.record:
        (options.record / f"sending-{datetime.now(UTC).date()}.json").write_text(told + "\n")
    print(told)


if __name__ == "__main__":
    main()
