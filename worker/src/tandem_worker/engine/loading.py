"""Blocks that a tier brings back: which are worth it, and what becomes of the sequences that wait for them.

A load begins when its request is queued, or comes to the head of the queue if there was no room before. Its sequence
waits outside the queue, holding what is cached and what is being loaded, and comes back to its place with the valid
leading blocks in the prefix cache: they count as cached like all others. A late load is cut by its source.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from tandem_worker.engine.schedule.request import Sequence, SequenceState
from tandem_worker.engine.schedule.scheduler import Scheduler
from tandem_worker.engine.tiers import BlockSink, BlockSource, LoadOrder, Offer, Tier

_FINISHED = SequenceState.FINISHED
_AHEAD_SHARE = 0.25
"""Share of memory up to which blocks are loaded for requests before they come to the head of the queue."""
_MOST_ASKS = 2
"""A source may be asked once when a request is queued, and once more at the head of the queue, a long time later."""
_MOST_LOADS = 2
"""One source may have the beginning of a prompt and another one the rest. Where the first has brought all that it said,
in time, the request is still no later than a tenth."""
_LEAST_LEFT = 16
"""An offer leaves at least so many blocks that can be given out, and as many again as it takes."""


class LoadDesk:
    """On the engine thread; `Scheduler.loads`."""

    def __init__(self, scheduler: Scheduler, source: BlockSource) -> None:
        self._scheduler, self._source = scheduler, source
        self._numbers = itertools.count(1)
        self._loading: dict[int, list[Sequence]] = {}
        """First whose blocks a load writes to, then those that wait for the same blocks and have none of their own."""
        self._load_of: dict[Sequence, int] = {}
        self._orders: dict[int, LoadOrder] = {}
        self._load_from: dict[bytes, int] = {}
        """The first load under way that begins with a block of this name."""
        self._ahead: dict[Sequence, int] = {}
        """Blocks that were loaded, or are, for sequences that were in no step."""

    def begin(self, sequence: Sequence, *, at_head: bool = False) -> bool:
        """Begin to load what a source has of a WAITING sequence in no queue, or at its head. True: it is LOADING now.

        Asked once for each request, and again, at the head of the queue, where there was no room for the blocks.
        """
        request = sequence.request
        if sequence.load_tried or request.admitted or request.reads_every_position or sequence.choice:
            return False
        scheduler = self._scheduler
        blocks = scheduler.blocks
        if sequence.retry_required > scheduler.queues.num_admissible or not (at_head or self._may_run_ahead()):
            return False
        most = (sequence.num_tokens - 1) // blocks.block_size
        names = sequence.name_blocks(most, blocks.block_size)
        matched = blocks.match_prefix(names, most)
        below = scheduler.queues.find_below(names[len(matched) : most])
        if self._follow(sequence, names, matched, below, most):
            return True
        rate = scheduler.hooks.prefill_rate()
        seconds_per_block = blocks.block_size / rate if rate else None
        start = len(matched) + len(below)
        held = request.kv_source_tokens // blocks.block_size - start if request.kv_source_tokens else None
        run = self._source.find(names[start:most], seconds_per_block, request.kv_source, held)
        if run is not None and not run.count:
            if self._may_ask(sequence, most):
                return self._ask(sequence, names[start:most], matched, below, seconds_per_block)
            run = run.otherwise
        says_no_more = run is not None and run.hearsay and held is not None and held <= 0
        if run is None or says_no_more:
            sequence.load_tried = True
            return False
        total = start + run.count
        likely = (total + run.followed) * blocks.block_size
        if run.hearsay:
            likely = min(likely, max(request.kv_source_tokens, start * blocks.block_size))
        if scheduler.goes_remote(sequence, sequence.num_tokens - likely):
            sequence.load_tried = True  # who computes the rest needs what comes before it, and has not got it from here
            return False
        if not scheduler.start_loading(sequence, matched, below, run.count):
            return False
        sequence.load_tried = True
        sequence.num_loads += 1
        self._ahead[sequence] = self._ahead.get(sequence, 0) + run.count + len(below)
        load = next(self._numbers)
        order = LoadOrder(
            load=load,
            names=tuple(names[start:total]),
            block_ids=tuple(sequence.block_ids[start:]),
            seconds_per_block=seconds_per_block,
            holder=request.kv_source,
        )
        self._loading[load], self._load_of[sequence], self._orders[load] = [sequence], load, order
        self._load_from.setdefault(order.names[0], load)
        scheduler.hooks.make_moves(True)
        self._source.start_load(order)
        return True

    def _follow(self, sequence: Sequence, names: list[bytes], matched: list[int], below: list[int], most: int) -> bool:
        """Wait for a load under way that brings nothing but what this sequence needs next, instead of loading it again:
        many that have the same prompt, all at once, would fill memory with copies."""
        start = len(matched) + len(below)
        load = self._load_from.get(names[start]) if start < most else None
        if load is None:
            return False
        order = self._orders[load]
        end = start + len(order.names)
        if end > most or names[end - 1] != order.names[-1]:  # equal names have equal ones before them
            return False
        scheduler = self._scheduler
        if scheduler.goes_remote(sequence, sequence.num_tokens - end * scheduler.blocks.block_size):
            return False
        if not scheduler.start_loading(sequence, matched, below, 0):
            return False
        scheduler.hooks.make_moves(False)
        self._loading[load].append(sequence)
        self._load_of[sequence] = load
        return True

    def _may_ask(self, sequence: Sequence, total: int) -> bool:
        """Whether the source may find out once more what it has: with it `total` blocks would be there at most."""
        left = sequence.num_tokens - total * self._scheduler.blocks.block_size
        return sequence.load_asks < _MOST_ASKS and not self._scheduler.goes_remote(sequence, left)

    def _ask(
        self,
        sequence: Sequence,
        names: list[bytes],
        matched: list[int],
        below: list[int],
        seconds_per_block: float | None,
    ) -> bool:
        """Have the source find out what it has, beside the queue and without blocks."""
        scheduler = self._scheduler
        if not scheduler.start_loading(sequence, matched, below, 0):
            return False
        scheduler.hooks.make_moves(False)
        sequence.load_asks += 1
        load = next(self._numbers)
        order = LoadOrder(load=load, names=(), block_ids=(), seconds_per_block=seconds_per_block, asks=tuple(names))
        self._loading[load], self._load_of[sequence], self._orders[load] = [sequence], load, order
        self._source.start_load(order)
        return True

    def _may_run_ahead(self) -> bool:
        """Whether what is loaded for requests that are not admitted yet leaves room: else one load would push out of
        memory what another has brought."""
        for sequence in [each for each in self._ahead if each.request.admitted or each.state is _FINISHED]:
            del self._ahead[sequence]
        return sum(self._ahead.values()) <= self._scheduler.blocks.num_blocks * _AHEAD_SHARE

    def ended(self, load: int, valid: int) -> None:
        """The source has done what it could. One that was cancelled is ignored."""
        if load not in self._loading:
            return
        if self._orders[load].asks:
            (asker,) = self._forget(load)
            self._scheduler.load_on(asker, 0)
        else:
            whole = valid == len(self._orders[load].names)
            first, *others = self._forget(load)
            if whole and first.num_loads < _MOST_LOADS:
                first.load_tried = False
                self._scheduler.load_on(first, valid)
            else:
                self._scheduler.load_done(first, valid)
            self._let_go(others, load_tried=not whole)

    def cancel(self, sequence: Sequence) -> None:
        """No byte is written any more for this LOADING sequence, whose blocks are others' next."""
        load = self._load_of[sequence]
        if self._loading[load][0] is not sequence:
            self._loading[load].remove(sequence)
            del self._load_of[sequence]
            return
        _, *others = self._forget(load)
        self._source.cancel(load)
        self._let_go(others, load_tried=True)

    def _forget(self, load: int) -> list[Sequence]:
        """Whom a load was for."""
        sequences, order = self._loading.pop(load), self._orders.pop(load)
        for sequence in sequences:
            del self._load_of[sequence]
        if order.names and self._load_from.get(order.names[0]) == load:
            del self._load_from[order.names[0]]
        return sequences

    def _let_go(self, sequences: list[Sequence], *, load_tried: bool) -> None:
        """Queue those that waited for a load of another. Nobody waits twice for what does not come."""
        for sequence in sequences:
            sequence.load_tried = load_tried
            self._scheduler.load_done(sequence, 0)


