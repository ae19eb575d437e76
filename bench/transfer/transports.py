"""Both transports and Mooncake's engine alone, in turns in one run, between two processes on loopback.

    python -m bench.transfer.transports [--rounds 8] [--layers 32] [--block-kib 64] [--blocks 128] [--scatter]

The engine alone moves as many bytes as an order has, in pieces of 1 MiB out of one buffer into another, as its makers
advise: 16 in flight, polled with sleep, by one thread; nothing is gathered, checked or copied on. Goal: the transport
that is built on it has 0.9 of its bandwidth. The last line is one JSON object. Where libibverbs is missing,
LD_LIBRARY_PATH names a folder with one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from tandem_worker.transfer.mooncake.engine import Engine, Memory

from bench.transfer.loopback import Mover, build_parser
from tests.mooncake.network import stay_inside

PIECE, IN_FLIGHT, POLL_SECONDS = 1 << 20, 16, 0.0005
GOAL = 0.9


def receive(pipe: Connection) -> None:
    engine, memory = Engine("127.0.0.1", "tcp"), Memory(PIECE * IN_FLIGHT)
    engine.register(memory)
    pipe.send((engine.address, memory.address))
    pipe.recv()
    os._exit(0)  # the library does not end its threads in time


class Alone:
    """The engine without anything of Tandem's around it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        context.Process(target=receive, args=(theirs,), daemon=True).start()
        self._target, self._base = self._pipe.recv()
        self._engine, self._memory = Engine("127.0.0.1", "tcp"), Memory(PIECE * IN_FLIGHT)
        self._memory.view[:] = b"x" * len(self._memory.view)

    def move(self, num_bytes: int) -> float:
        left, flying, free = num_bytes // PIECE, dict[int, int](), list(range(IN_FLIGHT))
        started = time.perf_counter()
        while left or flying:
            while left and free:
                row = free.pop() * PIECE
                number = self._engine.submit(self._target, self._memory.address + row, self._base + row, PIECE)
                assert number is not None, "the engines reach each other"
                flying[number] = row // PIECE
                left -= 1
            for number in list(flying):
                if (written := self._engine.check(number)) is not None:
                    assert written, "the piece was written"
                    free.append(flying.pop(number))
            time.sleep(POLL_SECONDS)
        return time.perf_counter() - started

    def close(self) -> None:
        self._pipe.send(None)


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each; one order a turn")
    args = parser.parse_args()

    def ask(transport: str) -> argparse.Namespace:
        return SimpleNamespace(**vars(args) | {"transport": transport})  # type: ignore[return-value]

    stay_inside()
    seconds: dict[str, list[float]] = {"engine alone": [], "Mooncake": [], "TCP": []}
    with Mover(ask("Mooncake")) as mooncake, Mover(ask("TCP")) as tcp:
        alone = Alone()
        alone.move(mooncake.order_bytes)
        for _ in range(args.rounds):
            seconds["engine alone"].append(alone.move(mooncake.order_bytes))
            seconds["Mooncake"].append(mooncake.move(1))
            seconds["TCP"].append(tcp.move(1))
        alone.close()
        mooncake.end()
        tcp.end()
    gigabytes = mooncake.order_bytes / 1e9
    rates: dict[str, Any] = {name: round(gigabytes / statistics.median(taken), 2) for name, taken in seconds.items()}
    fastest: dict[str, Any] = {name: round(gigabytes / min(taken), 2) for name, taken in seconds.items()}
    share = rates["Mooncake"] / rates["engine alone"]
    print(
        json.dumps(
            {
                "cores": os.cpu_count(), "order_mb": round(mooncake.order_bytes / 1e6, 1), "block_kib": args.block_kib,
                "scatter": args.scatter, "rounds": args.rounds, "gb_per_s": rates, "fastest_gb_per_s": fastest,
                "load": round(os.getloadavg()[0], 1),
                "Mooncake of the engine alone": {"value": round(share, 3), "goal": GOAL, "met": share >= GOAL},
                "fastest turns of each": round(fastest["Mooncake"] / fastest["engine alone"], 3),
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
