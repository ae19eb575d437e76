"""The API over the real engine with SmolLM2: answers, caches, structured output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import torch
from tandem_api.launch import KVConfig, ModelSource, WorkerConfig
from tandem_api.names import Role
from tandem_worker.engine.build import build_engine
from tandem_worker.model.load import load_model
from tandem_worker.model.tokenizer import load_tokenizer
from tandem_worker.server.answer.deltas import DeltaHub
from tandem_worker.server.app import build_app
from tandem_worker.server.prepare.served_model import end_tokens
from tandem_worker.server.structured.compiler import GrammarCompiler
from tandem_worker.server.wire.serving import serve

from e2e.model import find_model

QUESTION: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
SENTENCE = "The capital of France is Paris."
SAYS_IT = {"response_format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": re.escape(SENTENCE)}}}
"""Nothing else can be said: what the model likes best differs with the arithmetic of a CPU."""
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
            "capital": {"type": "boolean"},
        },
        "required": ["city", "population", "capital"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    {"type": "object", "properties": {"date": {"type": "string", "format": "date"}}, "required": ["date"],
     "additionalProperties": False},
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z]{3,8}$"}]},
    {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False,
     "required": ["next"],
     "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9}},
                        "required": ["v"], "additionalProperties": False}}},
]  # fmt: skip


@dataclass
class Real:
    engine: Any
    hub: DeltaHub
    tokenizer: Any
    vocab_size: int


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    path = find_model()
    tokenizer = load_tokenizer(path)
    model = load_model(path, device=torch.device("cpu"), dtype=torch.float32)
    hub = DeltaHub()
    engine = build_engine(model, configuration(), hub.deliver, eos_token_ids=end_tokens(tokenizer))
    yield Real(engine, hub, tokenizer, model.vocab_size)
    engine.stop()


def configuration() -> WorkerConfig:
    return WorkerConfig(
        model_name="smollm2", served_name="smollm2", role=Role.UNIFIED, revision="r1", max_model_len=1024,
        free_form_grammars=True, model=ModelSource(uri="file:///model"), kv=KVConfig(memory_bytes=256 * 1024 * 1024),
    )  # fmt: skip


@pytest.fixture(scope="module")
def grammars(real: Real) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(real.tokenizer, real.vocab_size, end_tokens(real.tokenizer))
    compiler.prepare()
    yield compiler
    compiler.close()


@pytest.fixture
async def client(real: Real, grammars: GrammarCompiler) -> AsyncIterator[openai.AsyncOpenAI]:
    app = build_app(
        real.engine, real.tokenizer, configuration(), hub=real.hub, pod_name="pod-0", ready=lambda: True,
        draining=lambda: False,
        max_model_len=real.engine.max_model_len, vocab_size=real.vocab_size, grammars=grammars,
    )  # fmt: skip
    server = await serve(app, "127.0.0.1", 0)
    async with (
        httpx.AsyncClient(verify=False) as transport,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=280,
            http_client=transport,
        ) as made,
    ):  # fmt: skip
        yield made
    await server.stop()


async def until_free(real: Real) -> None:
    async with asyncio.timeout(30):
        while real.engine.stats().kv_blocks_used:  # noqa: ASYNC110 - the engine has its own thread
            await asyncio.sleep(0.01)


async def test_answers_and_counts(client: openai.AsyncOpenAI, real: Real) -> None:
    arguments: dict[str, Any] = {"model": "smollm2", "messages": QUESTION, "max_tokens": 16, "extra_body": SAYS_IT}
    answer = await client.chat.completions.create(**arguments)
    assert answer.choices[0].message.content == SENTENCE
    assert answer.choices[0].finish_reason == "stop"
    stream = await client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SENTENCE
    usage = chunks[-1].usage
    assert usage is not None
    assert 7 <= usage.completion_tokens <= 16
    assert 7 <= answer.usage.completion_tokens <= 16
    assert usage.prompt_tokens_details.cached_tokens >= 16
    await until_free(real)


async def generate(client: openai.AsyncOpenAI, number: int) -> None:
    schema = SCHEMAS[number % len(SCHEMAS)]
    answer = await client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": f"Write some JSON about city number {number}."}],
        temperature=1.2,
        seed=number,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop", choice
    # As the standard has it, a format is not asserted: the grammar knows its shape, not the calendar.
    jsonschema.Draft202012Validator(schema).validate(json.loads(choice.message.content))


async def test_structured_answers_are_valid(client: openai.AsyncOpenAI, real: Real) -> None:
    await asyncio.gather(*(generate(client, number) for number in range(10)))
    await until_free(real)


async def test_json_objects_and_grammars(client: openai.AsyncOpenAI) -> None:
    async def ask(answer_format: Any) -> str:
        answer = await client.chat.completions.create(
            model="smollm2", messages=QUESTION, seed=3, max_tokens=100, response_format=answer_format
        )
        assert answer.choices[0].message.content is not None
        return answer.choices[0].message.content

    lark = 'start: CITY ("," CITY)?\nCITY: "Paris" | "Lyon"'
    json_object, regex, sentence = await asyncio.gather(
        ask({"type": "json_object"}),
        ask({"type": "grammar", "grammar": {"syntax": "regex", "definition": "[A-Z][a-z]{2,6} [0-9]{4}"}}),
        ask({"type": "grammar", "grammar": {"syntax": "lark", "definition": lark}}),
    )
    assert json_object.startswith("{")
    assert re.fullmatch("[A-Z][a-z]{2,6} [0-9]{4}", regex)
    assert re.fullmatch("(Paris|Lyon)(,(Paris|Lyon))?", sentence)


HOSTILE: list[dict[str, Any]] = [
    {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(a{1000}){1000}"}},
    {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(ab{1000}c){1000}"}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "ab" * 100_000}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer", "multipleOf": 9973}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer", "multipleOf": 99991}}},
    {"type": "grammar", "grammar": {"syntax": "regex", "definition": "(.{0,1000}x){0,1000}"}},
]


class Clock:
    """Seconds, less those that this process's threads have waited for a core that others had."""

    def __init__(self) -> None:
        self._waited: dict[str, int] = {}

    def read(self) -> float:
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                self._waited[thread.name] = int((thread / "schedstat").read_text().split()[1])
        return time.perf_counter() - sum(self._waited.values()) / 1e9


