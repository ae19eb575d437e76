"""From exec to the first token on a GPU: worker processes with a checkpoint of 16 GB in the page cache.

The first start finds an empty cache folder; the others what it left there. Each has a folder of its own for Triton, as
each container has, and the last one no C compiler.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from bench.engine.server import free_port
from bench.gpu.checkpoint import write_checkpoint
from bench.gpu.item import Figures, Item, Setting, WrongError
from bench.gpu.random_model import QWEN3_8B, SMALL
from bench.start.process import ask, describe, read_cpu_seconds, read_resident_bytes, running

ROOT = Path(__file__).parents[2]
FIRST_TOKEN_GOAL, WEIGHTS_GOAL = 3.0, 1.0
"""Seconds from exec to the first token where kernels are kept, and of these reading weights."""
LATER_STARTS = 2
_FIRST_SECONDS, _LATER_SECONDS, _KEEPING_SECONDS = 75.0, 22.0, 25.0
_TAIL = 3000
_LINES, _LINE = 150, 120


class Starts:
    """A checkpoint, the cache that its workers share, and what their starts took."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._folder = tempfile.TemporaryDirectory(prefix="tandem-start-")
        self.model, self.cache = (Path(self._folder.name, name) for name in ("model", "cache"))
        self.model.mkdir()
        self.num_bytes = 0
        self.found: dict[int, Figures] = {}
        """By their number, that of the first being 0."""

    def write(self) -> Figures:
        began = time.perf_counter()
        raw = SMALL if self._setting.tiny else QWEN3_8B
        self.num_bytes = write_checkpoint(self.model, raw, **({"shard_bytes": 60_000} if self._setting.tiny else {}))
        return {"bytes": self.num_bytes, "seconds to write": time.perf_counter() - began}

    def look(self) -> Figures:
        """A start whose threads are looked at: where its time goes. Looking takes some of it."""
        path = Path(self._folder.name, "stacks")
        figures = self.start(LATER_STARTS + 1, {"BENCH_STACKS": str(path)})
        return {"steps": figures["steps"], "stacks": json.loads(path.read_text()) if path.exists() else {}}

    def start(self, number: int, more: Mapping[str, str] = MappingProxyType({})) -> Figures:
        """One worker, from its exec until it has answered and keeps what the next needs."""
        if not self.num_bytes:  # another process of this lane wrote a checkpoint, and took it along
            self.write()
        seconds = _LATER_SECONDS if number else _FIRST_SECONDS
        port = free_port()
        device = "CUDA" if self._setting.device == "cuda" else "CPU"
        document = describe(self.model, self.cache, port) | {"device": device}
        kernels = Path(self._folder.name, f"kernels-{number}{'-looked-at' * bool(more)}")
        environment = {
            "TRITON_CACHE_DIR": str(kernels),
            "TERMINATION_MESSAGE_PATH": str(Path(self._folder.name, "termination")),
            **({"CC": "/bin/false"} if number == LATER_STARTS else {}),
            **more,
        }
        with running(ROOT, document, environment, module="bench.gpu.kept") as (process, log):
            began = time.monotonic()
            while not ask(port):
                if process.poll() is not None or time.monotonic() - began > seconds:
                    raise WrongError("the worker did not answer", {"tail": log.read_text()[-_TAIL:], **self._read(log)})
                time.sleep(0.005)
            first = time.monotonic() - began
            figures: Figures = {"seconds": first, "cpu": read_cpu_seconds(process.pid)}
            figures["resident bytes"] = read_resident_bytes(process.pid)
            figures["kernel files at first token"] = _count_files(kernels)
            again = time.monotonic()
            text = json.loads(ask(port, 8))["choices"][0]["text"]
            figures["seconds of second answer"] = time.monotonic() - again
            if more:
                time.sleep(1.5)  # until it has written what it saw
            figures["answer"] = zlib.crc32(text.encode())
            if number == 0 and device == "CUDA":
                _await_line(log, "compiled kernels are kept", _KEEPING_SECONDS)
            figures |= self._read(log)
        figures["kernel files"] = _count_files(kernels)
        figures["kernel files put back"] = figures["fields"].get("compiled kernels are put back", {}).get("files", 0)
        self.found[number] = figures
        return figures

    def _read(self, log: Path) -> Figures:
        """What a worker's log tells of its start."""
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        fields = {
            line["message"]: {key: value for key, value in line.items() if key not in _COMMON} for line in lines
        }  # fmt: skip
        ready = fields.get("serving bench", {})
        seconds = ready.get("seconds", {})
        figures: Figures = {"steps": ready.get("steps", {}), "step seconds": seconds, "memory": ready.get("memory", {})}
        read = fields.get("weights are on the device", {})
        figures["seconds of weights"] = read.get("seconds", 0.0) or seconds.get("weights", 0.0)
        figures["weights GB/s"] = self.num_bytes / max(figures["seconds of weights"], 1e-9) / 1e9
        figures["fields"] = {
            message[:_LINE]: extras for message, extras in fields.items() if extras and message != "serving bench"
        }
        figures["log"] = [f"{line['time'][11:23]} {line['message'][:_LINE]}" for line in lines[:_LINES]]
        return figures

    def compare(self) -> Figures:
        """The starts after the first with the goals, and whether any of them compiled anything. The last call."""
        self._folder.cleanup()
        later = [self.found[number] for number in range(1, LATER_STARTS + 1) if number in self.found]
        first, weights = (
            statistics.median(each[name] for each in later) for name in ("seconds", "seconds of weights")
        )  # fmt: skip
        compiled = [each["kernel files at first token"] - each["kernel files put back"] for each in later]
        figures: Figures = {
            "seconds": first, "goal": FIRST_TOKEN_GOAL, "seconds of weights": weights, "goal of weights": WEIGHTS_GOAL,
            "weights GB/s": self.num_bytes / weights / 1e9, "first start": self.found[0]["seconds"],
            "all": [each["seconds"] for each in later],
            "answers": len({each["answer"] for each in self.found.values()}), "kernel files compiled": compiled,
        }  # fmt: skip
        figures["met"] = first <= FIRST_TOKEN_GOAL and weights <= WEIGHTS_GOAL and not any(compiled)
        return figures


_COMMON = frozenset({"time", "level", "logger", "message", "pod", "role", "model"})


def start_items(setting: Setting) -> Iterator[Item]:
    starts = Starts(setting)
    yield Item(name="checkpoint", seconds=60, run=starts.write)
    yield Item(
        name="first start", seconds=_FIRST_SECONDS + _KEEPING_SECONDS + 25, needs=("checkpoint",),
        run=lambda: starts.start(0),
    )  # fmt: skip
    for number in range(1, LATER_STARTS + 1):
        yield Item(
            name=f"start {number}", seconds=_LATER_SECONDS + 25, needs=("first start",),
            run=lambda number=number: starts.start(number),
        )  # fmt: skip
        if number == 1:  # what is worth most comes first
            yield Item(
                name="start with parts of torch left for later", seconds=_LATER_SECONDS + 25, needs=("first start",),
                run=lambda: starts.start(LATER_STARTS + 2, {"BENCH_POSTPONED": "1"}),
            )  # fmt: skip
            yield Item(name="where time goes", seconds=_LATER_SECONDS + 25, needs=("first start",), run=starts.look)
    yield Item(name="goals", needs=("start 1",), run=starts.compare)


def _count_files(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*/*"))


def _await_line(log: Path, text: str, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while text not in log.read_text() and time.monotonic() < ends:
        time.sleep(0.1)
