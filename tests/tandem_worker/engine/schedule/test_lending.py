"""Blocks that are lent stay what they are, come back, and never leave requests without any."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.engine.lending import MOST_SHARE, LendingDesk
from tandem_worker.engine.schedule.block_manager import BlockManager
from tandem_worker.engine.schedule.plan import SchedulerLimits
from tandem_worker.engine.schedule.scheduler import Scheduler
from tandem_worker.engine.tiers import Loan

NUM_BLOCKS = 65


class Books:
    """What the desk asks of a scheduler."""

    def __init__(self) -> None:
        self.blocks = BlockManager(NUM_BLOCKS, 4)
        self.now = 0.0

    def give_back(self, blocks: tuple[int, ...]) -> None:
        self.now += 1
        self.blocks.release(blocks, (), self.now)

    def keep(self, count: int, first: int = 0) -> list[bytes]:
        """Idle blocks with names."""
        names = [number.to_bytes(16, "little") for number in range(first, first + count)]
        self.blocks.release(self.blocks.allocate(count), names, self.now)
        return names


def at_once(command: Callable[[], None]) -> None:
    command()


def open_desk() -> tuple[Books, LendingDesk]:
    books = Books()
    return books, LendingDesk(books, lambda: "fence", at_once)  # type: ignore[arg-type]


def borrow(desk: LendingDesk, names: list[bytes]) -> Loan:
    loans: list[Loan] = []
    desk.lend_blocks(names, loans.append)
    (loan,) = loans
    return loan


def test_the_leading_ones_are_lent_and_cannot_be_given_up() -> None:
    books, desk = open_desk()
    names = books.keep(8)
    loan = borrow(desk, [*names[:3], bytes(b"x" * 16), *names[4:]])
    assert [books.blocks.cache.name_of(block) for block in loan.block_ids] == names[:3]
    assert loan.fence == "fence"
    taken = books.blocks.allocate(books.blocks.num_available)
    assert not set(taken) & set(loan.block_ids)
    desk.give_back(loan)
    assert books.blocks.num_available == 3
    books.blocks.release(taken, (), 9.0)
    books.blocks.check()


def test_nothing_is_lent_of_what_there_is_not() -> None:
    _, desk = open_desk()
    loan = borrow(desk, [bytes(16)])
    assert (loan.block_ids, loan.fence) == ((), None)
    desk.give_back(loan)


@given(st.data())
def test_what_is_lent_comes_back_and_leaves_enough(data: st.DataObject) -> None:
    books, desk = open_desk()
    names = books.keep(data.draw(st.integers(1, NUM_BLOCKS - 1)))
    held = books.blocks.match_prefix(names, data.draw(st.integers(0, len(names))))
    books.blocks.hold(held)
    out: list[Loan] = []
    for _ in range(data.draw(st.integers(1, 12))):
        if out and data.draw(st.booleans()):
            desk.give_back(out.pop(data.draw(st.integers(0, len(out) - 1))))
        else:
            first = data.draw(st.integers(0, len(names) - 1))
            before = books.blocks.num_available
            out.append(borrow(desk, names[first:]))
            assert books.blocks.num_available >= min(before, 16)
        idle = {block for loan in out for block in loan.block_ids} - set(held)
        assert len(idle) <= int((NUM_BLOCKS - 1) * MOST_SHARE)
        books.blocks.check()
    for loan in out:
        desk.give_back(loan)
    assert books.blocks.num_held == len(held)
    assert not desk._lent
    books.blocks.release(held, (), 99.0)
    books.blocks.check()


def test_lent_blocks_are_used_at_the_time_that_others_are_told() -> None:
    """Not by the clock of arrivals, which counts from the machine's start."""
    limits, blocks = SchedulerLimits(max_batch_tokens=16, max_running=2), BlockManager(NUM_BLOCKS, 4)
    scheduler = Scheduler(limits, blocks, clock=lambda: 7.0, wall=lambda: 1000.0)
    desk = LendingDesk(scheduler, lambda: "fence", at_once)
    names = [bytes([number]) * 16 for number in range(2)]
    blocks.release(blocks.allocate(2), names, 900.0)
    loan = borrow(desk, names)
    assert loan.block_ids
    desk.give_back(loan)
    taken = blocks.allocate(blocks.num_available)
    assert blocks.cache.horizon == 1000.0
    blocks.release(taken, (), 1001.0)
    blocks.check()
