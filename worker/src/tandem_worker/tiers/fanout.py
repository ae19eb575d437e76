"""Several sinks beside each other: each block that memory offers goes to all of them that want it.

Memory offers every idle block once, so offers are kept for a sink that is not ready for them, up to a number of blocks:
what it does not keep up with is lost to it, not to the others. An offer is handed back when the last of them has copied
it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from tandem_worker.engine.tiers import BlockSink, Offer, TierEngine


class Sink(BlockSink, Protocol):
    """A sink that is joined with an engine of its own. `due` may be called on any thread."""

    @property
    def wants_blocks(self) -> bool:
        """Whether it takes any now. Any thread."""
        ...

    def bind(self, engine: TierEngine) -> None:
        """Join with the engine, before anything is offered."""
        ...


@dataclass(eq=False)
class _Share:
    """Blocks of one offer that stay pinned until every sink has copied its part of them."""

    offer: Offer
    holders: int = 0


@dataclass(eq=False)
class _Seat:
    """One sink, and what is kept for it."""

    sink: Sink
    waiting: bool = False
    """It has asked and was not answered yet."""
    wanted: int = 0
    """Blocks that it asked for: it has room for no more, whatever another one has asked for."""
    kept: deque[tuple[Offer, _Share]] = field(default_factory=deque)
    """Offers that it has not asked for yet."""
    held: list[tuple[Offer, _Share]] = field(default_factory=list)
    """What it has and has not handed back."""


class SinkFanout:
    """`engine.tiers.BlockSink`. Bind it with the engine; it binds the sinks with what stands for the engine."""

    def __init__(self, sinks: Sequence[Sink], most_kept: int) -> None:
        """`most_kept`: blocks that are pinned for one that is behind, about."""
        self._most_kept = most_kept
        self._seats = [_Seat(sink) for sink in sinks]
        self._used_once: set[bytes] = set()
        """Names in the offer that is being made whose blocks one request alone has used."""
        self._lock = threading.Lock()
        self._asked = False
        """Whether the engine was asked and has not answered yet."""
        self._engine: TierEngine = _Nobody()

    def bind(self, engine: TierEngine) -> None:
        """Join with the engine, and each sink with this."""
        self._engine = engine
        for seat in self._seats:
            seat.sink.bind(_EngineOf(self, seat, engine))

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def passes(self, name: bytes, reused: bool) -> bool:
        passes = all(not seat.sink.wants_blocks or seat.sink.passes(name, reused) for seat in self._seats)
        if not passes and not reused:
            self._used_once.add(name)
        return passes

    def due(self) -> None:
        self.drop_unwanted()
        for seat in self._seats:
            seat.sink.due()

    def offered(self, offer: Offer | None) -> None:
        """The engine's answer to whoever asked first; everybody who asked meanwhile is answered with it."""
        self.drop_unwanted()
        share = None if offer is None else _Share(offer, holders=1)
        used_once, self._used_once = self._used_once, set()
        told: list[Callable[[], None]] = []
        with self._lock:
            for seat in self._seats:
                part = None if share is None else _part_of(seat.sink, share.offer, used_once)
                if part is not None and share is not None:
                    told += self._give(seat, part, share)
            # To ask on for one that wants nothing of this would take blocks away from one that is behind.
            ends = offer is None or any(seat.kept for seat in self._seats)
            for seat in self._seats:
                if seat.waiting and (ends or not seat.sink.wants_blocks):
                    seat.waiting = False
                    told.append(partial(seat.sink.offered, None))
            self._asked = any(seat.waiting for seat in self._seats)
            again = self._asked
        for tell in told:
            tell()
        if share is not None:
            self._let_go(share)
            if again:
                self._engine.offer_blocks(len(share.offer.block_ids))

    def _give(self, seat: _Seat, part: Offer, share: _Share) -> list[Callable[[], None]]:
        """Under the lock. What is to be said to the sink afterwards."""
        if not seat.waiting and sum(len(kept.block_ids) for kept, _ in seat.kept) >= self._most_kept:
            return []
        if not seat.waiting:
            share.holders += 1
            seat.kept.append((part, share))
            return [seat.sink.due]
        seat.waiting = False
        return [partial(seat.sink.offered, self._hand_out(seat, part, share, seat.wanted))]

    @staticmethod
    def _hand_out(seat: _Seat, part: Offer, share: _Share, count: int) -> Offer:
        """Under the lock. The first `count` blocks of a part, which is nobody's; what is beyond is kept for later."""
        share.holders += 1
        first, rest = _split(part, count)
        seat.held.append((first, share))
        if rest is not None:
            share.holders += 1
            seat.kept.appendleft((rest, share))
        return first

    # -- any thread --------------------------------------------------------------------------------------------------

    def drop_unwanted(self) -> None:
        """What is kept for a sink that is off would be kept for ever: requests that need it would wait for it."""
        dropped: list[_Share] = []
        with self._lock:
            for seat in self._seats:
                if seat.kept and not seat.sink.wants_blocks:
                    dropped += [share for _, share in seat.kept]
                    seat.kept.clear()
        for share in dropped:
            self._let_go(share)

    def go_on_without(self, seat: _Seat) -> None:
        """A sink has gone off, whose turn it may have been to ask: the engine tells of blocks that are due once."""
        self.drop_unwanted()
        for other in self._seats:
            if other is not seat:
                other.sink.due()

    def ask(self, seat: _Seat, count: int, *, hottest: bool) -> None:
        """As `TierEngine.offer_blocks`, of one sink."""
        with self._lock:
            kept: Offer | None = None
            if seat.kept:
                part, share = seat.kept.popleft()
                share.holders -= 1
                kept = self._hand_out(seat, part, share, count)
            else:
                seat.waiting, seat.wanted = True, count
                if self._asked:
                    return
                self._asked = True
        if kept is not None:
            seat.sink.offered(kept)
            return
        self._engine.offer_blocks(count, hottest=hottest)

    def take_back(self, seat: _Seat, offer: Offer) -> None:
        """As `TierEngine.hand_back`, of one sink."""
        with self._lock:
            index = next(index for index, (held, _) in enumerate(seat.held) if held is offer)
            _, share = seat.held.pop(index)
        self._let_go(share)

    def _let_go(self, share: _Share) -> None:
        with self._lock:
            share.holders -= 1
            over = not share.holders
        if over:
            self._engine.hand_back(share.offer)


