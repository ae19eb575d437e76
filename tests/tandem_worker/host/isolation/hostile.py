"""Functions for the isolated process of `test_confined.py`: well-behaved, and in every way not."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping

import orjson


def setup(payload: bytes) -> Mapping[str, Callable[[bytes], bytes]]:
    return {
        "echo": lambda request: payload + request,
        "sleep": lambda request: time.sleep(60) or b"",
        "compute": lambda request: bytes(sum(range(10**12))),
        "allocate": lambda request: bytes(int(request)),
        "fill": lambda request: bytes(len(bytearray(os.urandom(1) * int(request)))),
        "signal": lambda request: os.kill(os.getpid(), int(request)) or b"",
        "fail": lambda request: b"%d" % (1 // 0),
        "leave": lambda request: sys.exit(3),
        "who": lambda request: b"%d" % os.getpid(),
        "look": look,
        "nap": nap,
    }


def nap(request: bytes) -> bytes:
    time.sleep(float(request))
    return b"%d" % os.getppid()


def look(request: bytes) -> bytes:
    numbers = os.listdir("/proc/self/fd")
    links = [os.readlink(f"/proc/self/fd/{n}") for n in numbers if os.path.exists(f"/proc/self/fd/{n}")]
    return orjson.dumps({"fds": links, "environment": list(os.environ), "modules": list(sys.modules)})


def setup_that_fails(payload: bytes) -> Mapping[str, Callable[[bytes], bytes]]:
    raise ValueError("the vocabulary is torn")


def setup_that_ends(payload: bytes) -> Mapping[str, Callable[[bytes], bytes]]:
    os._exit(7)


def setup_that_is_killed_until(payload: bytes) -> Mapping[str, Callable[[bytes], bytes]]:
    """As by a system that is out of memory for a while."""
    if time.time() < float(payload):
        os.kill(os.getpid(), signal.SIGKILL)
    return {"echo": lambda request: request}


def setup_with_numpy(payload: bytes) -> Mapping[str, Callable[[bytes], bytes]]:
    """As the setups of the worker do: its library starts a thread for each core unless it is told not to."""
    import numpy

    return {"sum": lambda request: b"%d" % numpy.frombuffer(request, numpy.uint8).sum()}


def setup_with_a_thread(payload: bytes) -> Mapping[str, Callable[[bytes], bytes]]:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return {}
