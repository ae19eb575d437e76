"""Prefill side: what other threads tell a connection's own one of its orders."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from tandem_worker.transfer.channel import Waker
from tandem_worker.transfer.messages import ReadyBlocks
from tandem_worker.transfer.prefill.outbox import Outbox
from tandem_worker.transfer.prefill.outgoing import Ended
from tandem_worker.transfer.protocol import Done
from tandem_worker.transfer.slicing import Piece

_GATHERED_SECONDS = 0.004
_GATHERED_BYTES = 256 << 10
"""Layers that are done sooner after one another, and are no more than this, are sent together: of a short prompt each
would wake a thread here and one of the peer's."""


class Reports:
    """Implements `engine.contract.LayerListener`, for the engine's thread, and `outbox.Reader`: both only enqueue."""

    def __init__(
        self,
        outbox: Outbox,
        waker: Waker,
        *,
        last_layer: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`waker` wakes the connection's thread. `last_layer`: every report of blocks ends with it, so nothing waits
        after that."""
        self._outbox, self._waker, self._last_layer, self._clock = outbox, waker, last_layer, clock
        self.transfers: dict[str, int] = {}
        """Numbers by the engine's name of an order; written by the connection's thread."""
        self.begun: set[int] = set()
        """Orders that the engine has begun with, and nobody has told the peer."""
        self._told: deque[ReadyBlocks | Ended] = deque()
        self._pieces: Mapping[int, Piece] = {}
        self._gathered_since = 0.0
        self._gathered_bytes = 0
        """Bytes of blocks in `_told` that nobody has woken the connection's thread for."""

    # engine.contract.LayerListener

    def blocks_ready(self, request_id: str, layer: int, first_index: int, block_ids: Sequence[int]) -> None:
        transfer = self.transfers.get(request_id)
        if transfer is not None:
            self._outbox.report(transfer, layer, first_index, block_ids)

    def prefill_started(self, request_id: str) -> None:
        transfer = self.transfers.get(request_id)
        if transfer is not None:
            self.begun.add(transfer)  # told with the next heartbeat, if no block has gone by then

    def prefill_done(self, request_id: str, logits: bytes, num_cached_tokens: int, prompt_name: bytes) -> None:
        self._end(request_id, Done(num_cached_tokens, logits, prompt_name))

    def prefill_failed(self, request_id: str, message: str) -> None:
        self._end(request_id, message)

    def _end(self, request_id: str, outcome: Done | str) -> None:
        transfer = self.transfers.get(request_id)
        if transfer is not None:
            self._post(Ended(transfer, outcome))

    # outbox.Reader

    def take(self, ready: ReadyBlocks) -> None:
        """Under the outbox's lock."""
        self._told.append(ready)
        layer, now = ready.blocks.layer, self._clock()
        if layer in self._pieces:
            self._gathered_bytes += ready.blocks.count * self._pieces[layer].num_bytes
        late = now - self._gathered_since >= _GATHERED_SECONDS
        if late or self._gathered_bytes >= _GATHERED_BYTES or layer == self._last_layer:
            self._gathered_since, self._gathered_bytes = now, 0
            self._waker.wake()

    def closed(self, transfer: int) -> None:
        self._post(Ended(transfer, "the order has ended at the first rank"))

    def _post(self, event: Ended) -> None:
        self._told.append(event)
        self._waker.wake()

    # The connection's thread.

    def agree(self, pieces: Mapping[int, Piece]) -> None:
        """What of a block of each layer goes to the peer."""
        self._pieces = pieces

    def pop(self) -> ReadyBlocks | Ended | None:
        """The oldest that was told; None: there is nothing."""
        return self._told.popleft() if self._told else None

    def clear(self) -> None:
        """The connection has ended."""
        self._told.clear()
