"""A source that must ask elsewhere what it has: requests wait beside the queue, without blocks, and not for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
from tandem_worker.engine.tiers import LoadOrder, Offer, Run, TierEngine

from tests.tandem_worker.engine.history_model import HistoryModel, greedy_answer
from tests.tandem_worker.engine.rig import Rig
from tests.tandem_worker.engine.test_loading import OTHER, PROMPT


class AskingTier:
    """Knows nothing before it is told that it does, and then has nothing, or brings blocks that hold nothing: none of
    them is ever valid."""

    def __init__(self, rig: Rig) -> None:
        self.known: Run | None = None
        self.knows = False
        self.orders: list[LoadOrder] = []
        self.held: list[tuple[str, int | None]] = []
        self.cancelled: list[int] = []
        self.started = threading.Semaphore(0)
        self.engine: TierEngine = rig.engine.open_desk(self, cold_blocks=0, fence=lambda: None)

    def find(
        self, names: Sequence[bytes], seconds_per_block: float | None, holder: str = "", held: int | None = None
    ) -> Run | None:
        self.held.append((holder, held))
        return self.known if self.knows else Run(count=0, seconds=0.0, otherwise=self.known)

    def start_load(self, order: LoadOrder) -> None:
        self.orders.append(order)
        self.started.release()

    def cancel(self, load: int) -> None:
        self.cancelled.append(load)

    def passes(self, name: bytes, reused: bool) -> bool:
        return True

    def due(self) -> None: ...

    def offered(self, offer: Offer | None) -> None: ...

    def await_start(self) -> LoadOrder:
        assert self.started.acquire(timeout=60)
        return self.orders[-1]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(HistoryModel(), 64)  # type: ignore[arg-type]
    yield rig
    rig.close()
    assert rig.engine._scheduler.blocks.num_held == 0
    assert not rig.engine._scheduler.queues.loading
    assert rig.engine.failure is None


def test_it_is_asked_for_all_that_memory_lacks_and_holds_no_blocks_meanwhile(rig: Rig) -> None:
    tier = AskingTier(rig)
    rig.submit("a", PROMPT)
    order = tier.await_start()
    assert (order.names, order.block_ids, len(order.asks)) == ((), (), 5)
    assert rig.engine._scheduler.blocks.num_held == 0
    tier.knows = True
    tier.engine.load_ended(order.load, 0)
    rig.wait()
    assert rig.out.tokens("a") == greedy_answer(PROMPT, 8)
    assert len(tier.orders) == 1


def test_what_it_has_then_is_loaded(rig: Rig) -> None:
    tier = AskingTier(rig)
    rig.submit("a", PROMPT)
    asked = tier.await_start()
    tier.knows, tier.known = True, Run(count=3, seconds=0.0)
    tier.engine.load_ended(asked.load, 0)
    order = tier.await_start()
    assert order.names == asked.asks[:3]
    assert len(order.block_ids) == 3
    tier.engine.load_ended(order.load, 0)
    rig.wait()
    assert rig.out.tokens("a") == greedy_answer(PROMPT, 8)


def test_others_pass_meanwhile(rig: Rig) -> None:
    tier = AskingTier(rig)
    rig.submit("a", PROMPT)
    order = tier.await_start()
    tier.knows = True
    rig.submit("b", OTHER)
    rig.out.wait_finished(1)
    assert rig.out.tokens("b") == greedy_answer(OTHER, 8)
    tier.engine.load_ended(order.load, 0)
    rig.wait()
    assert rig.out.tokens("a") == greedy_answer(PROMPT, 8)


def test_one_that_never_knows_is_asked_twice(rig: Rig) -> None:
    tier = AskingTier(rig)
    rig.submit("a", PROMPT)
    for _ in range(2):
        tier.engine.load_ended(tier.await_start().load, 0)
    rig.wait()
    assert rig.out.tokens("a") == greedy_answer(PROMPT, 8)
    assert len(tier.orders) == 2


def test_what_another_one_has_is_not_lost_with_one_that_never_knows(rig: Rig) -> None:
    tier = AskingTier(rig)
    tier.known = Run(count=3, seconds=0.0)
    rig.submit("a", PROMPT)
    for _ in range(2):
        tier.engine.load_ended(tier.await_start().load, 0)
    order = tier.await_start()
    assert (order.asks, len(order.names), len(order.block_ids)) == ((), 3, 3)
    tier.engine.load_ended(order.load, 0)
    rig.wait()
    assert rig.out.tokens("a") == greedy_answer(PROMPT, 8)
    assert len(tier.orders) == 3


def test_it_is_told_how_much_somebody_is_said_to_have(rig: Rig) -> None:
    tier = AskingTier(rig)
    tier.knows = True
    rig.run("a", PROMPT, kv_source="10.0.0.1:7000", kv_source_tokens=14)
    rig.run("b", (*PROMPT, *OTHER), kv_source="10.0.0.1:7000", kv_source_tokens=33)
    rig.run("c", OTHER, kv_source="10.0.0.1:7000")
    assert tier.held == [("10.0.0.1:7000", held) for held in (3, 3, None)]


def test_an_abort_takes_the_question_back(rig: Rig) -> None:
    tier = AskingTier(rig)
    rig.submit("a", PROMPT)
    order = tier.await_start()
    rig.engine.abort("a")
    rig.wait()
    assert tier.cancelled == [order.load]
    tier.engine.load_ended(order.load, 0)  # too late
    tier.knows = True
    assert rig.run("b", OTHER) == greedy_answer(OTHER, 8)
