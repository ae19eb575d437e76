"""What the next step computes: decodes, chunks of prompts, who is admitted, who gives up its blocks.

The rules are those of `scheduler`; here they are applied to one step. Nothing is computed or moved: a plan says so.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tandem_api.launch import TTFTDeadline

from tandem_worker.engine.schedule.deadlines import find_late_place, is_late
from tandem_worker.engine.schedule.plan import Chunk, SchedulerLimits, StepPlan
from tandem_worker.engine.schedule.queues import SequenceQueues
from tandem_worker.engine.schedule.request import Sequence, SequenceState

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


@dataclass(slots=True, kw_only=True)
class Hooks:
    """What a scheduler asks of those around it: how fast things are, and who helps. Without them it is on its own."""

    has_begun: Callable[[Sequence], bool] = lambda sequence: True
    """Whether a prefill worker computes this RECEIVING sequence."""
    ttft_target: TTFTDeadline | None = None
    """Orders what comes from now on by deadline (see `deadlines`); None: by arrival."""
    prefill_rate: Callable[[], float | None] = lambda: None
    """Prompt tokens that are computed per second; None while that is not known."""
    tokens_within: Callable[[float, bool], int] | None = None
    """Prompt tokens that a step of so many seconds computes, beside decodes or alone; None: as many as one may have."""
    guess: Callable[[StepPlan, int], dict[Sequence, tuple[int, ...]]] | None = None
    """Guesses for decodes of a plan, so many tokens in all at most and `most_guesses` of each; None: there are none."""
    loads: Loads | None = None
    """None: there is no tier to load from."""
    make_moves: Callable[[bool], None] = lambda others_write: None
    """Has the copies begun that `HostCache` has collected. True: what they read and write may be written by others than
    steps when it returns."""
    fetch_tokens: Callable[[int], int] = lambda num_blocks: 0
    """Prompt tokens that could be computed while so many blocks come from host memory."""


def first_chunk(length: int, most: int, block_size: int) -> int:
    """Tokens of the first of as few chunks of `length` as `most` tokens each allow, in whole blocks; 0 if none fits.

    Chunks are about equal: a short last one would cost a pass over the weights for few tokens.
    """
    num_blocks, fitting = -(-length // block_size), most // block_size
    if fitting == 0:
        return 0
    num_chunks = -(-num_blocks // fitting)
    return -(-num_blocks // num_chunks) * block_size


def may_go_remote(sequence: Sequence) -> bool:
    """Whether a prefill worker may compute its prompt: it has said nothing yet, and its request names workers."""
    request = sequence.request
    fresh = len(sequence.output) == sequence.num_resumed and not sequence.choice
    return bool(request.endpoints) and fresh and request.prompt_logprobs is None


class StepPlanner:
    """Plans steps over the sequences of `queues`."""

    def __init__(
        self, limits: SchedulerLimits, queues: SequenceQueues, hooks: Hooks, clock: Callable[[], float]
    ) -> None:
        self.blocks = queues.blocks
        # Decodes always fit into the budget and leave room for one block of prefill.
        self.max_running = min(limits.max_running, limits.max_batch_tokens - queues.blocks.block_size)
        self.num_preempted = 0
        """Sequences that had to give up their blocks."""
        self._limits = limits
        self._queues = queues
        self._hooks = hooks
        self._clock = clock
        self._steps_since_refusal = 0

    def plan(self, max_tokens: int | None) -> StepPlan:
        """Plan a step of at most `max_batch_tokens` tokens, or fewer prefill tokens if `max_tokens` says so."""
        plan = StepPlan()
        prefilling = self._plan_decodes(plan)
        limit = self._limits.max_batch_tokens
        if max_tokens is not None:
            limit = min(limit, max(max_tokens, len(plan.decodes) + self.blocks.block_size))
        budget = self._plan_chunks(plan, prefilling, limit - len(plan.decodes))
        if not plan.num_preempted:
            budget = self._admit(plan, budget)
            if self._hooks.guess is not None and plan.decodes and budget > 0:
                self._add_guesses(plan, self._hooks.guess(plan, budget))
        return plan

    def _plan_decodes(self, plan: StepPlan) -> list[Sequence]:
        """Give every decode its slot. The sequences that are still prefilling, in order."""
        prefilling: list[Sequence] = []
        running, index, block_size = self._queues.running, 0, self.blocks.block_size
        while index < len(running):
            sequence = running[index]
            if not sequence.decoding:
                prefilling.append(sequence)
            elif sequence.num_planned < sequence.last_input:  # else the step under way chooses its last token
                # A block that the last decode wrote to and did not fill is this sequence's own.
                begun = sequence.num_planned > sequence.num_prompt and sequence.num_planned % block_size
                if not begun and not self._reserve_slot(sequence, plan):
                    continue  # it preempted itself: the next one has moved to this index
                _add_decode(plan, sequence)
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
        unbegun = [sequence for sequence in self._queues.receiving if not self._hooks.has_begun(sequence)]
        if not unbegun:
            return False
        sequence = max(unbegun)
        plan.num_preempted += 1
        plan.withdrawn.append(sequence)
        self._queues.requeue(sequence)
        return True

    def _take_load(self, plan: StepPlan) -> bool:
        """Take the blocks of the last sequence that waits for a tier: it computes what it would have loaded."""
        if not self._queues.loading or self._hooks.loads is None:
            return False
        sequence = max(self._queues.loading)
        plan.num_preempted += 1
        self._hooks.loads.cancel(sequence)
        self._queues.end_loading(sequence, 0)
        return True

    def _take_over(self, plan: StepPlan) -> None:
        """Compute here what a prefill worker should have begun long ago, while others wait for its blocks."""
        has_begun = self._hooks.has_begun
        overdue = [each for each in self._queues.receiving if each.overdue and not has_begun(each)]
        if overdue:
            sequence = min(overdue)
            plan.num_preempted += 1  # there is something new to be planned
            plan.withdrawn.append(sequence)
            self._queues.compute_here(sequence)

    def _last_preemptable(self) -> Sequence:
        """Blocks of a peer's prompt are being sent: it is never preempted, and needs no further block either."""
        return next(sequence for sequence in reversed(self._queues.running) if not sequence.request.serves_peer)

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        plan.num_preempted += 1
        self.num_preempted += 1
        self._queues.requeue(sequence)

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
            spare = 0 if self._queues.num_queued else blocks.num_available - len(self._queues.running)
            block_ids.extend(blocks.allocate(max(0, min(missing, spare))))
        return min(count, len(block_ids) * blocks.block_size - sequence.num_planned)

    def _plan_chunks(self, plan: StepPlan, prefilling: list[Sequence], budget: int) -> int:
        for sequence in prefilling:
            if self._hooks.ttft_target is not None and not plan.num_preempted:
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
            self._queues.count_queued(sequence)
        return length

    def _find_allowance(self, plan: StepPlan, seconds: float) -> int:
        """Prompt tokens that may be added to a step that is to take so long. The first block always: however short the
        step is to be, its prompt gets on.
        """
        within = self._hooks.tokens_within
        tokens = self._limits.max_batch_tokens if within is None else within(seconds, bool(plan.decodes))
        return max(0, max(tokens, self.blocks.block_size) - plan.num_prefill_tokens)

    def _admit(self, plan: StepPlan, budget: int, *, before: Sequence | None = None) -> int:
        """Move waiting sequences in, in order, while rows, tokens and blocks suffice. Returns what is left of `budget`.

        `before`: only those that come before this one, which has blocks and more of its prompt to compute.
        """
        queues, block_size = self._queues, self.blocks.block_size
        self._steps_since_refusal += before is None
        while queues.waiting and len(queues.running) + len(queues.receiving) < self.max_running:
            sequence = queues.waiting[0]
            if sequence.state is not SequenceState.WAITING:
                heapq.heappop(queues.waiting)
                continue
            if before is not None and before < sequence:
                break
            remote_possible = may_go_remote(sequence)
            if not remote_possible and self._set_back(sequence):
                continue
            if budget < min(block_size, sequence.num_tokens) and not remote_possible:
                break
            if self._hooks.loads is not None and self._hooks.loads.begin(sequence, at_head=True):
                queues.pop()
                continue
            fetched = plan.num_fetched
            if not self._take_blocks(sequence, plan):
                if before is None:
                    self._take_over(plan)
                break
            queues.pop()
            uncached = sequence.num_tokens - sequence.num_computed
            if remote_possible and uncached > self._limits.local_prefill_max_tokens:
                sequence.move_to(SequenceState.RECEIVING)
                sequence.overdue = False
                queues.receiving.add(sequence)
                queues.count_queued(sequence)
                plan.orders.append(sequence)
            else:
                queues.start_running(sequence)
                budget -= self._add_chunk(plan, sequence, budget)
            if plan.num_fetched > fetched:
                budget = max(0, budget - self._hooks.fetch_tokens(plan.num_fetched - fetched))
        return budget

    def _set_back(self, sequence: Sequence) -> bool:
        """Whether the head of the queue, late whatever happens, has just been put behind those that are not. Once each,
        and before it is begun with.
        """
        target, request = self._hooks.ttft_target, sequence.request
        begun = request.admitted or request.set_back or request.resumed is not None
        if target is None or begun or self._queues.num_waiting == 1:
            return False
        if not is_late(request, target, self._clock(), self._hooks.prefill_rate()):
            return False
        request.set_back = True
        due = find_late_place(request, self._limits.seconds_per_priority)
        for choice in request.choices:
            choice.key = (due, *choice.key[1:])
        heapq.heapreplace(self._queues.waiting, sequence)
        return True

    def _take_blocks(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Hold the cached prefix and allocate the rest, or change nothing. At least one token stays to be computed.

        Matching walks the prompt, so a refused sequence is matched again only when the blocks it lacked may be there,
        now and then, or when nothing else is to be done (`plan` is empty).
        """
        blocks = self.blocks
        available = self._queues.num_admissible
        if sequence.retry_required > available and self._steps_since_refusal < _RETRY_STEPS and not plan.empty:
            return False
        num_total = blocks.count_blocks(sequence.num_tokens)
        bypass = sequence.request.reads_every_position and not sequence.output
        max_matched = 0 if bypass else (sequence.num_tokens - 1) // blocks.block_size
        matched = blocks.match_prefix(sequence.chain, max_matched)
        required = blocks.count_required(matched, num_total)
        if required > available:
            sequence.retry_required = required
            self._steps_since_refusal = 0
            return False
        sequence.retry_required = 0
        below = self._queues.find_below(sequence.chain[len(matched) : max_matched])
        self._queues.take_cached(sequence, matched, below, num_total)
        sequence.num_computed = sequence.num_planned = (len(matched) + len(below)) * blocks.block_size
        plan.num_fetched += len(below)
        request = sequence.request
        if not request.admitted:  # what is found after a preemption is this request's own work
            request.admitted = True
            request.num_cached_tokens = sequence.num_computed
            if request.trace is not None:
                request.trace.admitted = self._clock()
        return True


def _add_decode(plan: StepPlan, sequence: Sequence) -> None:
    sequence.num_planned += 1
    plan.decodes.append(sequence)
    plan.lockstep |= sequence.lockstep
