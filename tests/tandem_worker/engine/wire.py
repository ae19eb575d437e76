"""Both ends of disaggregation in memory: blocks are copied between two engines' spaces by a thread, when told to."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tandem_worker.engine.contract import RemotePrefill, RemotePrefillResult
from tandem_worker.engine.core import EngineCore
from tandem_worker.host.errors import WorkerError


class Wire:
    """Implements `PrefillClient` for `decode` and `LayerListener` for `prefill`."""

    def __init__(self, prefill: EngineCore, decode: EngineCore) -> None:
        self.prefill, self.decode = prefill, decode
        decode.prefill_client = self
        self.orders: dict[str, RemotePrefill] = {}
        self.reports: dict[str, list[tuple[int, int, tuple[int, ...]]]] = {}
        self._writing = threading.Lock()
        self.cancelled: set[tuple[str, int]] = set()
        self.hold = threading.Event()
        """Cleared: results do not leave the prefill side."""
        self.hold.set()
        self.damage_logits = False
        self.begun: set[tuple[str, int]] = set()
        self.refuse: str | None = None

    # PrefillClient

    def start(self, order: RemotePrefill) -> None:
        if self.refuse is not None:
            raise WorkerError(self.refuse)
        self.orders[order.request_id] = order
        self.reports[order.request_id] = []
        sent = RemotePrefill(
            request_id=order.request_id,
            generation=order.generation,
            token_ids=order.token_ids,
            num_cached_tokens=order.num_cached_tokens,
            block_ids=(),
            endpoints=(),
            cache_salt=order.cache_salt,
            priority=order.priority,
        )
        self.prefill.submit_prefill(sent, self)

    def has_begun(self, request_id: str, generation: int) -> bool:
        return (request_id, generation) in self.begun

    def cancel(self, request_id: str, generation: int) -> None:
        with self._writing:
            self.cancelled.add((request_id, generation))
        self.prefill.release(request_id)

    # LayerListener

    def blocks_ready(self, request_id: str, layer: int, first_index: int, block_ids: Sequence[int]) -> None:
        self.reports[request_id].append((layer, first_index, tuple(block_ids)))
        targets = self.orders[request_id].block_ids[first_index : first_index + len(block_ids)]
        assert len(targets) == len(block_ids)
        with self._writing:
            if (request_id, self.orders[request_id].generation) in self.cancelled:
                return
            for source, target in zip(block_ids, targets, strict=True):
                self.decode.kv_cache.layers[layer][target] = self.prefill.kv_cache.layers[layer][source]

    def prefill_started(self, request_id: str) -> None:
        self.begun.add((request_id, self.orders[request_id].generation))

    def prefill_done(self, request_id: str, logits: bytes, num_cached_tokens: int, prompt_name: bytes) -> None:
        assert prompt_name == self.orders[request_id].prompt_name
        threading.Thread(target=self._finish, args=(request_id, logits, num_cached_tokens)).start()

    def _finish(self, request_id: str, logits: bytes, num_cached_tokens: int) -> None:
        self.hold.wait(30)
        self.decode.remote_prefill_done(
            RemotePrefillResult(
                request_id=request_id,
                generation=self.orders[request_id].generation,
                logits=logits[:-4] if self.damage_logits else logits,
                num_cached_tokens=num_cached_tokens,
                worker="prefill-0",
            )
        )
        self.prefill.release(request_id)

    def prefill_failed(self, request_id: str, message: str) -> None:
        self.decode.remote_prefill_failed(request_id, self.orders[request_id].generation, message)
        self.prefill.release(request_id)
