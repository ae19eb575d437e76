"""A prefill engine that is told what to report, a decode engine that notes what it is told, and block spaces."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tandem_worker.engine.contract import RemotePrefill, RemotePrefillResult
from tandem_worker.engine.errors import EngineStoppedError
from tandem_worker.model.contract import KVCache, KVCacheSpec, KVLayerSpec, allocate_kv_cache
from tandem_worker.transfer.blocks import BlockSpace
from tandem_worker.transfer.contract import Identity, TransferTimeouts
from tandem_worker.transfer.decode.client import TcpPrefillClient
from tandem_worker.transfer.prefill.server import TcpPrefillServer
from tandem_worker.transfer.transports import Transports

from tests.tandem_worker.transfer.engines import build_transports
from tests.tandem_worker.transfer.scripted import PROMPT_NAME, ScriptedPeer

LAYERS, BLOCK_SIZE = 3, 4


@pytest.fixture(autouse=True)
def _alone(loopback_alone: None) -> None:
    """In a network with nothing but loopback: Mooncake's engines listen on all addresses."""


QUICK = TransferTimeouts(
    connect=0.5, handshake=0.5, frame=0.5, retry_after=0.05, heartbeat=0.05, silence=0.4, stall=0.3, patience=0.1,
    queue=1.5,
)  # fmt: skip

PATIENT = replace(QUICK, connect=15.0, handshake=15.0, frame=15.0, silence=15.0, stall=15.0, queue=60.0)
"""Nobody is given up because a busy machine is slow."""


def build_cache(num_blocks: int = 16, *, dtype: torch.dtype = torch.float32, heads: int = 2) -> KVCache:
    layer = KVLayerSpec(block_shape=(2, heads, BLOCK_SIZE, 8))
    spec = KVCacheSpec(layers=(layer,) * LAYERS, dtype=dtype, block_size=BLOCK_SIZE)
    return allocate_kv_cache(spec, num_blocks, torch.device("cpu"))


def fill(cache: KVCache) -> None:
    """Every element of every block is different."""
    for index, layer in enumerate(cache.layers):
        layer.copy_((torch.arange(layer.numel()).reshape(layer.shape) + index * layer.numel()).to(layer.dtype))


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.002)


