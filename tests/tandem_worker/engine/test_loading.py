"""Sequences that wait for a tier: beside the queue, at their place in it afterwards, and never in the way of others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tandem_worker.engine.contract import RemotePrefill
from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.schedule.host_cache import Moves
from tandem_worker.engine.schedule.prefix_cache import build_chain_root, extend_chain
from tandem_worker.engine.schedule.request import SequenceState
from tandem_worker.engine.tiers import LoadOrder, Offer, Run, TierEngine
from tandem_worker.model.contract import ForwardBatch, KVCache

from tests.tandem_worker.engine.history_model import HistoryModel, greedy_answer
from tests.tandem_worker.engine.rig import BLOCK_SIZE, Rig

PROMPT = tuple(range(21))
OTHER = tuple(range(40, 61))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.001)


class ScriptedTier:
    """Has the prompts that it is told of, and brings them when it is told to, from a cache that computed them."""

    def __init__(self, rig: Rig, *, has: Sequence[tuple[int, ...]] = (PROMPT,)) -> None:
        self.rig = rig
        root = build_chain_root("")
        self.names = {name for prompt in has for name in extend_chain(root, prompt, BLOCK_SIZE)}
        self.tokens = {
            name: prompt[BLOCK_SIZE * index : BLOCK_SIZE * (index + 1)]
            for prompt in has
            for index, name in enumerate(extend_chain(root, prompt, BLOCK_SIZE))
        }
        self.orders: list[LoadOrder] = []
        self.started = threading.Semaphore(0)
        self.cancelled: list[int] = []
        self.engine: TierEngine = rig.engine.open_desk(self, cold_blocks=0, fence=lambda: None)

    def find(
        self, names: Sequence[bytes], seconds_per_block: float | None, holder: str = "", held: int | None = None
    ) -> Run | None:
        count = next((index for index, name in enumerate(names) if name not in self.names), len(names))
        return Run(count=count, seconds=0.0) if count else None

    def start_load(self, order: LoadOrder) -> None:
        self.orders.append(order)
        self.started.release()

    def cancel(self, load: int) -> None:
        self.cancelled.append(load)

    def passes(self, name: bytes, reused: bool) -> bool:
        return True

    def due(self) -> None: ...

    def offered(self, offer: Offer | None) -> None: ...

    def bring(self, index: int, first: int, count: int, *, valid: int | None = None) -> None:
        """Write `count` blocks of an order, whose first is block `first` of its prompt, and end it."""
        import torch

        from tests.tandem_worker.engine.history_model import _C, mix_tensor

        order = self.orders[index]
        layers = self.rig.engine.kv_cache.layers
        for row in range(count):
            tokens = torch.tensor(self.tokens[order.names[row]])
            positions = torch.arange((first + row) * BLOCK_SIZE, (first + row + 1) * BLOCK_SIZE)
            layers[0][order.block_ids[row]] = tokens
            layers[1][order.block_ids[row]] = mix_tensor(tokens * _C + positions)
        self.engine.load_ended(order.load, count if valid is None else valid)

    def await_start(self) -> None:
        assert self.started.acquire(timeout=60)


class PacedModel(HistoryModel):
    """Takes `seconds` for every forward pass."""

    seconds = 0.1

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().forward(batch, kv_cache)


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[Rig, ScriptedTier]]]:
    rigs: list[Rig] = []

    def build(num_blocks: int = 64, model: Any = None, **options: object) -> tuple[Rig, ScriptedTier]:
        host_blocks, scheduler = options.pop("host_blocks", 0), options.pop("scheduler", None)
        rig = Rig(model or HistoryModel(), num_blocks, host_blocks=host_blocks, scheduler=scheduler)  # type: ignore[arg-type]
        rigs.append(rig)
        return rig, ScriptedTier(rig, **options)  # type: ignore[arg-type]

    yield build
    for rig in rigs:
        rig.close()
        assert rig.engine._scheduler.blocks.num_held == 0
        assert not rig.engine._scheduler.queues.loading
        assert rig.engine._scheduler.queues.queued_prefill_tokens == 0
        assert rig.engine.failure is None


Make = Callable[..., tuple[Rig, ScriptedTier]]


@pytest.mark.parametrize("valid", [0, 1, 3, 5])
def test_valid_leading_blocks_stay_and_the_rest_is_computed(make: Make, valid: int) -> None:
    rig, tier = make()
    rig.submit("a", PROMPT)
    tier.await_start()
    assert len(tier.orders[0].names) == 5
    tier.bring(0, 0, valid)
    rig.wait()
    assert rig.out.tokens("a") == greedy_answer(PROMPT, 8)
    assert rig.out.last("a").num_cached_tokens == valid * BLOCK_SIZE
    assert rig.model.num_tokens == 21 - valid * BLOCK_SIZE + 7


def test_only_what_memory_lacks_is_loaded(make: Make) -> None:
    rig, tier = make(has=(OTHER,))
    rig.submit("a", OTHER[:9], max_tokens=1)
    tier.await_start()
    tier.bring(0, 0, 2)
    rig.wait()
    rig.submit("b", OTHER)
    tier.await_start()
    assert len(tier.orders[1].names) == 3
    tier.bring(1, 2, 3)
    rig.wait()
    assert rig.out.tokens("b") == greedy_answer(OTHER, 8)
    assert rig.out.last("b").num_cached_tokens == 20


def test_others_pass_while_it_loads_and_it_comes_before_later_ones(make: Make) -> None:
    model = PacedModel()
    rig, tier = make(model=model, scheduler={"max_running_requests": 1})
    rig.submit("a", PROMPT, max_tokens=1)
    tier.await_start()
    assert rig.engine.stats().queued_requests == 1  # what loads is still in the queue
    rig.submit("b", OTHER, max_tokens=60)
    rig.out.wait_tokens("b", 1)
    rig.submit("c", OTHER[:5], max_tokens=1)
    tier.bring(0, 0, 5)
    model.seconds = 0.0
    rig.wait()
    order = [request for request, _ in rig.out.deltas]
    assert order.index("a") < order.index("c")
    assert rig.out.tokens("a") == greedy_answer(PROMPT, 1)


def test_a_running_request_takes_the_blocks_of_a_load(make: Make) -> None:
    """12 blocks: 6 are being loaded into, and an answer grows until it lacks one."""
    rig, tier = make(num_blocks=12)
    forward, began, goes_on = rig.model.forward, threading.Event(), threading.Event()

    def hold(batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        began.set()
        assert goes_on.wait(60)
        return forward(batch, kv_cache)

    rig.model.forward = hold  # type: ignore[method-assign]
    rig.submit("a", OTHER[:5], max_tokens=42)
    assert began.wait(60)
    rig.submit("b", PROMPT, max_tokens=2)
    goes_on.set()
    rig.wait()
    assert rig.out.tokens("a") == greedy_answer(OTHER[:5], 42)
    assert rig.out.tokens("b") == greedy_answer(PROMPT, 2)
    assert len(tier.cancelled) == len(tier.orders) <= 1


def test_an_abort_cancels_the_load_before_its_blocks_are_others(make: Make) -> None:
    rig, tier = make()
    rig.submit("a", PROMPT)
    tier.await_start()
    rig.engine.abort("a")
    rig.wait()
    assert tier.cancelled == [tier.orders[0].load]
    tier.engine.load_ended(tier.orders[0].load, 5)  # too late
    assert rig.run("b", OTHER) == greedy_answer(OTHER, 8)
    assert rig.engine._scheduler.blocks.cache.find(tier.orders[0].names[0]) == 0


def test_a_load_waits_for_room_and_begins_at_the_head_of_the_queue(make: Make) -> None:
    rig, tier = make(num_blocks=12)
    rig.submit("a", OTHER[:13], max_tokens=28)
    rig.out.wait_tokens("a", 24)
    rig.submit("b", PROMPT, max_tokens=1)
    tier.await_start()
    tier.bring(0, 0, 5)
    rig.wait()
    assert rig.out.tokens("b") == greedy_answer(PROMPT, 1)
    assert rig.out.last("b").num_cached_tokens == 20


def test_what_loads_counts_to_the_queue(make: Make) -> None:
    rig, tier = make(scheduler={"max_queued_requests": 1})
    rig.submit("a", PROMPT, max_tokens=1)
    tier.await_start()
    with pytest.raises(RequestError, match="queue is full"):
        rig.submit("b", OTHER)
    tier.bring(0, 0, 5)
    rig.wait()


def test_a_resumed_answer_is_loaded_too(make: Make) -> None:
    answer = greedy_answer(PROMPT[:13], 9)
    whole = (*PROMPT[:13], *answer)
    rig, tier = make(has=(whole,))
    rig.resume("a", PROMPT[:13], (tuple(answer),), max_tokens=12)
    tier.await_start()
    assert len(tier.orders[0].names) == 5
    tier.bring(0, 0, 5)
    rig.wait()
    assert answer + rig.out.tokens("a") == greedy_answer(PROMPT[:13], 12)


def test_several_choices_share_what_was_loaded(make: Make) -> None:
    rig, tier = make()
    rig.submit("a", PROMPT, n=3)
    tier.await_start()
    tier.bring(0, 0, 5)
    rig.wait()
    for choice in range(3):
        assert rig.out.tokens("a", choice) == greedy_answer(PROMPT, 8)
    assert len(tier.orders) == 1


def test_the_worker_stops_in_the_middle_of_a_load(make: Make) -> None:
    rig, tier = make()
    rig.submit("a", PROMPT)
    tier.await_start()
    (sequence,) = rig.engine._scheduler.queues.loading
    assert sequence.state is SequenceState.LOADING
    rig.engine.stop()
    assert tier.cancelled == [tier.orders[0].load]


def test_prompts_whose_every_position_is_read_are_not_loaded(make: Make) -> None:
    rig, tier = make()
    rig.submit("a", PROMPT, prompt_logprobs=1)
    rig.wait()
    assert tier.orders == []
    wait_until(lambda: rig.engine.idle)


class Sink(ScriptedTier):
    """Notes when it is told that blocks are due, and what it is offered."""

    def __init__(self, rig: Rig) -> None:
        self.told = 0
        self.offers: list[Offer | None] = []
        self.rig = rig
        self.engine = rig.engine.open_desk(self, cold_blocks=1000, fence=lambda: None)

    def find(
        self, names: Sequence[bytes], seconds_per_block: float | None, holder: str = "", held: int | None = None
    ) -> Run | None:
        return None

    def passes(self, name: bytes, reused: bool) -> bool:
        return False

    def due(self) -> None:
        self.told += 1

    def offered(self, offer: Offer | None) -> None:
        self.offers.append(offer)


def test_what_could_not_be_offered_for_want_of_room_is_told_again() -> None:
    rig = Rig(HistoryModel(), 24)
    sink = Sink(rig)
    rig.submit("long", OTHER[:5], max_tokens=59)
    rig.out.wait_tokens("long", 40)
    rig.submit("a", PROMPT, max_tokens=1)
    rig.out.wait_finished(1)
    wait_until(lambda: sink.told == 1)
    sink.engine.offer_blocks(4)
    wait_until(lambda: len(sink.offers) == 1)
    rig.wait()
    sink.engine.offer_blocks(4)
    wait_until(lambda: len(sink.offers) == 2)
    assert sink.offers[0] is not None or sink.told == 2
    assert sink.offers[1] is not None
    for offer in sink.offers:
        if offer is not None:
            sink.engine.hand_back(offer)
    wait_until(lambda: rig.engine._scheduler.blocks.num_held == 0)
    rig.close()


class NoPrefill:
    """A prefill client none of whose workers takes an order."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.orders = rig, list[RemotePrefill]()

    def start(self, order: RemotePrefill) -> None:
        self.orders.append(order)
        self.rig.engine.remote_prefill_failed(order.request_id, order.generation, "there is none")

    def has_begun(self, request_id: str, generation: int) -> bool:
        return False

    def cancel(self, request_id: str, generation: int) -> None: ...