async def test_hostile_grammars_do_not_hold_up_a_stream(client: openai.AsyncOpenAI) -> None:
    """Each of the first two held the engine for three seconds a token."""

    clock = Clock()

    async def longest_gap() -> float:
        gaps: list[float] = []
        stream = await client.chat.completions.create(
            model="smollm2", messages=QUESTION, seed=1, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        before = None
        async for _ in stream:
            now = clock.read()
            if before is not None:
                gaps.append(now - before)
            before = now
        return max(gaps)

    async def attack(response_format: Any) -> None:
        with contextlib.suppress(openai.APIError):  # refused, or ended by its budget
            await client.chat.completions.create(
                model="smollm2", messages=QUESTION, seed=2, max_tokens=12, response_format=response_format
            )

    async def control() -> None:
        await client.chat.completions.create(model="smollm2", messages=QUESTION, seed=2, max_tokens=12)

    alone, *_ = await asyncio.gather(longest_gap(), *(control() for _ in HOSTILE))
    attacked, *_ = await asyncio.gather(longest_gap(), *(attack(item) for item in HOSTILE))
    print(f"longest pause of a stream: {alone:.3f} s beside ordinary requests, {attacked:.3f} s beside hostile ones")
    assert attacked < 3 * alone + 0.5


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_500_structured_answers_are_valid(client: openai.AsyncOpenAI, real: Real) -> None:
    for start in range(0, 500, 50):
        await asyncio.gather(*(generate(client, number) for number in range(start, start + 50)))
    await until_free(real)


async def test_a_client_that_leaves_frees_its_blocks(client: openai.AsyncOpenAI, real: Real) -> None:
    stream = await client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    assert real.engine.stats().kv_blocks_used > 0
    await stream.close()
    await until_free(real)


async def test_echoed_logprobs_and_choices(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="smollm2", prompt="The capital of France is", echo=True, logprobs=2, max_tokens=2, temperature=0, n=2
    )
    for choice in answer.choices:
        assert choice.text.startswith("The capital of France is")
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text
    score = await client.completions.create(
        model="smollm2", prompt="The capital of France is", echo=True, logprobs=0, max_tokens=0
    )
    assert score.choices[0].text == "The capital of France is"


async def test_logprobs_of_a_prompt_are_those_of_its_echo(client: openai.AsyncOpenAI, real: Real) -> None:
    """Warm or not: cached blocks have none."""
    arguments: dict[str, Any] = {"model": "smollm2", "prompt": "The capital of France is Paris.", "max_tokens": 1}
    await client.completions.create(**arguments)
    plain = await client.completions.create(**arguments, extra_body={"prompt_logprobs": 3})
    echoed = await client.completions.create(**arguments, echo=True, logprobs=3)
    told = plain.choices[0].model_extra["prompt_logprobs"]
    logprobs = echoed.choices[0].logprobs
    ids = real.tokenizer.encode(arguments["prompt"])
    assert len(told) == len(ids) == plain.usage.prompt_tokens
    for each, token, text, value, top in zip(
        told[1:], ids[1:], logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=False
    ):
        own = each[str(token)]
        assert (own["decoded_token"], own["logprob"]) == (text, pytest.approx(value, abs=1e-4))
        assert sorted(entry["rank"] for entry in each.values() if entry["rank"] <= 3) == [1, 2, 3]
        assert {entry["decoded_token"] for entry in each.values()} == set(top)
        better = [entry["logprob"] for entry in each.values() if entry["rank"] < own["rank"]]
        assert all(logprob >= own["logprob"] for logprob in better)
    paris = next(each for each, text in zip(told, logprobs.tokens, strict=False) if text == " Paris")
    assert paris[str(real.tokenizer.encode(" Paris")[0])]["rank"] <= 3, "it is a language model that computes"
    chat = await client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens


async def test_structural_tags_hold_what_a_trigger_begins(client: openai.AsyncOpenAI, real: Real) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
    tags = {"type": "structural_tag", "triggers": ["The"],
            "structures": [{"begin": "The city=", "schema": schema, "end": ";"}]}  # fmt: skip
    answer = await client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=40, response_format=tags,
        logit_bias={str(real.tokenizer.encode("The")[0]): 100},
    )  # fmt: skip
    text = answer.choices[0].message.content
    before, *tagged = text.split("The")
    assert before == ""
    assert tagged
    for index, piece in enumerate(tagged, 1):
        cut_off = index == len(tagged) and answer.choices[0].finish_reason == "length"
        assert cut_off or re.match(r' city=\{\s*"city"\s*:\s*"(Paris|Rome)"\s*\};', piece), text
