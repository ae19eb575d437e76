"""What a client sees who sends grammars that cannot be compiled, and what others see meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import httpx
import pytest
from tandem_worker.server.structured.compiler import GrammarCompiler

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
CHAIN = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(3000)), 'r3000: "a"', ""])


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {"response_format": {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}}


def tools(*parameters: Any) -> dict[str, Any]:
    functions = [{"name": f"f{i}", "parameters": item, "strict": True} for i, item in enumerate(parameters)]
    return {"tools": [{"type": "function", "function": function} for function in functions]}


def tag(content: Any) -> dict[str, Any]:
    form = {"type": "triggered_tags", "triggers": ["<"], "tags": [{"begin": "<a>", "content": content, "end": "</a>"}]}
    return {"response_format": {"type": "structural_tag", "format": form}}


def nest(depth: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(depth):
        value = {"type": "array", "items": value}
    return value


async def ask(worker: Any, body: dict[str, Any]) -> httpx.Response:
    return await worker.http.post("/v1/chat/completions", json=HELLO | body)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (schema(nest(200)), "response_format.json_schema.schema", "at most 100 levels"),
        (schema({"enum": list(range(100_000))}), "response_format.json_schema.schema", "at most 20000"),
        (schema({"const": "x" * 600_000}), "response_format.json_schema.schema", "512 KiB"),
        (schema({"type": "integer", "multipleOf": 99991}), "response_format.json_schema.schema", "'multipleOf'"),
        (schema({"patternProperties": {f"^a{i}x*$": {} for i in range(400)}}), "response_format.json_schema.schema",
         "'patternProperties'"),
        (schema({"allOf": [{"anyOf": [{"properties": {f"x{i}{j}": {}}} for j in range(5)]} for i in range(40)]}),
         "response_format.json_schema.schema", "too large"),
        (grammar("regex", "(a|b)*" * 17_000), "response_format.grammar.definition", "16 KiB"),
        (grammar("regex", "(a|b)*" * 1_000_000), "response_format", "at most 524288"),
        (grammar("regex", "(" * 200 + "a" + ")" * 200), "response_format.grammar.definition", "100 levels"),
        (grammar("lark", CHAIN), "response_format.grammar.syntax", "freeFormGrammars: true"),
        (tag({"type": "json_schema", "json_schema": nest(200)}), "response_format", "at most 100 levels"),
        (tag({"type": "json_schema", "json_schema": {"type": "integer", "multipleOf": 99991}}), "response_format",
         "'multipleOf'"),
        (tag({"type": "regex", "pattern": "(a|b)*"}), "response_format.format.tags[0].content.type", "json_schema"),
        (tools({"type": "object"}, nest(200)), "tools[1].function.parameters", "at most 100 levels"),
        (tools({"type": "object"}, {"properties": {"a": {"type": "objekt"}}}),
         "tools[1].function.parameters", "objekt"),
    ],
)  # fmt: skip
async def test_what_cannot_be_compiled_is_refused(worker: Any, body: Any, param: str, words: str) -> None:
    response = await ask(worker, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


async def test_free_form_grammars_are_turned_on_by_the_configuration(start_worker: Any, tokenizer: Any) -> None:
    async with start_worker(tokenizer, free_form_grammars=True) as worker:
        assert (await ask(worker, grammar("lark", 'start: "a" | "b"'))).status_code == 200
        response = await ask(worker, grammar("lark", CHAIN))
        assert response.status_code == 400
        assert "3002 rules: at most 1000" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "response_format.grammar.definition"


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "string", "minLength": '0}/ | "anything" | /.{1'}}},
        {"properties": {"a": {"type": "string", "enum": 5}}},
        {"properties": 5},
        {"properties": {"a": 5}, "required": 7},
        {"properties": {f"p{number}": {} for number in range(130)}},
    ],
)
async def test_schemas_are_not_written_into_grammars_unread(
    start_worker: Any, tokenizer: Any, name: str, parameters: Any
) -> None:
    async with start_worker(tokenizer, tool_format=name) as worker:
        response = await ask(worker, tools({"type": "object", **parameters}))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools[0].function.parameters"


async def test_without_the_process_requests_fail_and_the_worker_is_well(
    start_worker: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    grammars = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    try:
        async with start_worker(tokenizer, grammars=grammars) as worker:
            response = await ask(worker, schema({"const": 1}))
            assert response.status_code == 503
            assert "/no/such/python" in response.json()["error"]["message"]
            assert (await ask(worker, {})).status_code == 200
    finally:
        grammars.close()


async def test_the_process_may_be_killed_under_requests(start_worker: Any, tokenizer: Any) -> None:
    grammars = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    try:
        async with start_worker(tokenizer, grammars=grammars) as worker:
            assert (await ask(worker, schema({"const": 0}))).status_code == 200
            process = grammars.process_id
            assert process is not None
            asked = [asyncio.create_task(ask(worker, schema({"const": number}))) for number in range(1, 9)]
            await asyncio.sleep(0.02)
            os.kill(process, signal.SIGKILL)
            for response in await asyncio.gather(*asked):
                assert response.status_code in {200, 503}, response.text
            for _ in range(100):
                if (await ask(worker, schema({"const": 9}))).status_code == 200:
                    break
                await asyncio.sleep(0.1)
            else:
                pytest.fail("the process has not come back")
            assert grammars.process_id not in {None, process}
            assert (await ask(worker, {})).status_code == 200
    finally:
        grammars.close()
