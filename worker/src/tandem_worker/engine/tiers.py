"""What the engine and tiers below its memory ask of each other: a source of blocks that were computed before, and a
sink for those that memory gives up.

A tier may lose anything. What it says is there has been verified, and belongs to the name that was asked for. The
engine never waits for it: every call here returns at once, and what takes time ends in a command to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive blocks of a chain that a source has."""

    count: int
    """0: it cannot tell before it has asked elsewhere; it is given an order of no blocks that `asks`."""
    seconds: float
    """From now until all of them are in memory, as far as that can be told: what the source has to do before counts.
    """
    hearsay: bool = False
    """A gateway says that they are there: some may not be, and nothing comes of those."""
    followed: int = 0
    """Blocks after these that another source is likely to bring, which is asked when these are there."""
    otherwise: Run | None = None
    """What there is where nobody asks, beside a run of no blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """Bring these blocks into memory."""

    load: int
    """Names this load; no two have the same number."""
    names: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    """Reserved for it: one for each name."""
    seconds_per_block: float | None
    """What computing one of them would take; None while that is not known. A load that is later is cut."""
    holder: str = ""
    """As in `BlockSource.find`."""
    asks: tuple[bytes, ...] = ()
    """In place of names: the source is to find out which of these it has, and `find` is called again afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Idle blocks, which are not given to anybody else until they are handed back."""

    block_ids: tuple[int, ...]
    names: tuple[bytes, ...]
    fence: object
    """Fence of the device: what the blocks hold is written once it has passed. None on a CPU."""


class BlockSource(Protocol):
    """The way in. Called on the engine thread."""

    def find(
        self, names: Sequence[bytes], seconds_per_block: float | None, holder: str = "", held: int | None = None
    ) -> Run | None:
        """The leading ones of `names` that it has; None where it has not even the first, or where computing them, each
        in `seconds_per_block`, is sooner. None: nobody knows what computing takes. `holder`: the KV port (`host:port`)
        of a worker that has some of them, as a gateway says; empty: none was named. `held`: how many of them it says;
        None: it does not. A source that must ask elsewhere says so with a run of no blocks."""
        ...

    def start_load(self, order: LoadOrder) -> None:
        """Begin. Ends in one call of `TierEngine.load_ended`, unless cancelled, within what computing would take and
        a tenth of that, whatever becomes of the tier."""
        ...

    def cancel(self, load: int) -> None:
        """Abandon. When this returns nothing of that load is written to its blocks any more. One that it does not know,
        or has ended, is ignored."""
        ...


class BlockSink(Protocol):
    """The way out. Called on the engine thread."""

    def passes(self, name: bytes, reused: bool) -> bool:
        """Whether it does not want this block: it has it, or takes none now. `reused`: more than one request has used
        the block."""
        ...

    def due(self) -> None:
        """There are blocks that memory will give up soon. It asks for them when it can take some."""
        ...

    def offered(self, offer: Offer | None) -> None:
        """What it has asked for; None: there is nothing. It hands an offer back as soon as it has copied the blocks."""
        ...


class Tier(BlockSource, BlockSink, Protocol):
    """Both ways."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """Blocks that are not given up until they are given back."""

    block_ids: tuple[int, ...]
    """The leading ones of those that were asked for; some may be held by requests too."""
    fence: object
    """As in `Offer`."""
    host_block_ids: tuple[int, ...] = ()
    """Blocks of host memory, which have what comes after those."""
    host_fence: object = None

    @property
    def num_blocks(self) -> int:
        """Blocks that were lent."""
        return len(self.block_ids) + len(self.host_block_ids)


class BlockLender(Protocol):
    """What is asked of an engine by who gives its blocks to others. Any thread; no step is made for it."""

    def lend_blocks(self, names: Sequence[bytes], answer: Callable[[Loan], None]) -> None:
        """`answer` is called on the engine thread, between two steps, and must only enqueue. An engine that ends does
        not call it."""
        ...

    def give_back(self, loan: Loan) -> None:
        """The blocks of a loan are copied, or nobody wants them any more."""
        ...


class TierEngine(Protocol):
    """What a tier asks of the engine. Any thread."""

    def load_ended(self, load: int, valid: int) -> None:
        """The first `valid` blocks of the order are in memory, the others are to be computed."""
        ...

    def offer_blocks(self, count: int, *, hottest: bool = False) -> None:
        """Offer up to `count` blocks: of those that are due the coldest, or, of all, the hottest."""
        ...

    def hand_back(self, offer: Offer) -> None:
        """The blocks of an offer are copied."""
        ...

    def drop_kept(self) -> None:
        """The sink takes nothing now: blocks that are kept for it until it asks are others' again."""
        ...