def test_what_a_prefill_worker_computes_anyway_is_not_loaded(make: Make) -> None:
    rig, tier = make()
    rig.engine.prefill_client = client = NoPrefill(rig)
    longer = (*PROMPT, *OTHER)
    assert rig.run("a", longer, prefill_endpoints=("p",)) == greedy_answer(longer, 8)
    assert (len(client.orders), tier.orders) == (1, [])


def test_a_prompt_of_which_little_is_left_is_loaded_instead_of_ordered(make: Make) -> None:
    rig, tier = make()
    rig.engine.prefill_client = client = NoPrefill(rig)
    rig.submit("a", PROMPT, prefill_endpoints=("p",))
    tier.await_start()
    tier.bring(0, 0, 5)
    rig.wait()
    assert rig.out.tokens("a") == greedy_answer(PROMPT, 8)
    assert client.orders == []


def test_a_load_that_brings_nothing_is_ordered(make: Make) -> None:
    rig, tier = make()
    rig.engine.prefill_client = client = NoPrefill(rig)
    rig.submit("a", PROMPT, prefill_endpoints=("p",))
    tier.await_start()
    tier.bring(0, 0, 0)
    rig.wait()
    assert rig.out.tokens("a") == greedy_answer(PROMPT, 8)
    assert len(client.orders) == 1