class ScriptedPrefill:
    """Prompt block i of an order lies in our block 15 - i. `auto` reports all layers as soon as an order is there."""

    def __init__(self, *, auto: bool = True, vocab: int = 5) -> None:
        self.auto = auto
        self.logits = b"".join(i.to_bytes(4, "little") for i in range(vocab))
        self.orders: dict[str, tuple[RemotePrefill, Any]] = {}
        self.released: list[str] = []
        self.aborted: list[str] = []
        self.refusal: Exception | None = None
        self.steps = 0
        self.changed = threading.Condition()

    def submit_prefill(self, order: RemotePrefill, listener: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        with self.changed:
            self.orders[order.request_id] = (order, listener)
            self.changed.notify_all()
        if self.auto:
            self.run(order.request_id)

    def begin(self, request_id: str) -> None:
        self.orders[request_id][1].prefill_started(request_id)

    def run(self, request_id: str, layers: range = range(LAYERS), *, finish: bool = True) -> None:
        order, listener = self.orders[request_id]
        first = order.num_cached_tokens // BLOCK_SIZE
        count = -(-len(order.token_ids) // BLOCK_SIZE)
        for layer in layers:
            listener.blocks_ready(request_id, layer, first, [15 - i for i in range(first, count)])
        if finish:
            listener.prefill_done(request_id, self.logits, order.num_cached_tokens, PROMPT_NAME)

    def release(self, request_id: str) -> None:
        with self.changed:
            self.released.append(request_id)
            self.changed.notify_all()

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def stats(self) -> Any:
        return SimpleNamespace(steps_total=self.steps)

    def next_order(self) -> str:
        with self.changed:
            assert self.changed.wait_for(lambda: bool(self.orders), 60), "no order came"
            return next(iter(self.orders))

    def stop_admitting(self) -> None:
        self.refusal = EngineStoppedError("draining")


class NotingDecode:
    def __init__(self) -> None:
        self.done: list[RemotePrefillResult] = []
        self.failed: list[tuple[str, int, str]] = []
        self.overdue: list[tuple[str, int]] = []

    def remote_prefill_overdue(self, request_id: str, generation: int) -> None:
        self.overdue.append((request_id, generation))

    def remote_prefill_done(self, result: RemotePrefillResult) -> None:
        self.done.append(result)

    def remote_prefill_failed(self, request_id: str, generation: int, reason: str) -> None:
        self.failed.append((request_id, generation, reason))


class Pair:
    """Both ends on loopback; the decode end's block i of a prompt is block i + 1."""

    limits = PATIENT

    def __init__(
        self,
        *,
        auto: bool = True,
        verify: bool = True,
        transport: str = "TCP",
        transports: list[Transports] | None = None,
        **client: Any,
    ) -> None:
        self.prefill, self.decode = ScriptedPrefill(auto=auto), NotingDecode()
        self.source, self.target = build_cache(), build_cache()
        fill(self.source)
        self.transports = transports or [build_transports(transport), build_transports(transport)]
        """Of the decode end and of the prefill end."""
        self.timeouts = self.limits
        self.client = TcpPrefillClient(verify=verify, timeouts=self.timeouts, transports=self.transports[0], **client)
        space = BlockSpace(self.target)
        self.identity = Identity(worker="decode-0", revision="r1", model_digest="d1", layout=space.layout.fingerprint)
        self.client.bind(self.decode, space, self.identity)
        self.server: TcpPrefillServer | None = None

    def serve(self, server: dict[str, Any] | None = None, **changes: str) -> str:
        self.server = TcpPrefillServer(
            engine=self.prefill,
            space=BlockSpace(self.source),
            identity=replace(self.identity, worker="prefill-0", **changes),
            host="127.0.0.1",
            port=0,
            timeouts=self.timeouts,
            transports=self.transports[1],
            **(server or {}),
        )
        self.server.start()
        return f"127.0.0.1:{self.server.port}"

    def order(
        self, *endpoints: str, tokens: int = 30, cached: int = 0, generation: int = 1, name: str = "a"
    ) -> RemotePrefill:
        count = -(-tokens // BLOCK_SIZE)
        return RemotePrefill(
            request_id=name,
            generation=generation,
            token_ids=tuple(range(tokens)),
            num_cached_tokens=cached,
            block_ids=tuple(range(1, count + 1)),
            endpoints=endpoints,
            cache_salt="salt",
            priority=-2,
            prompt_name=PROMPT_NAME,
        )

    def arrived(self, first: int, end: int) -> bool:
        """Whether prompt blocks `first` to `end - 1` are here in every layer, and nothing else is."""
        for layer, (mine, theirs) in enumerate(zip(self.target.layers, self.source.layers, strict=True)):
            expected = torch.zeros_like(mine)
            for index in range(first, end):
                expected[index + 1] = theirs[15 - index]
            if not torch.equal(mine, expected):
                return False
            del layer
        return True

    @property
    def untouched(self) -> bool:
        return all(not layer.any() for layer in self.target.layers)

    def close(self) -> None:
        self.client.close()
        if self.server is not None:
            self.server.close()


@pytest.fixture
def hasty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does nothing is given up within a second, but for the limits that a test's parameters say: of several the
    one that it is about is the first."""
    monkeypatch.setattr(Pair, "limits", replace(QUICK, **getattr(request, "param", {})))


@pytest.fixture
def transport() -> str:
    """What blocks move by; modules whose tests hold of every transport name all of them."""
    return "TCP"


@pytest.fixture
def pair(transport: str) -> Iterator[Pair]:
    both = Pair(transport=transport)
    yield both
    both.close()


@pytest.fixture
def held_pair(transport: str) -> Iterator[Pair]:
    """The prefill engine reports when the test says so."""
    both = Pair(auto=False, transport=transport)
    yield both
    both.close()


@pytest.fixture
def kit() -> SimpleNamespace:
    """What tests build their own set-ups from."""
    return SimpleNamespace(
        Pair=Pair, build_cache=build_cache, fill=fill, eventually=eventually, QUICK=QUICK, LAYERS=LAYERS,
        BLOCK_SIZE=BLOCK_SIZE, PROMPT_NAME=PROMPT_NAME, NotingDecode=NotingDecode, ScriptedPrefill=ScriptedPrefill,
    )  # fmt: skip


@pytest.fixture
def scripted(kit: SimpleNamespace) -> Iterator[Callable[..., tuple[Any, ScriptedPeer]]]:
    opened: list[Any] = []

    def build(*scripts: Callable[[ScriptedPeer, socket.socket], None], verify: bool = True) -> tuple[Any, ScriptedPeer]:
        pair = kit.Pair(verify=verify)
        peer = ScriptedPeer(pair, *scripts)
        opened.extend((pair, peer))
        return pair, peer

    yield build
    for each in opened:
        each.close()
