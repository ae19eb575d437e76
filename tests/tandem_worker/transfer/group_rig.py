"""A prefill and a decode worker of several ranks each, in one process: real TCP between them, real block spaces.

Each rank that follows has a thread that handles what its first rank posts, in order, as its step loop would.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tandem_worker.engine.contract import RemotePrefill
from tandem_worker.transfer.blocks import BlockSpace
from tandem_worker.transfer.contract import Identity, TransferTimeouts
from tandem_worker.transfer.decode.client import FollowingReceiver, TcpPrefillClient
from tandem_worker.transfer.layout import KVLayout, KVShard, RankAddress
from tandem_worker.transfer.prefill.server import TcpPrefillServer

from tests.ports import free_port
from tests.tandem_worker.transfer.engines import build_transports
from tests.tandem_worker.transfer.shards import BLOCK_SIZE, build_cache, build_whole, take_share

NUM_BLOCKS = 16


class Posts:
    """Implements `GroupChannel`: one queue and one thread per follower."""

    def __init__(self, handlers: list[Callable[[bytes], None]]) -> None:
        self.num_followers = len(handlers)
        self.errors: list[Exception] = []
        self.hold = threading.Event()
        """Cleared: followers are busy, as with a long step."""
        self.hold.set()
        self._queues: list[queue.SimpleQueue[bytes | None]] = [queue.SimpleQueue() for _ in handlers]
        self._threads = [
            threading.Thread(target=self._run, args=pair, daemon=True)
            for pair in zip(self._queues, handlers, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def post(self, message: bytes) -> None:
        for each in self._queues:
            each.put(message)

    def settle(self) -> None:
        """Until every follower has handled what was posted before."""
        for each in self._queues:
            done = threading.Event()
            each.put(done)  # type: ignore[arg-type]
            assert done.wait(30)

    def close(self) -> None:
        self.hold.set()
        for each in self._queues:
            each.put(None)
        for thread in self._threads:
            thread.join(60)
        assert not self.errors

    def _run(self, inbox: queue.SimpleQueue[bytes | None], handle: Callable[[bytes], None]) -> None:
        while (message := inbox.get()) is not None:
            if isinstance(message, threading.Event):
                message.set()
                continue
            self.hold.wait(30)
            try:
                handle(message)
            except Exception as error:
                self.errors.append(error)


class Groups:
    """Prompt block i lies in block 15 - i of the prefill worker and goes to block i + 1 of the decode worker."""

    def __init__(
        self,
        layout: KVLayout,
        sources: list[KVShard],
        targets: list[KVShard],
        engine: Any,
        decode: Any,
        timeouts: TransferTimeouts,
        *,
        verify: bool = True,
        transport: str = "TCP",
    ) -> None:
        self._transport = transport
        self.layout, self.engine, self.decode = layout, engine, decode
        self.sources, self.targets = sources, targets
        self.whole = build_whole(layout, NUM_BLOCKS)
        self._timeouts, self._verify = timeouts, verify
        self.source_caches = [build_cache(take_share(self.whole, layout, s), layout, s) for s in sources]
        empty = [torch.zeros_like(layer) for layer in self.whole]
        self.target_caches = [build_cache(take_share(empty, layout, s), layout, s) for s in targets]
        self.identity = Identity(worker="prefill-0", revision="r", model_digest="d", layout=layout.fingerprint)
        self._build_prefill()
        self._build_decode()

    def _build_prefill(self) -> None:
        self.ports = [free_port() for _ in self.sources]
        ranks = [
            RankAddress(endpoint=f"127.0.0.1:{port}", shard=shard)
            for port, shard in zip(self.ports, self.sources, strict=True)
        ]
        identity = replace(self.identity, ranks=tuple(ranks) if len(ranks) > 1 else ())
        self.servers: list[TcpPrefillServer] = []
        self.prefill_posts = Posts([lambda message, rank=r: self.servers[rank].handle(message) for r in _others(ranks)])
        for rank, (shard, cache) in enumerate(zip(self.sources, self.source_caches, strict=True)):
            server = TcpPrefillServer(
                engine=None if rank else self.engine,
                space=BlockSpace(cache, shard, self.layout),
                identity=identity,
                host="127.0.0.1",
                port=self.ports[rank],
                group=None if rank or len(ranks) == 1 else self.prefill_posts,
                timeouts=self._timeouts,
                transports=build_transports(self._transport),
            )
            server.start()
            self.servers.append(server)
        self.endpoint = ranks[0].endpoint

    def _build_decode(self) -> None:
        spaces = [
            BlockSpace(cache, shard, self.layout) for shard, cache in zip(self.targets, self.target_caches, strict=True)
        ]
        identity = replace(self.identity, worker="decode-0")
        options: dict[str, Any] = {"verify": self._verify, "timeouts": self._timeouts}
        self.client = TcpPrefillClient(transports=build_transports(self._transport), **options)
        self.receivers = [
            FollowingReceiver(
                space, identity, self.client.handle, transports=build_transports(self._transport), **options
            )
            for space in spaces[1:]
        ]
        self.decode_posts = Posts([receiver.handle for receiver in self.receivers])
        self.client.bind(self.decode, spaces[0], identity, self.decode_posts if len(spaces) > 1 else None)

    def order(self, *endpoints: str, tokens: int = 30, cached: int = 0, generation: int = 1) -> RemotePrefill:
        return RemotePrefill(
            request_id="a",
            generation=generation,
            token_ids=tuple(range(tokens)),
            num_cached_tokens=cached,
            block_ids=tuple(range(1, -(-tokens // BLOCK_SIZE) + 1)),
            endpoints=endpoints or (self.endpoint,),
            cache_salt="",
            priority=0,
            prompt_name=b"name of a prompt",
        )

    def run_prefill(self, *, finish: bool = True) -> str:
        """The first rank's engine computes the order that comes next."""
        name = self.engine.next_order()
        self.engine.run(name, range(self.sources[0].num_layers), finish=finish)
        return name

    def arrived(self, first: int, end: int) -> bool:
        """Whether every decode rank has its share of prompt blocks `first` to `end - 1`, and nothing else."""
        expected = [torch.zeros_like(layer) for layer in self.whole]
        for layer, whole in zip(expected, self.whole, strict=True):
            for index in range(first, end):
                layer[index + 1] = whole[15 - index]
        return all(
            torch.equal(mine, wanted)
            for shard, cache in zip(self.targets, self.target_caches, strict=True)
            for mine, wanted in zip(cache.layers, take_share(expected, self.layout, shard), strict=True)
        )

    def snapshot(self) -> list[torch.Tensor]:
        return [layer.clone() for cache in self.target_caches for layer in cache.layers]

    def close(self) -> None:
        self.client.close()
        for receiver in self.receivers:
            receiver.close()
        for server in self.servers:
            server.close()
        self.prefill_posts.close()
        self.decode_posts.close()


@contextmanager
def running(groups: Groups) -> Iterator[Groups]:
    try:
        yield groups
    finally:
        groups.close()


def _others(ranks: list[RankAddress]) -> range:
    return range(1, len(ranks))
