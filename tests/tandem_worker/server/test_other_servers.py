"""Options that vLLM's and SGLang's servers take: done, taken where they change nothing, or refused by name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.names import HEADER_IGNORED, HEADER_LENIENT
from tandem_worker.server.structured.contract import GrammarError
from tandem_worker.server.structured.token_masks import AllowedTokens, BadWords

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello"}]
LENIENT = {HEADER_LENIENT: "true"}


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": USER} if path == CHAT else {"prompt": "x"}
    return {"model": "tiny", "max_tokens": 4, **prompt, **fields}


async def post(worker: Any, path: str, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    response = await worker.http.post(path, json=body(path, **fields), headers=headers)
    assert response.status_code == 200, (fields, response.text)
    return response


async def refusal(worker: Any, path: str, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    response = await worker.http.post(path, json=body(path, **fields), headers=headers)
    assert response.status_code == 400, (fields, response.text)
    return response.json()["error"]


NO_OPS: list[dict[str, Any]] = [
    {"use_beam_search": False}, {"length_penalty": 1.0}, {"early_stopping": False}, {"bad_words": []},
    {"skip_special_tokens": True}, {"spaces_between_special_tokens": True}, {"include_stop_str_in_output": False},
    {"guided_json": None}, {"structured_outputs": None}, {"structured_outputs": {"disable_fallback": True}},
    {"prompt_logprobs": None}, {"truncate_prompt_tokens": None}, {"best_of": 1}, {"include_reasoning": True},
    {"separate_reasoning": True}, {"stream_reasoning": True}, {"return_hidden_states": False}, {"stop_regex": []},
    {"regex": None}, {"ebnf": None}, {"lora_path": None}, {"kv_transfer_params": None}, {"no_stop_trim": False},
    {"return_tokens_as_token_ids": False}, {"custom_params": None}, {"logits_processors": None}, {"request_id": None},
    {"stream": True, "stream_options": {"continuous_usage_stats": True}}, {"truncation_side": "left"},
    {"response_format": {"type": "text"}, "guided_regex": "[0-9]"}, {"model": None},
    {"session_id": "s"}, {"stream_interval": 1}, {"mm_payload": "tensors"}, {"return_meta_info": False},
    {"routed_experts_start_len": 0}, {"custom_labels": {}}, {"watermarking": False},
    {"suffix": None}, {"documents": None}, {"chat_template": None}, {"unheard_of": None},
]  # fmt: skip


async def test_what_changes_nothing_is_taken(worker: Any) -> None:
    worker.says("a")
    for fields in NO_OPS:
        for path in (CHAT, TEXT):
            await post(worker, path, **fields)
    for fields in ({"chat_template": None}, {"documents": []}, {"echo": False}, {"add_special_tokens": False},
                   {"tool_choice": "auto"}, {"tool_choice": "none"}):  # fmt: skip
        await post(worker, CHAT, **fields)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_rest_is_refused_by_name(worker: Any, path: str) -> None:
    refused: dict[str, Any] = {
        "use_beam_search": True, "length_penalty": 0.5,
        "lora_path": "x", "kv_transfer_params": {"a": 1}, "return_hidden_states": True, "separate_reasoning": False,
        "guided_whitespace_pattern": " ", "guided_decoding_backend": "outlines", "request_id": "r", "rid": "r",
        "session_params": {"id": "x"}, "best_of": 3, "thinking_token_budget": 5,
        "truncation_side": "right", "logprob_token_ids": [1], "watermarking": True, "stream_interval": 4,
        "return_weight_versions": True, "repetition_detection": {"max_pattern_size": 3}, "return_prompt_text": True,
        "reasoning": {"effort": "low"}, "input_ids": [1], "return_meta_info": True, "routed_dp_rank": 0,
        "return_prompt_token_ids": True, "custom_labels": {"a": "b"}, "use_audio_in_video": True,
    }  # fmt: skip
    for name, value in refused.items():
        error = await refusal(worker, path, **{name: value})
        assert (error["param"], error["code"]) == (name, "unsupported_parameter"), error
        assert name in error["message"]
    assert worker.engine.requests == []


async def test_refused_in_chats(worker: Any) -> None:
    for fields, param in (
        ({"chat_template": "{{ messages }}"}, "chat_template"), ({"chat_template": ""}, "chat_template"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"echo": True}, "echo"),
        ({"tool_choice": "required"}, "tool_choice"), ({"response_format": {"type": "structural_tag"}},
        "response_format.structures"),
    ):  # fmt: skip
        assert (await refusal(worker, CHAT, **fields))["param"] == param


def tagged(end: str, schema: Any) -> dict[str, Any]:
    return {"structures": [{"begin": "<f>", "schema": schema, "end": end}], "triggers": ["<f"]}


TAGS = tagged("</f>", {"type": "integer"})
NESTED: Any = {"type": "string"}
for _ in range(120):
    NESTED = {"type": "array", "items": NESTED}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": "{"}, "guided_json"), ({"guided_json": [1]}, "guided_json"), ({"guided_regex": 1}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"), ({"guided_choice": ["a", ""]}, "guided_choice[1]"),
    ({"guided_choice": ["a", 1]}, "guided_choice[1]"), ({"guided_regex": "("}, "guided_regex"),
    ({"guided_json": {"type": "object", "not": {}}}, "guided_json"), ({"ebnf": ""}, "ebnf"),
    ({"structured_outputs": {"x": 1}}, "structured_outputs.x"),
    ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ({"guided_grammar": "start: /a/"}, "guided_grammar"), ({"ebnf": "root ::= \"a\""}, "ebnf"),
    ({"allowed_token_ids": []}, "allowed_token_ids"), ({"allowed_token_ids": [10**6]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [1], "regex": "a"}, "allowed_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"bad_words": "no"}, "bad_words"), ({"bad_words": [1]}, "bad_words[0]"),
    ({"bad_words": ["a", " "]}, "bad_words[1]"),
    ({"bad_words": ["a"] * 65}, "bad_words"), ({"bad_words": ["a" * 129]}, "bad_words[0]"),
    ({"bad_words": ["a"], "regex": "a"}, "bad_words"), ({"bad_words": ["a"], "allowed_token_ids": [1]}, "bad_words"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"), ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": True}, "prompt_logprobs"), ({"prompt_logprobs": 1.0}, "prompt_logprobs"),
    ({"prompt_logprobs": "1"}, "prompt_logprobs"), ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"structural_tag": "{"}, "structural_tag"), ({"structural_tag": "{}"}, "structural_tag.structures"),
    ({"structural_tag": {"type": "x"}}, "structural_tag.type"), ({"structural_tag": []}, "structural_tag"),
    ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs.structural_tag"),
    ({"structural_tag": TAGS, "regex": "a"}, "structural_tag"),
    ({"structural_tag": TAGS, "min_tokens": 2}, "min_tokens"),
    ({"structural_tag": TAGS, "bad_words": ["a"]}, "bad_words"),
    ({"structural_tag": TAGS, "ignore_eos": True}, "ignore_eos"),
    ({"structural_tag": {"format": {"type": "regex", "pattern": "("}}}, "structural_tag.format.type"),
    ({"structural_tag": tagged("<|im_end|>", {})}, "structural_tag"),
    ({"structural_tag": tagged("</f>", {"not": {}})}, "structural_tag"),
    ({"structural_tag": tagged("</f>", {"enum": [*range(30_000)]})}, "structural_tag"),
    ({"structural_tag": tagged("</f>", NESTED)}, "structural_tag"),
    ({"logit_bias": {"": 1}}, "logit_bias"), ({"logit_bias": {"01": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"), ({"logit_bias": {"x" * 65: 1}}, "logit_bias"),
    ({"logit_bias": {"one two three": 1}}, "logit_bias"), ({"logit_bias": {"a": 101}}, "logit_bias.a"),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_wrong_values_are_named(worker: Any, path: str) -> None:
    for fields, param in WRONG:
        assert (await refusal(worker, path, **fields))["param"] == param, fields
    assert worker.engine.requests == []


# -- other names for structured output ---------------------------------------------------------------------------------


def admits(worker: Any, factory: Any, text: str) -> bool:
    """Whether the grammar lets this be a whole answer."""
    grammar, mask = factory.new(), np.zeros(((len(worker.tokenizer) + 31) // 32,), dtype=np.int32)
    for token in [*worker.tokenizer.encode(text), worker.tokenizer.eos_token_id]:
        grammar.fill_mask(mask)
        if not (mask[token // 32] >> (token % 32)) & 1:
            return False
        grammar.accept(token)
    return True


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
SAME: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"guided_json": SCHEMA}, ['{"a":1}'], ["{}", "x"]),
    ({"guided_json": json.dumps(SCHEMA)}, ['{"a":1}'], ["{}"]),
    ({"json_schema": json.dumps(SCHEMA)}, ['{"a":1}'], ["{}"]),
    ({"structured_outputs": {"json": SCHEMA}}, ['{"a":1}'], ["{}"]),
    ({"structured_outputs": {"json_object": True}}, ["{}", '{"b":"c"}'], ["1"]),
    ({"guided_regex": "[0-9]{2}"}, ["12"], ["1", "123"]),
    ({"regex": "[0-9]{2}"}, ["12"], ["1"]),
    ({"structured_outputs": {"regex": "a/b"}}, ["a/b"], ["a"]),
    ({"guided_choice": ["yes", "no (a+b)*?", "a/b\\c", "[x]{2}^$|#&~-é \"\n<>'"]},
     ["yes", "no (a+b)*?", "a/b\\c", "[x]{2}^$|#&~-é \"\n<>'"], ["no", "xx", "yes "]),
    ({"structured_outputs": {"choice": ["a", "b"]}}, ["a", "b"], ["c", "ab"]),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_other_names_for_structured_output(worker: Any, path: str) -> None:
    worker.says("a")
    for fields, good, bad in SAME:
        await post(worker, path, **fields)
        factory = worker.engine.requests[-1].sampling.grammar
        assert all(admits(worker, factory, text) for text in good), fields
        assert not any(admits(worker, factory, text) for text in bad), fields


@pytest.fixture
async def free_worker(start_worker: Any, tokenizer: Any) -> AsyncIterator[Any]:
    async with start_worker(tokenizer, free_form_grammars=True) as running:
        yield running


async def test_grammars_of_two_dialects(free_worker: Any) -> None:
    free_worker.says("a")
    for fields in (
        {"ebnf": 'root ::= "yes" | "no" digit+\ndigit ::= [0-9]\n'},
        {"guided_grammar": 'root ::= "yes" | "no" [0-9]+'},
        {"guided_grammar": 'start: "yes" | "no" /[0-9]+/'},
        {"structured_outputs": {"grammar": 'start: "yes" | "no" /[0-9]+/'}},
    ):
        await post(free_worker, CHAT, **fields)
        factory = free_worker.engine.requests[-1].sampling.grammar
        assert admits(free_worker, factory, "yes")
        assert admits(free_worker, factory, "no12")
        assert not admits(free_worker, factory, "no")
    for bad in ("root ::= [", "root ::= missing", "root ::= " + "(" * 200):
        error = await refusal(free_worker, CHAT, ebnf=bad)
        assert (error["param"], error["code"]) == ("ebnf", "invalid_grammar")
    many = "root ::= r1\n" + "\n".join(f'r{index} ::= "a"' for index in range(1, 200))
    assert "at most 100" in (await refusal(free_worker, CHAT, ebnf=many))["message"]


async def test_allowed_tokens(worker: Any) -> None:
    worker.says("a")
    await post(worker, TEXT, allowed_token_ids=[3, 40])
    mask = np.full(20, -1, dtype=np.int32)
    grammar = worker.engine.requests[-1].sampling.grammar.new()
    grammar.fill_mask(mask)
    assert {word * 32 + bit for word in range(20) for bit in range(32) if mask[word] >> bit & 1} == {3, 40}
    assert not grammar.terminated


def test_allowed_tokens_hold_at_the_edges_of_words() -> None:
    tokens = {0, 31, 32, 63, 64, 99}
    mask = np.full(6, -1, dtype=np.int32)
    AllowedTokens(tokens, 100).new().fill_mask(mask)
    assert {word * 32 + bit for word in range(6) for bit in range(32) if mask[word] >> bit & 1} == tokens


def forbidden(grammar: Any, num_words: int = 4) -> set[int]:
    mask = np.zeros(num_words, dtype=np.int32)
    grammar.fill_mask(mask)
    return {token for token in range(100) if not mask[token // 32] >> token % 32 & 1}


def test_a_bad_word_is_forbidden_where_it_would_be_complete() -> None:
    words = BadWords([(31,), (5, 6), (7, 5, 9), (5, 5, 6)], 100)
    grammar = words.new()
    assert forbidden(grammar) == {31}
    for token, expected in ((5, {31, 6}), (5, {31, 6}), (7, {31}), (5, {31, 6, 9}), (9, {31}), (6, {31})):
        grammar.accept(token)
        assert forbidden(grammar) == expected
    assert forbidden(words.new()) == {31}, "choices know nothing of each other"


@given(
    words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple), min_size=1, max_size=6),
    tokens=st.lists(st.integers(0, 4), max_size=12),
)
def test_no_text_of_what_is_left_has_a_bad_word(words: list[tuple[int, ...]], tokens: list[int]) -> None:
    grammar = BadWords(words, 100).new()
    written: list[int] = []
    for token in tokens:
        expected = {word[-1] for word in words if (*written, word[-1])[-len(word) :] == word}
        assert forbidden(grammar) == expected
        if token not in expected:
            grammar.accept(token)
            written.append(token)


async def test_bad_words_are_forbidden_with_and_without_a_space(worker: Any) -> None:
    worker.says("a")
    await post(worker, CHAT, bad_words=["two"])
    for spelled in ("two", " two"):
        grammar = worker.engine.requests[-1].sampling.grammar.new()
        *before, last = worker.tokenizer.encode(spelled, add_special_tokens=False)
        for token in before:
            grammar.accept(token)
        assert last in forbidden(grammar, 20) or last >= 100


async def test_a_bias_by_text(worker: Any) -> None:
    worker.says("a")
    (token,) = worker.tokenizer.encode("a", add_special_tokens=False)
    for path in (CHAT, TEXT):
        await post(worker, path, logit_bias={"a": -5, "7": 1})
        assert worker.engine.requests[-1].sampling.logit_bias == {token: -5, 7: 1}


# -- what an answer has ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("option", ["include_stop_str_in_output", "no_stop_trim", None])
async def test_stop_strings_in_the_output(worker: Any, path: str, stream: bool, option: str | None) -> None:
    worker.says("one two three")
    fields = {} if option is None else {option: True}
    response = await post(worker, path, max_tokens=50, stop=["wo t", "x"], stream=stream, **fields)
    events = events_of(response) if stream else [response.json()]
    text = "".join(text_of(event, path) for event in events)
    assert text == ("one t" if option is None else "one two t")
    last = events[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"], last["matched_stop"]) == ("stop", "wo t", "wo t")


async def test_logprobs_of_a_prompt(worker: Any) -> None:
    """As vLLM writes them: in completions beside each choice, in chats beside the choices."""
    worker.says("a")
    fields = {"prompt": ["abc", "de"], "n": 2, "prompt_logprobs": 2}
    choices = (await post(worker, TEXT, **fields)).json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [3, 3, 2, 2]
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]
    first, second, third = choices[0]["prompt_logprobs"]
    token = worker.tokenizer.encode("b")[0]
    assert first is None
    assert second[str(token)] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}
    assert list(second) == [str(token), str(token + 1)]  # the script says that it is the likeliest itself
    assert second[str(token + 1)] == {"logprob": -1.5, "rank": 2, "decoded_token": "c"}
    assert third[str(token + 1)]["decoded_token"] == "c"
    answer = (await post(worker, CHAT, prompt_logprobs=0, n=2, logprobs=True)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(each) == 1 for each in answer["prompt_logprobs"][1:])
    assert "prompt_logprobs" not in answer["choices"][0]
    assert worker.engine.requests[-1].prompt_logprobs == 0
    for path in (CHAT, TEXT):
        answer = (await post(worker, path)).json()
        assert "prompt_logprobs" not in answer
        assert "prompt_logprobs" not in answer["choices"][0]
        assert worker.engine.requests[-1].prompt_logprobs is None


@pytest.mark.parametrize(("logprobs", "scores"), [(1, 3), (3, 1), (0, 2), (None, 1)])
async def test_logprobs_of_a_prompt_that_is_echoed(worker: Any, logprobs: int | None, scores: int) -> None:
    """Each tells as many likeliest tokens as it was asked for."""
    worker.says("a")
    fields = {"prompt": "abcd", "echo": True, "max_tokens": 0, "logprobs": logprobs, "prompt_logprobs": scores}
    choice = (await post(worker, TEXT, **fields)).json()["choices"][0]
    assert choice["text"] == "abcd"
    assert [len(each) for each in choice["prompt_logprobs"][1:]] == [max(1, scores)] * 3
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert [len(each) for each in choice["logprobs"]["top_logprobs"][1:]] == [max(1, logprobs)] * 3


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_logprobs_of_a_prompt_have_a_bound(worker: Any, path: str) -> None:
    worker.says("a")
    text = "x " * 700
    prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    error = await refusal(worker, path, n=16, prompt_logprobs=20, **prompt)
    assert error["param"] == "prompt_logprobs"
    assert str(1 << 18) in error["message"]
    assert worker.engine.requests == []
    await post(worker, path, n=1, prompt_logprobs=20, **prompt)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [{"n": 16, "logprobs": 20}, {"n": 16, "logprobs": 15, "prompt_logprobs": 4}])
async def test_echoes_have_a_bound(worker: Any, most: dict[str, int], stream: bool) -> None:
    """Every choice repeats its prompt, with so many logprobs for each of its tokens."""
    if stream and "prompt_logprobs" in most:
        return
    worker.says("a")
    fields = {"prompt": "x " * 500, "echo": True, "stream": stream}
    error = await refusal(worker, TEXT, **fields, **most)
    assert error["param"] == "echo"
    assert str(1 << 18) in error["message"]
    assert worker.engine.requests == []
    fewer = await post(worker, TEXT, **fields, **most | {"n": 1})
    assert fewer.status_code == 200
    # Without logprobs a token counts once.
    plain = await post(worker, TEXT, **fields, n=16)
    assert plain.status_code == 200
    error = await refusal(worker, TEXT, **fields | {"prompt": ["x " * 500] * 17}, n=16)
    assert error["param"] == "echo"


async def test_logprobs_of_a_prompt_through_the_client(worker: Any) -> None:
    worker.says("a")
    answer = await worker.client.completions.create(model="tiny", prompt="é", extra_body={"prompt_logprobs": 1})
    (last,) = answer.choices[0].model_extra["prompt_logprobs"][-1].values()
    assert last["decoded_token"] == "\ufffd"  # half a character
    with pytest.raises(openai.BadRequestError, match="stream"):
        await worker.client.chat.completions.create(
            model="tiny", messages=USER, stream=True, extra_body={"prompt_logprobs": 1}
        )


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_structural_tags(worker: Any, path: str) -> None:
    """Under all their names they become the same grammar, which no answer leaves."""
    worker.says("say <f>1</f>!")
    whole = {"type": "structural_tag", **TAGS}
    for fields in (
        {"response_format": whole}, {"structural_tag": TAGS}, {"structural_tag": json.dumps(whole)},
        {"structured_outputs": {"structural_tag": json.dumps(whole)}}, {"structural_tag": TAGS, "n": 3, "stream": True},
        {"structural_tag": TAGS, "stop": "x", "logprobs": True if path == CHAT else 2},
    ):  # fmt: skip
        await post(worker, path, **fields)
        grammar = worker.engine.requests[-1].sampling.grammar.new()
        for token in worker.tokenizer.encode("say <f>1</f> <f>2"):
            grammar.accept(token)
        with pytest.raises(GrammarError):
            grammar.accept(worker.tokenizer.encode("x")[0])


async def test_structural_tags_with_tools(worker: Any) -> None:
    """The tools are described to the model and its calls are read; what they look like is up to the tags."""
    worker.says('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    tags = {"structures": [{"begin": "<tool_call>", "end": "</tool_call>"}], "triggers": ["<tool_call>"]}
    choice = (await post(worker, CHAT, max_tokens=80, structural_tag=tags, tools=[tool])).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}
    for fields in ({"tools": [strict]}, {"tools": [tool], "tool_choice": "required"}):
        assert (await refusal(worker, CHAT, structural_tag=tags, **fields))["param"] == "structural_tag"


async def test_structural_tags_in_the_responses_api(worker: Any) -> None:
    worker.says("<f>1</f>")
    answer = await worker.client.responses.create(
        model="tiny", input="x", text={"format": {"type": "structural_tag", **TAGS}}
    )
    assert answer.output_text == "<f>1</f>"
    assert worker.engine.requests[-1].sampling.grammar is not None
    response = await worker.http.post(
        "/v1/responses",
        json={"model": "tiny", "input": "x", "text": {"format": {"type": "structural_tag", "format": 1}}},
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "text.format.format")


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/v1/messages"])
async def test_stop_regexes_are_refused_by_name(worker: Any, path: str) -> None:
    others = {"/v1/responses": {"input": "x"}, "/v1/messages": {"messages": USER, "max_tokens": 20}}
    fields = {"model": "tiny", **others.get(path, body(path))}
    for value in ("a", ["a", "b"], "(", "", 1, {}):
        response = await worker.http.post(path, json={**fields, "stop_regex": value})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "stop_regex", "unsupported_parameter")
        assert "use 'stop'" in error["message"]
    assert worker.engine.requests == []
    worker.says("a")
    for value in (None, []):
        response = await worker.http.post(path, json={**fields, "stop_regex": value})
        assert response.status_code == 200, response.text


async def test_stop_tokens_are_told(worker: Any) -> None:
    stop = worker.tokenizer.encode("b")[0]
    worker.says("abc")
    choice = (await post(worker, CHAT, stop_token_ids=[stop])).json()["choices"][0]
    assert (choice["message"]["content"], choice["matched_stop"], choice["stop_reason"]) == ("a", stop, stop)
    choice = (await post(worker, CHAT, stop_token_ids=[stop], include_stop_str_in_output=True)).json()["choices"][0]
    assert choice["message"]["content"] == "ab"


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_says_what_ended_it(worker: Any, path: str, stream: bool) -> None:
    worker.says("abc")
    for fields, finish, matched in (({}, "stop", worker.tokenizer.eos_token_id), ({"max_tokens": 2}, "length", None)):
        response = await post(worker, path, stream=stream, **fields)
        last = (events_of(response)[-1] if stream else response.json())["choices"][0]
        assert (last["finish_reason"], last["stop_reason"], last["matched_stop"]) == (finish, None, matched)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_special_tokens_can_be_shown(worker: Any, path: str) -> None:
    marks = worker.tokenizer.encode("a<|im_start|>b")
    worker.engine.script = lambda _request, _choice: [*marks, worker.tokenizer.eos_token_id]
    assert text_of((await post(worker, path)).json(), path) == "ab"
    assert text_of((await post(worker, path, skip_special_tokens=False)).json(), path) == "a<|im_start|>b"


async def test_tokens_named_by_their_ids(worker: Any) -> None:
    worker.says("ab")
    ids = worker.tokenizer.encode("ab")
    content = (await post(worker, CHAT, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)).json()
    entries = content["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{each}" for each in ids]
    assert bytes(entries[0]["bytes"]).decode() == entries[0]["token"]
    logprobs = (await post(worker, TEXT, logprobs=1, return_tokens_as_token_ids=True)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{each}" for each in ids]
    assert all(key.startswith("token_id:") for top in logprobs["top_logprobs"] for key in top)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_usage_in_every_chunk(worker: Any, path: str) -> None:
    worker.says("abc")
    worker.engine.step_seconds = 0.02
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(await post(worker, path, max_tokens=10, stream=True, stream_options=options))
    usages = [event["usage"] for event in events]
    assert all(usage["prompt_tokens"] == usages[-1]["prompt_tokens"] for usage in usages)
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert counts[-1] == 4
    if path == CHAT:
        assert counts[0] == 0, "the chunk with the role comes before all tokens"
    assert len(set(counts)) > 2
    assert events[-1]["choices"] == []


async def test_prompts_are_cut_from_their_beginning(worker: Any) -> None:
    worker.says("a")
    ids = worker.tokenizer.encode("one two")
    for prompt in ("one two", ids):
        await post(worker, TEXT, prompt=prompt, truncate_prompt_tokens=3)
        assert list(worker.engine.requests[-1].prompt_token_ids) == ids[-3:]
    await post(worker, TEXT, prompt="ab" * 5000, truncate_prompt_tokens=-1, max_tokens=6)
    assert len(worker.engine.requests[-1].prompt_token_ids) == 4096 - 6
    await post(worker, CHAT, messages=[{"role": "user", "content": "ab" * 5000}], truncate_prompt_tokens=100)
    assert len(worker.engine.requests[-1].prompt_token_ids) == 100
    assert (await refusal(worker, TEXT, echo=True, truncate_prompt_tokens=1))["param"] == "truncate_prompt_tokens"


async def test_special_tokens_of_the_tokenizer_can_be_left_out(worker: Any) -> None:
    worker.says("a")
    await post(worker, TEXT, prompt="ab", add_special_tokens=False)
    assert list(worker.engine.requests[-1].prompt_token_ids) == worker.tokenizer.encode("ab", add_special_tokens=False)


async def test_a_missing_model_is_the_one_that_is_served(worker: Any) -> None:
    worker.says("a")
    for path, fields in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "x"})):
        response = await worker.http.post(path, json=fields)
        assert (response.status_code, response.json()["model"]) == (200, "tiny")


# -- lenient ----------------------------------------------------------------------------------------------------------


async def test_lenient_clients_are_told_what_was_ignored(worker: Any) -> None:
    worker.says("a")
    fields: dict[str, Any] = {"reasoning_effort": "low", "verbosity": "high", "tool_choice": "required", "store": True}
    for name, value in fields.items():
        assert (await refusal(worker, CHAT, **{name: value}))["param"] == name
        response = await post(worker, CHAT, LENIENT, **{name: value})
        assert response.headers[HEADER_IGNORED] == name
    response = await post(worker, CHAT, LENIENT, stream=True, **fields)
    assert set(response.headers[HEADER_IGNORED].split(", ")) == set(fields)
    assert HEADER_IGNORED not in (await post(worker, CHAT, LENIENT)).headers
    assert (await refusal(worker, CHAT, LENIENT, unheard_of=1))["code"] == "unknown_parameter"


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_lenient_clients_get_what_fits(worker: Any, path: str) -> None:
    worker.says("a")
    assert (await refusal(worker, path, max_tokens=5000))["code"] == "context_length_exceeded"
    response = await post(worker, path, LENIENT, max_tokens=5000)
    assert response.headers[HEADER_IGNORED] == "max_tokens"
    request = worker.engine.requests[-1]
    assert len(request.prompt_token_ids) + request.sampling.max_tokens == 4096
    long = {"messages": [{"role": "user", "content": "ab" * 9000}]} if path == CHAT else {"prompt": "ab" * 9000}
    assert (await refusal(worker, path, LENIENT, **long))["code"] == "context_length_exceeded"


async def test_lenient_large_requests(worker: Any) -> None:
    """They are prepared in a process of their own."""
    worker.says("a")
    response = await post(worker, CHAT, LENIENT, metadata={"x": "y" * 40_000}, verbosity="high")
    assert response.headers[HEADER_IGNORED] == "verbosity"


# -- mended -----------------------------------------------------------------------------------------------------------


async def test_integers_that_no_64_bits_hold_are_integers(worker: Any) -> None:
    for value, code in ((-(2**63) - 1, "integer_below_min_value"), (2**64, "integer_above_max_value")):
        content = json.dumps(body(CHAT, seed=value))
        error = (await worker.http.post(CHAT, content=content)).json()["error"]
        assert (error["param"], error["code"]) == ("seed", code)
    content = json.dumps(body(CHAT, top_k=2**70))
    error = (await worker.http.post(CHAT, content=content)).json()["error"]
    assert (error["param"], error["code"]) == ("top_k", "integer_above_max_value")


@pytest.mark.parametrize("form", ["text", "ids"])
async def test_offsets_of_an_echoed_prompt_with_special_tokens(worker: Any, form: str) -> None:
    worker.says("end", end=False)
    text = "<|im_start|>the<|im_end|>one"
    prompt: Any = text if form == "text" else worker.tokenizer.encode(text)
    choice = (await post(worker, TEXT, prompt=prompt, echo=True, logprobs=0, max_tokens=3)).json()["choices"][0]
    assert choice["text"] == (text if form == "text" else "theone") + "end"
    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if form == "text" or not token.startswith("<|"):
            assert choice["text"][offset:].startswith(token), (token, offset)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


@pytest.mark.parametrize("strict", [True, False])
async def test_definitions_of_each_tool_are_its_own(worker: Any, strict: bool) -> None:
    def tool(name: str, kind: str) -> dict[str, Any]:
        node = {"type": "object", "properties": {"v": {"type": kind}, "next": {"$ref": "#/$defs/X"}}, "required": ["v"],
                "additionalProperties": False}  # fmt: skip
        parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/X"}}, "required": ["a"],
                      "additionalProperties": False, "$defs": {"X": node}}  # fmt: skip
        return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}

    worker.says("a")
    tools = [tool("f", "integer"), tool("g", "string")]
    await post(worker, CHAT, tools=tools, tool_choice="required", parallel_tool_calls=False)
    factory = worker.engine.requests[-1].sampling.grammar

    def call(name: str, value: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": {value}}}}}\n</tool_call>'

    assert admits(worker, factory, call("f", '{"v": 1, "next": {"v": 2}}'))
    assert admits(worker, factory, call("g", '{"v": "x"}'))
    assert not admits(worker, factory, call("f", '{"v": "x"}'))
    assert not admits(worker, factory, call("g", '{"v": 1}'))


TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["v"], "additionalProperties": False}  # fmt: skip
NAMES = {"type": "object", "properties": {"default": {"$ref": "#/$defs/X"}, "const": {"$ref": "#/$defs/X"}},
         "required": ["default", "const"], "additionalProperties": False,
         "$defs": {"X": {"type": "integer"}}}  # fmt: skip
REFERENCES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("hermes", TREE, ['{"v": 1, "kids": [{"v": 2, "kids": []}]}'], ['{"v": 1, "kids": [[]]}']),
    ("hermes", NAMES, ['{"default": 1, "const": 2}'], ['{"default": "x", "const": 2}']),
    ("pythonic", TREE, ['v=1, kids=[{"v": 2, "kids": []}]'], ["v=1, kids=[[]]"]),
    ("pythonic", NAMES, ["default=1, const=2"], ['default="x", const=2']),
    ("qwen3_coder", TREE, ['v|1|kids|[{"v": 2, "kids": []}]'], ["v|1|kids|[[]]"]),
    ("qwen3_coder", NAMES, ["default|1|const|2"], ['default|"x"|const|2']),
]


@pytest.mark.parametrize(("form", "schema", "right", "wrong"), REFERENCES)
async def test_references_in_a_function_s_schema(
    start_worker: Any, make_tokenizer: Any, form: str, schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    """To the whole schema too, and of parameters that are called as a keyword is."""

    def call(arguments: str) -> str:
        if form == "pythonic":
            return f"[f({arguments})]"
        if form == "hermes":
            return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        parts = arguments.split("|")
        values = "".join(
            f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in zip(parts[::2], parts[1::2], strict=True)
        )
        return f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"

    async with start_worker(make_tokenizer(), tool_format=form) as worker:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
        await post(worker, CHAT, tools=[tool], tool_choice="required", parallel_tool_calls=False)
        factory = worker.engine.requests[-1].sampling.grammar
        assert all(admits(worker, factory, call(each)) for each in right)
        assert not any(admits(worker, factory, call(each)) for each in wrong)


def events_of(response: Any) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line and line != "data: [DONE]"]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(event: dict[str, Any], path: str) -> str:
    if not event["choices"]:
        return ""
    choice = event["choices"][0]
    if path == TEXT:
        return choice["text"]
    return (choice.get("message") or choice["delta"]).get("content") or ""
