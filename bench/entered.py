"""Which files a chat enters, in each process that it goes through, and which one look at a model does.

    python -m bench.entered

Prefill and decode worker are processes with a tiny model on the CPU, which are asked for one streamed chat; gateway and
operator run in a test of theirs. A file is entered when a function of it runs: what a reader has to open to follow it.
What workers enter without any request (telemetry, health) is told apart.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]
WANTED = {"gateway": 20, "decode": 60, "prefill": 32, "operator": 30}
IDLE_SECONDS = 2.0
GATEWAY = (
    "tandem_gateway", "--under", "Reception.on_request", "--until", "Gateway.on_exchange_end",
    "tests/tandem_gateway/test_openai.py::test_stream_with_usage",
)  # fmt: skip
OPERATOR = (
    "tandem_operator", "--under", "Reconciler.reconcile",
    "tests/tandem_operator/reconcile/test_reconciler.py::test_a_new_model_is_made_without_asking_what_there_is",
)  # fmt: skip
WITNESS = """
import pathlib, sys, threading, time
folder, entered = pathlib.Path({folder!r}), set()

def profile(frame, event, _):
    code = frame.f_code
    if event == "call" and "/src/tandem_worker/" in code.co_filename and code.co_name != "<module>":
        entered.add(code.co_filename.partition("/src/tandem_worker/")[2])

def tell():
    for number in range(3):
        while not (folder / f"asked-{{number}}").exists():
            time.sleep(0.01)
        found = sorted(entered)
        entered.clear()
        (folder / f"part-{{number}}").write_text("\\n".join(found))
        (folder / f"part-{{number}}").rename(folder / f"told-{{number}}")

if "tandem_worker" in sys.orig_argv:
    threading.Thread(target=tell, daemon=True).start()
    threading.setprofile(profile)
    sys.setprofile(profile)
"""
"""Loaded before a worker, as `sitecustomize`: tells what was entered since it was asked last."""


class Witness:
    """What a process with `WITNESS` has entered."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._asked = folder, 0
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(WITNESS.format(folder=str(folder)))
        self.environment = {"PYTHONPATH": str(folder)}

    def tell(self) -> set[str]:
        told = self._folder / f"told-{self._asked}"
        (self._folder / f"asked-{self._asked}").touch()
        self._asked += 1
        while not told.exists():
            time.sleep(0.01)
        return set(told.read_text().split())


@contextlib.contextmanager
def running(folder: Path, model: Path, role: str) -> Iterator[tuple[object, Witness]]:
    from tests.tandem_worker.process.conftest import await_ready, run_worker

    witness = Witness(folder / f"{role}-witness")
    with run_worker(folder, role, model, environment=witness.environment) as worker:
        await_ready(worker)
        yield worker, witness


def list_workers_files(folder: Path) -> Mapping[str, tuple[set[str], set[str]]]:
    """By role: files that a streamed chat enters, and those that are entered without any request."""
    from tests.tandem_worker.process.conftest import build_model

    model = build_model(folder / "model")
    with running(folder, model, "prefill") as (prefill, first), running(folder, model, "decode") as (decode, second):
        witnesses = {"prefill": first, "decode": second}
        _chat(decode.url, prefill.kv, "warm up " * 20)  # pyright: ignore[reportAttributeAccessIssue]
        for witness in witnesses.values():
            witness.tell()
        time.sleep(IDLE_SECONDS)
        idle = {role: witness.tell() for role, witness in witnesses.items()}
        _chat(decode.url, prefill.kv, "something else to say " * 20)  # pyright: ignore[reportAttributeAccessIssue]
        return {role: (witness.tell(), idle[role]) for role, witness in witnesses.items()}


def _chat(url: str, prefill: str, text: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "stream": True}
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body, headers={"x-tandem-prefill": prefill}, timeout=60
    ) as answer:
        answer.raise_for_status()
        assert b"[DONE]" in b"".join(answer.iter_bytes())
        assert answer.headers["x-tandem-prefill-worker"] == "prefill-0"


def list_files(package: str, *options: str) -> set[str]:
    """What `bench.rooms entered` tells of a test, in a process of its own."""
    command = [sys.executable, "-m", "bench.rooms", "entered", package, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].partition(": ")[2].split())


def list_entered_files(folder: Path) -> dict[str, tuple[set[str], set[str]]]:
    """By process: the files that it enters, and of these what it enters anyway."""
    chat = {"gateway": (list_files(*GATEWAY), set[str]()), **list_workers_files(folder)}
    return {**chat, "operator": (list_files(*OPERATOR), set[str]())}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = list_entered_files(Path(folder))
    for process, (files, idle) in found.items():
        what = "one look at a model" if process == "operator" else "one streamed chat"
        beside = f", {len(files & idle)} of them without it too" if files & idle else ""
        print(f"{process}, {what}: {len(files)} files (wanted {WANTED[process]}){beside}: {' '.join(sorted(files))}")
    print(json.dumps({process: len(files) for process, (files, _) in found.items()}))


if __name__ == "__main__":
    main()
