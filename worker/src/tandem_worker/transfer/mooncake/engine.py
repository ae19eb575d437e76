"""Mooncake's Transfer Engine, as far as it can be held to what it says.

What is known of release 0.3.13.post1, and what follows for who uses an engine:

- Destroying one joins its threads for up to a second with the interpreter's lock held: none is ever destroyed.
- A transfer's number is freed by the call that tells its end; asking once more ends the process: a flight asks once.
- A transfer that was reported as failed may still write: its target is not used again while anything could bring it.
- A batch tells the state of its first piece only: pieces are submitted one by one.
- What lies outside registered memory is refused by the receiver, also after it was registered once.
- It has no authentication, listens on all addresses, and lets whoever reaches it read registered memory, too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path
from typing import Any

from tandem_api.names import MOONCAKE_PORTS

from tandem_worker.host.mooncake import find_mooncake_obstacle
from tandem_worker.transfer.errors import TransferError

_SETTINGS = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",  # the default wedges a peer for good
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",  # of 30, in which a frozen peer would make it spin
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",  # of 5, after which the heartbeats of the connection would be missed
    "MC_MIN_RPC_PORT": str(MOONCAKE_PORTS[0]),
    "MC_MAX_RPC_PORT": str(MOONCAKE_PORTS[1]),
    "MC_LOG_LEVEL": "WARNING",
}
"""The library reads these when it is loaded or when an engine begins. What the environment has set goes before."""
_NETWORK_STATES = {"01", "02", "03", "04", "05", "08", "09", "0B"}
"""States in /proc/net/tcp: everything but listening, closed, waiting out and acknowledging a close of both sides."""
_BEGINNING = threading.Lock()


class Engine:
    """One Transfer Engine and the memory that it may move."""

    def __init__(self, host: str, protocol: str) -> None:
        """It begins at once. `host`: the address of this pod, under which peers reach the engine.

        Raises TransferError with what is missing.
        """
        if (obstacle := find_mooncake_obstacle()) is not None:
            raise TransferError(obstacle)
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise TransferError(f"Mooncake cannot be loaded: {error}") from error
        with _BEGINNING:
            before = _listening_ports()
            self._engine: Any = TransferEngine()
            if self._engine.initialize(_bracket(host), "P2PHANDSHAKE", protocol, "") != 0:
                raise TransferError(f"Mooncake's engine does not begin at {host} with protocol {protocol}")
            opened = _listening_ports() - before
        self.protocol = protocol
        rpc_port = self._engine.get_rpc_port()
        self.address = f"{_bracket(host)}:{rpc_port}"
        self._data_ports = opened - {rpc_port}
        """At which peers' engines connect to write; another thread's may be among them."""

    def register(self, memory: Memory) -> None:
        """Let peers write into `memory`, and move from it. Raises TransferError."""
        if self._engine.register_memory(memory.address, memory.size) != 0:
            raise TransferError(f"Mooncake's engine does not register {memory.size >> 20} MiB of memory")

    def unregister(self, memory: Memory) -> bool:
        """No write into `memory` begins after this; one that has begun may go on. False where the engine says no."""
        return self._engine.unregister_memory(memory.address) == 0

    def submit(self, target: str, source: int, destination: int, num_bytes: int) -> int | None:
        """Begin to write; the number for `check`, or None where it could not even begin. May take seconds the first
        time. One thread at a time."""
        number = self._engine.transfer_submit_write(target, source, destination, num_bytes)
        return None if number in (0, -1, 2**64 - 1) else number

    def check(self, number: int) -> bool | None:
        """True: the receiver has written it. False: it failed, and may still be written. None: not ended yet.

        Not to be asked again after an answer that is not None.
        """
        state = self._engine.transfer_check_status(number)
        return None if state not in (1, -1) else state == 1

    def is_reached(self) -> bool:
        """Whether a connection stands, or cannot be excluded, over which another engine may write here."""
        if self.protocol != "tcp" or not self._data_ports:
            return True
        try:
            return not self._data_ports.isdisjoint(_connected_ports())
        except OSError:
            return True


class Memory:
    """Pages that are taken when they are written to, and given back with the object."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pages = mmap.mmap(-1, size)
        self.view = memoryview(self._pages)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))

    def discard(self) -> None:
        """Give the pages back and keep the addresses."""
        self._pages.madvise(mmap.MADV_DONTNEED)


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _listening_ports() -> set[int]:
    """Those of this process. Raises TransferError where the system does not tell."""
    mine: set[str] = set()
    try:
        for entry in os.scandir("/proc/self/fd"):
            try:
                mine.add(os.readlink(entry.path))
            except OSError:
                continue  # closed meanwhile
        return {
            int(fields[1].rpartition(":")[2], 16)
            for fields in _sockets()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine
        }
    except OSError as error:
        raise TransferError(f"the ports of Mooncake's engine cannot be told: {error}") from error


def _connected_ports() -> set[int]:
    return {int(fields[1].rpartition(":")[2], 16) for fields in _sockets() if fields[3] in _NETWORK_STATES}


def _sockets() -> list[list[str]]:
    found: list[list[str]] = []
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net", table)
        if path.exists():
            found += [line.split() for line in path.read_text().splitlines()[1:]]
    return found
