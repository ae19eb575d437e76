"""Several sources and sinks beside each other, as one tier of the engine's.

Of the sources that have a beginning of what is wanted the one is taken with which the whole of it is there soonest:
what it brings, and the rest computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem_worker.engine.tiers import BlockSink, BlockSource, LoadOrder, Offer, Run


class CombinedTier:
    """`engine.tiers.Tier`, on the engine's thread."""

    def __init__(self, sources: Sequence[BlockSource], sink: BlockSink | None = None) -> None:
        """Sources that are as good as each other are asked in this order."""
        self._sources, self._sink = sources, sink
        self._found: BlockSource | None = None
        """The source of the run that `find` named last: a load of it is begun before another is looked for."""
        self._asker: BlockSource | None = None
        """The one that must ask elsewhere."""

    def find(
        self, names: Sequence[bytes], seconds_per_block: float | None, holder: str = "", held: int | None = None
    ) -> Run | None:
        best: tuple[float, float] | None = None
        chosen: Run | None = None
        likely = 0
        self._found = self._asker = None
        for source in self._sources:
            run = source.find(names, seconds_per_block, holder)
            if run is None:
                continue
            if not run.count:
                self._asker = self._asker or source
                continue
            count = run.count if held is None or not run.hearsay else max(0, min(run.count, held))
            seconds = run.seconds * count / run.count
            cost = _cost(count, seconds, len(names), seconds_per_block)
            if best is None or cost < best:
                best, chosen, likely, self._found = cost, run, count, source
        if self._asker is not None and likely < len(names):
            # One that has more may be the better one, which is known once it has answered.
            return Run(count=0, seconds=0.0, otherwise=chosen)
        return chosen

    def start_load(self, order: LoadOrder) -> None:
        source = self._asker if order.asks else self._found
        assert source is not None, "find comes before start_load"
        source.start_load(order)

    def cancel(self, load: int) -> None:
        for source in self._sources:
            source.cancel(load)

    def passes(self, name: bytes, reused: bool) -> bool:
        return self._sink is None or self._sink.passes(name, reused)

    def due(self) -> None:
        if self._sink is not None:
            self._sink.due()

    def offered(self, offer: Offer | None) -> None:
        if self._sink is not None:
            self._sink.offered(offer)


def _cost(count: int, seconds: float, wanted: int, seconds_per_block: float | None) -> tuple[float, float]:
    """Seconds until all that is wanted is there; where nobody knows what computing takes, who has most comes first."""
    if seconds_per_block is None:
        return -count, seconds
    return seconds + (wanted - count) * seconds_per_block, seconds
