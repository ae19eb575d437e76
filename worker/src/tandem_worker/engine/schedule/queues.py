"""The place of every sequence, and what it holds: the queue, the running set, those that wait for others' blocks."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Names

from tandem_worker.engine.schedule.block_manager import BlockManager
from tandem_worker.engine.schedule.host_cache import HostCache
from tandem_worker.engine.schedule.request import Sequence, SequenceState


class SequenceQueues:
    """Moves sequences, and keeps count. Decides nothing."""

    def __init__(self, blocks: BlockManager, host: HostCache | None, wall: Callable[[], float]) -> None:
        self.blocks = blocks
        self.host = host
        """None: what `blocks` gives up is lost."""
        self._wall = wall
        self.on_release: Callable[[], None] = lambda: None
        """Called before a sequence lets go of its blocks, to which nothing may be written afterwards."""
        self.running: list[Sequence] = []
        """In the order of their keys."""
        self.rows: list[Sequence] = []
        """The same sequences; `rows[s.row] is s`. A sequence that leaves is replaced by the last one."""
        self.receiving: set[Sequence] = set()
        self.held: set[Sequence] = set()
        self.loading: set[Sequence] = set()
        self.waiting: list[Sequence] = []
        """A heap by key. Aborted ones stay until they come up."""
        self.num_waiting = 0
        self.running_tokens = 0
        """Tokens in the contexts of running sequences."""
        self.queued_prefill_tokens = 0
        """Tokens to be computed here before their sequences decode, without those already found in the cache."""

    @property
    def num_queued(self) -> int:
        """Sequences that wait for their turn, those whose blocks are being loaded included."""
        return self.num_waiting + len(self.loading)

    @property
    def num_admissible(self) -> int:
        """Blocks that sequences may take which are not running yet: some are left for those that are."""
        return self.blocks.num_available - -(-len(self.running) // 4)

    def enqueue(self, sequence: Sequence) -> None:
        """Put a WAITING sequence in its place."""
        heapq.heappush(self.waiting, sequence)
        self.num_waiting += 1
        self.count_queued(sequence)

    def start_running(self, sequence: Sequence) -> None:
        """It holds blocks for all its tokens, and takes part in steps from now on."""
        sequence.move_to(SequenceState.RUNNING)
        insort(self.running, sequence)
        sequence.row = len(self.rows)
        sequence.num_synced = 0
        self.rows.append(sequence)
        self.running_tokens += sequence.num_tokens
        self.count_queued(sequence)

    def stop_running(self, sequence: Sequence) -> None:
        """It takes part in no further step; it keeps its blocks."""
        self.running.remove(sequence)
        last = self.rows.pop()
        if last is not sequence:
            self.rows[sequence.row] = last
            last.row = sequence.row
            last.num_synced = 0
        sequence.row = -1
        self.running_tokens -= sequence.num_tokens
        self.count_queued(sequence)

    def compact(self) -> None:
        """Forget sequences that left the queue from its middle, if they are many."""
        if len(self.waiting) > 2 * self.num_waiting + 64:
            self.waiting[:] = [waiting for waiting in self.waiting if waiting.state is SequenceState.WAITING]
            heapq.heapify(self.waiting)

    def pop(self) -> None:
        """Take the head out of the queue."""
        heapq.heappop(self.waiting)
        self.num_waiting -= 1

    def requeue(self, sequence: Sequence) -> None:
        """Put one that has lost its blocks, or what it waited for, back in its place."""
        self.withdraw(sequence)
        self.release_blocks(sequence)
        sequence.move_to(SequenceState.WAITING)
        self.enqueue(sequence)

    def compute_here(self, sequence: Sequence) -> None:
        """A RECEIVING sequence computes its prompt here, from where the cached blocks end."""
        self.receiving.discard(sequence)
        sequence.request.endpoints = ()
        self.start_running(sequence)

    def stop_loading(self, sequence: Sequence, valid: int) -> None:
        """The first `valid` of the blocks to be loaded are there, under their names from here on; nothing is written
        to the others any more. The sequence is WAITING, in no queue."""
        self.loading.discard(sequence)
        sequence.num_named += valid
        self.release_blocks(sequence)
        sequence.move_to(SequenceState.WAITING)

    def end_loading(self, sequence: Sequence, valid: int) -> None:
        """As `stop_loading`; the sequence is queued in its place."""
        self.stop_loading(sequence, valid)
        self.enqueue(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out of wherever it is."""
        if sequence.state is SequenceState.RUNNING:
            self.stop_running(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.num_waiting -= 1
        self.receiving.discard(sequence)
        self.held.discard(sequence)
        self.loading.discard(sequence)
        self.queued_prefill_tokens -= sequence.queued_tokens
        sequence.queued_tokens = 0

    def find_below(self, names: Names) -> list[int]:
        """Blocks of host memory with the leading ones of these names. Holds nothing yet."""
        return [] if self.host is None or not names else self.host.find(names)

    def take_cached(self, sequence: Sequence, matched: list[int], below: list[int], num_total: int) -> None:
        """Give a sequence without blocks `num_total`: the cached ones `matched`, then blocks that take what the host's
        blocks `below` hold, then new ones. There is room."""
        blocks, host = self.blocks, self.host
        blocks.hold(matched)
        if host is not None and below:
            host.blocks.hold(below)  # before others are evicted, for which those would make room
        sequence.block_ids = matched + blocks.allocate(num_total - len(matched))
        sequence.num_named = len(matched)
        if host is not None and below:
            host.fetch(below, sequence.block_ids[len(matched) : len(matched) + len(below)])

    def release_blocks(self, sequence: Sequence) -> None:
        """Let go of a sequence's blocks; they stay cached as far as they have names."""
        if sequence.block_ids:
            self.on_release()
            self.blocks.release(sequence.block_ids, sequence.chain[: sequence.num_named], self._wall())
        sequence.block_ids = []
        sequence.num_computed = sequence.num_planned = sequence.num_named = 0
        sequence.decoding = False

    def let_go(self, blocks: tuple[int, ...]) -> None:
        """Let go of named blocks that no sequence was told of: they count as used now."""
        self.blocks.release(blocks, (), self._wall())

    def name_full_blocks(self, sequence: Sequence) -> None:
        """From now on its computed blocks are found in the prefix cache."""
        count = sequence.num_computed // self.blocks.block_size
        if count <= sequence.num_named:
            return
        names = sequence.name_blocks(count, self.blocks.block_size)
        for index in range(sequence.num_named, count):
            self.blocks.cache.register(names[index], sequence.block_ids[index])
        sequence.num_named = count

    def count_queued(self, sequence: Sequence) -> None:
        """Bring this sequence's share of `queued_prefill_tokens` up to date."""
        elsewhere = sequence.state is SequenceState.RECEIVING
        tokens = sequence.num_tokens - sequence.num_planned
        tokens = 0 if sequence.decoding or elsewhere else tokens
        self.queued_prefill_tokens += tokens - sequence.queued_tokens
        sequence.queued_tokens = tokens
