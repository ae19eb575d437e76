"""Starters as processes on loopback, and one hub for all of them that sends no faster than it is told to."""

from __future__ import annotations

import hashlib
import json
import random
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem_api.keys import KEY_BYTES

from bench.start.starter import CONTENT, REPOSITORY, Facts, content_of
from e2e.mirror.server import HubHandler, MirrorServer
from tests.ports import free_port

MB = 1_000_000
_PIECE = 64 << 10
LIMIT_SECONDS = 120.0


class SlowHub(MirrorServer):
    """Sends `rate` bytes per second over all connections together, and counts what it sends, killed starters' too."""

    def __init__(self, root: Path, rate: float) -> None:
        super().__init__(("127.0.0.1", 0), root)
        self.RequestHandlerClass = _SlowHandler
        self.rate, self.sent = rate, 0
        self._free_at = 0.0
        self._turn = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def pace(self, count: int) -> None:
        """Return when the link has taken so many bytes."""
        with self._turn:
            now = time.monotonic()
            self._free_at = max(now - 0.01, self._free_at) + count / self.rate
            self.sent += count
            time.sleep(max(0.0, self._free_at - now))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A killed starter resets its connections; what else goes wrong is shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _SlowHandler(HubHandler):
    server: Any

    def setup(self) -> None:
        super().setup()
        write = self.wfile.write

        def slow(data: Any) -> int:
            view = memoryview(data)
            for start in range(0, len(view), _PIECE):
                piece = view[start : start + _PIECE]
                self.server.pace(len(piece))
                write(piece)
            return len(view)

        self.wfile.write = slow

    def log_message(self, format: str, *args: Any) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """One start that ended."""

    seconds: float
    """From exec, or from its release, to the line that tells it."""
    received: dict[str, int]
    faults: dict[str, int]
    right: bool
    """The model is the hub's, byte by byte."""


class Starters:
    """`count` places for processes, each with a cache folder of its own."""

    def __init__(self, home: Path, count: int, *, model_bytes: int, hub_rate: float) -> None:
        root = home / "mirror" / REPOSITORY
        root.mkdir(parents=True)
        self.home, self.model_bytes = home, model_bytes
        content = random.Random(7).randbytes(model_bytes)
        (root / CONTENT).write_bytes(content)
        (root / "config.json").write_bytes(b"{}")
        (root / "tokenizer.json").write_bytes(b"[]")
        self.digest = hashlib.sha256(content).hexdigest()
        self.key = random.Random(8).randbytes(KEY_BYTES).hex()
        self.hub = SlowHub(home / "mirror", hub_rate)
        self.ports = [free_port() for _ in range(count)]
        self.processes: dict[int, subprocess.Popen[str]] = {}
        self._began: dict[int, float] = {}

    def start(self, number: int, vice: str = "", *, held: bool = False) -> None:
        """`held`: it waits for `release`."""
        facts = Facts(
            port=self.ports[number],
            peers=[f"127.0.0.1:{port}" for port in self.ports],
            key=self.key,
            cache=str(self.cache(number)),
            hub=self.hub.url,
            vice=vice,
            held=held,
        )
        command = [sys.executable, "-m", "bench.start.starter", json.dumps(asdict(facts))]
        with self.log(number).open("w") as log:
            self._began[number] = time.monotonic()
            self.processes[number] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def release(self, numbers: list[int]) -> None:
        """Let held starts begin at once, when all have imported what they need. Raises RuntimeError."""
        for number in numbers:
            if self._read_line(number) != "held\n":
                raise RuntimeError(f"start {number} came to nothing:\n{self.log(number).read_text()[-3000:]}")
        for number in numbers:
            self._began[number] = time.monotonic()
            given = self.processes[number].stdin
            assert given is not None
            given.write("\n")
            given.flush()

    def finish(self, number: int) -> Ready:
        """Wait for a start's end. Raises RuntimeError when it ends without a model, or not in time."""
        line = self._read_line(number)
        seconds = time.monotonic() - self._began[number]
        if not line:
            raise RuntimeError(f"start {number} came to nothing:\n{self.log(number).read_text()[-3000:]}")
        path, received, faults = json.loads(line)
        with content_of(path).open("rb") as content:
            right = hashlib.file_digest(content, "sha256").hexdigest() == self.digest
        return Ready(seconds=seconds, received=received, faults=faults, right=right)

    def finish_all(self, numbers: list[int]) -> list[Ready]:
        """As each would be by itself: whoever is ready is looked at at once."""
        found: dict[int, Ready] = {}
        threads = [threading.Thread(target=lambda n=n: found.setdefault(n, self.finish(n))) for n in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if missing := [number for number in numbers if number not in found]:
            raise RuntimeError(f"starts {missing} came to nothing")
        return [found[number] for number in numbers]

    def _read_line(self, number: int) -> str:
        out = self.processes[number].stdout
        assert out is not None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            return out.readline() if selector.select(LIMIT_SECONDS) else ""

    def is_ready(self, number: int) -> bool:
        """Whether it has told so. It still can be finished."""
        out = self.processes[number].stdout
        assert out is not None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            return bool(selector.select(0))

    def kill(self, number: int) -> None:
        process = self.processes.pop(number)
        process.kill()
        process.communicate()

    def wait(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("what was waited for did not come")
            time.sleep(0.02)

    def cache(self, number: int) -> Path:
        return self.home / f"cache{number}"

    def log(self, number: int) -> Path:
        return self.home / f"{number}.log"

    def close(self) -> None:
        for number in list(self.processes):
            self.kill(number)
        self.hub.close()
