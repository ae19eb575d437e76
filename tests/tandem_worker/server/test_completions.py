"""The completions endpoint: prompt forms, echo, legacy logprobs; tokenize and detokenize; models and probes."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing


def echo_prompt(worker: Any) -> None:
    """Answers with ` PROMPT`."""
    worker.engine.script = lambda request, _choice: [
        *worker.tokenizer.encode(" " + worker.tokenizer.decode(request.prompt_token_ids)),
        worker.tokenizer.eos_token_id,
    ]


@pytest.mark.parametrize("form", ["string", "strings", "ids", "lists of ids"])
async def test_prompt_forms(worker: Any, form: str) -> None:
    echo_prompt(worker)
    ids = [worker.tokenizer.encode(text) for text in ("one", "two")]
    prompt: Any = {"string": "one", "strings": ["one", "two"], "ids": ids[0], "lists of ids": ids}[form]
    answer = await worker.client.completions.create(model="tiny", prompt=prompt)
    expected = [" one", " two"] if form in ("strings", "lists of ids") else [" one"]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert answer.usage.prompt_tokens == sum(len(item) for item in ids[: len(expected)])
    assert worker.engine.requests[0].sampling.max_tokens == 16


async def test_all_prompts_share_one_prediction(worker: Any) -> None:
    """A copy for each would be 36 bytes a token: 150 MB, of a request of 130 KB."""
    echo_prompt(worker)
    body = {"model": "tiny", "prompt": ["one", "two", "three"], "prediction": "one two three"}
    assert (await worker.http.post("/v1/completions", json=body)).status_code == 200
    first, *others = (request.prediction for request in worker.engine.requests)
    assert first == tuple(worker.tokenizer.encode("one two three"))
    assert all(other is first for other in others)


async def test_prompts_times_choices(worker: Any) -> None:
    echo_prompt(worker)
    arguments: dict[str, Any] = {"model": "tiny", "prompt": ["one", "two"], "n": 2}
    answer = await worker.client.completions.create(**arguments)
    assert [choice.text for choice in answer.choices] == [" one", " one", " two", " two"]
    texts = ["", "", "", ""]
    stream = await worker.client.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [" one", " one", " two", " two"]
    assert usage.completion_tokens == answer.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs(worker: Any, stream: bool) -> None:
    worker.says("end", end=False)
    arguments: dict[str, Any] = {"model": "tiny", "prompt": "the 🌍", "echo": True, "logprobs": 2, "stream": stream}
    answer = await worker.client.completions.create(**arguments)
    chunks = [chunk async for chunk in answer] if stream else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    text = "".join(choice.text for choice in choices)
    assert text == "the 🌍end"
    parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for part in parts for token in part.tokens]
    offsets = [offset for part in parts for offset in part.text_offset]
    values = [value for part in parts for value in part.token_logprobs]
    assert values[0] is None
    assert len(tokens) == len(offsets) == len(values) == len(worker.tokenizer.encode("the 🌍end"))
    assert all(
        text[offset:].startswith(token) for token, offset in zip(tokens, offsets, strict=True) if token[0] != "b"
    )
    assert worker.engine.requests[0].prompt_logprobs == 2


async def test_scoring_a_prompt(worker: Any) -> None:
    worker.says("never shown")
    answer = await worker.client.completions.create(model="tiny", prompt="the end", echo=True, logprobs=0, max_tokens=0)
    assert answer.choices[0].text == "the end"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.prompt_tokens


async def test_special_tokens_of_a_prompt_are_read(worker: Any) -> None:
    worker.says("x")
    await worker.client.completions.create(model="tiny", prompt="<|im_start|>user")
    assert worker.engine.requests[0].prompt_token_ids[0] == worker.tokenizer.backend_tokenizer.token_to_id(
        "<|im_start|>"
    )


async def test_empty_prompt_is_the_start_of_a_document(worker: Any) -> None:
    worker.says("x")
    await worker.client.completions.create(model="tiny", prompt="")
    assert worker.engine.requests[0].prompt_token_ids == (worker.tokenizer.bos_token_id,)


async def test_tokenize_and_detokenize(worker: Any) -> None:
    response = await worker.http.post("/tokenize", json={"model": "tiny", "prompt": "the 🌍"})
    assert response.json() == {
        "count": 7,
        "max_model_len": 4096,
        "tokens": worker.tokenizer.encode("the 🌍"),
        "token_strs": None,
    }
    response = await worker.http.post("/detokenize", json={"tokens": response.json()["tokens"]})
    assert response.json() == {"prompt": "the 🌍"}
    response = await worker.http.post(
        "/tokenize", json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    )
    text = worker.tokenizer.decode(response.json()["tokens"])
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (await worker.http.post("/detokenize", json={"tokens": ["a"]})).json()["error"]["param"] == "tokens[0]"


async def test_tokens_as_the_vocabulary_writes_them(worker: Any) -> None:
    response = (await worker.http.post("/tokenize", json={"prompt": "the 🌍", "return_token_strs": True})).json()
    assert response["token_strs"] == list(map(worker.tokenizer.backend_tokenizer.id_to_token, response["tokens"]))
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "the"}], "return_token_strs": True}
    response = (await worker.http.post("/tokenize", json=chat)).json()
    assert response["token_strs"][0] == "<|im_start|>"
    assert len(response["token_strs"]) == response["count"]
    refused = await worker.http.post("/tokenize", json=chat | {"return_token_strs": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_token_strs")


async def test_special_tokens_beside_a_template(start_worker: Any, make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    start = ("<|endoftext|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[start])
    async with start_worker(tokenizer) as worker:
        worker.says("a")
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
        for wanted in (False, True):
            told = await worker.http.post("/tokenize", json=chat | {"add_special_tokens": wanted})
            await worker.http.post("/v1/chat/completions", json=chat | {"add_special_tokens": wanted})
            tokens = list(worker.engine.requests[-1].prompt_token_ids)
            assert told.json()["tokens"] == tokens
            assert tokens.count(tokenizer.bos_token_id) == wanted


async def test_long_prompts_are_tokenized_beside_the_loop(worker: Any) -> None:
    text = "the " * 3000
    response = await worker.http.post("/tokenize", json={"prompt": text})
    assert response.json()["tokens"] == worker.tokenizer.encode(text)


async def test_models(worker: Any) -> None:
    models = await worker.client.models.list()
    assert [model.id for model in models.data] == ["tiny"]
    assert (await worker.client.models.retrieve("tiny")).owned_by == "tandem"
    assert (await worker.http.get("/v1/models/other/name")).status_code == 404
    assert (await worker.http.head("/v1/models")).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/telemetry"])
async def test_what_watches_a_worker_is_not_at_this_port(worker: Any, path: str) -> None:
    assert (await worker.http.get(path)).status_code == 404


async def test_outcomes_are_observed(worker: Any) -> None:
    worker.says("a b c")
    await worker.client.completions.create(model="tiny", prompt="x")
    outcome = worker.outcomes[0]
    assert (outcome.path, outcome.status) == ("/v1/completions", 200)
    assert outcome.usage.completion_tokens == 6
    assert 0 < outcome.first_token_seconds <= outcome.seconds


async def test_what_other_servers_tell_on_this_port(worker: Any) -> None:
    assert (await worker.http.get("/health")).status_code == (await worker.http.get("/ping")).status_code == 200
    worker.state["ready"] = False
    assert (await worker.http.get("/health")).status_code == (await worker.http.get("/ping")).status_code == 503
    assert (await worker.http.get("/version")).json()["version"]
    assert (await worker.http.get("/load")).json() == {"server_load": 0}
    card = (await worker.http.get("/v1/models")).json()["data"][0]
    assert (card["max_model_len"], card["root"], card["owned_by"]) == (4096, "file:///m", "tandem")
    info = (await worker.http.get("/tokenizer_info")).json()
    assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", "<|endoftext|>")
    assert "message.role" in info["chat_template"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"return_token_ids": True}, "return_token_ids"),
    ],
)
async def test_what_an_answer_repeats_of_its_prompts_is_bounded(
    worker: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], param: str
) -> None:
    """Every choice repeats its prompt: a body of megabytes would be answered with gigabytes."""
    monkeypatch.setattr("tandem_worker.server.answer.planning.MAX_SCORES", 2 * 2 * 16)
    monkeypatch.setattr("tandem_worker.server.answer.planning.MAX_IDS", 2 * 2 * 16)
    body = {"model": "tiny", "prompt": [[65, 66], [67, 68]], "max_tokens": 1, "n": 16}
    assert (await worker.http.post("/v1/completions", json=body | fields)).status_code == 200
    assert (
        await worker.http.post("/v1/completions", json=body | {"prompt": [[65] * 999] * 9, "n": 1})
    ).status_code == 200
    worker.engine.requests.clear()
    response = await worker.http.post("/v1/completions", json=body | {"prompt": [[65, 66], [67, 68, 69]]} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert "would repeat 80" in response.json()["error"]["message"]
    assert worker.engine.requests == []
