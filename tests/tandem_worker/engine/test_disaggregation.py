"""Prefill on one engine, decode on another: same tokens, every block reported once, nothing left behind."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import pytest
import torch
from tandem_worker.engine.contract import RemotePrefill
from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.schedule.params import FinishReason
from tandem_worker.server.structured.compiler import GrammarCompiler

from tests.tandem_worker.engine.history_model import HistoryModel, greedy_answer
from tests.tandem_worker.engine.rig import BLOCK_SIZE, Rig
from tests.tandem_worker.engine.wire import Wire
from tests.tandem_worker.server.conftest import byte_level_tokenizer

MakeRig = Callable[..., Rig]
ENDPOINT = ("prefill-0:1",)


@pytest.fixture
def pair(make_rig: MakeRig) -> tuple[Rig, Rig, Wire]:
    prefill = make_rig(num_blocks=200, scheduler={"max_batch_tokens": 16})
    decode = make_rig(num_blocks=100, scheduler={"local_prefill_max_tokens": 2})
    return prefill, decode, Wire(prefill.engine, decode.engine)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("length", [3, 4, 5, 15, 16, 17, 40, 63])
def test_tokens_equal_those_of_one_engine(pair: tuple[Rig, Rig, Wire], length: int) -> None:
    prefill, decode, wire = pair
    prompt = tuple(range(length))
    assert decode.run("r", prompt, prefill_endpoints=ENDPOINT) == greedy_answer(prompt, 8)
    assert decode.out.last("r").prefill_worker == "prefill-0"
    assert decode.model.num_tokens == 7, "the decode worker computes no prompt token"
    until(lambda: prefill.engine.idle)
    expected = list(range(-(-length // BLOCK_SIZE)))
    for layer in range(2):
        sent = [first + i for at, first, ids in wire.reports["r"] if at == layer for i in range(len(ids))]
        assert sent == expected, "each block of each layer is reported once, in order"
    assert decode.engine.stats().prefills_remote_total == 1


@pytest.mark.parametrize(("salt", "cached"), [("one", 40), ("two", 0), ("", 0), ("one ", 0), ("One", 0), ("on", 0)])
def test_a_salt_separates_blocks_on_both_workers(pair: tuple[Rig, Rig, Wire], salt: str, cached: int) -> None:
    prefill, decode, wire = pair
    prompt = tuple(range(41))
    decode.run("first", prompt, prefill_endpoints=ENDPOINT, cache_salt="one")
    other = Rig(HistoryModel(), 100, scheduler={"local_prefill_max_tokens": 0})
    try:  # a decode worker that knows nothing: what is cached is the prefill worker's
        Wire(prefill.engine, other.engine)
        other.run("second", prompt, prefill_endpoints=ENDPOINT, cache_salt=salt)
        assert other.out.last("second").num_cached_tokens == cached
    finally:
        other.close()
    decode.run("third", prompt, prefill_endpoints=ENDPOINT, cache_salt=salt)
    assert ("third" in wire.orders) == (cached == 0)


def test_short_and_cached_prompts_are_prefilled_here(pair: tuple[Rig, Rig, Wire]) -> None:
    _, decode, wire = pair
    decode.run("short", (1, 2), prefill_endpoints=ENDPOINT)
    decode.run("first", tuple(range(10)), prefill_endpoints=ENDPOINT)
    decode.run("again", tuple(range(10)), prefill_endpoints=ENDPOINT)
    assert list(wire.orders) == ["first"]
    assert decode.out.last("again").num_cached_tokens == 8
    assert decode.out.last("again").prefill_worker is None


def test_a_prompt_whose_logprobs_are_asked_for_is_computed_here(pair: tuple[Rig, Rig, Wire]) -> None:
    """All of it, although its blocks have come from the prefill worker before."""
    _, decode, wire = pair
    prompt = tuple(range(21))
    decode.run("first", prompt, prefill_endpoints=ENDPOINT)
    computed = decode.model.num_tokens
    assert decode.run("r", prompt, prefill_endpoints=ENDPOINT, prompt_logprobs=1) == greedy_answer(prompt, 8)
    assert list(wire.orders) == ["first"]
    assert decode.model.num_tokens == computed + 21 + 7
    scores = decode.out.deltas["r", 0][0].prompt_logprobs or ()
    assert [score and score.token_id for score in scores] == [None, *prompt[1:]]


def test_only_missing_blocks_travel_and_cached_ones_go_at_once(pair: tuple[Rig, Rig, Wire]) -> None:
    prefill, decode, wire = pair
    prompt = tuple(range(41))
    other = Rig(HistoryModel(), 100, scheduler={"local_prefill_max_tokens": 2})
    try:  # the prefill worker learns 32 tokens from another decode worker's request, this one has 8 of them
        Wire(prefill.engine, other.engine)
        other.run("warm", prompt[:33], prefill_endpoints=ENDPOINT)
    finally:
        other.close()
    decode.run("mine", prompt[:9], 1)
    assert decode.run("r", prompt, prefill_endpoints=ENDPOINT) == greedy_answer(prompt, 8)
    assert wire.orders["r"].num_cached_tokens == 8
    assert [(layer, first, len(ids)) for layer, first, ids in wire.reports["r"]] == [
        (0, 2, 6),
        (1, 2, 6),
        (0, 8, 3),
        (1, 8, 3),
    ]
    assert decode.out.last("r").num_cached_tokens == 32


def test_choices_are_sampled_here_from_the_same_logits(pair: tuple[Rig, Rig, Wire], make_rig: MakeRig) -> None:
    _, decode, _ = pair
    alone = make_rig()
    for rig in (decode, alone):
        rig.submit("r", tuple(range(18)), 10, n=3, temperature=0.9, seed=3, prefill_endpoints=ENDPOINT)
        rig.wait()
    for choice in range(3):
        assert decode.out.tokens("r", choice) == alone.out.tokens("r", choice)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 1},
        {"num_logprobs": 2},
        {"n": 3, "temperature": 0.9, "seed": 3},
        {"stop_token_ids": frozenset(greedy_answer(tuple(range(18)), 1))},
        {"frequency_penalty": 0.5, "max_tokens": 40},
    ],
    ids=["plain", "one token", "logprobs", "choices", "ends at once", "penalties"],
)
def test_the_first_token_is_out_before_a_step_is_computed(
    make_rig: MakeRig, options: dict[str, Any], runs_ahead: bool
) -> None:
    prefill = make_rig(num_blocks=200)
    decode = make_rig(num_blocks=100, scheduler={"local_prefill_max_tokens": 2}, runs_ahead=runs_ahead)
    Wire(prefill.engine, decode.engine)
    alone, prompt, num_choices = make_rig(), tuple(range(18)), options.get("n", 1)
    delivered: list[int] = []
    forward = decode.model.forward

    def watch(*args: Any) -> torch.Tensor:
        delivered.append(len(decode.out.deltas))
        return forward(*args)

    decode.model.forward = watch
    for rig in (decode, alone):
        rig.submit("r", prompt, prefill_endpoints=ENDPOINT, **{"max_tokens": 10, **options})
        rig.wait()
    assert all(count == num_choices for count in delivered), "each choice has had its first token before any step"
    for choice in range(num_choices):
        assert decode.out.tokens("r", choice) == alone.out.tokens("r", choice)
        assert decode.out.logprobs("r", choice) == alone.out.logprobs("r", choice)
        assert decode.out.reason("r", choice) == alone.out.reason("r", choice)
    figures = ("prompt_tokens_total", "generated_tokens_total", "running_requests", "kv_blocks_used")
    for figure in figures:
        assert getattr(decode.engine.stats(), figure) == getattr(alone.engine.stats(), figure), figure


SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_a_grammar_leads_from_the_first_token_on(make_rig: MakeRig) -> None:
    """The first token comes from the prefill worker's logits, the mask from here."""
    tokenizer = byte_level_tokenizer()
    prefill, decode, alone = (make_rig(HistoryModel(vocab_size=300), num_blocks=100) for _ in range(3))
    wire = Wire(prefill.engine, decode.engine)
    compiler = GrammarCompiler(tokenizer, 300, [tokenizer.eos_token_id])
    grammar = compiler.compile_here(compiler.write_json_schema(SCHEMA))
    compiler.close()
    for seed in range(12):
        options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "grammar": grammar}
        prompt = tuple(range(seed, seed + 30))
        answer = decode.run(f"r{seed}", prompt, 200, prefill_endpoints=ENDPOINT, **options)
        assert answer == alone.run(f"r{seed}", prompt, 200, **options)
        assert decode.out.reason(f"r{seed}") is FinishReason.STOP
        jsonschema.validate(json.loads(tokenizer.decode(answer)), SCHEMA)
    assert len(wire.orders) == decode.engine.stats().prefills_remote_total == 12


