"""Chat templates that requests bring along: off unless allowed, and then a program in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tandem_worker.engine.errors import RequestError
from tandem_worker.server.dialects.openai.chat_request import parse_chat
from tandem_worker.server.prepare import placing

CHAT = "/v1/chat/completions"
SHOUT = "{% for m in messages %}{{ m.role | upper }}> {{ m.content }}\n{% endfor %}{{ '!' if add_generation_prompt }}"
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def trusting(start_worker: Any, tokenizer: Any) -> AsyncIterator[Any]:
    async with start_worker(tokenizer, request_chat_templates=True) as running:
        running.says("hi")
        yield running


async def ask(worker: Any, path: str = CHAT, **fields: Any) -> Any:
    """While the process starts, requests are to be tried again."""
    while True:
        response = await worker.http.post(path, json={"model": "tiny", "messages": USER} | fields)
        if response.status_code != 503:
            return response


def prompt_of(worker: Any) -> str:
    return worker.tokenizer.decode(worker.engine.requests[-1].prompt_token_ids)


async def refusal(worker: Any, **fields: Any) -> dict[str, Any]:
    worker.engine.requests.clear()
    response = await ask(worker, **fields)
    assert response.status_code == 400, response.text
    assert worker.engine.requests == []
    return response.json()["error"]


def test_templates_have_a_bound() -> None:
    with pytest.raises(RequestError, match="at most 65536 characters"):
        parse_chat({"messages": USER, "chat_template": "x" * 65_537}, 300)


async def test_off(worker: Any) -> None:
    error = await refusal(worker, chat_template=SHOUT)
    assert (error["param"], error["code"]) == ("chat_template", "unsupported_parameter")
    assert "requestChatTemplates: true" in error["message"]


async def test_calls_are_read_as_the_models_own_template_asks_for_them(trusting: Any) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    error = await refusal(trusting, chat_template=SHOUT, tools=[tool], tool_choice="required")
    assert error["param"] == "chat_template"
    assert "exclude each other" in error["message"]


async def test_a_request_is_rendered_by_its_own_template(trusting: Any) -> None:
    response = await ask(trusting, chat_template=SHOUT)
    assert response.status_code == 200, response.text
    assert prompt_of(trusting) == "USER> hello\n!"
    counted = (await ask(trusting, "/tokenize", chat_template=SHOUT)).json()
    assert counted["count"] == len(trusting.engine.requests[-1].prompt_token_ids)
    await ask(trusting)
    assert "USER>" not in prompt_of(trusting), "the next request has the model's"
    error = await refusal(trusting, chat_template="{% for i in range(9999) %}abc{% endfor %}")
    assert error["code"] == "context_length_exceeded"
    for content in ("hello", "hello " * 300):
        await check_what_templates_are_given(trusting, content, padding="")
    await check_what_templates_are_given(trusting, "hello", padding="{#" + "x" * 40_000 + "#}")  # a large body


async def check_what_templates_are_given(trusting: Any, content: str, padding: str) -> None:
    """Arguments of its own, documents, efforts, and earlier calls with objects."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    template = (
        "{{ messages[0].content }}|{{ messages[1].tool_calls[0].function.arguments.x + 1 }}|{{ documents[0].text }}|"
        "{{ reasoning_effort }}|{{ mood }}"
    )
    response = await ask(
        trusting, messages=messages, chat_template=template + padding, documents=[{"text": "doc"}],
        reasoning_effort="low", chat_template_kwargs={"mood": "calm"},
    )  # fmt: skip
    assert response.status_code == 200, response.text
    assert prompt_of(trusting) == f"{content}|2|doc|low|calm"


FAILING = {
    "{% for": "chat_template",
    "{{ 1 / 0 }}": "division by zero",
    "{{ raise_exception('no such role') }}": "no such role",
    "{{ messages[9].content }}": "chat_template",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "chat_template",
    "{{ messages.append(1) }}": "chat_template",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}": "chat_template",
}
LOOP = "{% for i in range(99999) %}"
ENDLESS = [3 * LOOP + 3 * "{% endfor %}", "{{ 'x' * 9999999999 }}"]


async def test_templates_that_fail(trusting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are their sender's fault, and nobody else notices."""
    for template, words in FAILING.items():
        error = await refusal(trusting, chat_template=template)
        assert words in error["message"]
        assert error["param"] == "chat_template"
    for template in ENDLESS:
        with monkeypatch.context() as soon:
            soon.setattr(placing, "TEMPLATE_SECONDS", 0.5)
            error = await refusal(trusting, chat_template=template)
        assert error["code"] == "request_too_complex"
        assert (await ask(trusting)).status_code == 200
    assert (await ask(trusting, chat_template=SHOUT)).status_code == 200


@pytest.mark.parametrize("padding", [0, 40_000], ids=["small", "large"])
async def test_templates_hold_up_nobody_but_each_other(
    trusting: Any, monkeypatch: pytest.MonkeyPatch, padding: int
) -> None:
    """However large its body is, such a request waits for such requests, and so many of them that there is an end."""
    large = [{"role": "user", "content": "hello " * 6000}]
    await ask(trusting, "/tokenize", messages=large)  # the process has started
    monkeypatch.setattr(placing, "TEMPLATE_SECONDS", 3600.0)  # none ends by itself before others are answered
    monkeypatch.setattr(placing, "MAX_TEMPLATES", 3)
    endless = ENDLESS[0] + "{#" + "x" * padding + "#}"
    jobs = [asyncio.create_task(ask(trusting, chat_template=endless)) for _ in range(4)]
    (refused,), running = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
    assert (refused.result().status_code, len(running)) == (429, 3)
    assert "chat template of their own waiting" in refused.result().json()["error"]["message"]
    for _ in range(3):
        assert (await ask(trusting, "/tokenize", messages=large)).status_code in (200, 400)
    assert not any(job.done() for job in running), "three large requests were prepared meanwhile"
    for job in running:
        job.cancel()
    await asyncio.wait(running)
    assert (await ask(trusting, chat_template=SHOUT)).status_code == 200, (
        "its clients have left, and so has the process"
    )
