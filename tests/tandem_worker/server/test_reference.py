"""Every option that OpenAI's client knows is taken, or refused with a sentence that names it."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from tandem_worker.engine.errors import RequestError
from tandem_worker.server.dialects.openai.chat_request import parse_chat
from tandem_worker.server.dialects.openai.completion_request import parse_completion
from tandem_worker.server.dialects.openai.pooling_requests import parse_embedding

USER: Any = [{"role": "user", "content": "x"}]
FUNCTION: Any = {"type": "function", "function": {"name": "f"}}
COMMON: dict[str, list[Any]] = {
    "frequency_penalty": [1.5],
    "logit_bias": [{"7": -100}],
    "max_tokens": [5],
    "n": [2],
    "presence_penalty": [-2],
    "seed": [7],
    "stop": ["x", ["x", "y"]],
    "stream_options": [],  # together with `stream`, see below
    "temperature": [0],
    "top_p": [0.5],
    "user": ["u"],
}
CHAT: dict[str, list[Any]] = {
    **COMMON,
    "logprobs": [True],
    "max_completion_tokens": [5],
    "messages": [USER],
    "metadata": [{"a": "b"}],
    "modalities": [["text"]],
    "model": ["m"],
    "parallel_tool_calls": [False],
    "prediction": [
        {"type": "content", "content": "x"},
        {"type": "content", "content": [{"type": "text", "text": "x"}]},
    ],
    "prompt_cache_key": ["k"],
    "prompt_cache_retention": ["in_memory"],
    "reasoning_effort": ["low"],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}],
    "safety_identifier": ["s"],
    "service_tier": ["auto", "default"],
    "store": [False],
    "tool_choice": ["none"],
    "tools": [[FUNCTION]],
    "top_logprobs": [],  # together with `logprobs`
    "verbosity": ["medium"],
}
CHAT_REFUSED: dict[str, list[Any]] = {
    "audio": [{"voice": "x", "format": "wav"}],
    "function_call": ["auto"],
    "functions": [[{"name": "f"}]],
    "modalities": [["text", "audio"]],
    "moderation": [{"model": "omni"}],
    "prompt_cache_options": [{}],
    "prompt_cache_retention": ["24h"],
    "service_tier": ["flex", "priority"],
    "store": [True],
    "verbosity": ["low", "high"],
    "web_search_options": [{}],
}
COMPLETION: dict[str, list[Any]] = {
    **COMMON, "best_of": [1], "echo": [True], "logprobs": [3], "model": ["m"], "prompt": ["x", ["x"], [1], [[1]]],
    "suffix": [""],
}  # fmt: skip
COMPLETION_REFUSED: dict[str, list[Any]] = {"best_of": [3], "suffix": ["end"]}
EMBEDDING: dict[str, list[Any]] = {
    "dimensions": [3], "encoding_format": ["float", "base64"], "input": ["x", ["x"], [1], [[1]]], "model": ["m"],
    "user": ["u"],
}  # fmt: skip


def chat(**options: Any) -> Any:
    return parse_chat({"model": "m", "messages": USER, **options}, 100)


def completion(**options: Any) -> Any:
    return parse_completion({"model": "m", "prompt": "x", **options}, 100)


def embedding(**options: Any) -> Any:
    return parse_embedding({"model": "m", "input": "x", **options}, 100, 8)


@pytest.mark.parametrize(
    ("documented", "taken", "refused"),
    [
        (chat_create_params.CompletionCreateParamsBase, CHAT, CHAT_REFUSED),
        (completion_create_params.CompletionCreateParamsBase, COMPLETION, COMPLETION_REFUSED),
        (embedding_create_params.EmbeddingCreateParams, EMBEDDING, {}),
    ],
)
def test_the_tables_are_complete(documented: Any, taken: dict[str, Any], refused: dict[str, Any]) -> None:
    assert set(documented.__annotations__) == taken.keys() | refused.keys()


@pytest.mark.parametrize(
    ("parse", "options"), [(chat, CHAT), (completion, COMPLETION), (embedding, EMBEDDING)]
)  # fmt: skip
def test_what_is_taken(parse: Any, options: dict[str, list[Any]]) -> None:
    for name, values in options.items():
        for value in values:
            parse(**{name: value})


def test_options_that_need_another() -> None:
    for parse in (chat, completion):
        assert parse(stream=True, stream_options={"include_usage": True}).common.include_usage
    assert chat(logprobs=True, top_logprobs=5).num_logprobs == 5
    assert chat(tools=[FUNCTION], tool_choice="required").tools.mode == "required"


@pytest.mark.parametrize(("parse", "options"), [(chat, CHAT_REFUSED), (completion, COMPLETION_REFUSED)])
def test_what_is_refused(parse: Any, options: dict[str, list[Any]]) -> None:
    for name, values in options.items():
        for value in values:
            with pytest.raises(RequestError, match=name) as refusal:
                parse(**{name: value})
            assert (refusal.value.param, refusal.value.code) == (name, "unsupported_parameter")
