"""Hostile grammars: refused or harmless, in time, and without the worker or anybody else noticing."""

from __future__ import annotations

import asyncio
import os
import random
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from llguidance import LLMatcher
from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.schedule.params import Grammar
from tandem_worker.host.isolation import keeper
from tandem_worker.server.structured import compiler as compiling
from tandem_worker.server.structured.compiler import MAX_CACHED, MAX_PENDING, GrammarCompiler
from tandem_worker.server.structured.contract import GrammarError, GrammarUnavailableError
from tandem_worker.server.text.detokenizer import byte_level_alphabet
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.effort import count_instructions

sys.path.insert(0, str(Path(__file__).parent))
from hostile import generate

sys.path.pop(0)

VOCAB = 4000
WORDS = VOCAB // 32


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and some thousand short words as a real vocabulary has them."""
    rng = random.Random(0)
    pieces = dict.fromkeys(byte_level_alphabet())
    while len(pieces) < VOCAB - 1:
        pieces["".join(rng.choices('abcdefgxyz0123456789{}[]:,."Ġ', k=rng.randrange(2, 7)))] = None
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerFast) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer, VOCAB, [tokenizer.eos_token_id])
    made.compile_here(made.write_json_schema({}))
    yield made
    made.close()


def write(compiler: GrammarCompiler, kind: str, grammar: Any) -> str:
    writers: dict[str, Callable[[Any], str]] = {
        "schema": compiler.write_json_schema, "regex": compiler.write_regex, "lark": compiler.write_lark,
    }  # fmt: skip
    return writers[kind](grammar)


def answer(compiler: GrammarCompiler, kind: str, grammar: Any, seed: int = 0) -> str | None:
    """Compile as a request does and write a few tokens. The refusal."""
    try:
        text = write(compiler, kind, grammar)
        factory = compiler.compile_here(text, time.monotonic() + 120)
        walk(factory.for_request().new(), random.Random(seed))
    except (GrammarError, RequestError) as error:
        return str(error)
    return None


def walk(grammar: Grammar, rng: random.Random, most: int = 40) -> None:
    mask = np.zeros(WORDS, dtype=np.int32)
    for _ in range(most):
        grammar.fill_mask(mask)
        grammar.accept(int(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))))
        if grammar.terminated:
            return


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def attack(compiler: GrammarCompiler, count: int, seed: int) -> None:
    before = resident_bytes()
    refused = 0
    for number, (kind, grammar) in enumerate(generate(count, seed)):
        busy = time.process_time()
        refusal = answer(compiler, kind, grammar, number)
        busy = time.process_time() - busy
        refused += refusal is not None
        assert not re.search(r"\bm?s of computing|\d ms\b", refusal or ""), (number, kind, refusal)  # all is counted
        # What the proof lets through is computed here again: twenty times what it takes.
        assert busy < compiling.JOB_LIMITS.cpu_seconds, (number, kind, refusal)
    assert 0.2 * count < refused < 0.8 * count
    assert compiler.num_restarts == 0
    assert resident_bytes() - before < compiling.MAX_CACHED_BYTES


def test_hostile_grammars(compiler: GrammarCompiler) -> None:
    attack(compiler, 66, seed=1)
    assert answer(compiler, "schema", {"const": 1}) is None


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_1000_hostile_grammars(compiler: GrammarCompiler) -> None:
    attack(compiler, 1000, seed=0)
    assert answer(compiler, "schema", {"const": 1}) is None


def test_a_chain_of_rules(compiler: GrammarCompiler) -> None:
    """3,000 rules overflow the stack of a thread; the process that proves them has a smaller one."""
    chain = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(3000)), 'r3000: "a"', ""])
    assert "3002 rules" in (answer(compiler, "lark", chain) or "")
    with pytest.raises(GrammarError, match="nested too deeply for 512 KiB of stack"):
        compiler.compile_here(chain)
    assert compiler.num_restarts == 0


def test_a_large_regex(compiler: GrammarCompiler) -> None:
    before, refusals, regex = resident_bytes(), [], "(a|b)*" * 1_000_000
    assert count_instructions(lambda: refusals.append(answer(compiler, "regex", regex))) < 1000
    assert "16 KiB" in refusals[0]
    assert resident_bytes() - before < 32 << 20


@pytest.mark.parametrize(
    ("kind", "grammar"),
    [
        ("schema", {"type": "integer", "multipleOf": 9973}),
        ("schema", {"type": "number", "multipleOf": 0.0097}),
        ("schema", {"type": "string", "maxLength": 10**6}),
        ("schema", {"const": "ab" * 50_000}),
        ("regex", "(a{1000}){1000}"),
        ("regex", "(ab{1000}c){1000}"),
    ],
)
def test_a_step_takes_no_longer_than_a_few_ordinary_ones(compiler: GrammarCompiler, kind: str, grammar: Any) -> None:
    """Of these a step took up to 3.3 s."""

    def worst(kind: str, grammar: Any) -> float:
        try:
            made = compiler.compile_here(write(compiler, kind, grammar)).for_request().new()
        except GrammarError:
            return 0.0
        mask, slowest = np.zeros(WORDS, dtype=np.int32), 0.0
        for _ in range(30):
            began = time.thread_time()
            made.fill_mask(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            made.accept(int(allowed[len(allowed) // 2]))
            slowest = max(slowest, time.thread_time() - began)
            if made.terminated:
                break
        return slowest

    assert worst(kind, grammar) < 0.02 + 10 * worst("schema", {})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 19_997},
        {
            "type": "object",
            "properties": {f"p{step}": {"multipleOf": step} for step in range(1, 190)},
        },
        {"allOf": [{"type": "number", "multipleOf": 139}, {"type": "number", "multipleOf": 1.43}]},
        {"type": "object", "patternProperties": {f"^a{number}x*$": {"type": "integer"} for number in range(141)}},
        {
            "type": "object",
            "properties": {f"b{number}": {} for number in range(900)},
            "patternProperties": {f"^a{number}x*$": {"type": "integer"} for number in range(20)},
        },
        {
            "patternProperties": {f"^a{number}x*$": {"type": "integer"} for number in range(10)},
            "anyOf": [{"properties": {f"b{number}": {"type": "string"}}} for number in range(100)],
        },
    ],
)
def test_what_the_counts_let_through_is_far_from_the_seconds(compiler: GrammarCompiler, schema: Any) -> None:
    _, confined = compiler._prepare(None)
    grammar = compiler.write_json_schema(schema)
    compiler.limits.check_text(grammar)
    proof = orjson.loads(confined.call_here("prove", grammar.encode(), seconds=120))
    assert proof["refusal"] is None or "Too many items" in proof["refusal"]
    assert proof["seconds"] < compiling.JOB_LIMITS.cpu_seconds / 2


def test_waiting_too_long_is_nobodys_fault(compiler: GrammarCompiler) -> None:
    compiler._prepare(None)
    grammar, refused = compiler.write_json_schema({"const": "late"}), compiler.counts.refused
    with pytest.raises(GrammarUnavailableError):
        compiler.compile_here(grammar, time.monotonic())
    assert compiler.counts.refused == refused
    compiler.compile_here(grammar)


def test_what_is_true_without_limits(compiler: GrammarCompiler) -> None:
    """The reason for the header: a mask spells out what must follow, and fuel does not count it."""
    assert compiler.write_regex("a").startswith(compiling.HEADER)
    prepared, _ = compiler._prepare(None)
    spent = []
    for header in (compiling.HEADER, ""):
        matcher = LLMatcher(prepared, f"{header}start: /(a{{300}}){{300}}/\n", log_level=0)
        began = time.thread_time()
        matcher.compute_bitmask()
        spent.append(time.thread_time() - began)
    assert spent[0] < 0.2 * spent[1]


def test_refusals_and_results_are_kept(compiler: GrammarCompiler) -> None:
    grammar = compiler.write_json_schema({"const": "kept"})
    first, cached = compiler.compile_here(grammar), compiler.counts.cached
    assert compiler.compile_here(grammar) is first
    for _ in range(2):
        with pytest.raises(GrammarError, match="objekt"):
            compiler.compile_here(compiler.write_json_schema({"type": "objekt"}))
    assert compiler.counts.cached == cached + 2


def test_what_is_kept_is_bounded_by_number_and_bytes(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "MAX_CACHED_BYTES", 3 * compiling.LEAST_BYTES)
    grammars = [compiler.write_json_schema({"const": f"{number} of 5"}) for number in range(5)]
    first, *_, last = (compiler.compile_here(grammar) for grammar in grammars)
    assert compiler.compile_here(grammars[-1]) is last
    assert compiler.compile_here(grammars[0]) is not first
    assert compiler._cached_bytes <= 3 * compiling.LEAST_BYTES
    assert len(compiler._cache) <= MAX_CACHED


def test_the_process_may_die_at_any_time(compiler: GrammarCompiler) -> None:
    process = compiler.process_id
    assert process is not None
    os.kill(process, signal.SIGKILL)
    for number in range(3):
        compiler.compile_here(compiler.write_json_schema({"const": f"after {number}"}))
    deadline = time.monotonic() + 120
    while compiler.process_id in {None, process}:  # jobs of the first one may have answered
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_that_cannot_be_started_is_the_requests_error(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    made = GrammarCompiler(tokenizer, VOCAB, [tokenizer.eos_token_id])
    with pytest.raises(GrammarUnavailableError, match="/no/such/python"):
        made.compile_here(made.write_json_schema({}))
    made.close()


def test_one_that_is_closed_while_it_is_prepared_starts_no_process(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = GrammarCompiler(tokenizer, VOCAB, [tokenizer.eos_token_id])
    began, closed = threading.Event(), threading.Event()

    def wait(_: object) -> str:
        began.set()
        assert closed.wait(60)
        return "{}"

    monkeypatch.setattr("tandem_worker.server.structured.compiler._tokenizer_text", wait)
    made.start()
    assert began.wait(60)
    made.close()
    closed.set()
    with pytest.raises(GrammarUnavailableError, match="closed"):
        made.prepare()
    assert made._confined is None


async def test_a_crowd_is_refused_at_once_and_known_grammars_do_not_wait(compiler: GrammarCompiler) -> None:
    deadline = time.monotonic() + 120
    known = compiler.write_json_schema({"const": "known"})
    await compiler.compile(known, deadline)
    crowd = [
        asyncio.create_task(compiler.compile(compiler.write_json_schema({"const": f"crowd {number}"}), deadline))
        for number in range(MAX_PENDING)
    ]
    await asyncio.sleep(0)
    with pytest.raises(GrammarUnavailableError, match="try again"):
        await compiler.compile(compiler.write_json_schema({"const": "one more"}), deadline)
    await compiler.compile(known, deadline)
    assert not all(task.done() for task in crowd)
    await asyncio.gather(*crowd)


async def test_a_vocabulary_that_the_library_does_not_take_is_said_and_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token of 5,000 characters makes the library panic, here and in the process beside."""
    monkeypatch.setattr(keeper, "_FIRST_PAUSE_SECONDS", 0.01)
    vocab = {piece: index for index, piece in enumerate([*byte_level_alphabet(), "x" * 5000])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    before = {thread for thread in threading.enumerate() if thread.name == "grammars-keeper"}
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    compiler.start()
    try:
        for _ in range(3):
            with pytest.raises(GrammarUnavailableError, match="num_parents"):
                await compiler.compile(compiler.write_json_schema({}), time.monotonic() + 60)
        async with asyncio.timeout(60):
            while {thread for thread in threading.enumerate() if thread.name == "grammars-keeper"} - before:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        with pytest.raises(GrammarUnavailableError, match=r"num_parents.*given up after 5 tries"):
            await compiler.compile(compiler.write_json_schema({}), time.monotonic() + 60)
    finally:
        compiler.close()
