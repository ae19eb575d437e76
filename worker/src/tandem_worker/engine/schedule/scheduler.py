"""Which sequences run in the next step: continuous batching with chunked prefill and preemption.

Order of service is a key per sequence, (arrival + priority * seconds_per_priority, submission, choice). Decodes take
one token each, then prefill chunks fill the token budget, then waiting sequences are admitted strictly in order: the
head of the queue is never overtaken, so nothing starves. What is left of the budget is for guesses: tokens that may
follow a decode's newest one and are computed with it. They take no block that somebody waits for. When blocks run out
the running sequence with the largest key gives up its own, so the first in order always advances and every sequence
eventually is the first. Its KV is computed again later, or moved to host memory and back where that is cheaper and
there is room.

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
"""

from __future__ import annotations

import heapq
import time
from bisect import insort
from collections.abc import Callable
from typing import Protocol

from tandem_api.launch import TTFTDeadline

from tandem_worker.engine.schedule.block_manager import BlockManager
from tandem_worker.engine.schedule.deadlines import find_late_place, find_place, is_late
from tandem_worker.engine.schedule.host_blocks import HostBlocks
from tandem_worker.engine.schedule.plan import Chunk, SchedulerLimits, StepPlan
from tandem_worker.engine.schedule.request import Request, Sequence, SequenceState

_RETRY_STEPS = 16
"""A refused head of the queue is matched against the cache again after this many steps at the latest."""


class Loads(Protocol):
    """Brings blocks back from tiers (`engine.loading`)."""

    def begin(self, sequence: Sequence, *, at_head: bool = False) -> bool:
        """Whether this WAITING sequence is LOADING now."""
        ...

    def cancel(self, sequence: Sequence) -> None:
        """When this returns nothing is written any more to the blocks of a LOADING sequence."""
        ...