def test_loads_do_not_push_each_others_blocks_out_of_memory(make: Make) -> None:
    """Eight prompts wait, and a quarter of memory is loaded ahead; each is loaded when its turn comes."""
    prompts = [tuple((number * 7 + index) % 64 for index in range(21)) for number in range(8)]
    model = PacedModel()
    rig, tier = make(num_blocks=40, model=model, has=prompts, scheduler={"max_running_requests": 1})
    rig.submit("long", OTHER[:5], max_tokens=60)
    rig.out.wait_tokens("long", 1)
    for number, prompt in enumerate(prompts):
        rig.submit(f"r{number}", prompt, max_tokens=1)
    for index in range(8):
        tier.await_start()
        if index == 2:
            assert rig.out.reason("long") is None
            assert len(tier.orders) == 3, "5 + 5 blocks are a quarter, a third load goes beyond it, and no more"
            model.seconds = 0.0
        tier.bring(index, 0, 5)
    rig.wait()
    for number, prompt in enumerate(prompts):
        assert rig.out.tokens(f"r{number}") == greedy_answer(prompt, 1)
        assert rig.out.last(f"r{number}").num_cached_tokens == 20


def follow(rig: Rig, tier: ScriptedTier, count: int) -> None:
    rig.submit("a", PROMPT)
    tier.await_start()
    for number in range(count):
        rig.submit(f"b{number}", (*PROMPT, number))
    wait_until(lambda: len(rig.engine._scheduler.queues.loading) == count + 1)


