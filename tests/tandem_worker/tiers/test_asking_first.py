"""Among several sources, one that must ask elsewhere is asked before another one's part is taken for all there is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tandem_worker.engine.tiers import LoadOrder, Run
from tandem_worker.tiers.combined import CombinedTier

NAMES = [bytes([index]) * 16 for index in range(4)]


class Source:
    def __init__(self, count: int | None, seconds: float = 0.0) -> None:
        self.count, self.seconds = count, seconds
        self.orders: list[LoadOrder] = []

    def find(
        self, names: Sequence[bytes], seconds_per_block: float | None, holder: str = "", held: int | None = None
    ) -> Run | None:
        return None if self.count is None else Run(count=self.count, seconds=self.seconds)

    def start_load(self, order: LoadOrder) -> None:
        self.orders.append(order)

    def cancel(self, load: int) -> None: ...


def order(*, asks: Sequence[bytes] = (), names: Sequence[bytes] = ()) -> LoadOrder:
    ids = tuple(range(len(names)))
    return LoadOrder(load=1, names=tuple(names), block_ids=ids, seconds_per_block=1.0, asks=tuple(asks))


@pytest.mark.parametrize("disk", [None, 1, 3])
def test_it_is_asked_where_no_other_has_everything(disk: int | None) -> None:
    known, asking = Source(disk), Source(0)
    tier = CombinedTier([known, asking])
    run = tier.find(NAMES, 1.0)
    assert run is not None
    assert run.count == 0
    tier.start_load(order(asks=NAMES))
    assert (len(known.orders), len(asking.orders)) == (0, 1)


def test_it_is_not_asked_where_another_one_has_everything() -> None:
    known, asking = Source(4, 0.5), Source(0)
    tier = CombinedTier([asking, known])
    run = tier.find(NAMES, 1.0)
    assert run is not None
    assert run.count == 4
    tier.start_load(order(names=NAMES))
    assert (len(known.orders), len(asking.orders)) == (1, 0)


@pytest.mark.parametrize(("answer", "chosen"), [(None, 0), (1, 0), (4, 1)])
def test_once_it_has_answered_the_better_one_is_taken(answer: int | None, chosen: int) -> None:
    sources = [Source(3), Source(0)]
    tier = CombinedTier(sources)
    tier.find(NAMES, 1.0)
    sources[1].count = answer
    tier.find(NAMES, 1.0)
    tier.start_load(order(names=NAMES))
    assert [len(source.orders) for source in sources] == [int(chosen == 0), int(chosen == 1)]


def test_what_there_is_where_nobody_asks_is_told_and_loaded() -> None:
    known, asking = Source(3), Source(0)
    tier = CombinedTier([known, asking])
    run = tier.find(NAMES, 1.0)
    assert run is not None
    assert (run.count, run.otherwise) == (0, Run(count=3, seconds=0.0))
    tier.start_load(order(names=NAMES[:3]))
    assert (len(known.orders), len(asking.orders)) == (1, 0)
