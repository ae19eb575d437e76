"""The process that calls Mooncake: `python -m tandem_worker.tiers.mooncake.helper CONNECTION MEMORY SIZE ADDRESS`.

It is a shared-memory client of the `mooncake_client` at ADDRESS. What Mooncake's library does to a process that calls
it (threads that spin, calls that do not return, aborts) it does to this one, which the worker ends where it is late.

CONNECTION and MEMORY are inherited descriptors: requests and answers, and SIZE bytes that the worker has mapped too. No
byte of those is within Mooncake's reach: it reads and writes a pool of the same size that is known to this process
alone, and what has come is copied before it is answered for. So what arrives late lands in a pool that nobody looks at.

A request is a JSON list: number, call, keys, and for `put` and `get` where the first one's bytes stand and how many
each has. The answer has the number, and one of Mooncake's codes for each key: negative ones are its errors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import orjson

_PR_SET_PDEATHSIG = 1
_LOCAL_BUFFER_BYTES = 1 << 20
"""For calls that are not made here."""


def main() -> None:
    """Serve until the worker closes the connection, or ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(int(sys.argv[1]))
    memory = mmap.mmap(int(sys.argv[2]), int(sys.argv[3]))
    try:
        pool = _Pool(memory, sys.argv[4])
    except Exception as error:
        connection.send_bytes(orjson.dumps([0, str(error) or repr(error)]))
        os._exit(1)
    connection.send_bytes(orjson.dumps([0, ""]))
    while True:
        try:
            number, call, *arguments = orjson.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            os._exit(0)  # its threads would not let the interpreter end
        connection.send_bytes(orjson.dumps([number, getattr(pool, f"do_{call}")(*arguments)]))


class _Pool:
    """Raises OSError where the client cannot be reached, ImportError where the library cannot be loaded."""

    def __init__(self, memory: mmap.mmap, address: str) -> None:
        import mooncake.store as library  # pyright: ignore[reportMissingImports]

        size = len(memory)
        self._store: Any = library.MooncakeDistributedStore()
        if self._store.setup_dummy(size, _LOCAL_BUFFER_BYTES, address):
            raise ConnectionRefusedError(f"no mooncake_client answers at {address}")
        self._pool: int = self._store.alloc_from_mem_pool(size)
        if not self._pool or self._store.register_buffer(self._pool, size):
            raise MemoryError(f"mooncake_client at {address} takes no {size} bytes of shared memory")
        self._memory = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def do_put(self, keys: list[str], first: int, size: int) -> Sequence[int]:
        ctypes.memmove(self._pool + first, self._memory + first, len(keys) * size)
        return self._store.batch_put_from(keys, self._places(len(keys), first, size), [size] * len(keys))

    def do_get(self, keys: list[str], first: int, size: int) -> Sequence[int]:
        codes = self._store.batch_get_into(keys, self._places(len(keys), first, size), [size] * len(keys))
        ctypes.memmove(self._memory + first, self._pool + first, len(keys) * size)
        return codes

    def do_exist(self, keys: list[str]) -> Sequence[int]:
        return self._store.batch_is_exist(keys)

    def do_remove(self, keys: list[str]) -> Sequence[int]:
        return [self._store.remove(key, True) for key in keys]

    def _places(self, count: int, first: int, size: int) -> list[int]:
        return [self._pool + first + index * size for index in range(count)]


if __name__ == "__main__":
    main()
