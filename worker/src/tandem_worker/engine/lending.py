"""Blocks of the prefix cache that are lent to who copies them for another worker.

A loan is a reference like a request's: its blocks are not given up before they are given back. It is made between two
steps and costs none. Idle blocks that are lent are lacking when requests come, so no more than a share of memory is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tandem_worker.engine.schedule.scheduler import Scheduler
from tandem_worker.engine.tiers import Loan

MOST_SHARE = 0.25
"""Share of memory that is lent at most at a time, blocks that requests hold not counted."""
_LEAST_LEFT = 16
"""Blocks that can be given out besides, at least."""


class LendingDesk:
    """`BlockLender` for any thread: what it is told is done on the engine thread, by way of `send`."""

    def __init__(
        self,
        scheduler: Scheduler,
        fence: Callable[[], object],
        send: Callable[[Callable[[], None]], None],
        host_fence: Callable[[], object] | None = None,
    ) -> None:
        """`fence`: marks the point at which everything that was launched is written. `host_fence`: the same of host
        memory below; None: there is none."""
        self._scheduler, self._fence, self._send, self._host_fence = scheduler, fence, send, host_fence
        self._num_host_lent = 0
        self._lent: dict[int, int] = {}
        """Loans of each block that is lent."""

    def lend_blocks(self, names: Sequence[bytes], answer: Callable[[Loan], None]) -> None:
        self._send(partial(self._lend, tuple(names), answer))

    def give_back(self, loan: Loan) -> None:
        if loan.num_blocks:
            self._send(partial(self._take_back, loan))

    def _lend(self, names: tuple[bytes, ...], answer: Callable[[Loan], None]) -> None:
        blocks = self._scheduler.blocks
        matched = blocks.match_prefix(names, len(names))
        allowed = min(int(blocks.num_blocks * MOST_SHARE) - len(self._lent), blocks.num_available - _LEAST_LEFT)
        taken: list[int] = []
        for block in matched:
            if not blocks.num_holders(block):
                allowed -= 1
            if allowed < 0:
                break
            taken.append(block)
        blocks.hold(taken)
        for block in taken:
            self._lent[block] = self._lent.get(block, 0) + 1
        below = self._lend_below(names[len(taken) :]) if len(taken) == len(matched) else []
        answer(
            Loan(
                block_ids=tuple(taken),
                fence=self._fence() if taken else None,
                host_block_ids=tuple(below),
                host_fence=self._host_fence() if below and self._host_fence is not None else None,
            )
        )

    def _lend_below(self, names: tuple[bytes, ...]) -> list[int]:
        """Blocks of host memory with the leading ones of these names, held for the loan."""
        host = self._scheduler.host if self._host_fence is not None else None
        if host is None:
            return []
        self._scheduler.hooks.make_moves(False)
        allowed = min(int(host.blocks.num_blocks * MOST_SHARE) - self._num_host_lent, host.blocks.num_available)
        taken = host.blocks.match_prefix(names, max(0, allowed))
        host.blocks.hold(taken)
        self._num_host_lent += len(taken)
        return taken

    def _take_back(self, loan: Loan) -> None:
        for block in loan.block_ids:
            self._lent[block] -= 1
            if not self._lent[block]:
                del self._lent[block]
        self._scheduler.give_back(loan.block_ids)
        if loan.host_block_ids:
            self._num_host_lent -= len(loan.host_block_ids)
            self._scheduler.give_back_below(loan.host_block_ids)
