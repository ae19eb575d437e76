"""Prefill side: the orders of one connection, between the peer that gives them, the engine and the outbox."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tandem_api.tracing import Tracer

from tandem_worker.engine.contract import PrefillEngine, RemotePrefill
from tandem_worker.host.errors import WorkerError
from tandem_worker.transfer.errors import QuotaError, TransferError
from tandem_worker.transfer.prefill.outbox import Outbox
from tandem_worker.transfer.prefill.outgoing import Outgoing
from tandem_worker.transfer.prefill.quotas import Account
from tandem_worker.transfer.prefill.reports import Reports
from tandem_worker.transfer.prefill.tracing import OrderTrace

_ACKNOWLEDGE_SECONDS = 30.0
"""A peer that was sent everything and does not answer for this long is hung: its connection is dropped."""
_MAX_STRAYS = 4096
"""Frames about orders that are not open, since the last good order: some are late, so many are a flood."""

Refuse = Callable[[int, str], None]
"""Tells the peer that an order, by its number, ends, and why."""


class Orders:
    """For the connection's thread."""

    def __init__(
        self,
        name: str,
        *,
        engine: PrefillEngine | None,
        outbox: Outbox,
        reports: Reports,
        account: Account,
        block_size: int,
        draining: Callable[[], bool],
        refuse: Refuse,
        tracer: Tracer | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`reports` takes what the engine and the outbox tell of these orders."""
        self._name = name
        self._engine, self._outbox, self._reports, self._account = engine, outbox, reports, account
        self._block_size = block_size
        self._draining, self._refuse = draining, refuse
        self._tracer, self._clock = tracer, clock
        self._num_strays = 0
        self._open: dict[int, Outgoing] = {}

    def __len__(self) -> int:
        return len(self._open)

    def find(self, transfer: int) -> Outgoing | None:
        """The order of this number, where it is open."""
        return self._open.get(transfer)

    def count_stray(self) -> None:
        """A frame was about an order that is not open. Raises TransferError where these are too many."""
        self._num_strays += 1
        if self._num_strays > _MAX_STRAYS:
            raise TransferError(f"the peer sent {_MAX_STRAYS} frames about orders that are not open")

    def take(self, transfer: int, order: RemotePrefill, worker: str, prepare: Callable[[Outgoing], None]) -> None:
        """Give the order of `worker` to the engine, or tell why not. What goes out for it is made ready by `prepare`.

        Raises TransferError where the peer breaks a rule.
        """
        if transfer in self._open:
            raise TransferError(f"the peer used transfer number {transfer} twice")
        if order.num_cached_tokens % self._block_size:
            raise TransferError("the peer's order begins inside a block")
        refusal = "draining" if self._draining() else None
        priority = self._account.place(order.priority, len(order.token_ids))
        if self._engine is None:
            refusal = "this rank takes no orders: the first rank of its group does, where that is a prefill worker"
        elif refusal is None:
            refusal = self._admit(transfer, len(order.token_ids))
        if self._engine is None or refusal is not None:
            self._refuse(transfer, refusal or "")
            return
        # Request ids are the clients': two decode workers may bring the same one, one worker may bring it again.
        engine_id = f"{order.request_id}/{self._name}/{transfer}"
        num_tokens = len(order.token_ids)
        outgoing = Outgoing(
            transfer, self._outbox.attach(transfer, self._reports), engine_id, num_tokens, self._clock()
        )
        prepare(outgoing)
        self._open[transfer] = outgoing
        self._reports.transfers[engine_id] = transfer
        self._num_strays = 0
        noted = None
        if order.hop is not None and order.hop.context.sampled and self._tracer is not None and self._tracer.active:
            outgoing.trace = OrderTrace(order, worker)
            noted = outgoing.trace.request
        inside = replace(order, request_id=engine_id, priority=priority, trace=noted, hop=None)
        try:
            self._engine.submit_prefill(inside, self._reports)
        except WorkerError as error:
            self._forget(outgoing)
            self._refuse(transfer, str(error))

    def _admit(self, transfer: int, num_tokens: int) -> str | None:
        """Why it cannot be taken; None: it is in the account and in the outbox."""
        try:
            self._account.take_order(num_tokens)
        except QuotaError as error:
            return str(error)
        if not self._outbox.open(transfer):
            self._account.return_order(num_tokens)
            return f"transfer number {transfer} is in use"
        return None

    def attach(self, transfer: int, num_slices: int, prepare: Callable[[Outgoing], None]) -> None:
        """Serve an order that the first rank of the group has: so many slices of blocks are to come.

        Raises TransferError where the peer breaks a rule.
        """
        if transfer in self._open:
            raise TransferError(f"the peer used transfer number {transfer} twice")
        try:
            self._account.take_attachment()
        except QuotaError as error:
            self._refuse(transfer, str(error))
            return
        shelf = self._outbox.attach(transfer, self._reports)
        outgoing = Outgoing(transfer, shelf, None, since=self._clock(), num_unreported=num_slices)
        prepare(outgoing)
        self._open[transfer] = outgoing

    def _forget(self, outgoing: Outgoing) -> None:
        """Before the engine hears of it: no connection of the group reads the blocks when they are given back."""
        self._open.pop(outgoing.transfer, None)
        self._outbox.detach(outgoing.transfer, self._reports)
        if outgoing.engine_id is None:
            self._account.return_attachment()
            return
        self._reports.transfers.pop(outgoing.engine_id, None)
        self._reports.begun.discard(outgoing.transfer)
        self._outbox.close(outgoing.transfer)
        self._account.return_order(outgoing.num_tokens)

    def give_up(self, outgoing: Outgoing, *, abort: bool) -> None:
        """The order is over here: its blocks go back to the engine, which stops computing where `abort`."""
        self._forget(outgoing)
        if outgoing.trace is not None and self._tracer is not None:
            failure = None if not abort and outgoing.done is not None else "not_wanted" if abort else "not_computed"
            self._tracer.add(outgoing.trace.build(failure))
        if outgoing.engine_id is not None and self._engine is not None:
            if abort:
                self._engine.abort(outgoing.engine_id)
            self._engine.release(outgoing.engine_id)

    def check(self, now: float, stall_seconds: float) -> None:
        """To be called about once a second. Raises TransferError where the peer has not acknowledged one."""
        for outgoing in list(self._open.values()):
            if outgoing.sent_at is not None and now - outgoing.sent_at > _ACKNOWLEDGE_SECONDS:
                raise TransferError(f"the peer has not acknowledged an order for {_ACKNOWLEDGE_SECONDS:g} s")
            never_opened = outgoing.engine_id is None and not outgoing.shelf.is_open
            if never_opened and now - outgoing.since > stall_seconds:
                self._forget(outgoing)
                self._refuse(outgoing.transfer, f"no order of this number came within {stall_seconds:g} s")

    def take_begun(self) -> Iterator[int]:
        """Orders that the engine has begun with since the last call."""
        while self._reports.begun:
            yield self._reports.begun.pop()

    @property
    def num_steps(self) -> int:
        """Steps that the engine has made: a sign of life."""
        return 0 if self._engine is None else self._engine.stats().steps_total

    def close(self) -> int:
        """The connection has ended. Returns how many orders of its own had not."""
        num_open = len(self._reports.transfers)
        for outgoing in list(self._open.values()):
            self.give_up(outgoing, abort=True)
        return num_open
