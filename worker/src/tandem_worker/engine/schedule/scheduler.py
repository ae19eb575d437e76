"""Which sequences run in the next step: continuous batching with chunked prefill and preemption.

Order of service is a key per sequence, (arrival + priority * seconds_per_priority, submission, choice). Decodes take
one token each, then prefill chunks fill the token budget, then waiting sequences are admitted strictly in order: the
head of the queue is never overtaken, so nothing starves. What is left of the budget is for guesses: tokens that may
follow a decode's newest one and are computed with it. They take no block that somebody waits for. When blocks run out
the running sequence with the largest key gives up its own, so the first in order always advances and every sequence
eventually is the first. Its blocks stay cached until others need them, and go to host memory then where there is some;
what is found of them is not computed again.

With a target for first tokens the deadline takes the place of the arrival, within bounds (`deadlines`), and a waiting
sequence that comes before a prompt under way gets its chunks first. Without one a key never changes.

Blocks of a remote prefill are reserved for good once the prefill worker has begun with it. Before, a decode that lacks
a block takes them, and the order is given again later; where a waiting sequence lacks them and the prefill worker is
slow to begin, the prompt is computed here instead, so that no peer holds memory by doing nothing.

A sequence gets the blocks of all its known tokens on admission; later it takes one block at a time. Chunks end at
block boundaries except the last, so each prompt block is completed by exactly one step. The work of a step is
proportional to the sequences in it; the prefix cache is walked once per admission, and with a target once per arrival.

Steps are scheduled, then completed or cancelled, in this order. One more may be scheduled before the last one is
completed, unless that one is `lockstep`: its sequences then decode tokens that are not known here yet. A sequence that
ends meanwhile keeps its blocks until the steps that still write to them are over.

A step with guesses is lockstep. When it is complete, the newest tokens count as computed and the guesses do not; each
that turns out to be the next token is then confirmed, in order, and counts from there on. What was written for the
others is overwritten before anything reads it, and a block gets its name when all of its tokens count.

Here requests come and go, and steps end. `planner` applies the rules to one step; `queues` has where every sequence is.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tandem_worker.engine.schedule.block_manager import BlockManager
from tandem_worker.engine.schedule.deadlines import find_place
from tandem_worker.engine.schedule.host_cache import HostCache, Moves
from tandem_worker.engine.schedule.plan import SchedulerLimits, StepPlan
from tandem_worker.engine.schedule.planner import Hooks, StepPlanner, may_go_remote
from tandem_worker.engine.schedule.queues import SequenceQueues
from tandem_worker.engine.schedule.request import Request, Sequence, SequenceState


class Scheduler:
    __slots__ = ("_limits", "_num_submitted", "_wall", "blocks", "hooks", "host", "planner", "queues")

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        clock: Callable[[], float] = time.monotonic,
        host: HostCache | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is that of arrivals, which must not be set: who came while it was ahead would wait until it is there
        again. `wall` has unix seconds, in which others are told when blocks were last used.
        `host` takes what `blocks` gives up."""
        if limits.max_batch_tokens <= blocks.block_size:
            raise ValueError(
                f"max_batch_tokens ({limits.max_batch_tokens}) must exceed the block size ({blocks.block_size}): "
                "prefill advances by whole blocks beside at least one decode"
            )
        self.blocks = blocks
        self.host = host
        if host is not None:
            blocks.cache.on_evict = host.keep
        self.hooks = Hooks()
        self.queues = SequenceQueues(blocks, host, wall)
        self.planner = StepPlanner(limits, self.queues, self.hooks, clock)
        self._limits, self._wall = limits, wall
        self._num_submitted = 0

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take in a request. Choice 0 waits for its turn; the others wait for its prompt (`fork`).

        Of a resumed one the first open choice does; the others find the prompt in the prefix cache (`_unpark`).
        """
        self._num_submitted += 1
        target = self.hooks.ttft_target
        if target is not None:
            cached = 0 if request.reads_every_position else self.count_cached(request.prompt_chain)
            request.num_uncached = len(request.prompt) - cached * self.blocks.block_size
        due = find_place(request, target, self._limits.seconds_per_priority)
        request.choices = [Sequence(request, choice, (due, self._num_submitted, choice)) for choice in range(request.n)]
        leader = request.choices[0]
        if request.resumed is not None:
            leader = _take_up(request.choices, request.resumed)
        loads, waiting = self.hooks.loads, self.queues.waiting
        if loads is None or (waiting and waiting[0].retry_required) or not loads.begin(leader):
            self.queues.enqueue(leader)

    def fork(self, request: Request) -> None:
        """The prompt is computed: choice 0's blocks are shared with the other choices, which begin to decode.

        A choice beyond `max_running` waits instead, and finds the prompt in the prefix cache.
        """
        leader = request.choices[0]
        for choice in request.choices[1:]:
            if choice.state is not SequenceState.PARKED:
                continue
            if len(self.queues.running) + len(self.queues.receiving) >= self.planner.max_running:
                choice.move_to(SequenceState.WAITING)
                self.queues.enqueue(choice)
                continue
            choice.block_ids = list(leader.block_ids)
            self.blocks.hold(choice.block_ids)
            choice.num_computed = choice.num_planned = leader.num_computed
            choice.num_named = leader.num_named
            choice.decoding = leader.decoding
            self.queues.start_running(choice)

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """The sequence has got this token."""
        sequence.output.append(token_id)
        if sequence.state is SequenceState.RUNNING:
            self.queues.running_tokens += 1
        elif sequence.state is SequenceState.WAITING:
            self.queues.count_queued(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence in any state and let go of its blocks. Writes to those of a RECEIVING or LOADING one were
        cancelled before."""
        if sequence.state is SequenceState.FINISHED:
            return
        self.queues.withdraw(sequence)
        sequence.move_to(SequenceState.FINISHED)
        if sequence.request.resumed is not None:
            self._unpark(sequence.request)
        if not sequence.under_way:
            self.queues.release_blocks(sequence)
        self.queues.compact()

    def hold_for_peer(self, sequence: Sequence) -> None:
        """The prompt of a peer is computed: keep its blocks, out of the running set, until `finish`."""
        self.queues.stop_running(sequence)
        sequence.move_to(SequenceState.HELD)
        self.queues.held.add(sequence)

    def receive_done(self, sequence: Sequence) -> None:
        """The prefill worker wrote all prompt blocks; the caller samples the first token from its logits."""
        self.queues.receiving.discard(sequence)
        sequence.num_computed = sequence.num_planned = sequence.num_tokens
        self.queues.start_running(sequence)
        self.queues.name_full_blocks(sequence)
        sequence.decoding = True
        if sequence.request.resumed is not None:
            self._unpark(sequence.request)

    def receive_failed(self, sequence: Sequence) -> None:
        """Compute here, from where the cached blocks end."""
        self.queues.compute_here(sequence)

    def start_loading(self, sequence: Sequence, matched: list[int], below: list[int], count: int) -> bool:
        """Hold the cached blocks `matched`, copies of the host's blocks `below` and `count` new ones for a WAITING
        sequence in no queue, or at the head of the queue, which it leaves then. False: there is no room."""
        total = len(matched) + len(below) + count
        if self.blocks.count_required(matched, total) > self.queues.num_admissible:
            return False
        self.queues.take_cached(sequence, matched, below, total)
        sequence.num_named = len(matched) + len(below)  # they are there before anything is launched that reads them
        sequence.num_computed = sequence.num_planned = total * self.blocks.block_size
        sequence.move_to(SequenceState.LOADING)
        self.queues.loading.add(sequence)
        self.queues.count_queued(sequence)
        return True

    def load_done(self, sequence: Sequence, valid: int) -> None:
        """As `SequenceQueues.end_loading`."""
        self.queues.end_loading(sequence, valid)

    def goes_remote(self, sequence: Sequence, num_uncached: int) -> bool:
        """Whether a prefill worker computes its prompt, when so many tokens of it are not in memory."""
        return may_go_remote(sequence) and num_uncached > self._limits.local_prefill_max_tokens

    def give_back(self, blocks: tuple[int, ...]) -> None:
        """Let go of named blocks that were held for who copies them."""
        self.queues.let_go(blocks)

    def give_back_below(self, host_blocks: tuple[int, ...]) -> None:
        """The same of blocks of host memory."""
        assert self.host is not None
        self.host.blocks.release(host_blocks, (), self._wall())

    def load_on(self, sequence: Sequence, valid: int) -> None:
        """As `load_done`, and what comes after that may be with a source too, or it knows now which blocks it has. The
        sequence waits for those, or is queued in its place."""
        self.queues.stop_loading(sequence, valid)
        if self.hooks.loads is None or not self.hooks.loads.begin(sequence):
            self.queues.enqueue(sequence)

    def take_moves(self) -> Moves | None:
        """As `HostCache.take_moves`; None: there are none."""
        return None if self.host is None or not self.host.has_moves else self.host.take_moves(self._wall())

    def count_cached(self, names: list[bytes]) -> int:
        """Blocks in memory of the longest known beginning of `names`."""
        matched = self.blocks.match_prefix(names, len(names))
        return len(matched) + len(self.queues.find_below(names[len(matched) :]))

    # -- one step ------------------------------------------------------------------------------------------------

    def schedule(self, max_tokens: int | None = None) -> StepPlan:
        """Plan a step of at most `max_batch_tokens` tokens, or fewer prefill tokens if `max_tokens` says so."""
        return self.planner.plan(max_tokens)

    def complete(self, plan: StepPlan) -> None:
        """The forward pass succeeded: tokens count as computed, full blocks get their names; guesses do not count."""
        block_size = self.blocks.block_size
        _drop_guesses(plan)
        for sequence in plan.decodes:
            if sequence.state is SequenceState.RUNNING:
                sequence.num_computed += 1
                if not sequence.num_computed % block_size:
                    self.queues.name_full_blocks(sequence)
            else:
                self._settle(sequence, 1)
        for sequence, _, length in plan.chunks:
            if sequence.state is SequenceState.RUNNING:
                sequence.num_computed += length
                self.queues.name_full_blocks(sequence)
                if sequence.decoding and sequence.request.resumed is not None:
                    self._unpark(sequence.request)
            else:
                self._settle(sequence, length)

    def cancel(self, plan: StepPlan) -> None:
        """The forward pass was not made, or failed: nothing of it counts."""
        _drop_guesses(plan)
        for sequence in plan.decodes:
            if sequence.state is SequenceState.RUNNING:
                sequence.num_planned -= 1
            else:
                self._settle(sequence, 1)
        for sequence, _, length in plan.chunks:
            if sequence.state is SequenceState.RUNNING:
                sequence.num_planned -= length
                sequence.decoding = False
                self.queues.count_queued(sequence)
            else:
                self._settle(sequence, length)

    def confirm(self, sequence: Sequence) -> None:
        """The newest token was guessed in the step that is complete: its KV is computed."""
        sequence.num_planned += 1
        sequence.num_computed += 1
        if not sequence.num_computed % self.blocks.block_size:
            self.queues.name_full_blocks(sequence)

    def _settle(self, sequence: Sequence, length: int) -> None:
        """A step is over for a sequence that left in the meantime; a preempted one has given its blocks back before."""
        if sequence.state is SequenceState.FINISHED and sequence.under_way:
            sequence.num_planned -= length
            if not sequence.under_way:
                self.queues.release_blocks(sequence)

    def _unpark(self, request: Request) -> None:
        """The prompt of a resumed request is computed, or never will be by its leader."""
        for choice in request.choices:
            if choice.state is SequenceState.PARKED:
                choice.move_to(SequenceState.WAITING)
                self.queues.enqueue(choice)


def _take_up(choices: list[Sequence], resumed: tuple[tuple[int, ...] | None, ...]) -> Sequence:
    """Give choices what they have already said. Returns the first open one."""
    for choice, output in zip(choices, resumed, strict=True):
        if output is None:
            choice.move_to(SequenceState.FINISHED)
        else:
            choice.output = list(output)
            choice.num_resumed = len(output)
    leader = next(choice for choice in choices if choice.state is not SequenceState.FINISHED)
    if leader.state is SequenceState.PARKED:
        leader.move_to(SequenceState.WAITING)
    return leader


def _drop_guesses(plan: StepPlan) -> None:
    for sequence, tokens in plan.guesses.items():
        if sequence.under_way:
            sequence.num_planned -= len(tokens)
