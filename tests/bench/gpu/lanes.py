"""Lanes that end in every way there is, for the tests of what runs them. No torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from bench.gpu.item import AbsentError, Figures, Item, Setting, WrongError


def say_pid() -> Figures:
    return {"pid": os.getpid()}


def fail() -> Figures:
    raise WrongError("three is not four", {"evidence": [3, 4], "failing": ["a::b"], "error": float("inf")})


def lose_device() -> Figures:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def die() -> Figures:
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def hang() -> Figures:
    time.sleep(600)
    return {}


def be_absent() -> Figures:
    raise AbsentError("no such tool")


def divide() -> Figures:
    return {"never": 1 // 0}


def hard(setting: Setting) -> Iterator[Item]:
    yield Item(name="first", run=say_pid)
    yield Item(name="wrong", run=fail)
    yield Item(name="needs wrong", run=say_pid, needs=("wrong",))
    yield Item(name="needs first", run=say_pid, needs=("first",))
    yield Item(name="error", run=divide)
    yield Item(name="lost", run=lose_device)
    yield Item(name="after lost", run=say_pid, needs=("first",))
    yield Item(name="dies", run=die)
    yield Item(name="after death", run=say_pid)
    yield Item(name="hangs", run=hang, seconds=0.5)
    yield Item(name="after hang", run=say_pid)
    yield Item(name="absent", run=be_absent)


def named(setting: Setting, argument: str) -> Iterator[Item]:
    yield Item(name=f"item {argument}", run=say_pid)


def second(setting: Setting) -> Iterator[Item]:
    """A later phase: it sees what the first left."""
    failing = [name for outcome in setting.results.values() for name in outcome["failing"]]
    yield Item(name="sees", run=lambda: {"failing": failing})
    yield Item(name="needs the first phase's", run=say_pid, needs=("first",))
    yield Item(name="needs what failed there", run=say_pid, needs=("wrong",))


def endless(setting: Setting) -> Iterator[Item]:
    """A good one, then one that starts a process and waits for ever."""

    def start() -> Figures:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(process.pid, flush=True)
        with open(os.path.join(setting.out, "started"), "w") as file:
            file.write(f"{os.getpid()} {process.pid}")
        time.sleep(600)
        return {}

    yield Item(name="good", run=say_pid)
    yield Item(name="waits", run=start, seconds=500)
    yield Item(name="never", run=say_pid)


def broken(setting: Setting) -> Iterator[Item]:
    raise ImportError("a module is not there")
