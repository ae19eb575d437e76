"""The scheduler without an engine: a driver that pretends to compute."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tandem_api.launch import TTFTDeadline
from tandem_worker.engine.schedule.block_manager import BlockManager
from tandem_worker.engine.schedule.host_cache import HostCache
from tandem_worker.engine.schedule.params import SamplingParams
from tandem_worker.engine.schedule.plan import SchedulerLimits, StepPlan
from tandem_worker.engine.schedule.planner import first_chunk
from tandem_worker.engine.schedule.prefix_cache import build_chain_root, extend_chain
from tandem_worker.engine.schedule.request import Request, Sequence, SequenceState
from tandem_worker.engine.schedule.scheduler import Scheduler

BLOCK_SIZE = 4
ROOT = build_chain_root("model")
MAX_BATCH_TOKENS = 16


class Driver:
    """Runs plans and checks each against what any plan must keep.

    It keeps what every block holds: for each token a digest of all tokens up to it. `ahead`: the tokens of a step
    become known only after the next one was planned, where the plans allow it.
    """

    def __init__(
        self,
        num_blocks: int = 50,
        *,
        ahead: bool = False,
        num_host_blocks: int = 0,
        ttft_target: TTFTDeadline | None = None,
        guesses: random.Random | None = None,
        **limits: Any,
    ) -> None:
        self.ahead = ahead
        self.under_way: tuple[StepPlan, list[Sequence]] | None = None
        self.cancelled = False
        """The next step that is finished has failed."""
        self.limits = SchedulerLimits(**({"max_batch_tokens": MAX_BATCH_TOKENS, "max_running": 8} | limits))
        self.now = 0.0
        self.blocks = BlockManager(num_blocks + 1, BLOCK_SIZE)
        self.host = HostCache(num_host_blocks + 1, BLOCK_SIZE) if num_host_blocks else None
        self.scheduler = Scheduler(
            self.limits, self.blocks, clock=lambda: self.now, host=self.host, wall=lambda: self.now
        )
        self.scheduler.hooks.ttft_target = ttft_target
        self.guesses = guesses
        if guesses is not None:
            self.scheduler.hooks.guess = self.guess
        self.unbegun: set[Sequence] = set()
        """RECEIVING, and the prefill worker has not begun."""
        self.scheduler.hooks.has_begun = lambda sequence: sequence not in self.unbegun
        self.contents: dict[int, dict[int, int]] = {}
        self.host_contents: dict[int, dict[int, int]] = {}
        self.requests: list[Request] = []
        self.finished: list[str] = []

    def add(self, prompt: list[int], max_tokens: int = 4, *, lockstep: bool = False, **fields: Any) -> Request:
        request = Request(
            id=str(len(self.requests)),
            prompt=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=frozenset(fields.pop("stop", ()))),
            arrival=self.now,
            chain_root=ROOT,
            prompt_chain=extend_chain(ROOT, prompt, BLOCK_SIZE),
            **fields,
        )
        self.requests.append(request)
        self.scheduler.add(request)
        for choice in request.choices:
            choice.lockstep = lockstep
        return request

    def guess(self, plan: StepPlan, budget: int) -> dict[Sequence, tuple[int, ...]]:
        """Some tokens for some decodes, of which most are right."""
        assert self.guesses is not None
        chosen: dict[Sequence, tuple[int, ...]] = {}
        for sequence in plan.decodes:
            count = min(budget, sequence.most_guesses, self.guesses.randrange(6))
            if count > 0:
                end = sequence.num_tokens
                tokens = [token_at(sequence, position) for position in range(end, end + count)]
                chosen[sequence] = tuple(-1 if self.guesses.random() < 0.2 else token for token in tokens)
                budget -= count
        return chosen

    def step(self) -> StepPlan:
        self.now += 1
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        self.compute(plan)
        producing = [*plan.decodes, *(chunk.sequence for chunk in plan.chunks if chunk.final)]
        before, self.under_way = self.under_way, None
        if before is not None:
            self.finish_step(*before)
        if self.ahead and not plan.lockstep and not plan.empty:
            self.under_way = (plan, producing)
        else:
            self.finish_step(plan, producing)
        return plan

    def finish_step(self, plan: StepPlan, producing: list[Sequence]) -> None:
        if self.cancelled:
            self.cancelled = False
            self.scheduler.cancel(plan)
            return
        self.scheduler.complete(plan)
        for sequence in producing:
            if sequence.state is not SequenceState.FINISHED:
                self.accept(sequence)
                for guess in plan.guesses.get(sequence, ()):
                    if sequence.state is SequenceState.FINISHED or sequence.output[-1] != guess:
                        break
                    self.scheduler.confirm(sequence)
                    self.accept(sequence)

    def accept(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.serves_peer:
            self.scheduler.hold_for_peer(sequence)
            return
        choices = [sequence]
        if not sequence.output:
            self.scheduler.fork(request)
            choices = request.choices
        for choice in choices:
            token = token_at(choice, choice.num_tokens)
            self.scheduler.append_token(choice, token)
            if len(choice.output) >= request.sampling.max_tokens or token in request.sampling.stop_token_ids:
                self.finish(choice)

    def settle(self) -> None:
        """Finish the step that is under way."""
        if self.under_way is not None:
            self.finish_step(*self.under_way)
            self.under_way = None

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        if sequence.request.num_open == 0:
            self.finished.append(sequence.request.id)

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if all(request.num_open == 0 for request in self.requests):
                self.settle()
                return
            self.step()
        raise AssertionError("requests starve")

    def compute(self, plan: StepPlan) -> None:
        """Move, copy and write what the plan says; what a token's computation reads must be what came before it."""
        self.make_moves()
        sources = [dict(self.contents[source]) for source, _ in plan.copies]
        for (_, target), content in zip(plan.copies, sources, strict=True):
            self.contents[target] = content
        for sequence, start, end in spans_of(plan):
            guesses = plan.guesses.get(sequence, ())
            digests = digests_of(sequence, end - len(guesses), guesses)
            for position in range(start):
                block = self.contents[sequence.block_ids[position // BLOCK_SIZE]]
                assert block[position % BLOCK_SIZE] == digests[position], "another token's KV is read"
            self.write(sequence, start, digests)

    def make_moves(self) -> None:
        moves = self.scheduler.take_moves()
        if moves is None:
            return
        assert len({host for _, host in moves.out}) == len(moves.out)
        for block, host_block in moves.out:
            self.host_contents[host_block] = dict(self.contents[block])
            assert len(self.host_contents[host_block]) == BLOCK_SIZE
        for host_block, block in moves.into:
            self.contents[block] = dict(self.host_contents[host_block])

    def write(self, sequence: Sequence, start: int, digests: list[int]) -> None:
        for position in range(start, len(digests)):
            block = self.contents.setdefault(sequence.block_ids[position // BLOCK_SIZE], {})
            block[position % BLOCK_SIZE] = digests[position]

    def receive(self, sequence: Sequence) -> None:
        """A prefill worker has computed the prompt."""
        self.write(sequence, sequence.num_computed, digests_of(sequence, sequence.num_prompt))
        self.scheduler.receive_done(sequence)
        self.accept(sequence)

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.limits.max_batch_tokens
        sequences = list(plan.sequences())
        assert len(set(sequences)) == len(sequences)
        assert len(sequences) <= self.limits.max_running
        for sequence in sequences:
            assert sequence.state is SequenceState.RUNNING
        for chunk in plan.chunks:
            assert chunk.length > 0
            assert chunk.start % BLOCK_SIZE == 0
            assert chunk.final or chunk.end % BLOCK_SIZE == 0
        written: set[int] = set()
        assert plan.lockstep or not plan.guesses
        for sequence, start, end in spans_of(plan):
            assert end <= sequence.last_input or sequence.request.serves_peer or end == sequence.num_prompt, (
                "nobody asked"
            )
            for index in range(start // BLOCK_SIZE, (end - 1) // BLOCK_SIZE + 1):
                block = sequence.block_ids[index]
                assert self.blocks.num_holders(block) == 1, "a shared block is written"
                assert block not in written
                written.add(block)

    def check_counts(self) -> None:
        scheduler = self.scheduler
        self.blocks.check()
        if self.host is not None:
            self.host.blocks.check()
            assert not self.host.has_moves
            assert not self.host.blocks.num_held
        choices = [choice for request in self.requests for choice in request.choices]
        holders: dict[int, int] = {}
        for choice in choices:
            for block in choice.block_ids:
                holders[block] = holders.get(block, 0) + 1
        assert all(c.state is not SequenceState.FINISHED or not c.block_ids or c.under_way for c in choices)
        assert all(c.num_computed == c.num_planned for c in choices) or self.under_way is not None
        assert all(self.blocks.num_holders(b) == holders.get(b, 0) for b in range(1, self.blocks.num_blocks + 1))
        assert scheduler.queues.rows == sorted(scheduler.queues.running, key=lambda s: s.row)
        assert [s.row for s in scheduler.queues.rows] == list(range(len(scheduler.queues.rows)))
        assert scheduler.queues.running == sorted(scheduler.queues.running)
        assert scheduler.queues.num_waiting == sum(c.state is SequenceState.WAITING for c in choices)
        assert scheduler.queues.running_tokens == sum(c.num_tokens for c in scheduler.queues.running)
        queued = sum(
            c.num_tokens - c.num_planned
            for c in choices
            if c.state in (SequenceState.WAITING, SequenceState.RUNNING) and not c.decoding
        )
        assert scheduler.queues.queued_prefill_tokens == queued, "what a prefill worker computes is in its queue alone"


def spans_of(plan: StepPlan) -> list[tuple[Sequence, int, int]]:
    """Which tokens of each sequence are computed: from, and to before."""
    decodes = [(s, s.num_planned - 1 - len(plan.guesses.get(s, ())), s.num_planned) for s in plan.decodes]
    return decodes + [(chunk.sequence, chunk.start, chunk.end) for chunk in plan.chunks]


def token_at(sequence: Sequence, position: int) -> int:
    if position < sequence.num_prompt:
        return sequence.prompt[position]
    return (7 * position + sequence.choice) % 5


def digests_of(sequence: Sequence, end: int, guesses: tuple[int, ...] = ()) -> list[int]:
    digest, digests = 0, []
    for token in (*(token_at(sequence, position) for position in range(end)), *guesses):
        digest = hash((digest, token))
        digests.append(digest)
    return digests


def test_prefill_is_chunked_beside_decodes() -> None:
    driver = Driver()
    driver.add([1, 2], max_tokens=10)
    driver.step()
    long = driver.add(list(range(40)))
    plans = [driver.step() for _ in range(4)]
    assert [[(c.start, c.length) for c in plan.chunks] for plan in plans] == [
        [(0, 12)],
        [(12, 12)],
        [(24, 8)],
        [(32, 8)],
    ]
    assert all(len(plan.decodes) == 1 for plan in plans)
    assert long.choices[0].decoding


def test_requests_start_in_order_of_arrival_and_none_overtakes() -> None:
    driver = Driver(num_blocks=12)
    driver.add(list(range(30)), max_tokens=12)
    driver.step()
    big = driver.add(list(range(100, 140)))
    small = driver.add([1])
    driver.step()
    driver.step()
    assert big.choices[0].state is SequenceState.WAITING
    while big.choices[0].state is SequenceState.WAITING:
        assert small.choices[0].state is SequenceState.WAITING
        driver.step()
    driver.run()
    assert len(driver.finished) == 3


@given(length=st.integers(1, 500), most=st.integers(0, 200), block_size=st.sampled_from([1, 4, 16]))
def test_chunks_are_few_and_about_equal(length: int, most: int, block_size: int) -> None:
    if most < block_size:
        assert first_chunk(length, most, block_size) == 0
        return
    chunks: list[int] = []
    while sum(chunks) < length:
        rest = length - sum(chunks)
        chunks.append(min(rest, first_chunk(rest, most, block_size)))
    assert max(chunks) <= most
    assert all(chunk % block_size == 0 for chunk in chunks[:-1])
    assert len(chunks) == -(-length // (most - most % block_size))
    assert max(chunks) - min(chunks) < 2 * block_size


def test_a_smaller_priority_number_runs_first_but_waiting_counts() -> None:
    driver = Driver(max_running=1, seconds_per_priority=10)
    driver.add([1], max_tokens=30)
    driver.step()
    late = driver.add([2], priority=2)  # worth 20 seconds
    driver.now += 5
    normal = driver.add([3])
    driver.now += 30
    urgent_but_last = driver.add([4], priority=-1)
    driver.run()
    assert driver.finished == ["0", normal.id, late.id, urgent_but_last.id]


def test_the_last_in_order_is_preempted_and_finds_its_blocks_again() -> None:
    driver = Driver(num_blocks=6)
    first = driver.add(list(range(8)), max_tokens=9)
    driver.step()
    second = driver.add(list(range(50, 58)), max_tokens=9)
    plans = []
    while second.choices[0].state is not SequenceState.WAITING or not plans:
        plans.append(driver.step())
    assert plans[-1].num_preempted == 1
    assert first.choices[0].state is SequenceState.RUNNING
    driver.run()
    assert driver.scheduler.planner.num_preempted >= 1
    assert driver.finished == ["0", "1"]
    assert second.num_cached_tokens == 0, "what a preempted request finds again is its own work"


@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_a_preempted_sequence_goes_on_where_it_was_when_the_host_has_room(num_host_blocks: int) -> None:
    driver = Driver(num_blocks=6, num_host_blocks=num_host_blocks)
    driver.add(list(range(8)), max_tokens=17)
    driver.step()
    second = driver.add(list(range(50, 58)), max_tokens=9).choices[0]
    while not second.output or second.state is not SequenceState.WAITING:
        driver.step()
    num_tokens, chunks = second.num_tokens, []
    while second.state is SequenceState.WAITING:
        plan = driver.step()
        chunks += [chunk for chunk in plan.chunks if chunk.sequence is second]
    (chunk,) = chunks
    full = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert chunk.end == num_tokens
    if driver.host is None:
        assert chunk.start < full, "others have taken its blocks"
    else:
        assert chunk.start == full, "only the block that was not full is computed again"
        assert plan.num_fetched == driver.host.counts.blocks_in > 0
    driver.run()


def test_a_fully_cached_prompt_still_computes_a_token() -> None:
    driver = Driver()
    driver.add(list(range(16)))
    driver.run()
    again = driver.add(list(range(16)))
    plan = driver.step()
    assert [(c.start, c.length) for c in plan.chunks] == [(12, 4)]
    assert again.num_cached_tokens == 12


def test_prompt_logprobs_bypass_the_cache_in_small_chunks() -> None:
    driver = Driver(max_scored_chunk=8)
    driver.add(list(range(16)))
    driver.run()
    driver.add(list(range(16)), prompt_logprobs=0)
    assert [(c.start, c.length) for c in driver.step().chunks] == [(0, 8)]


def test_receiving_sequences_hold_blocks_and_cost_no_tokens() -> None:
    driver = Driver(local_prefill_max_tokens=4)
    request = driver.add(list(range(20)), endpoints=("p:1",))
    plan = driver.step()
    assert plan.empty
    assert plan.orders == request.choices
    assert driver.blocks.num_held == 5
    driver.check_counts()
    driver.receive(request.choices[0])
    assert driver.step().decodes == request.choices
    driver.run()
    driver.add(list(range(20)), endpoints=("p:1",))
    assert not driver.step().orders, "four uncached tokens are computed here"
    driver.run()


def test_a_decode_takes_blocks_that_a_prefill_worker_has_not_begun_with() -> None:
    driver = Driver(num_blocks=8)
    local = driver.add([1, 2, 3], max_tokens=29)
    driver.step()
    remote = driver.add(list(range(20)), endpoints=("p:1",)).choices[0]
    driver.unbegun.add(remote)
    plan = driver.step()
    assert plan.orders == [remote]
    while remote.state is SequenceState.RECEIVING:
        plan = driver.step()
    assert plan.withdrawn == [remote]
    assert (remote.state, remote.block_ids) == (SequenceState.WAITING, [])
    assert local.choices[0].state is SequenceState.RUNNING
    assert driver.scheduler.planner.num_preempted == 0, "nothing that was computed is lost"
    driver.check_counts()
    for _ in range(40):
        if remote in driver.step().orders:
            break
    assert remote.state is SequenceState.RECEIVING, "it is ordered again when there is room"
    driver.receive(remote)
    driver.run()


def test_what_a_prefill_worker_has_begun_with_is_not_taken() -> None:
    driver = Driver(num_blocks=8)
    local = driver.add([1, 2, 3], max_tokens=29)
    driver.step()
    remote = driver.add(list(range(20)), endpoints=("p:1",)).choices[0]
    driver.step()
    for _ in range(12):
        assert not driver.step().withdrawn
    assert remote.state is SequenceState.RECEIVING
    assert local.choices[0].state is SequenceState.WAITING
    driver.receive(remote)
    driver.run()


@pytest.mark.parametrize(("overdue", "started"), [(True, False), (False, False), (True, True)])
def test_an_overdue_prefill_is_done_here_when_others_lack_its_blocks(overdue: bool, started: bool) -> None:
    """A peer that begins with nothing must not hold the memory that others wait for."""
    driver = Driver(num_blocks=12)
    remotes = [driver.add(list(range(20 * i, 20 * i + 20)), endpoints=("p:1",)).choices[0] for i in range(2)]
    driver.step()
    assert [remote.state for remote in remotes] == [SequenceState.RECEIVING] * 2
    for remote in remotes:
        remote.overdue = overdue
        if not started:
            driver.unbegun.add(remote)
    driver.step()
    assert [remote.state for remote in remotes] == [SequenceState.RECEIVING] * 2, "nobody else wants the blocks"
    driver.add(list(range(50, 80)))
    plan = driver.step()
    if overdue and not started:
        assert plan.withdrawn == remotes[:1]
        assert remotes[0].state is SequenceState.RUNNING
        driver.run()
    else:
        assert not plan.withdrawn
        assert [remote.state for remote in remotes] == [SequenceState.RECEIVING] * 2
        for remote in remotes:
            driver.receive(remote)
        driver.run()


def test_a_peers_prompt_is_never_preempted() -> None:
    driver = Driver(num_blocks=8)
    local = driver.add([1, 2, 3], max_tokens=29)
    driver.step()
    peer = driver.add(list(range(20)), serves_peer=True)
    for _ in range(12):
        driver.step()
    assert local.choices[0].state is SequenceState.WAITING, "it gave way although it is older"
    assert peer.choices[0].state is SequenceState.HELD
    driver.finish(peer.choices[0])
    driver.run()
    driver.check_counts()


def test_a_token_limit_shortens_prefill_but_not_below_a_block() -> None:
    driver = Driver()
    driver.add(list(range(40)))
    assert driver.scheduler.schedule(max_tokens=1).num_tokens == BLOCK_SIZE
    assert driver.scheduler.schedule(max_tokens=10).num_tokens == 8


def test_a_budget_that_cannot_advance_prefill_is_refused() -> None:
    with pytest.raises(ValueError, match="must exceed the block size"):
        Scheduler(SchedulerLimits(max_batch_tokens=4), BlockManager(9, 4))


TARGETS = st.none() | st.builds(TTFTDeadline, seconds=st.floats(0, 40), seconds_per_token=st.floats(0, 10))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(-2, 3),
    st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=5),
    st.booleans(),
    TARGETS,
)
def test_no_stream_of_urgent_requests_keeps_one_from_ending(
    priority: int, others: list[tuple[int, int, int]], ahead: bool, target: TTFTDeadline | None
) -> None:
    """Others keep coming, of whatever priority and length, as fast as they are served."""
    driver = Driver(
        num_blocks=13, ahead=ahead, num_host_blocks=8, max_running=3, seconds_per_priority=20, ttft_target=target
    )
    driver.scheduler.hooks.prefill_rate = lambda: 3.0
    mine = driver.add(list(range(20)), max_tokens=12, priority=priority)
    for step in range(2000):
        if not mine.num_open:
            return
        open_others = sum(request.num_open for request in driver.requests) - mine.num_open
        if open_others < 6:
            other_priority, length, max_tokens = others[step % len(others)]
            driver.add([step % 7] * length, max_tokens, priority=other_priority)
        driver.step()
    raise AssertionError("it starves")


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(PROMPTS, st.integers(1, 20), st.integers(1, 3), st.integers(-1, 2), st.integers(0, 5)),
        min_size=1,
        max_size=12,
    ),
    st.integers(13, 30),
    st.booleans(),
    st.sampled_from([0, 10, 100]),
    TARGETS,
)
def test_everything_finishes_and_every_block_comes_back(
    arrivals: list[tuple[list[int], int, int, int, int]],
    num_blocks: int,
    ahead: bool,
    num_host_blocks: int,
    target: TTFTDeadline | None,
) -> None:
    driver = Driver(num_blocks=num_blocks, ahead=ahead, num_host_blocks=num_host_blocks, ttft_target=target)
    for prompt, max_tokens, n, priority, steps in arrivals:
        driver.add(prompt, max_tokens, n=n, priority=priority)
        for _ in range(steps):
            driver.step()
    driver.run()
    driver.check_counts()
    assert driver.blocks.num_held == 0
    assert driver.scheduler.queues.num_waiting == driver.scheduler.queues.queued_prefill_tokens == 0


class Life(RuleBasedStateMachine):
    """Anything a client, a peer or a prefill worker may do, at any time."""

    AHEAD = False
    HOST_BLOCKS = 0
    TARGET: TTFTDeadline | None = None
    GUESSES = False

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(
            num_blocks=16,
            local_prefill_max_tokens=4,
            ahead=self.AHEAD,
            num_host_blocks=self.HOST_BLOCKS,
            ttft_target=self.TARGET,
            guesses=random.Random(5) if self.GUESSES else None,
        )
        self.driver.scheduler.hooks.prefill_rate = lambda: 4.0

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        remote=st.booleans(),
        lockstep=st.sampled_from([False, False, False, True]),
        stop=st.sets(st.integers(0, 4), max_size=1),
    )
    def submit(self, prompt: list[int], max_tokens: int, n: int, remote: bool, lockstep: bool, stop: set[int]) -> None:
        endpoints = ("p:1",) if remote else ()
        self.driver.add(prompt, max_tokens, n=n, endpoints=endpoints, lockstep=lockstep, stop=stop)

    @rule(prompt=PROMPTS)
    def submit_peer(self, prompt: list[int]) -> None:
        self.driver.add(prompt, serves_peer=True)

    @rule(data=st.data(), begun=st.booleans())
    def hear_from_a_prefill_worker(self, data: st.DataObject, begun: bool) -> None:
        receiving = sorted(self.driver.scheduler.queues.receiving)
        if receiving:
            sequence = data.draw(st.sampled_from(receiving))
            sequence.overdue = True
            (self.driver.unbegun.discard if begun else self.driver.unbegun.add)(sequence)

    @rule(steps=st.integers(1, 6))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @rule()
    def fail_a_step(self) -> None:
        """It was not computed, and is tried again."""
        self.driver.settle()
        self.driver.cancelled = True
        self.driver.step()
        self.driver.settle()
        self.driver.cancelled = False

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        open_requests = [request for request in self.driver.requests if request.num_open]
        if open_requests:
            for choice in data.draw(st.sampled_from(open_requests)).choices:
                self.driver.finish(choice)

    @rule(data=st.data(), good=st.booleans())
    def answer_remote(self, data: st.DataObject, good: bool) -> None:
        receiving = sorted(self.driver.scheduler.queues.receiving)
        if receiving:
            self.answer(data.draw(st.sampled_from(receiving)), good)

    def answer(self, sequence: Sequence, good: bool) -> None:
        if good:
            self.driver.receive(sequence)
        else:
            self.driver.scheduler.receive_failed(sequence)

    @invariant()
    def counts(self) -> None:
        self.driver.check_counts()

    def teardown(self) -> None:
        driver = self.driver
        for _ in range(2000):
            for sequence in sorted(driver.scheduler.queues.receiving):
                self.answer(sequence, True)
            for sequence in list(driver.scheduler.queues.held):
                driver.finish(sequence)
            if not any(request.num_open for request in driver.requests):
                break
            driver.step()
        driver.settle()
        driver.check_counts()
        assert not any(request.num_open for request in driver.requests), "requests starve"
        assert driver.blocks.num_held == 0


class LifeWithHost(Life):
    """Blocks that are given up go to the host."""

    HOST_BLOCKS = 14


class LifeAhead(LifeWithHost):
    """The same, while tokens become known one step late."""

    AHEAD = True


class LifeWithTarget(LifeAhead):
    """The same, in the order of deadlines that some prompts miss."""

    TARGET = TTFTDeadline(seconds=2.0, seconds_per_token=0.5)


class LifeWithGuesses(LifeWithHost):
    """Blocks that are given up go to the host, and steps check guesses."""

    GUESSES = True


class LifeWithGuessesAhead(LifeWithGuesses):
    """The same, where steps without guesses are known one step late."""

    AHEAD = True


TestLife, TestLifeWithHost, TestLifeAhead = Life.TestCase, LifeWithHost.TestCase, LifeAhead.TestCase
TestLifeWithGuesses, TestLifeWithGuessesAhead = LifeWithGuesses.TestCase, LifeWithGuessesAhead.TestCase
TestLifeWithGuesses.settings = TestLifeWithGuessesAhead.settings = settings(
    max_examples=settings().max_examples * 3 // 5, stateful_step_count=40, deadline=None
)
TestLifeWithTarget = LifeWithTarget.TestCase
TestLifeWithTarget.settings = TestLife.settings = TestLifeWithHost.settings = TestLifeAhead.settings = settings(
    max_examples=settings().max_examples * 3 // 5, stateful_step_count=40, deadline=None
)


def test_a_prompt_beside_streams_takes_no_more_of_a_step_than_it_may() -> None:
    driver = Driver(max_batch_tokens=64)
    asked: list[tuple[float, bool]] = []

    def tokens_within(seconds: float, decoding: bool) -> int:
        asked.append((seconds, decoding))
        return 9 if decoding else 17

    driver.scheduler.hooks.tokens_within = tokens_within
    driver.add(list(range(100, 110)), max_tokens=8)
    driver.step()
    driver.add(list(range(200, 240)), step_seconds=0.5)
    plans = [driver.step() for _ in range(7)]
    assert [len(plan.decodes) for plan in plans[:5]] == [1] * 5
    assert [plan.num_prefill_tokens for plan in plans[:5]] == [8] * 5  # whole blocks of what may be
    assert set(asked) == {(0.5, True)}
    driver.run()
    driver.add(list(range(300, 340)), step_seconds=0.5)
    assert driver.step().num_prefill_tokens == 16  # nobody waits, and still


def test_paced_prompts_share_what_a_step_may_take_and_hold_up_no_orders() -> None:
    driver = Driver(max_batch_tokens=64, local_prefill_max_tokens=0)
    driver.scheduler.hooks.tokens_within = lambda seconds, decoding: 8
    for first in (100, 200, 300):
        driver.add(list(range(first, first + 24)), step_seconds=0.5)
    driver.add(list(range(400, 424)), endpoints=("p:1",))
    plan = driver.step()
    assert [chunk.length for chunk in plan.chunks] == [8]
    assert [sequence.request.id for sequence in plan.orders] == ["3"]
    driver.receive(plan.orders[0])
    driver.run()


def test_a_paced_prompt_gets_on_however_short_steps_are_to_be() -> None:
    driver = Driver()
    driver.scheduler.hooks.tokens_within = lambda seconds, decoding: 0
    driver.add(list(range(100, 105)), max_tokens=30)
    driver.add(list(range(200, 230)), step_seconds=1e-6)
    driver.add(list(range(300, 330)), step_seconds=1e-6, n=2)
    driver.run()
    assert len(driver.finished) == 3


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 8), st.none() | st.just(0.5), st.integers(0, 30)),
        min_size=1,
        max_size=8,
    ),
    st.booleans(),
)
def test_pacing_changes_no_token_and_bounds_what_steps_compute_of_paced_prompts(
    asked: list[tuple[int, int, float | None, int]], ahead: bool
) -> None:
    """`check_plan` and `compute` of the driver hold every token to what comes before it."""
    driver = Driver(ahead=ahead)
    room = {True: 5, False: 12}
    driver.scheduler.hooks.tokens_within = lambda seconds, decoding: room[decoding]
    for index, (length, tokens, pace, allowed) in enumerate(asked):
        driver.add([1000 * index + at for at in range(length)], max_tokens=tokens, step_seconds=pace)
        for _ in range(allowed):
            plan = driver.step()
            paced = sum(chunk.length for chunk in plan.chunks if chunk.sequence.request.step_seconds is not None)
            assert paced <= max(BLOCK_SIZE, room[bool(plan.decodes)])
    driver.run()
