"""Of several sources the one is taken with which everything is there soonest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.engine.tiers import LoadOrder, Offer, Run
from tandem_worker.tiers.combined import CombinedTier

NAMES = [bytes([number] * 16) for number in range(10)]


class Source:
    def __init__(self, run: Run | None) -> None:
        self.run, self.orders, self.cancelled, self.holders = run, list[LoadOrder](), list[int](), list[str]()

    def find(
        self, names: Sequence[bytes], seconds_per_block: float | None, holder: str = "", held: int | None = None
    ) -> Run | None:
        self.holders.append(holder)
        return self.run

    def start_load(self, order: LoadOrder) -> None:
        self.orders.append(order)

    def cancel(self, load: int) -> None:
        self.cancelled.append(load)


class Sink:
    def __init__(self) -> None:
        self.offers: list[Offer | None] = []
        self.asked = 0

    def passes(self, name: bytes, reused: bool) -> bool:
        return reused

    def due(self) -> None:
        self.asked += 1

    def offered(self, offer: Offer | None) -> None:
        self.offers.append(offer)


def run(count: int, seconds: float) -> Run:
    return Run(count=count, seconds=seconds)


@pytest.mark.parametrize(
    ("runs", "per_block", "chosen"),
    [
        ([None, None], 1.0, None),
        ([run(3, 1.0), None], 1.0, 0),
        ([None, run(3, 1.0)], 1.0, 1),
        ([run(10, 2.0), run(10, 1.0)], 1.0, 1),
        ([run(10, 1.0), run(10, 1.0)], 1.0, 0),
        ([run(3, 2.0), run(10, 5.0)], 1.0, 1),  # 2 + 3.5 s, the rest from the other one, against 5
        ([run(3, 0.1), run(10, 5.0)], 1.0, 0),  # 0.1 + 3.5 s against 5
        ([run(3, 0.1), run(10, 5.0)], 0.5, 0),
        ([run(3, 0.1), run(9, 9.0)], 0.5, 0),  # and computes the rest
        ([run(3, 0.1), run(10, 5.0)], None, 1),
        ([run(10, 6.0), run(10, 5.0)], None, 1),
    ],
)
def test_the_soonest_is_asked(runs: list[Run | None], per_block: float | None, chosen: int | None) -> None:
    sources = [Source(each) for each in runs]
    tier = CombinedTier(sources)
    found = tier.find(NAMES, per_block, "10.0.0.1:7000")
    assert [source.holders for source in sources] == [["10.0.0.1:7000"]] * len(sources)
    if chosen is None:
        assert found is None
        return
    assert found is not None
    assert replace(found, followed=0) == runs[chosen]
    other = runs[1 - chosen]
    follows = per_block == 1.0 and other is not None and other.count > found.count
    assert found.followed == (7 if follows else 0)
    order = LoadOrder(load=4, names=tuple(NAMES), block_ids=tuple(range(10)), seconds_per_block=per_block)
    tier.start_load(order)
    assert [source.orders for source in sources] == [[order] if index == chosen else [] for index in range(2)]
    tier.cancel(4)
    assert all(source.cancelled == [4] for source in sources)


@pytest.mark.parametrize(("held", "chosen"), [(None, 0), (10, 0), (8, 0), (5, 1), (0, 1), (-3, 1)])
def test_hearsay_counts_for_what_is_said_to_be_there(held: int | None, chosen: int) -> None:
    """Who is named is asked for all; how much of it that worker has the gateway knows, and says."""
    sources = [Source(Run(count=10, seconds=1.0, hearsay=True)), Source(run(7, 0.9))]
    tier = CombinedTier(sources)
    assert tier.find(NAMES, 1.0, "10.0.0.1:7000", held) == sources[chosen].run
    alone = CombinedTier(sources[:1])
    assert alone.find(NAMES, 1.0, "10.0.0.1:7000", held) == sources[0].run


@pytest.mark.parametrize(("held", "asks"), [(None, False), (10, False), (9, True), (0, True)])
def test_hearsay_of_a_part_keeps_nobody_from_asking_elsewhere(held: int | None, asks: bool) -> None:
    hearsay = Run(count=10, seconds=0.0, hearsay=True)
    tier = CombinedTier([Source(hearsay), Source(run(0, 0.0))])
    found = tier.find(NAMES, 1.0, "10.0.0.1:7000", held)
    assert found == (Run(count=0, seconds=0.0, otherwise=hearsay) if asks else hearsay)


@given(
    st.lists(st.none() | st.builds(run, st.integers(1, 10), st.floats(0, 100)), min_size=1, max_size=4),
    st.floats(1e-3, 10),
)
def test_nobody_else_would_be_done_sooner(runs: list[Run | None], per_block: float) -> None:
    found = CombinedTier([Source(each) for each in runs]).find(NAMES, per_block)
    there = [each for each in runs if each is not None]
    assert (found is None) == (not there)
    if found is not None:
        ends = {each: each.seconds + (10 - each.count) * per_block for each in there}
        for first in there:
            for then in there:
                if then.count > first.count:
                    share = (then.count - first.count) / then.count
                    joined = first.seconds + then.seconds * share + (10 - then.count) * per_block
                    ends[first] = min(ends[first], joined)
        assert ends[replace(found, followed=0)] == pytest.approx(min(ends.values()))


def test_a_sink_gets_what_is_offered_and_without_one_nothing_is_wanted() -> None:
    sink = Sink()
    tier = CombinedTier([], sink)
    tier.due()
    tier.offered(None)
    assert (sink.asked, sink.offers) == (1, [None])
    assert [tier.passes(NAMES[0], reused) for reused in (True, False)] == [True, False]
    alone = CombinedTier([Source(None)])
    alone.due()
    alone.offered(None)
    assert alone.passes(NAMES[0], False)
