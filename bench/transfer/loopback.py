"""KV transport between two processes on loopback: bandwidth and CPU seconds per GB at both ends.

    python bench/transfer/loopback.py [--gib 2] [--layers 32] [--block-kib 64] [--blocks 128] [--no-verify] [--scatter]
                                      [--tp 2] [--transport Mooncake]

One process plays the prefill worker (its engine reports finished layers at once), the other the decode worker, or the
first of its tensor-parallel ranks, which takes its heads out of every block. Every order moves layers x blocks of
block-kib at the decode end. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import threading
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from tandem_api.launch import KVConfig
from tandem_worker.engine.contract import RemotePrefill, RemotePrefillResult
from tandem_worker.model.contract import KVCacheSpec, KVLayerSpec, allocate_kv_cache
from tandem_worker.transfer.blocks import BlockSpace
from tandem_worker.transfer.contract import Identity
from tandem_worker.transfer.decode.client import TcpPrefillClient
from tandem_worker.transfer.layout import KVLayout, KVShard
from tandem_worker.transfer.prefill.server import TcpPrefillServer
from tandem_worker.transfer.transports import open_transports

BLOCK_SIZE = 16
_PROMPT_NAME = b"name of a prompt"


def build_space(args: argparse.Namespace, *, whole: bool) -> tuple[BlockSpace, Any]:
    """All heads of the model, or those of the first of `--tp` ranks."""

    def build_spec(num_heads: int) -> KVCacheSpec:
        shape = (2, num_heads, BLOCK_SIZE, args.block_kib * 1024 // (2 * BLOCK_SIZE * 2))
        layer = KVLayerSpec(block_shape=shape, head_dim_index=1)
        return KVCacheSpec(layers=(layer,) * args.layers, dtype=torch.bfloat16, block_size=BLOCK_SIZE)

    layout = KVLayout.of(build_spec(args.tp))
    shard = KVShard(first_layer=0, num_layers=args.layers, tp_size=1 if whole else args.tp)
    cache = allocate_kv_cache(build_spec(args.tp if whole else 1), args.blocks + 1, torch.device("cpu"))
    return BlockSpace(cache, shard, layout), cache


def identity(space: BlockSpace, worker: str) -> Identity:
    return Identity(worker=worker, revision="bench", model_digest="bench", layout=space.layout.fingerprint)


def placement(args: argparse.Namespace, seed: int) -> tuple[int, ...]:
    """Block ids of the prompt: neighbours, or scattered as in a block space that has been in use."""
    ids = list(range(1, args.blocks + 1))
    if args.scatter:
        random.Random(seed).shuffle(ids)
    return tuple(ids)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class InstantEngine:
    """Reports every layer of an order the moment it is submitted."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._layers, self._ids = args.layers, placement(args, 1)

    def submit_prefill(self, order: RemotePrefill, listener: Any) -> None:
        for layer in range(self._layers):
            listener.blocks_ready(order.request_id, layer, 0, self._ids)
        listener.prefill_done(order.request_id, b"\0" * 4096, 0, _PROMPT_NAME)

    def release(self, request_id: str) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def stats(self) -> Any:
        return SimpleNamespace(steps_total=0)


def run_prefill(args: argparse.Namespace, pipe: Connection) -> None:
    torch.set_num_threads(1)
    space, cache = build_space(args, whole=True)
    for index, layer in enumerate(cache.layers):
        layer.fill_(index + 1)
    server = TcpPrefillServer(
        engine=InstantEngine(args),
        space=space,
        identity=identity(space, "prefill"),
        host="127.0.0.1",
        port=0,
        transports=open_transports(KVConfig(transport=args.transport), "127.0.0.1"),
    )
    server.start()
    pipe.send(server.port)
    pipe.recv()
    before = cpu_seconds()
    pipe.send(None)
    pipe.recv()
    pipe.send(cpu_seconds() - before)
    server.close()


class Decode:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.failure: str | None = None

    def remote_prefill_overdue(self, request_id: str, generation: int) -> None: ...

    def remote_prefill_done(self, result: RemotePrefillResult) -> None:
        self.ended.set()

    def remote_prefill_failed(self, request_id: str, generation: int, reason: str) -> None:
        self.failure = reason
        self.ended.set()


def build_parser(text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--block-kib", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--scatter", action="store_true")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of the decode worker")
    parser.add_argument("--transport", choices=("TCP", "Mooncake"), default="TCP")
    return parser


class Mover:
    """Both ends, which move one order at a time. A context manager."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.order_bytes = args.layers * args.blocks * args.block_kib * 1024
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run_prefill, args=(args, theirs), daemon=True)
        self._process.start()
        self._port = self._pipe.recv()
        torch.set_num_threads(1)
        space, self._cache = build_space(args, whole=False)
        self._client = TcpPrefillClient(
            verify=not args.no_verify,
            transports=open_transports(KVConfig(transport=args.transport), "127.0.0.1"),
        )
        self._engine = Decode()
        self._client.bind(self._engine, space, identity(space, "decode"))
        self._ids = placement(args, 2)
        self._number = 0

    def __enter__(self) -> Mover:
        self._transfer()
        self._pipe.send(None)
        self._pipe.recv()
        return self

    def move(self, rounds: int) -> float:
        """Seconds that so many orders took."""
        started = time.perf_counter()
        for _ in range(rounds):
            self._transfer()
        return time.perf_counter() - started

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._process.join(5)

    def end(self) -> float:
        """CPU seconds of the prefill end, from the beginning on. What arrived is compared."""
        self._pipe.send(None)
        seconds = self._pipe.recv()
        for index, layer in enumerate(self._cache.layers):
            assert bool((layer[1:] == index + 1).all()), "what arrived is what was sent"
        moved = self._client.stats().transports
        assert list(moved) == [self.args.transport], "it went by what was asked for"
        return seconds

    def _transfer(self) -> None:
        self._engine.ended.clear()
        self._client.start(
            RemotePrefill(
                request_id="bench",
                generation=self._number,
                token_ids=(0,) * (self.args.blocks * BLOCK_SIZE),
                num_cached_tokens=0,
                block_ids=self._ids,
                endpoints=(f"127.0.0.1:{self._port}",),
                cache_salt="",
                priority=0,
                prompt_name=_PROMPT_NAME,
            )
        )
        self._number += 1
        self._engine.ended.wait()
        if self._engine.failure:
            raise SystemExit(self._engine.failure)


def main() -> None:
    args = build_parser(__doc__).parse_args()
    with Mover(args) as mover:
        rounds = max(1, round(args.gib * 2**30 / mover.order_bytes))
        cpu = cpu_seconds()
        elapsed = mover.move(rounds)
        cpu = cpu_seconds() - cpu
        sender_cpu = mover.end()
    gigabytes = rounds * mover.order_bytes / 1e9
    result = {
        "transport": args.transport,
        "order_mb": round(mover.order_bytes / 1e6, 1),
        "block_kib": args.block_kib,
        "verify": not args.no_verify,
        "scatter": args.scatter,
        "tp": args.tp,
        "gb_per_s": round(gigabytes / elapsed, 2),
        "ms_per_order": round(elapsed / rounds * 1e3, 2),
        "decode_cpu_s_per_gb": round(cpu / gigabytes, 3),
        "prefill_cpu_s_per_gb": round(sender_cpu / gigabytes, 3),
    }
    print(f"{gigabytes:.2f} GB in {rounds} orders of {mover.order_bytes / 1e6:.1f} MB")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