def test_a_failed_remote_prefill_is_done_here(pair: tuple[Rig, Rig, Wire]) -> None:
    prefill, decode, wire = pair
    prompt = tuple(range(20))
    prefill.model.fail_once = ValueError("no")
    assert decode.run("failed", prompt, prefill_endpoints=ENDPOINT) == greedy_answer(prompt, 8)
    wire.damage_logits = True
    prompt = tuple(range(5, 30))
    assert decode.run("damaged", prompt, prefill_endpoints=ENDPOINT) == greedy_answer(prompt, 8)
    wire.refuse = "unreachable"
    prompt = tuple(range(9, 40))
    assert decode.run("refused", prompt, prefill_endpoints=ENDPOINT) == greedy_answer(prompt, 8)
    stats = decode.engine.stats()
    assert (stats.prefills_fallback_total, stats.prefills_remote_total, stats.prefills_local_total) == (3, 0, 0)
    until(lambda: prefill.engine.idle)


def test_abort_while_receiving_cancels_before_it_frees(pair: tuple[Rig, Rig, Wire]) -> None:
    prefill, decode, wire = pair
    wire.hold.clear()
    decode.submit("r", tuple(range(30)), prefill_endpoints=ENDPOINT)
    until(lambda: "r" in wire.orders and decode.engine.stats().kv_blocks_used == 8)
    decode.engine.abort("r")
    decode.wait()
    assert decode.out.reason("r") is FinishReason.ABORT
    assert wire.cancelled == {("r", wire.orders["r"].generation)}
    wire.hold.set()  # the late result finds nobody
    assert decode.run("next", (1, 2, 3)) == greedy_answer((1, 2, 3), 8)
    until(lambda: prefill.engine.idle and decode.engine.idle)


