"""Loads and the scheduler without an engine: what is done for a sequence that waits, step after step."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tandem_worker.engine.loading import LoadDesk
from tandem_worker.engine.schedule.request import SequenceState
from tandem_worker.engine.tiers import LoadOrder, Run

from tests.tandem_worker.engine.schedule.test_scheduler import Driver


class Source:
    """Has `count` blocks of everything from token 100 on, and never ends a load."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_asked = 0

    def find(
        self, names: Sequence[bytes], seconds_per_block: float | None, holder: str = "", held: int | None = None
    ) -> Run | None:
        self.num_asked += 1
        return Run(count=self.count, seconds=0.0) if len(names) >= self.count else None

    def start_load(self, order: LoadOrder) -> None: ...

    def cancel(self, load: int) -> None: ...


def test_a_refused_head_is_not_looked_for_again_until_there_is_room() -> None:
    """Blocks are kept for the running: the head lacks one of those, and its prompt is not walked again in each step."""
    driver = Driver(num_blocks=60)
    for number in range(4):
        driver.add([number] * 9, max_tokens=40)
    for _ in range(8):
        driver.step()
    source = Source(60)
    driver.scheduler.hooks.loads = desk = LoadDesk(driver.scheduler, source)
    (head,) = driver.add(list(range(100, 400)), max_tokens=1).choices
    driver.step()
    assert head.state is SequenceState.WAITING
    head.retry_required = driver.blocks.num_available
    num_asked = source.num_asked
    assert not desk.begin(head, at_head=True)
    assert source.num_asked == num_asked


def test_guesses_take_no_block_while_somebody_loads() -> None:
    """It wants more blocks than those that are loaded, and comes back for them."""
    driver = Driver(guesses=random.Random(1))
    driver.scheduler.hooks.loads = LoadDesk(driver.scheduler, Source(12))
    answering = driver.add([1] * 5, max_tokens=60).choices[0]
    while not answering.decoding:
        driver.step()
    loading = driver.add(list(range(100, 160)), max_tokens=1)
    assert loading.choices[0].state is SequenceState.LOADING
    for _ in range(12):
        driver.step()
        assert len(answering.block_ids) == driver.blocks.count_blocks(answering.num_computed)
