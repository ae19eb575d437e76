"""What a tier has asked for when it went off, or was closed, is the engine's again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tandem_worker.engine.tiers import Offer
from tandem_worker.tiers.errors import TierError
from tandem_worker.tiers.health import TierHealth
from tandem_worker.tiers.policy import WriteBudget
from tandem_worker.tiers.stats import Counters
from tandem_worker.tiers.writer import BlockWriter

OFFER = Offer(block_ids=(1, 2), names=(b"1", b"2"), fence=None)


class Engine:
    """Answers at once. Something may happen meanwhile."""

    def __init__(self, offers: int) -> None:
        self.left, self.back = offers, 0
        self.meanwhile: Callable[[], None] = lambda: None
        self.writer: BlockWriter

    def offer_blocks(self, count: int, *, hottest: bool = False) -> None:
        self.meanwhile()
        self.left -= 1
        self.writer.offered(OFFER if self.left >= 0 else None)

    def hand_back(self, offer: Offer) -> None:
        self.back += 1

    def load_ended(self, load: int, valid: int) -> None: ...

    def drop_kept(self) -> None: ...


def build(offers: int) -> tuple[Engine, BlockWriter, TierHealth, list[int]]:
    written: list[int] = []

    def write(names: tuple[bytes, ...], rows: np.ndarray) -> int:
        written.append(len(names))
        return len(names)

    geometry = SimpleNamespace(slot_bytes=1 << 20, slot_header_bytes=0)
    slots: Any = SimpleNamespace(
        geometry=geometry, most_slots=4, allocate=lambda count: np.zeros((count, 8)), write=write
    )
    memory: Any = SimpleNamespace(copy_out=lambda ids, rows, first, fence: None)
    engine, health = Engine(offers), TierHealth("store")
    health.recover()
    writer = BlockWriter(slots, memory, health, Counters(16, tier="store"), WriteBudget(None))
    engine.writer = writer
    writer.engine = engine
    return engine, writer, health, written


def test_all_that_is_offered_is_written_and_handed_back() -> None:
    engine, writer, _, written = build(3)
    writer.write_due()
    assert (engine.back, written) == (3, [2, 2, 2])


@pytest.mark.parametrize("end", ["off", "closed"])
def test_what_is_offered_to_one_that_has_ended_is_handed_back_unwritten(end: str) -> None:
    engine, writer, health, written = build(3)

    def meanwhile() -> None:
        if end == "closed":
            writer.close()
        else:
            health.fail(TierError("StoreFailed", "for a test"))

    engine.meanwhile = meanwhile
    writer.write_due()
    assert (engine.left, engine.back, written) == (2, 1, [])