def first_chunk(length: int, most: int, block_size: int) -> int:
    """Tokens of the first of as few chunks of `length` as `most` tokens each allow, in whole blocks; 0 if none fits.

    Chunks are about equal: a short last one would cost a pass over the weights for few tokens.
    """
    num_blocks, fitting = -(-length // block_size), most // block_size
    if fitting == 0:
        return 0
    num_chunks = -(-num_blocks // fitting)
    return -(-num_blocks // num_chunks) * block_size


class Scheduler:
    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        clock: Callable[[], float] = time.monotonic,
        host: HostBlocks | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is that of arrivals, which must not be set: who came while it was ahead would wait until it is there
        again. `wall` has unix seconds, in which others are told when blocks were last used."""
        if limits.max_batch_tokens <= blocks.block_size:
            raise ValueError(
                f"max_batch_tokens ({limits.max_batch_tokens}) must exceed the block size ({blocks.block_size}): "
                "prefill advances by whole blocks beside at least one decode"
            )
        self._limits = limits
        self.blocks = blocks
        self.host = host or HostBlocks(0)
        self.prefers_move: Callable[[int, int], bool] = lambda num_tokens, num_blocks: True
        """Whether a victim with so many computed tokens and blocks is moved, if the host has room."""
        self.has_begun: Callable[[Sequence], bool] = lambda sequence: True
        """Whether a prefill worker computes this RECEIVING sequence."""
        self.ttft_target: TTFTDeadline | None = None
        """Orders what comes from now on by deadline (see `deadlines`); None: by arrival."""
        self.prefill_rate: Callable[[], float | None] = lambda: None
        """Prompt tokens that are computed per second; None while that is not known."""
        self.tokens_within: Callable[[float, bool], int] = lambda seconds, decoding: limits.max_batch_tokens
        """Prompt tokens that a step of so many seconds computes, beside decodes or alone."""
        self.guess: Callable[[StepPlan, int], dict[Sequence, tuple[int, ...]]] | None = None
        """Guesses for decodes of a plan, so many tokens in all at most and `most_guesses` of each; None: there are
        none."""
        self._clock = clock
        self._wall = wall
        # Decodes always fit into the budget and leave room for one block of prefill.
        self.max_running = min(limits.max_running, limits.max_batch_tokens - blocks.block_size)
        self.running: list[Sequence] = []
        """In the order of their keys."""
        self.rows: list[Sequence] = []
        """The same sequences; `rows[s.row] is s`. A sequence that leaves is replaced by the last one."""
        self.receiving: set[Sequence] = set()
        self.held: set[Sequence] = set()
        self.loads: Loads | None = None
        """None: there is no tier to load from."""
        self.loading: set[Sequence] = set()
        self._waiting: list[Sequence] = []
        """A heap by key. Aborted ones stay until they come up."""
        self._num_submitted = 0
        self._steps_since_refusal = 0
        self.num_waiting = 0
        self.running_tokens = 0
        """Tokens in the contexts of running sequences."""
        self.queued_prefill_tokens = 0
        """Tokens to be computed here before their sequences decode, without those already found in the cache."""
        self.num_recomputed = 0
        """Preemptions after which KV is computed again."""
        self.num_moved = 0
        """Preemptions that moved KV to the host."""

    @property
    def num_queued(self) -> int:
        """Sequences that wait for their turn, those whose blocks are being loaded included."""
        return self.num_waiting + len(self.loading)

    @property
    def num_admissible(self) -> int:
        """Blocks that sequences may take which are not running yet: some are left for those that are."""
        return self.blocks.num_available - -(-len(self.running) // 4)

    # -- requests come and go ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take in a request. Choice 0 waits for its turn; the others wait for its prompt (`fork`).

        Of a resumed one the first open choice does; the others find the prompt in the prefix cache (`_unpark`).
        """
        self._num_submitted += 1
        target = self.ttft_target
        if target is not None:
            cached = (
                0
                if request.reads_every_position
                else len(self.blocks.match_prefix(request.prompt_chain, len(request.prompt_chain)))
            )
            request.num_uncached = len(request.prompt) - cached * self.blocks.block_size
        due = find_place(request, target, self._limits.seconds_per_priority)
        request.choices = [Sequence(request, choice, (due, self._num_submitted, choice)) for choice in range(request.n)]
        leader = request.choices[0]
        if request.resumed is not None:
            leader = self._take_up(request.choices, request.resumed)
        if self.loads is None or (self._waiting and self._waiting[0].retry_required) or not self.loads.begin(leader):
            self._enqueue(leader)

    @staticmethod
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

    def _unpark(self, request: Request) -> None:
        """The prompt of a resumed request is computed, or never will be by its leader."""
        for choice in request.choices:
            if choice.state is SequenceState.PARKED:
                choice.move_to(SequenceState.WAITING)
                self._enqueue(choice)

    def fork(self, request: Request) -> None:
        """The prompt is computed: choice 0's blocks are shared with the other choices, which begin to decode.

        A choice beyond `max_running` waits instead, and finds the prompt in the prefix cache.
        """
        leader = request.choices[0]
        for choice in request.choices[1:]:
            if choice.state is not SequenceState.PARKED:
                continue
            if len(self.running) + len(self.receiving) >= self.max_running:
                choice.move_to(SequenceState.WAITING)
                self._enqueue(choice)
                continue
            choice.block_ids = list(leader.block_ids)
            self.blocks.hold(choice.block_ids)
            choice.num_computed = choice.num_planned = leader.num_computed
            choice.num_named = leader.num_named
            choice.decoding = leader.decoding
            self._start_running(choice)

    def append_token(self, sequence: Sequence, token_id: int) -> None:
        """The sequence has got this token."""
        sequence.output.append(token_id)
        if sequence.state is SequenceState.RUNNING:
            self.running_tokens += 1
        elif sequence.state is SequenceState.WAITING:
            self._count_queued(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence in any state and let go of its blocks. Writes to those of a RECEIVING or LOADING one were
        cancelled before."""
        if sequence.state is SequenceState.FINISHED:
            return
        self._withdraw(sequence)
        self._release_host(sequence)
        sequence.move_to(SequenceState.FINISHED)
        if sequence.request.resumed is not None:
            self._unpark(sequence.request)
        if not sequence.under_way:
            self._release_blocks(sequence)
        if len(self._waiting) > 2 * self.num_waiting + 64:
            self._waiting = [waiting for waiting in self._waiting if waiting.state is SequenceState.WAITING]
            heapq.heapify(self._waiting)

    def hold_for_peer(self, sequence: Sequence) -> None:
        """The prompt of a peer is computed: keep its blocks, out of the running set, until `finish`."""
        self._stop_running(sequence)
        sequence.move_to(SequenceState.HELD)
        self.held.add(sequence)

    def receive_done(self, sequence: Sequence) -> None:
        """The prefill worker wrote all prompt blocks; the caller samples the first token from its logits."""
        self.receiving.discard(sequence)
        sequence.num_computed = sequence.num_planned = sequence.num_tokens
        self._start_running(sequence)
        self._name_full_blocks(sequence)
        sequence.decoding = True
        if sequence.request.resumed is not None:
            self._unpark(sequence.request)

    def receive_failed(self, sequence: Sequence) -> None:
        """Compute here, from where the cached blocks end."""
        self.receiving.discard(sequence)
        sequence.request.endpoints = ()
        self._start_running(sequence)

    def start_loading(self, sequence: Sequence, matched: list[int], count: int) -> bool:
        """Hold the cached blocks `matched` and `count` new ones for a WAITING sequence in no queue, or at the head of
        the queue, which it leaves then. False: there is no room."""
        total = len(matched) + count
        if self.blocks.count_required(matched, total) > self.num_admissible:
            return False
        self.blocks.hold(matched)
        sequence.block_ids = matched + self.blocks.allocate(count)
        sequence.num_named = len(matched)
        sequence.num_computed = sequence.num_planned = total * self.blocks.block_size
        sequence.move_to(SequenceState.LOADING)
        self.loading.add(sequence)
        self._count_queued(sequence)
        return True

    def load_done(self, sequence: Sequence, valid: int) -> None:
        """The first `valid` of the blocks to be loaded are there, under their names from here on; nothing is written
        to the others any more. The sequence is queued in its place."""
        self.loading.discard(sequence)
        sequence.num_named += valid
        self._release_blocks(sequence)
        sequence.move_to(SequenceState.WAITING)
        self._enqueue(sequence)

    def give_back(self, blocks: tuple[int, ...]) -> None:
        """Let go of named blocks that were held for who copies them."""
        self.blocks.release(blocks, (), self._clock())

    def ask_done(self, sequence: Sequence) -> None:
        """A source knows now which blocks it has. The sequence waits for those, or is queued in its place."""
        self.loading.discard(sequence)
        self._release_blocks(sequence)
        sequence.move_to(SequenceState.WAITING)
        if self.loads is None or not self.loads.begin(sequence):
            self._enqueue(sequence)

    # -- one step ------------------------------------------------------------------------------------------------

    def schedule(self, max_tokens: int | None = None) -> StepPlan:
        """Plan a step of at most `max_batch_tokens` tokens, or fewer prefill tokens if `max_tokens` says so."""
        plan = StepPlan()
        prefilling = self._plan_decodes(plan)
        limit = self._limits.max_batch_tokens
        if max_tokens is not None:
            limit = min(limit, max(max_tokens, len(plan.decodes) + self.blocks.block_size))
        budget = self._plan_chunks(plan, prefilling, limit - len(plan.decodes))
        if not plan.num_preempted:
            budget = self._admit(plan, budget)
            if self.guess is not None and plan.decodes and budget > 0:
                self._add_guesses(plan, self.guess(plan, budget))
        return plan

    def complete(self, plan: StepPlan) -> None:
        """The forward pass succeeded: tokens count as computed, full blocks get their names; guesses do not count."""
        block_size = self.blocks.block_size
        self._drop_guesses(plan)
        for sequence in plan.decodes:
            if sequence.state is SequenceState.RUNNING:
                sequence.num_computed += 1
                if not sequence.num_computed % block_size:
                    self._name_full_blocks(sequence)
            else:
                self._settle(sequence, 1)
        for sequence, _, length in plan.chunks:
            if sequence.state is SequenceState.RUNNING:
                sequence.num_computed += length
                self._name_full_blocks(sequence)
                if sequence.decoding and sequence.request.resumed is not None:
                    self._unpark(sequence.request)
            else:
                self._settle(sequence, length)

    def cancel(self, plan: StepPlan) -> None:
        """The forward pass was not made, or failed: nothing of it counts."""
        self._drop_guesses(plan)
        for sequence in plan.decodes:
            if sequence.state is SequenceState.RUNNING:
                sequence.num_planned -= 1
            else:
                self._settle(sequence, 1)
        for sequence, _, length in plan.chunks:
            if sequence.state is SequenceState.RUNNING:
                sequence.num_planned -= length
                sequence.decoding = False
                self._count_queued(sequence)
            else:
                self._settle(sequence, length)

    def confirm(self, sequence: Sequence) -> None:
        """The newest token was guessed in the step that is complete: its KV is computed."""
        sequence.num_planned += 1
        sequence.num_computed += 1
        if not sequence.num_computed % self.blocks.block_size:
            self._name_full_blocks(sequence)

    @staticmethod
    def _drop_guesses(plan: StepPlan) -> None:
        for sequence, tokens in plan.guesses.items():
            if sequence.under_way:
                sequence.num_planned -= len(tokens)

    def _settle(self, sequence: Sequence, length: int) -> None:
        """A step is over for a sequence that left in the meantime; a preempted one has given its blocks back before."""
        if sequence.state is SequenceState.FINISHED and sequence.under_way:
            sequence.num_planned -= length
            if not sequence.under_way:
                self._release_blocks(sequence)

    def _plan_decodes(self, plan: StepPlan) -> list[Sequence]:
        """Give every decode its slot. The sequences that are still prefilling, in order."""
        prefilling: list[Sequence] = []
        running, index, block_size = self.running, 0, self.blocks.block_size
        while index < len(running):
            sequence = running[index]
            if not sequence.decoding:
                prefilling.append(sequence)
            elif sequence.num_planned < sequence.last_input:  # else the step under way chooses its last token
                # A block that the last decode wrote to and did not fill is this sequence's own.
                begun = sequence.num_planned > sequence.num_prompt and sequence.num_planned % block_size
                if not begun and not self._reserve_slot(sequence, plan):
                    continue  # it preempted itself: the next one has moved to this index
                self._add_decode(plan, sequence)
            index += 1
        if plan.num_preempted:
            return [sequence for sequence in prefilling if sequence.state is SequenceState.RUNNING]
        return prefilling

    def _reserve_slot(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Make sure that the next token's KV has a place of its own. False: the sequence was preempted."""
        index = sequence.num_planned // self.blocks.block_size
        blocks, block_ids = self.blocks, sequence.block_ids
        fresh = index == len(block_ids)
        if not fresh and not blocks.is_shared(block_ids[index]):
            return True
        while not blocks.num_available:
            if self._take_reservation(plan) or self._take_load(plan):
                continue
            victim = self._last_preemptable()
            self._preempt(victim, plan)
            if victim is sequence:
                return False
            if not fresh and not blocks.is_shared(block_ids[index]):
                return True  # the victim was the other holder
        if fresh:
            block_ids.extend(blocks.allocate(1))
        else:
            source = block_ids[index]
            block_ids[index] = blocks.replace_shared(source)
            plan.copies.append((source, block_ids[index]))
            sequence.num_synced = min(sequence.num_synced, index)
        return True

    def _take_reservation(self, plan: StepPlan) -> bool:
        """Take the blocks of the last remote prefill that has not begun: nothing is lost but its place in a queue."""
        unbegun = [sequence for sequence in self.receiving if not self.has_begun(sequence)]
        if not unbegun:
            return False
        sequence = max(unbegun)
        plan.num_preempted += 1
        plan.withdrawn.append(sequence)
        self._withdraw(sequence)
        self._release_blocks(sequence)
        sequence.move_to(SequenceState.WAITING)
        self._enqueue(sequence)
        return True

    def _take_load(self, plan: StepPlan) -> bool:
        """Take the blocks of the last sequence that waits for a tier: it computes what it would have loaded."""
        if not self.loading or self.loads is None:
            return False
        sequence = max(self.loading)
        plan.num_preempted += 1
        self.loads.cancel(sequence)
        self.load_done(sequence, 0)
        return True

    def _take_over(self, plan: StepPlan) -> None:
        """Compute here what a prefill worker should have begun long ago, while others wait for its blocks."""
        overdue = [sequence for sequence in self.receiving if sequence.overdue and not self.has_begun(sequence)]
        if overdue:
            sequence = min(overdue)
            plan.num_preempted += 1  # there is something new to be planned
            plan.withdrawn.append(sequence)
            self.receive_failed(sequence)

    def _last_preemptable(self) -> Sequence:
        """Blocks of a peer's prompt are being sent: it is never preempted, and needs no further block either."""
        return next(sequence for sequence in reversed(self.running) if not sequence.request.serves_peer)

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        plan.num_preempted += 1
        count = self.blocks.count_blocks(sequence.num_planned)
        if 0 < count <= self.host.num_available and self.prefers_move(sequence.num_planned, count):
            sequence.host_blocks = self.host.allocate(count)
            sequence.num_saved = sequence.num_planned  # a step under way has written its part when the move begins
            plan.moves_out.extend(zip(sequence.block_ids, sequence.host_blocks, strict=False))
            self.num_moved += 1
        else:
            self.num_recomputed += 1
        self._withdraw(sequence)
        self._release_blocks(sequence)
        sequence.move_to(SequenceState.WAITING)
        self._enqueue(sequence)

    @staticmethod
    def _add_decode(plan: StepPlan, sequence: Sequence) -> None:
        sequence.num_planned += 1
        plan.decodes.append(sequence)
        plan.lockstep |= sequence.lockstep

    def _add_guesses(self, plan: StepPlan, guesses: dict[Sequence, tuple[int, ...]]) -> None:
        for sequence, tokens in guesses.items():
            count = self._reserve_guesses(sequence, len(tokens))
            if count:
                plan.guesses[sequence] = tokens[:count]
                plan.lockstep = True
                sequence.num_planned += count

    def _reserve_guesses(self, sequence: Sequence, count: int) -> int:
        """How many of `count` guesses have a place: in the sequence's own blocks, or in those that nobody wants.

        Blocks that are added stay its own. Only the first one of those it has may be shared, which has been seen to.
        """
        blocks, block_ids = self.blocks, sequence.block_ids
        count = min(count, sequence.most_guesses)
        missing = blocks.count_blocks(sequence.num_planned + count) - len(block_ids)
        if missing > 0:
            spare = 0 if self.num_queued else blocks.num_available - len(self.running)
            block_ids.extend(blocks.allocate(max(0, min(missing, spare))))
        return min(count, len(block_ids) * blocks.block_size - sequence.num_planned)

    def _plan_chunks(self, plan: StepPlan, prefilling: list[Sequence], budget: int) -> int:
        for sequence in prefilling:
            if self.ttft_target is not None and not plan.num_preempted:
                budget = self._admit(plan, budget, before=sequence)
            budget -= self._add_chunk(plan, sequence, budget)
        return budget

    def _add_chunk(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        start = sequence.num_planned
        length = sequence.num_tokens - start
        if sequence.request.prompt_logprobs is not None:
            budget = min(budget, max(self._limits.max_scored_chunk, self.blocks.block_size))
        if sequence.request.step_seconds is not None:
            budget = min(budget, self._find_allowance(plan, sequence.request.step_seconds))
        if length > budget:
            length = first_chunk(length, budget, self.blocks.block_size)
        if length:
            plan.chunks.append(Chunk(sequence, start, length))
            sequence.num_planned += length
            if sequence.num_planned == sequence.num_tokens:
                sequence.decoding = True
                plan.lockstep |= sequence.lockstep or (not sequence.output and sequence.request.starts_on_host)
            elif sequence.request.reads_every_position:
                plan.lockstep = True
            self._count_queued(sequence)
        return length

    def _find_allowance(self, plan: StepPlan, seconds: float) -> int:
        """Prompt tokens that may be added to a step that is to take so long. The first block always: however short the
        step is to be, its prompt gets on.
        """
        tokens = self.tokens_within(seconds, bool(plan.decodes))
        return max(0, max(tokens, self.blocks.block_size) - plan.num_prefill_tokens)

    def _admit(self, plan: StepPlan, budget: int, *, before: Sequence | None = None) -> int:
        """Move waiting sequences in, in order, while rows, tokens and blocks suffice. Returns what is left of `budget`.

        `before`: only those that come before this one, which has blocks and more of its prompt to compute.
        """
        block_size = self.blocks.block_size
        self._steps_since_refusal += before is None
        while self._waiting and len(self.running) + len(self.receiving) < self.max_running:
            sequence = self._waiting[0]
            if sequence.state is not SequenceState.WAITING:
                heapq.heappop(self._waiting)
                continue
            if before is not None and before < sequence:
                break
            remote_possible = self._may_go_remote(sequence)
            if not remote_possible and self._set_back(sequence):
                continue
            if budget < min(block_size, sequence.num_tokens) and not remote_possible:
                break
            if self.loads is not None and self.loads.begin(sequence, at_head=True):
                heapq.heappop(self._waiting)
                self.num_waiting -= 1
                continue
            if not self._take_blocks(sequence, plan):
                if before is None:
                    self._take_over(plan)
                break
            heapq.heappop(self._waiting)
            self.num_waiting -= 1
            uncached = sequence.num_tokens - sequence.num_computed
            if remote_possible and uncached > self._limits.local_prefill_max_tokens:
                sequence.move_to(SequenceState.RECEIVING)
                sequence.overdue = False
                self.receiving.add(sequence)
                self._count_queued(sequence)
                plan.orders.append(sequence)
            else:
                self._start_running(sequence)
                if sequence.decoding:
                    self._add_decode(plan, sequence)
                    budget -= 1
                else:
                    budget -= self._add_chunk(plan, sequence, budget)
        return budget

    def _set_back(self, sequence: Sequence) -> bool:
        """Whether the head of the queue, late whatever happens, has just been put behind those that are not. Once each,
        and before it is begun with.
        """
        target, request = self.ttft_target, sequence.request
        begun = request.admitted or request.set_back or request.resumed is not None
        if target is None or begun or self.num_waiting == 1:
            return False
        if not is_late(request, target, self._clock(), self.prefill_rate()):
            return False
        request.set_back = True
        due = find_late_place(request, self._limits.seconds_per_priority)
        for choice in request.choices:
            choice.key = (due, *choice.key[1:])
        heapq.heapreplace(self._waiting, sequence)
        return True

    def goes_remote(self, sequence: Sequence, num_uncached: int) -> bool:
        """Whether a prefill worker computes its prompt, when so many tokens of it are not in memory."""
        return self._may_go_remote(sequence) and num_uncached > self._limits.local_prefill_max_tokens

    def _may_go_remote(self, sequence: Sequence) -> bool:
        request = sequence.request
        fresh = len(sequence.output) == sequence.num_resumed and not sequence.num_saved and not sequence.choice
        return bool(request.endpoints) and fresh and request.prompt_logprobs is None

    def _take_blocks(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Hold the cached prefix and allocate the rest, or change nothing. At least one token stays to be computed.

        Matching walks the prompt, so a refused sequence is matched again only when the blocks it lacked may be there,
        now and then, or when nothing else is to be done (`plan` is empty).
        """
        blocks = self.blocks
        available = self.num_admissible
        if sequence.retry_required > available and self._steps_since_refusal < _RETRY_STEPS and not plan.empty:
            return False
        num_total = blocks.count_blocks(sequence.num_tokens)
        bypass = sequence.request.reads_every_position and not sequence.output
        num_saved = sequence.num_saved
        max_matched = 0 if bypass else (num_saved or sequence.num_tokens - 1) // blocks.block_size
        matched = blocks.match_prefix(sequence.chain, max_matched)
        required = blocks.count_required(matched, num_total)
        if required > available:
            sequence.retry_required = required
            self._steps_since_refusal = 0
            return False
        sequence.retry_required = 0
        blocks.hold(matched)
        sequence.block_ids = matched + blocks.allocate(num_total - len(matched))
        sequence.num_named = len(matched)
        sequence.num_computed = sequence.num_planned = num_saved or len(matched) * blocks.block_size
        if num_saved:
            self._fetch(sequence, len(matched), plan)
        request = sequence.request
        if not request.admitted:  # what is found after a preemption is this request's own work
            request.admitted = True
            request.num_cached_tokens = sequence.num_computed
            if request.trace is not None:
                request.trace.admitted = self._clock()
        return True

    def _fetch(self, sequence: Sequence, first: int, plan: StepPlan) -> None:
        """Move blocks back in that are not in the prefix cache any more, `first` and later ones."""
        pairs = list(zip(sequence.host_blocks, sequence.block_ids, strict=False))
        plan.moves_in.extend(pairs[first:])
        sequence.decoding = bool(sequence.output) and sequence.num_computed == sequence.num_tokens - 1
        self._release_host(sequence)

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def _enqueue(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, sequence)
        self.num_waiting += 1
        self._count_queued(sequence)

    def _start_running(self, sequence: Sequence) -> None:
        sequence.move_to(SequenceState.RUNNING)
        insort(self.running, sequence)
        sequence.row = len(self.rows)
        sequence.num_synced = 0
        self.rows.append(sequence)
        self.running_tokens += sequence.num_tokens
        self._count_queued(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        last = self.rows.pop()
        if last is not sequence:
            self.rows[sequence.row] = last
            last.row = sequence.row
            last.num_synced = 0
        sequence.row = -1
        self.running_tokens -= sequence.num_tokens
        self._count_queued(sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out of wherever it is."""
        if sequence.state is SequenceState.RUNNING:
            self._stop_running(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.num_waiting -= 1
        self.receiving.discard(sequence)
        self.held.discard(sequence)
        self.loading.discard(sequence)
        self.queued_prefill_tokens -= sequence.queued_tokens
        sequence.queued_tokens = 0

    def _release_host(self, sequence: Sequence) -> None:
        self.host.release(sequence.host_blocks)
        sequence.host_blocks = []
        sequence.num_saved = 0

    def _release_blocks(self, sequence: Sequence) -> None:
        """Let go of a sequence's blocks; they stay cached as far as they have names."""
        if sequence.block_ids:
            self.blocks.release(sequence.block_ids, sequence.chain[: sequence.num_named], self._wall())
        sequence.block_ids = []
        sequence.num_computed = sequence.num_planned = sequence.num_named = 0
        sequence.decoding = False

    def _name_full_blocks(self, sequence: Sequence) -> None:
        count = sequence.num_computed // self.blocks.block_size
        if count <= sequence.num_named:
            return
        names = sequence.name_blocks(count, self.blocks.block_size)
        for index in range(sequence.num_named, count):
            self.blocks.cache.register(names[index], sequence.block_ids[index])
        sequence.num_named = count

    def _count_queued(self, sequence: Sequence) -> None:
        """Bring this sequence's share of `queued_prefill_tokens` up to date."""
        elsewhere = sequence.state is SequenceState.RECEIVING
        tokens = sequence.num_tokens - sequence.num_planned - sequence.num_saved
        tokens = 0 if sequence.decoding or elsewhere else tokens
        self.queued_prefill_tokens += tokens - sequence.queued_tokens
        sequence.queued_tokens = tokens