class _Nobody:
    """`TierEngine` before there is one: nothing is asked of it."""

    def load_ended(self, load: int, valid: int) -> None:
        raise AssertionError("bind comes first")

    def offer_blocks(self, count: int, *, hottest: bool = False) -> None:
        raise AssertionError("bind comes first")

    def hand_back(self, offer: Offer) -> None:
        raise AssertionError("bind comes first")

    def drop_kept(self) -> None:
        raise AssertionError("bind comes first")


class _EngineOf:
    """`TierEngine` of one sink."""

    def __init__(self, fanout: SinkFanout, seat: _Seat, engine: TierEngine) -> None:
        self._fanout, self._seat, self._engine = fanout, seat, engine

    def load_ended(self, load: int, valid: int) -> None:
        self._engine.load_ended(load, valid)

    def offer_blocks(self, count: int, *, hottest: bool = False) -> None:
        self._fanout.ask(self._seat, count, hottest=hottest)

    def hand_back(self, offer: Offer) -> None:
        self._fanout.take_back(self._seat, offer)

    def drop_kept(self) -> None:
        self._fanout.go_on_without(self._seat)


def _split(offer: Offer, count: int) -> tuple[Offer, Offer | None]:
    """The first `count` blocks of an offer, and the others."""
    if len(offer.block_ids) <= count:
        return replace(offer), None  # an object of its own: by that it is handed back
    ids, names = offer.block_ids, offer.names
    return (
        replace(offer, block_ids=ids[:count], names=names[:count]),
        replace(offer, block_ids=ids[count:], names=names[count:]),
    )


def _part_of(sink: Sink, offer: Offer, used_once: set[bytes]) -> Offer | None:
    """What of an offer a sink wants. An offer has passed where one of them wants it."""
    if not sink.wants_blocks:
        return None
    wanted = [index for index, name in enumerate(offer.names) if not sink.passes(name, name not in used_once)]
    if not wanted:
        return None
    ids, names = (tuple(values[index] for index in wanted) for values in (offer.block_ids, offer.names))
    return replace(offer, block_ids=ids, names=names)
