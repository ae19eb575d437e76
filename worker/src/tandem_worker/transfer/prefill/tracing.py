"""Prefill side: the spans of an order that a traced request was given to this worker for."""

from __future__ import annotations

import time

from tandem_api.spans import Span

from tandem_worker.engine.contract import RemotePrefill
from tandem_worker.engine.trace import Hop, RequestTrace


class OrderTrace:
    """What is noted of one order until its blocks are given back."""

    __slots__ = ("_parent", "_peer", "request", "sent")

    def __init__(self, order: RemotePrefill, peer: str) -> None:
        """`order` has come with a trace context; `peer` is the decode worker's name."""
        assert order.hop is not None, "the order is traced"
        self._parent, self._peer = order.hop.context, peer
        self.request = RequestTrace(self._parent.child())
        self.sent = Hop(self.request.context.child())
        """Frames of blocks that left."""

    def build(self, failure: str | None) -> list[Span]:
        """The order is over: its wait, what was computed, and the way of its blocks until the peer had them."""
        noted, sent, now = self.request, self.sent, time.monotonic()
        own = noted.context
        spans = [
            Span(
                name="prefill", context=own, parent=self._parent, kind="server", began=noted.arrived or now, ended=now,
                attributes={
                    "gen_ai.usage.input_tokens": noted.prompt_tokens or None,
                    "gen_ai.usage.cache_read.input_tokens": noted.cached_tokens if noted.prefilled else None,
                    "tandem.decode_worker": self._peer,
                },
                error=failure,
            ),
            Span(name="prefill queue", context=own.child(), parent=own, began=noted.arrived or now,
                 ended=noted.admitted or now),
        ]  # fmt: skip
        if noted.admitted:
            spans.append(
                Span(name="prefill compute", context=own.child(), parent=own, began=noted.admitted,
                     ended=noted.prefilled or now)
            )  # fmt: skip
        if sent.num_bytes:
            spans.append(
                Span(
                    name="kv send", context=sent.context, parent=own, began=sent.first_block, ended=now,
                    attributes={"tandem.kv.bytes": sent.num_bytes, "tandem.kv.last_sent_ms":
                                round(1000 * (sent.last_block - sent.first_block), 3)},
                )
            )  # fmt: skip
        return spans
