"""What this worker has computed, for other workers that ask for it by name: out of its memory, the host's, its disk.

Blocks of memory are lent for as long as copying them takes. They travel with sums of their own, so that what comes from
the disk is verified before it leaves, and everything again where it arrives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from tandem_worker.engine.tiers import BlockLender, Loan
from tandem_worker.host.errors import WorkerError
from tandem_worker.tiers.format import Geometry, TierKey
from tandem_worker.tiers.memory import BlockMemory, allocate_rows
from tandem_worker.tiers.stats import Counters
from tandem_worker.tiers.wire import place_in, plan_piece, seal
from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.fetches import FetchOrder, Slots


class BlockReader(Protocol):
    """A tier below memory."""

    def read_blocks(self, names: Sequence[bytes], rows: np.ndarray) -> int:
        """Some leading ones of `names` into `rows`, verified; 0 where it has not the first. Any thread."""
        ...


class Shelf:
    """`transfer.fetches.BlockShelf`."""

    def __init__(
        self,
        key: TierKey,
        geometry: Geometry,
        memory: BlockMemory,
        lender: BlockLender,
        counters: Counters,
        below: BlockReader | None = None,
        host: BlockMemory | None = None,
    ) -> None:
        """`memory`: for this alone. `below`: asked for what memory lacks. `host`: memory of the host's blocks."""
        self._key, self._digest, self.geometry, self._memory = key, key.digest, geometry, memory
        self._lender, self._counters, self._below, self._host = lender, counters, below, host
        self._copying = threading.Lock()
        self.slot_bytes = geometry.slot_bytes

    def open(self, order: FetchOrder, wake: Callable[[], None]) -> ShelfFetch:
        """Raises TransferError."""
        if order.key != self._digest:
            raise TransferError(
                f"the blocks wanted are of another model, revision, layout, shard or format than {self._key.to_json()}"
            )
        fetch = ShelfFetch(self, order, wake)
        try:
            self._lender.lend_blocks(order.names, fetch.be_lent)
        except WorkerError as error:
            raise TransferError(str(error)) from error
        return fetch

    def give_back(self, loan: Loan) -> None:
        """Nobody copies these any more."""
        self._lender.give_back(loan)

    def copy(self, loan: Loan, first: int, rows: np.ndarray) -> int:
        """Blocks `first` on of a loan, as many as there are and `rows` take."""
        start, memory, fence = self.geometry.slot_header_bytes, self._memory, loan.fence
        ids = loan.block_ids[first : first + len(rows)]
        if not ids:
            first -= len(loan.block_ids)
            ids = loan.host_block_ids[first : first + len(rows)]
            assert self._host is not None, "nothing of it is lent where there is none"
            memory, fence = self._host, loan.host_fence
        with self._copying:
            memory.copy_out(ids, rows, start, fence)
        return len(ids)

    def read(self, names: Sequence[bytes], rows: np.ndarray) -> int:
        """What memory lacks, from below."""
        return self._below.read_blocks(names, rows) if self._below is not None and names else 0

    def seal(self, order: FetchOrder, first: int, rows: np.ndarray) -> None:
        """Blocks `first` on of an order are in `rows`."""
        for row, name in enumerate(order.names[first : first + len(rows)]):
            seal(rows[row], self.geometry, self._key, name, place_in(order.transfer, first + row))

    def count_given(self, num_blocks: int, seconds: float) -> None:
        """So many were copied for others."""
        self._counters.count_written(num_blocks, num_blocks * self.slot_bytes, seconds)


class ShelfFetch:
    """`transfer.fetches.Fetch`."""

    def __init__(self, shelf: Shelf, order: FetchOrder, wake: Callable[[], None]) -> None:
        self._shelf, self._order, self._wake = shelf, order, wake
        self._lock = threading.Lock()
        self._loan: Loan | None = None
        self._returned = self._closed = self._over = False
        self._rows: np.ndarray | None = None
        self._given = 0

    @property
    def ended(self) -> bool:
        return self._over

    @property
    def num_given(self) -> int:
        return self._given

    def be_lent(self, loan: Loan) -> None:
        """On the engine thread."""
        with self._lock:
            if not self._closed:
                self._loan = loan
        if self._loan is not loan:
            self._shelf.give_back(loan)
            return
        self._wake()

    def next_slots(self) -> Slots | None:
        loan = self._loan
        if loan is None or self._over:
            return None
        began, first = time.monotonic(), self._given
        if self._rows is None:
            self._rows = allocate_rows(plan_piece(self._shelf.slot_bytes), self._shelf.slot_bytes)
        rows = self._rows[: len(self._order.names) - first]
        if first < loan.num_blocks:
            count = self._shelf.copy(loan, first, rows)
        else:
            count = self._shelf.read(self._order.names[first : first + len(rows)], rows)
        self._given += count
        if self._given >= loan.num_blocks:
            self._return()
        if not count:
            self._over = True
            return None
        self._shelf.seal(self._order, first, rows[:count])
        self._shelf.count_given(count, time.monotonic() - began)
        return Slots(first, count, rows[:count].reshape(-1).data)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._over = True
        self._return()

    def _return(self) -> None:
        if self._loan is not None and not self._returned:
            self._returned = True
            self._shelf.give_back(self._loan)
