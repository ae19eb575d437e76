"""A network namespace with nothing but loopback: Mooncake listens on all addresses, and nobody else is to reach it.

Everything of one process shares one namespace, because Mooncake's engines outlive the test that began them. Threads and
processes that are started inside stay there (network_namespaces(7)).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import socket
import struct
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_PATH = "/proc/thread-self/ns/net"


@contextlib.contextmanager
def own_network() -> Iterator[None]:
    """The calling thread is in the namespace meanwhile. Raises PermissionError where it may not make one."""
    own, outside = _make()
    _enter(own)
    try:
        yield
    finally:
        _enter(outside)


def stay_inside() -> None:
    """The calling thread, and what it starts, is in the namespace from here on. Raises PermissionError."""
    _enter(_make()[0])


@functools.cache
def _make() -> tuple[int, int]:
    """Descriptors of the namespace and of the one outside."""
    outside = os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC)
    _call("unshare", _CLONE_NEWNET)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            asked = struct.pack("16sH14x", b"lo", 0)
            (flags,) = struct.unpack("16xH14x", fcntl.ioctl(probe, _SIOCGIFFLAGS, asked))
            fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))
        return os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC), outside
    finally:
        _enter(outside)


def _enter(descriptor: int) -> None:
    _call("setns", descriptor, _CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}, which needs CAP_SYS_ADMIN: {os.strerror(number)}")