class OfferDesk:
    """On the engine thread: hands idle blocks to a sink."""

    def __init__(
        self, scheduler: Scheduler, sink: BlockSink, cold_blocks: int, fence: Callable[[], object], *, below: bool
    ) -> None:
        """`fence`: marks the point at which everything that was launched is written. `below`: blocks of host memory are
        offered, which those of the device have gone to before."""
        self._scheduler, self._sink, self._fence, self._below = scheduler, sink, fence, below
        host = scheduler.host
        assert host is not None or not below
        self._blocks = host.blocks if below and host is not None else scheduler.blocks
        self._cache = self._blocks.watch()
        self._cache.on_due = sink.due
        self._cache.cold_blocks = cold_blocks

    def offer(self, count: int, *, hottest: bool) -> None:
        """As `TierEngine.offer_blocks`. Nothing is offered where requests may want the blocks meanwhile."""
        blocks = self._blocks
        # In host memory nobody waits for a block, and there may be only a few.
        left = min(_LEAST_LEFT, blocks.num_blocks // 2) if self._below else _LEAST_LEFT
        count = min(count, (blocks.num_available - left) // 2, max(1, blocks.num_blocks // 16))
        if count <= 0:
            self._cache.ask_again()
            self._sink.offered(None)
            return
        taken = self._take_hottest(count) if hottest else self._cache.take_coldest(count, self._sink.passes)
        if not taken:
            self._sink.offered(None)
            return
        ids = tuple(block for block, _ in taken)
        self._scheduler.hooks.make_moves(False)
        self._sink.offered(Offer(block_ids=ids, names=tuple(name for _, name in taken), fence=self._fence()))

    def _take_hottest(self, count: int) -> list[tuple[int, bytes]]:
        """Nothing only where the sink wants nothing of all that is idle: it asks no more then."""
        while True:
            freed = self._scheduler.blocks.free_newest(count) if self._below else 0
            taken = self._cache.take_hottest(count, self._sink.passes)
            if taken or not (freed or self._cache.has_unexamined):
                return taken

    def take_back(self, offer: Offer) -> None:
        """As `TierEngine.hand_back`."""
        self._cache.unpin(offer.block_ids)


class TierDesk:
    """`TierEngine` for any thread: what it is told is done on the engine thread, by way of `send`."""

    def __init__(
        self,
        scheduler: Scheduler,
        tier: Tier,
        *,
        cold_blocks: int,
        fence: Callable[[], object],
        send: Callable[[Callable[[], None]], None],
        below: bool = False,
    ) -> None:
        """`cold_blocks`: so many blocks that memory gives up next are to be in the tier. `below`: that memory is the
        host's, and `fence` its own."""
        self._send = send
        self._loads = LoadDesk(scheduler, tier)
        self._offers = OfferDesk(scheduler, tier, cold_blocks, fence, below=below)
        scheduler.hooks.loads = self._loads

    def load_ended(self, load: int, valid: int) -> None:
        self._send(partial(self._loads.ended, load, valid))

    def offer_blocks(self, count: int, *, hottest: bool = False) -> None:
        self._send(partial(self._offers.offer, count, hottest=hottest))

    def hand_back(self, offer: Offer) -> None:
        self._send(partial(self._offers.take_back, offer))

    def drop_kept(self) -> None:
        """Nothing is kept here."""