def test_what_is_on_its_way_is_not_loaded_again(make: Make) -> None:
    rig, tier = make(num_blocks=200)
    follow(rig, tier, 20)
    assert rig.engine._scheduler.blocks.num_held == 5
    tier.bring(0, 0, 5)
    rig.wait()
    assert len(tier.orders) == 1
    for number in range(20):
        assert rig.out.tokens(f"b{number}") == greedy_answer((*PROMPT, number), 8)
        assert rig.out.last(f"b{number}").num_cached_tokens == 20


@pytest.mark.parametrize("ends", ["cut", "aborted", "all aborted"])
def test_who_waits_for_the_load_of_another_waits_once(make: Make, ends: str) -> None:
    rig, tier = make(num_blocks=200)
    follow(rig, tier, 6)
    rig.engine.abort("b0")
    if ends == "cut":
        tier.bring(0, 0, 2)
    else:
        rig.engine.abort("a")
    if ends == "all aborted":
        for number in range(1, 6):
            rig.engine.abort(f"b{number}")
    rig.wait()
    assert len(tier.orders) == 1
    if ends != "all aborted":
        for number in range(1, 6):
            assert rig.out.tokens(f"b{number}") == greedy_answer((*PROMPT, number), 8)


@pytest.mark.parametrize("first", [0, 1])
def test_what_another_loads_beyond_the_prompt_is_not_waited_for(make: Make, first: int) -> None:
    rig, tier = make()
    rig.submit("a", PROMPT)
    tier.await_start()
    rig.submit("b", PROMPT[:9])
    tier.await_start()
    assert len(tier.orders[1].names) == 2
    for index in (first, 1 - first):
        tier.bring(index, 0, len(tier.orders[index].names))
    rig.wait()
    assert rig.out.last("b").num_cached_tokens == 8


