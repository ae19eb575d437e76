"""Two engines as their processes would join them: one gives its blocks away, the other asks for them. The model notices
every wrong block."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from tandem_api.keys import KeyRing, open_ring
from tandem_worker.host.peers.handshake import ACCEPTANCE_BYTES, CHALLENGE_BYTES
from tandem_worker.tiers.combined import CombinedTier
from tandem_worker.tiers.format import TierKey, plan_geometry
from tandem_worker.tiers.memory import PooledMemory, open_memory
from tandem_worker.tiers.peer_link import PullTerms
from tandem_worker.tiers.peers import PeerSource
from tandem_worker.tiers.shelf import BlockReader, Shelf
from tandem_worker.tiers.stats import Counters
from tandem_worker.transfer.blocks import BlockSpace
from tandem_worker.transfer.contract import Identity
from tandem_worker.transfer.prefill.quotas import Quotas
from tandem_worker.transfer.prefill.server import TcpPrefillServer
from tandem_worker.transfer.protocol import encode_hello

from tests.tandem_worker.engine.history_model import HistoryModel
from tests.tandem_worker.engine.rig import BLOCK_SIZE, Rig

KEY = TierKey(model_digest="digest", revision="r1", layout="layout")
SLOT_BYTES = 8192
"""Of a block of the history model."""


class PeerRig(Rig):
    """A worker that gives its blocks away and asks others for theirs."""

    def __init__(
        self,
        worker: str,
        num_blocks: int = 64,
        *,
        key: TierKey = KEY,
        prefill_rate: float = 1.0,
        ring: Callable[[], KeyRing] = open_ring,
        below: BlockReader | None = None,
        clock: Callable[[], float] = time.monotonic,
        **kw: Any,
    ) -> None:
        """`prefill_rate`: tokens per second that computing is taken to be; so slow that no load is ever late.
        `clock`: by which loads are late, and others left alone."""
        model: Any = HistoryModel()
        super().__init__(model, num_blocks, model_digest=key.model_digest, **kw)
        self.engine._scheduler.hooks.prefill_rate = lambda: prefill_rate
        memory = open_memory(self.engine.kv_cache)
        space = BlockSpace(self.engine.kv_cache)
        identity = Identity(
            worker=worker, revision=key.revision, model_digest=key.model_digest, layout=space.layout.fingerprint
        )
        geometry = plan_geometry(memory.layer_bytes, 0)
        assert geometry.slot_bytes == SLOT_BYTES
        counters = Counters(BLOCK_SIZE, "peer")
        self.terms = PullTerms(
            key=key, geometry=geometry, memory=memory, identity=identity, ring=ring, landing=threading.Lock()
        )
        self.source = PeerSource(self.terms, BLOCK_SIZE, counters=counters, clock=clock)
        self.source.bind(self.engine.open_desk(CombinedTier([self.source]), cold_blocks=0, fence=memory.fence))
        self.source.start()
        pool = self.engine.host_pool
        host = None if pool is None else PooledMemory(pool, memory)
        self.shelf = Shelf(key, geometry, memory, self.engine.open_lending(memory.fence), counters, below, host)
        self.server = TcpPrefillServer(
            engine=None,
            space=space,
            identity=identity,
            host="127.0.0.1",
            port=0,
            ring=ring,
            quotas=Quotas.of(space.num_slots),
            shelf=self.shelf,
        )
        self.server.start()

    @property
    def greeting_bytes(self) -> int:
        """What it says before it gives anything."""
        return CHALLENGE_BYTES + ACCEPTANCE_BYTES + len(encode_hello(self.server._identity))

    @property
    def kv(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def cached(self, request_id: str) -> int:
        """Tokens of its prompt that were not computed."""
        return self.out.last(request_id).num_cached_tokens

    def close(self) -> None:
        self.source.close()
        self.server.close()
        super().close()
        assert self.engine._scheduler.blocks.num_held == 0
        assert self.engine.failure is None


class Middle:
    """Between a worker and a holder: passes on what `alter` makes of what the holder says."""

    def __init__(self, holder: PeerRig, alter: Callable[[bytes, int], bytes | None]) -> None:
        """`alter(data, offset)`: bytes behind the holder's greeting, from `offset` on; None: the connection ends."""
        self._target, self.alter = ("127.0.0.1", holder.server.port), alter
        self._greeting = holder.greeting_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            far = socket.create_connection(self._target, timeout=60)
            far.settimeout(None)
            self._sockets += [near, far]
            for source, sink, alter in ((near, far, None), (far, near, self.alter)):
                thread = threading.Thread(target=self._pump, args=(source, sink, alter), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(
        self, source: socket.socket, sink: socket.socket, alter: Callable[[bytes, int], bytes | None] | None
    ) -> None:
        offset = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if alter is not None:
                    known = max(0, min(len(data), self._greeting - offset))
                    sink.sendall(data[:known])
                    passed = alter(data[known:], offset + known - self._greeting) if known < len(data) else b""
                    offset += len(data)
                    if passed is None:
                        break
                    data = passed
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(60)
        for sock in self._sockets:
            sock.close()