def test_a_late_result_of_an_earlier_attempt_is_ignored(pair: tuple[Rig, Rig, Wire]) -> None:
    _, decode, wire = pair
    wire.hold.clear()
    decode.submit("r", tuple(range(30)), prefill_endpoints=ENDPOINT)
    until(lambda: "r" in wire.orders)
    generation = wire.orders["r"].generation
    decode.engine.remote_prefill_failed("r", generation - 1, "old")
    decode.engine.remote_prefill_failed("unknown", generation, "old")
    wire.hold.set()
    decode.wait()
    assert decode.out.tokens("r") == greedy_answer(tuple(range(30)), 8)
    assert decode.engine.stats().prefills_fallback_total == 0


def test_running_requests_are_preempted_beside_receiving_ones(make_rig: MakeRig) -> None:
    rng = random.Random(5)
    prefill = make_rig(num_blocks=60, scheduler={"max_batch_tokens": 16})
    decode = make_rig(num_blocks=24, scheduler={"local_prefill_max_tokens": 2, "max_running_requests": 6})
    Wire(prefill.engine, decode.engine)
    prompts = {f"r{i}": tuple(rng.randrange(64) for _ in range(rng.randint(1, 40))) for i in range(40)}
    for name, prompt in prompts.items():
        decode.submit(name, prompt, 30, prefill_endpoints=ENDPOINT)
    decode.wait()
    for name, prompt in prompts.items():
        assert decode.out.tokens(name) == greedy_answer(prompt, 30)
    assert decode.engine.stats().preemptions_total > 0
    until(lambda: prefill.engine.idle)


def test_release_before_the_end_abandons_the_prompt(make_rig: MakeRig) -> None:
    prefill = make_rig(scheduler={"max_batch_tokens": 16})  # four steps
    decode = make_rig()
    released = threading.Event()

    class HeldWire(Wire):
        def blocks_ready(self, request_id: str, layer: int, first_index: int, block_ids: Sequence[int]) -> None:
            released.wait(30)

    wire = HeldWire(prefill.engine, decode.engine)
    order = RemotePrefill(
        request_id="p",
        generation=1,
        token_ids=tuple(range(50)),
        num_cached_tokens=0,
        block_ids=tuple(range(1, 14)),
        endpoints=(),
        cache_salt="",
        priority=0,
    )
    wire.orders["p"], wire.reports["p"] = order, []
    prefill.engine.submit_prefill(order, wire)
    with pytest.raises(RequestError, match="in use"):
        prefill.engine.submit_prefill(order, wire)
    prefill.engine.release("p")
    released.set()
    until(lambda: prefill.engine.idle)
    assert prefill.engine.stats().kv_blocks_used == 0
