"""A worker's disk for blocks is full, read-only, or does not answer: it answers as before, the model's status soon says
so, and that all is well again once it is mended.

A slow disk, damage, and what a request loses by each are in `tests/tandem_worker/tiers/test_faults.py`: a clock says
little beside other tests.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import openai
import pytest
from tandem_api.names import KV_DISK_PATH

from e2e.cluster.binaries.backend import BinariesBackend
from e2e.suite.fleet import Fleet, Say, smollm2, until
from e2e.suite.test_store import read_tokens

MODEL = "failing-disk"
WORKER = f"{MODEL}-decode-0"
PROMPTS = [f"{number} times the sea is wide and the sky is high. " + "The wind blows on. " * 60 for number in range(10)]
"""More than memory has blocks for: what was asked first has gone to the disk when all were asked."""
LONGEST_SECONDS = 120.0
"""Until the status says it on a busy machine, where an answer takes ten seconds. Who looks when another filesystem just
comes or goes may find neither, and looks again 15 s later. How soon workers and the operator tell is in their tests."""
MOUNT = """
import ctypes, os, sys
pid, action, path = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
BIND, REMOUNT, READ_ONLY, DETACH, MOVE = 4096, 32, 1, 2, 8192

def call(name, *arguments):
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), name + ": " + os.strerror(ctypes.get_errno()))

theirs = f"/proc/{pid}/ns/mnt"
assert os.readlink(theirs) != os.readlink("/proc/self/ns/mnt"), "this would change the machine, not the container"
call("setns", os.open(theirs, os.O_RDONLY), 0x20000)
folders, path = [each.name for each in os.scandir(path) if each.is_dir()], path.encode()
if action == "full":
    made = b"/dev/shm/full"
    os.mkdir(made)
    call("mount", b"tmpfs", made, b"tmpfs", 0, b"size=1m,mode=0777")
    for each in folders:
        os.mkdir(os.path.join(made, each.encode()))
        os.chmod(os.path.join(made, each.encode()), 0o777)
    call("mount", made, path, None, MOVE, None)
    os.rmdir(made)
elif action == "read-only":
    call("mount", path, path, None, BIND, None)
    call("mount", None, path, None, BIND | REMOUNT | READ_ONLY, None)
else:
    call("umount2", path, DETACH)
"""
"""Mounts over the volume, in the container's own mount namespace: no other container sees it, and it ends with this
one.

The other filesystem has as little room as that of a volume that is full, and is moved there whole: a worker that wrote
while its folders were made would say that they had gone. What is bound read-only lets nothing be opened for writing, as
a filesystem does that has become so.
"""
FREEZE = """
import os, pathlib, sys
for path in list(pathlib.Path(sys.argv[1]).rglob("*.kv")):
    try:
        path.rename(path.with_suffix(".kept"))
    except FileNotFoundError:  # it was given up meanwhile
        continue
    os.mkfifo(path)
"""
"""Opening such a file does not return until somebody writes to it: the system call hangs, as one to a device that has
gone does, and yet the process can be ended."""
THAW = """
import errno, os, pathlib, sys
for kept in list(pathlib.Path(sys.argv[1]).rglob("*.kept")):
    pipe = kept.with_suffix(".pipe")
    kept.with_suffix(".kv").rename(pipe)
    kept.rename(kept.with_suffix(".kv"))
    try:
        os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:  # nobody waits for this one
            raise
    pipe.unlink()
"""


def find_process(fleet: Fleet) -> int:
    """A process of the worker's container, as this machine numbers it."""
    uid = fleet.get("pods", WORKER)["metadata"]["uid"]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            group, command = (folder / "cgroup").read_text(), (folder / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if f"pod{uid}/" in group and b"tandem_worker" in command:
            return int(folder.name)
    raise AssertionError(f"no process of {WORKER} is to be seen here")


@contextmanager
def mounted(fleet: Fleet, action: str) -> Iterator[None]:
    """Another volume in the place of the worker's."""

    def change(what: str) -> None:
        command = [sys.executable, "-c", MOUNT, str(find_process(fleet)), what, KV_DISK_PATH]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr

    change(action)
    try:
        yield
    finally:
        change("mend")


@contextmanager
def frozen(fleet: Fleet) -> Iterator[None]:
    """What is on the worker's disk cannot be opened."""
    fleet.run_python(WORKER, "worker", FREEZE, KV_DISK_PATH)
    try:
        yield
    finally:
        fleet.run_python(WORKER, "worker", THAW, KV_DISK_PATH)


FAULTS: dict[str, Callable[[Fleet], AbstractContextManager[None]]] = {
    "VolumeFull": lambda fleet: mounted(fleet, "full"),
    "VolumeReadOnly": lambda fleet: mounted(fleet, "read-only"),
    "VolumeFrozen": frozen,
}
"""By the reason that tells them."""


@pytest.mark.timeout(1200)
def test_a_disk_that_fails_is_told_of_and_costs_no_answer(fleet: Fleet, say: Say) -> None:
    if not isinstance(fleet.cluster.backend, BinariesBackend) or os.geteuid() != 0:
        pytest.skip("the containers of this cluster are not this machine's processes")
    disk = {"size": "1Gi", "writeThrough": True}
    fleet.apply(smollm2(MODEL, prefill=None, kv={"memory": "128Mi", "disk": disk}))
    fleet.wait_ready(MODEL)
    numbers, turns = itertools.count(), itertools.cycle(range(len(PROMPTS)))
    with fleet.openai(MODEL) as api:
        texts = [answer(api, prompt) for prompt in PROMPTS]
        others: list[str] = []

        def go_on() -> None:
            """A prompt that nobody knows is written to the disk, one of those before comes from there: both are
            answered whatever becomes of that."""
            turn = next(turns)
            if (text := answer(api, PROMPTS[turn])) != texts[turn]:  # who waits would take it for not yet
                others.append(f"{text!r} instead of {texts[turn]!r}")
            answer(api, f"{next(numbers)} more of them. {PROMPTS[0]}")

        def is_told(status: str, reason: str) -> str:
            go_on()
            told = fleet.condition(MODEL, "KVTiersReady")
            assert told is not None
            assert (told["status"], told["reason"]) == (status, reason), told
            return told["message"]

        until("the disk is in use", lambda: is_told("True", "DisksInUse"), within=LONGEST_SECONDS)
        until(
            "some of them came from the disk",
            lambda: read_tokens(fleet, "read", WORKER, "disk") or go_on(),
            within=LONGEST_SECONDS,
        )
        for reason, fault in FAULTS.items():
            with fault(fleet):
                began = time.monotonic()
                message = until(f"{reason} is told", lambda of=reason: is_told("False", of), within=LONGEST_SECONDS)
                say(f"{reason} after {time.monotonic() - began:.1f} s: {message}")
                assert f"{WORKER}: " in message
            began = time.monotonic()
            until(f"{reason} is over", lambda: is_told("True", "DisksInUse"), within=LONGEST_SECONDS)
            say(f"in use again {time.monotonic() - began:.1f} s after {reason} was mended")
    assert not others, f"{len(others)} answers are others; the first: {others[0]}"
    (worker,) = fleet.get("pods", WORKER)["status"]["containerStatuses"]
    assert worker["restartCount"] == 0


def answer(api: openai.OpenAI, prompt: str) -> str:
    """What a stream says from its first piece to its end."""
    stream = api.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0.0, stream=True)
    pieces = [choice for event in stream for choice in event.choices]
    assert pieces[-1].finish_reason in ("stop", "length")
    return "".join(each.text for each in pieces)
