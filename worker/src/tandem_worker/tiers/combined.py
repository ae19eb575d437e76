"""Several sources and sinks beside each other, as one tier of the engine's.

Of the sources that have a beginning of what is wanted the one is taken with which the whole of it is there soonest:
what it brings, and the rest computed, or brought by another one that has more. Of that one it is asked for when the
beginning is there (`engine.loading`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
        found: list[tuple[BlockSource, Run, int, float]] = []
        self._found = self._asker = None
        for source in self._sources:
            run = source.find(names, seconds_per_block, holder)
            if run is None:
                continue
            if not run.count:
                self._asker = self._asker or source
                continue
            count = run.count if held is None or not run.hearsay else max(0, min(run.count, held))
            found.append((source, run, count, run.seconds * count / run.count))
        chosen, likely = None, 0
        if found:
            plans = [_plan_rest(found, each, len(names), seconds_per_block) for each in range(len(found))]
            best = min(range(len(found)), key=lambda each: plans[each][0])
            self._found, run, likely, _ = found[best]
            followed = plans[best][1]
            chosen = replace(run, followed=followed) if followed else run
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


def _plan_rest(
    found: Sequence[tuple[BlockSource, Run, int, float]], own: int, wanted: int, seconds_per_block: float | None
) -> tuple[tuple[float, bool, float], int]:
    """Seconds until all that is wanted is there, if the source `own` is taken first, and how many blocks another one
    brings then. Of two plans that take as long, the one of a single load is the better one.

    Where nobody knows what computing takes, who has most comes first. Nobody follows then, or one that may bring less
    than it is asked for.
    """
    _, run, count, seconds = found[own]
    if seconds_per_block is None:
        return (-count, False, seconds), 0
    rest, followed = (wanted - count) * seconds_per_block, 0
    if run.hearsay:
        return (seconds + rest, False, seconds), 0
    for _, _, more, took in found:
        if more > count:
            joined = took * (more - count) / more + (wanted - more) * seconds_per_block
            if joined < rest:
                rest, followed = joined, more - count
    return (seconds + rest, followed > 0, seconds), followed
