from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from tandem_worker.engine.schedule.block_manager import BlockManager
from tandem_worker.engine.schedule.prefix_cache import build_chain_root, extend_chain

BLOCK_SIZE = 2
ROOT = build_chain_root("model")


class Table:
    """A sequence as the block manager sees it, with the content each block must have."""

    def __init__(self, tokens: list[int], blocks: list[int]) -> None:
        self.tokens, self.blocks = tokens, blocks

    @property
    def names(self) -> list[bytes]:
        return extend_chain(ROOT, self.tokens, BLOCK_SIZE)


class Sharing(RuleBasedStateMachine):
    """Tables come, fork, part and go; `content` is what a forward pass would have written into each block."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(13, BLOCK_SIZE)
        self.live: list[Table] = []
        self.content: dict[int, tuple[int, ...]] = {}
        self.now = 0.0

    @rule(target=tables, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit(self, tokens: list[int]) -> Table:
        names = extend_chain(ROOT, tokens, BLOCK_SIZE)
        matched = self.manager.match_prefix(names, (len(tokens) - 1) // BLOCK_SIZE)
        for index, block in enumerate(matched):
            assert self.content[block] == tuple(tokens[: BLOCK_SIZE * (index + 1)]), "a hit has other tokens"
        total = self.manager.count_blocks(len(tokens))
        if self.manager.count_required(matched, total) > self.manager.num_available:
            return Table([], [])
        self.manager.hold(matched)
        table = Table(tokens, matched + self.manager.allocate(total - len(matched)))
        for index in range(len(matched), total):
            self.content[table.blocks[index]] = tuple(tokens[: BLOCK_SIZE * (index + 1)])
        for name, block in zip(table.names, table.blocks, strict=False):
            self.manager.cache.register(name, block)
        self.live.append(table)
        return table

    @rule(target=tables, table=tables)
    def fork(self, table: Table) -> Table:
        if table not in self.live:
            return Table([], [])
        self.manager.hold(table.blocks)
        other = Table(list(table.tokens), list(table.blocks))
        self.live.append(other)
        return other

    @rule(table=tables, token=st.integers(0, 1))
    def append(self, table: Table, token: int) -> None:
        if table not in self.live:
            return
        index = len(table.tokens) // BLOCK_SIZE
        fresh = index == len(table.blocks)
        if (fresh or self.manager.is_shared(table.blocks[index])) and not self.manager.num_available:
            return
        if fresh:
            table.blocks += self.manager.allocate(1)
        elif self.manager.is_shared(table.blocks[index]):
            table.blocks[index] = self.manager.replace_shared(table.blocks[index])
        table.tokens.append(token)
        self.content[table.blocks[index]] = tuple(table.tokens)
        if len(table.tokens) % BLOCK_SIZE == 0:
            self.manager.cache.register(table.names[index], table.blocks[index])

    @rule(table=consumes(tables))
    def release(self, table: Table) -> None:
        if table in self.live:
            self.now += 1
            self.live.remove(table)
            self.manager.release(table.blocks, table.names, self.now)

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        self.manager.check()

    @invariant()
    def counts_are_right(self) -> None:
        for block in range(1, 13):
            assert self.manager.num_holders(block) == sum(block in table.blocks for table in self.live)

    @invariant()
    def blocks_hold_what_their_tables_say(self) -> None:
        for table in self.live:
            for index, block in enumerate(table.blocks):
                expected = tuple(table.tokens[: BLOCK_SIZE * (index + 1)])
                assert self.content[block] == expected, "somebody else wrote into this block"

    @invariant()
    def blocks_that_were_written_are_the_first_ones(self) -> None:
        assert self.manager.num_touched == max(self.content, default=0) + 1

    @invariant()
    def idle_children_are_evicted_before_their_parents(self) -> None:
        order = {self.content[block]: at for at, block in enumerate(self.manager.cache.idle_blocks())}
        for tokens, at in order.items():
            parent = tokens[:-BLOCK_SIZE]
            assert parent not in order or order[parent] > at

    @precondition(lambda self: not self.live)
    @invariant()
    def nothing_is_held_without_a_table(self) -> None:
        assert self.manager.num_held == 0


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_block_zero_is_never_given_out() -> None:
    manager = BlockManager(5, BLOCK_SIZE)
    assert sorted(manager.allocate(4)) == [1, 2, 3, 4]
    assert manager.num_available == 0


def compute_twice() -> tuple[BlockManager, list[bytes], list[int], list[int]]:
    """Two sequences that computed the same first block at the same time; the second one went further."""
    manager = BlockManager(8, BLOCK_SIZE)
    names = extend_chain(ROOT, [1, 2, 3, 4], BLOCK_SIZE)
    first, second = manager.allocate(1), manager.allocate(2)
    for name, block in [(names[0], first[0]), (names[0], second[0]), (names[1], second[1])]:
        manager.cache.register(name, block)
    return manager, names, first, second


def test_a_child_keeps_the_block_that_has_its_parents_name_in_use() -> None:
    manager, names, first, second = compute_twice()
    manager.release(first, names[:1], now=1.0)
    manager.release(second, names, now=2.0)
    assert manager.cache.idle_blocks() == [second[1], first[0]], "the parent is evicted last"
    assert manager.match_prefix(names, 2) == [first[0], second[1]]
    manager.check()


def test_a_parent_whose_namesake_was_evicted_takes_the_name() -> None:
    manager, names, first, second = compute_twice()
    manager.release(first, names[:1], now=1.0)
    rest = manager.allocate(manager.num_available)
    assert manager.match_prefix(names, 2) == []
    manager.release(second, names, now=2.0)
    assert manager.match_prefix(names, 2) == second
    manager.release(rest, [], now=3.0)
    manager.check()
