"""Requests are the same wherever they are prepared, and what waits for it is bounded."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

import orjson
import pytest
from tandem_worker.engine.errors import ContextLengthError, RequestError
from tandem_worker.host.isolation.contract import Limits
from tandem_worker.server.prepare import placing as preparation
from tandem_worker.server.prepare.fitting import observe_bound
from tandem_worker.server.prepare.job import KINDS, MAX_DEFINITION_BYTES, SETUP, _run, pack_setup, unpack
from tandem_worker.server.prepare.placing import Preparation
from tandem_worker.server.prepare.preparer import Preparer
from tandem_worker.server.prepare.prompting import Prompter
from tandem_worker.server.prepare.rules import PromptRules
from tandem_worker.server.structured.limits import GrammarLimits
from tandem_worker.server.wire import intake
from tandem_worker.server.wire.http import ClientGoneError, ServiceError, describe_error

RULES = PromptRules(
    name="tiny", max_model_len=40_000, vocab_size=300, start_token=0, embedding_size=8, grammar_limits=GrammarLimits()
)
LONG = "hello world " * 3000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def body_of(**fields: Any) -> bytes:
    return orjson.dumps({"model": "tiny"} | fields)


def chat(content: str = "hello", **fields: Any) -> bytes:
    return body_of(messages=[{"role": "user", "content": content}], seed=1, **fields)


FLAT_TOOL = {"type": "function", **TOOL["function"]}


def requests() -> dict[str, tuple[str, bytes]]:
    return {
        "a chat": ("chat", chat(LONG, stop=["x"], logit_bias={"1": 2}, max_tokens=5)),
        "a chat with tools": ("chat", chat(LONG, tools=[TOOL], tool_choice="required")),
        "an answer to continue": ("chat", body_of(
            messages=[{"role": "assistant", "content": LONG}], continue_final_message=True, seed=1)),
        "texts": ("completion", body_of(prompt=[LONG, "", "x"], seed=1)),
        "an echo": ("completion", body_of(prompt=LONG, echo=True, seed=1)),
        "token ids": ("completion", body_of(prompt=[[1, 2] * 9000, [3]], seed=1)),
        "inputs": ("embedding", body_of(input=[LONG, "x"])),
        "texts to compare": ("score", body_of(queries=LONG, documents=["x", LONG])),
        "texts to rank": ("rerank", body_of(query="x", documents=[LONG, {"text": "y"}])),
        "text to count": ("tokenize", body_of(prompt=LONG)),
        "a chat to count": ("tokenize", chat(LONG)),
        "a response": ("responses", body_of(input=LONG, instructions="x", seed=1, tools=[FLAT_TOOL])),
        "a message": ("messages", body_of(messages=[{"role": "user", "content": LONG}], max_tokens=5, seed=1)),
        "a message to count": ("count", body_of(messages=[{"role": "user", "content": LONG}], system="x")),
        "tokens to read": ("detokenize", body_of(tokens=[70] * 20_000)),
    }  # fmt: skip


@pytest.fixture(scope="module")
def preparer(tokenizer: Any) -> Preparer:
    return Preparer(Prompter(tokenizer), RULES, observe_bound(tokenizer.backend_tokenizer))


@pytest.fixture
async def prepared_apart(tokenizer: Any, preparer: Preparer) -> AsyncIterator[Preparation]:
    pack = partial(pack_setup, tokenizer, RULES, observe_bound(tokenizer.backend_tokenizer))
    made = Preparation(preparer, pack)
    yield made
    made.close()


class Client:
    """An ASGI `receive` that sends `chunks` and then stays, until it leaves."""

    def __init__(self, *chunks: bytes, complete: bool = True) -> None:
        self._chunks = list(chunks)
        self._complete = complete
        self.gone = asyncio.Event()

    async def __call__(self) -> dict[str, Any]:
        if self._chunks:
            chunk = self._chunks.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks) or not self._complete}
        await self.gone.wait()
        return {"type": "http.disconnect"}


def pieces_of(body: bytes, size: int = 60_000) -> Iterable[bytes]:
    return (body[start : start + size] for start in range(0, len(body), size))


SCOPE: dict[str, Any] = {"headers": []}


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_both_ways_lead_to_the_same(prepared_apart: Preparation, preparer: Preparer) -> None:
    for name, (kind, body) in requests().items():
        here = preparer.prepare(kind, body)
        assert len(body) > intake.SMALL_BODY_BYTES, name
        apart = await prepared_apart.prepare(kind, SCOPE, Client(*pieces_of(body)))
        if isinstance(here, bytes):
            assert apart == here
            continue
        assert type(apart) is type(here)
        assert apart.request.model == here.request.model
        if kind in ("embedding", "score", "rerank"):
            assert [list(each) for each in apart.tokens] == [list(each) for each in here.tokens]
            continue
        assert apart.request.common == here.request.common
        assert apart.room == here.room
        assert getattr(apart, "echo", None) == getattr(here, "echo", None)
        if kind in ("chat", "responses", "messages"):
            assert list(apart.tokens) == list(here.tokens)
            assert apart.prompt_end == here.prompt_end
            assert [tool.parameters for tool in apart.request.tools.tools] == [
                tool.parameters for tool in here.request.tools.tools
            ]
        else:
            assert [list(each) for each in apart.tokens] == [list(each) for each in here.tokens]
            assert apart.request.prompts == (here.request.prompts if here.request.echo else ())
    assert prepared_apart.intake.held_bytes == 0
    assert prepared_apart.counts.isolated == 0
    assert prepared_apart.counts.isolated_total == len(requests())


def test_the_process_for_large_requests_loads_no_library_that_it_does_not_need() -> None:
    program = f"import sys, {SETUP.partition(':')[0]}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"numpy", "llguidance", "torch", "transformers"} & set(done.stdout.split())


def test_every_kind_has_a_function(preparer: Preparer) -> None:
    assert {kind for kind, _ in requests().values()} == set(KINDS)


@pytest.mark.parametrize(("kind", "fields"), [
    ("completion", {"prompt": "x" * 2_000_000}),
    ("completion", {"prompt": ["x", "x" * 2_000_000]}),
    ("chat", {"messages": [{"role": "user", "content": "x" * 2_000_000}]}),
    ("embedding", {"input": ["x" * 2_000_000]}),
    ("tokenize", {"prompt": "x" * 2_000_000}),
])  # fmt: skip
def test_what_cannot_fit_is_not_tokenized(preparer: Preparer, kind: str, fields: dict[str, Any]) -> None:
    draft = preparer.draft(kind, body_of(**fields))
    with pytest.raises(ContextLengthError, match=r"length is 40000 tokens.* at least \d{6}"):
        preparer.encode(draft)


def test_what_might_fit_is_counted(preparer: Preparer) -> None:
    with pytest.raises(ContextLengthError, match="The prompt has 50000 tokens and 16 were requested"):
        preparer.prepare("completion", body_of(prompt="x" * 50_000))


def test_refusals_come_back_as_they_were(preparer: Preparer) -> None:
    for body in (b"{", b'{"model": 1}', body_of(model="other", prompt="x"), body_of(prompt="x" * 50_000)):
        with pytest.raises(RequestError) as here:
            preparer.prepare("completion", body)
        with pytest.raises(type(here.value)) as apart:
            unpack(_run(preparer, "completion", body))
        for name in ("param", "code", "status"):
            assert getattr(apart.value, name) == getattr(here.value, name)
        assert str(apart.value) == str(here.value)


@pytest.mark.parametrize("call", [os.system, eval, dataclasses.replace, Prompter, pickle.loads, Preparer.prepare])
def test_what_comes_back_is_data_whoever_wrote_it(call: Any) -> None:
    """A template that broke out of its sandbox writes the answer of its process as it likes."""

    class Harm:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return call, ("print(1)",)

    with pytest.raises(pickle.UnpicklingError, match="is no part of a prepared request"):
        unpack(pickle.dumps((False, Harm(), None, None, 400)))


def test_schemas_that_nothing_could_compile_stay_where_they_are(preparer: Preparer) -> None:
    long = {"type": "object", "description": "é" * (MAX_DEFINITION_BYTES // 2)}
    format_ = {"type": "json_schema", "json_schema": {"name": "s", "schema": long}}
    tool = {"type": "function", "function": {"name": "f", "parameters": long}}
    for fields, param in (({"response_format": format_}, "response_format"), ({"tools": [tool]}, "tools")):
        roomy = Preparer(preparer._prompter, PromptRules(**vars_of(RULES) | {"max_model_len": 10**9}), None)
        with pytest.raises(RequestError, match="at most 524288 are supported") as refused:
            unpack(_run(roomy, "chat", chat(**fields)))
        assert refused.value.param == param


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


async def test_a_schema_that_is_nested_too_deeply_is_the_clients_error_on_both_ways(
    prepared_apart: Preparation,
) -> None:
    deep = nested(150)
    format_ = {"type": "json_schema", "json_schema": {"name": "s", "schema": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    for fields, param in (
        ({"response_format": format_}, "response_format.json_schema.schema"),
        ({"tools": [tool]}, "tools[0].function.parameters"),
    ):
        for content in ("x", LONG):  # the longer one goes to a process of its own
            body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}).encode()
            with pytest.raises(RequestError, match="nested too deeply") as refused:
                await prepared_apart.prepare("chat", SCOPE, Client(body))
            assert (refused.value.status, refused.value.param) == (400, param)


def vars_of(rules: PromptRules) -> dict[str, Any]:
    return {name: getattr(rules, name) for name in PromptRules.__slots__}


async def test_bodies_together_are_bounded(prepared_apart: Preparation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_HELD_BYTES", 150_000)
    slow = Client(b"x" * 100_000, complete=False)
    holding = asyncio.create_task(prepared_apart.prepare("chat", SCOPE, slow))
    await until(lambda: prepared_apart.intake.held_bytes == 0 and not slow._chunks)
    slow._chunks = [b"x" * 10]
    slow.gone.set()
    with pytest.raises(ClientGoneError):
        await holding
    assert prepared_apart.intake.held_bytes == 0
    held = Client(*pieces_of(b"x" * 100_000), complete=False)
    holding = asyncio.create_task(prepared_apart.prepare("chat", SCOPE, held))
    await until(lambda: prepared_apart.intake.held_bytes == 100_000)
    with pytest.raises(RequestError, match="try again later") as refused:
        await prepared_apart.prepare("chat", SCOPE, Client(*pieces_of(b"x" * 60_000)))
    assert refused.value.status == 429
    assert prepared_apart.counts.refused_total == 1
    # Small requests are none of it.
    small = await prepared_apart.prepare("chat", SCOPE, Client(chat()))
    assert small.tokens
    held.gone.set()
    with pytest.raises(ClientGoneError):
        await holding
    assert prepared_apart.intake.held_bytes == 0


@pytest.mark.parametrize("parts", [(), (b"x" * 40_000, b"x")])
async def test_a_body_must_end(
    prepared_apart: Preparation, monkeypatch: pytest.MonkeyPatch, parts: tuple[bytes, ...]
) -> None:
    monkeypatch.setattr(intake, "BODY_SECONDS", 0.1)
    with pytest.raises(RequestError, match=r"not complete after 0\.1 s") as refused:
        await prepared_apart.prepare("chat", SCOPE, Client(*parts, complete=False))
    assert refused.value.status == 408
    assert prepared_apart.intake.held_bytes == 0


async def test_who_leaves_while_waiting_costs_nothing(
    prepared_apart: Preparation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_apart, "_medium", asyncio.Semaphore(0))
    client = Client(chat(LONG))
    waiting = asyncio.create_task(prepared_apart.prepare("chat", SCOPE, client))
    await until(lambda: prepared_apart.counts.isolated == 1)
    client.gone.set()
    with pytest.raises(ClientGoneError):
        await waiting
    await until(lambda: prepared_apart.intake.held_bytes == 0 and prepared_apart.counts.isolated == 0)
    assert prepared_apart.counts.isolated_total == 0


async def test_who_leaves_takes_the_job_along(prepared_apart: Preparation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lane is free at once, and not after the minute that the job might go on for."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def never_ends(*_: Any) -> bytes:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()  # a call that is given up ends its job
        raise AssertionError("unreachable")

    with monkeypatch.context() as patch:
        patch.setattr(prepared_apart, "_call", never_ends)
        client = Client(chat(LONG))
        waiting = asyncio.create_task(prepared_apart.prepare("chat", SCOPE, client))
        await begun.wait()
        client.gone.set()
        with pytest.raises(ClientGoneError):
            await waiting
        await asyncio.sleep(0)
    assert ended.is_set()
    assert (prepared_apart.counts.isolated, prepared_apart.intake.held_bytes) == (0, 0)
    assert (await prepared_apart.prepare("chat", SCOPE, Client(chat(LONG)))).tokens


async def test_where_large_requests_cannot_be_prepared_others_still_can(prepared_apart: Preparation) -> None:
    """The answer says so: a gateway must not take this worker for one that stops."""
    prepared_apart.start().close()
    with pytest.raises(ServiceError, match="cannot prepare large requests") as caught:
        await prepared_apart.prepare("chat", SCOPE, Client(chat(LONG)))
    status, _, headers = describe_error(caught.value)
    assert (status, headers) == (503, {"x-tandem-retry": "request"})
    assert (await prepared_apart.prepare("chat", SCOPE, Client(chat("hello")))).tokens


@pytest.mark.parametrize("fails", [RequestError("refused"), ServiceError("later", status=503), ZeroDivisionError("x")])
async def test_what_happens_after_the_client_left_is_told_only_if_it_is_a_defect(
    prepared_apart: Preparation,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: Exception,
) -> None:
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    client = Client(chat(LONG))

    async def refuse(job: str, body: bytes, seconds: float) -> bytes:
        client.gone.set()
        try:
            await asyncio.sleep(0.3)
        finally:
            raise fails

    monkeypatch.setattr(prepared_apart, "_call", refuse)
    with pytest.raises(ClientGoneError):
        await prepared_apart.prepare("chat", SCOPE, client)
    await until(lambda: prepared_apart.counts.isolated == 0)
    gc.collect()
    await asyncio.sleep(0)
    assert not unheard
    told = [record for record in caplog.records if record.exc_info and record.exc_info[1] is fails]
    assert len(told) == isinstance(fails, ZeroDivisionError)


async def test_a_crowd_is_told_to_come_back(prepared_apart: Preparation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_apart, "_medium", asyncio.Semaphore(0))
    monkeypatch.setattr(preparation, "MAX_WAITING", 0)
    clients = [Client(chat(LONG)) for _ in range(preparation.NUM_MEDIUM + preparation.NUM_LARGE + 1)]
    tasks = [asyncio.create_task(prepared_apart.prepare("chat", SCOPE, client)) for client in clients]
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    (refused,) = done
    assert isinstance(refused.exception(), RequestError)
    assert refused.exception().status == 429  # type: ignore[union-attr]
    for client in clients:
        client.gone.set()
    for task in waiting:
        with pytest.raises(ClientGoneError):
            await task
    await until(lambda: prepared_apart.intake.held_bytes == 0)


async def test_a_request_that_takes_too_much_ends_alone(
    prepared_apart: Preparation, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = Limits(memory_bytes=64 << 20, stack_bytes=8 << 20, cpu_seconds=20.0, answer_bytes=1 << 20)
    monkeypatch.setattr(preparation, "JOB_LIMITS", limits)
    with pytest.raises(
        RequestError, match=r"too complex: preparing its .* takes more than 64 MiB of memory"
    ) as refused:
        await prepared_apart.prepare("chat", SCOPE, Client(*pieces_of(b"[" + b"[]," * 2_000_000 + b"1]")))
    assert (refused.value.status, refused.value.code) == (400, "request_too_complex")
    assert (await prepared_apart.prepare("chat", SCOPE, Client(chat(LONG)))).tokens
    assert prepared_apart.counts.refused_total == 1