def test_who_waited_loads_what_comes_after(make: Make) -> None:
    longer = (*PROMPT, *OTHER)
    rig, tier = make(has=(PROMPT, longer), num_blocks=100)
    rig.submit("a", PROMPT)
    tier.await_start()
    rig.submit("b", longer)
    wait_until(lambda: len(rig.engine._scheduler.queues.loading) == 2)
    tier.bring(0, 0, 5)
    tier.await_start()
    assert len(tier.orders[1].names) == 5
    tier.bring(1, 5, 5)
    rig.wait()
    assert rig.out.tokens("b") == greedy_answer(longer, 8)
    assert rig.out.last("b").num_cached_tokens == 40


class Sparing(ScriptedTier):
    """Tells of two blocks at a time."""

    def find(
        self, names: Sequence[bytes], seconds_per_block: float | None, holder: str = "", held: int | None = None
    ) -> Run | None:
        return super().find(names[:2], seconds_per_block, holder, held)


@pytest.mark.parametrize("valid", [1, 2])
def test_what_comes_after_a_whole_load_is_loaded_once_more(valid: int) -> None:
    """Of two loads; what is left then is computed. After one that was late nothing more is waited for."""
    rig = Rig(HistoryModel(), 64)  # type: ignore[arg-type]
    tier = Sparing(rig)
    rig.submit("a", PROMPT)
    tier.await_start()
    tier.bring(0, 0, valid)
    if valid == 2:
        tier.await_start()
        tier.bring(1, 2, 2)
    rig.wait()
    assert rig.out.tokens("a") == greedy_answer(PROMPT, 8)
    assert len(tier.orders) == valid
    assert rig.out.last("a").num_cached_tokens == (16 if valid == 2 else 4)
    rig.close()
    assert rig.engine._scheduler.blocks.num_held == 0


def test_others_write_when_earlier_copies_to_the_host_are_made(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that were let go of while they are copied out are free: nothing has to be copied for who gets them."""
    rig, tier = make(num_blocks=30, has=(OTHER,), host_blocks=50)
    rig.run("a", PROMPT)
    engine, events = rig.engine, list[object]()
    move, start = engine._executor.move_blocks, tier.start_load

    def watch_moves(moves: Moves, *, lane: int = 0, settle: bool = False) -> None:
        events.append((len(moves.out), settle))
        move(moves, lane=lane, settle=settle)

    def watch_start(order: LoadOrder) -> None:
        events.append("load")
        start(order)

    monkeypatch.setattr(engine._executor, "move_blocks", watch_moves)
    monkeypatch.setattr(tier, "start_load", watch_start)
    engine._scheduler.blocks.free_newest(3)
    engine._scheduler.hooks.make_moves(False)
    rig.submit("b", OTHER)
    tier.await_start()
    assert events == [(3, False), (0, True), "load"]
    tier.bring(0, 0, 5)
    rig.wait()
    assert rig.out.tokens("b") == greedy_answer(OTHER, 8)
    assert (0, False) not in events, "what is settled is not waited for again"


@pytest.mark.parametrize(("told", "asked"), [(0, [3, 2]), (8, [3]), (12, [3]), (16, [3, 2])])
def test_a_worker_that_has_no_more_is_not_asked_for_the_rest(
    make: Make, monkeypatch: pytest.MonkeyPatch, told: int, asked: list[int]
) -> None:
    """A disk brought 12 tokens; the gateway names a worker, which has so many by what it says (0: it does not)."""
    rig, tier = make()
    runs = [Run(count=3, seconds=0.0), Run(count=2, seconds=0.0, hearsay=True)]
    monkeypatch.setattr(tier, "find", lambda names, *_: runs[len(tier.orders)])
    rig.submit("a", PROMPT, kv_source="10.0.0.7:7000", kv_source_tokens=told)
    tier.await_start()
    tier.bring(0, 0, 3)
    if len(asked) > 1:
        tier.await_start()
        tier.bring(1, 3, 2)
    rig.wait()
    assert [len(order.names) for order in tier.orders] == asked
    assert rig.out.tokens("a") == greedy_answer(PROMPT, 8)


def test_what_a_step_that_ended_early_left_is_waited_for_too(make: Make) -> None:
    """It was abandoned between layers, whose copies are not made then; others than steps write next."""
    rig, _ = make(host_blocks=50)
    rig.engine._executor.move_blocks(Moves(out=((1, 1),), into=()))
    pool = rig.engine.host_pool
    assert pool is not None
    assert pool.is_pending
    rig.engine._scheduler.hooks.make_moves(False)
    assert not pool.is_pending
