"""The name of a model changes while its workers run: whoever may ask has checked it, and gets it back."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

MESSAGES = [{"role": "user", "content": "hi"}]
StartWorker = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.mark.parametrize("large", [False, True], ids=["here", "in a process of its own"])
async def test_behind_keys_answers_carry_the_name_that_was_asked_for(
    start_worker: StartWorker, tokenizer: Any, large: bool
) -> None:
    padding = " " * 40_000 if large else ""
    async with start_worker(tokenizer, keys_path="/keys") as worker:
        for path, prompt in (("chat/completions", {"messages": MESSAGES}), ("completions", {"prompt": "hi"})):
            body = {"model": "renamed", "max_tokens": 2, **prompt}
            answer = await worker.http.post(f"/v1/{path}", content=json.dumps(body) + padding)
            assert (answer.status_code, answer.json().get("model")) == (200, "renamed"), answer.text
            stream = await worker.http.post(f"/v1/{path}", content=json.dumps(body | {"stream": True}) + padding)
            events = [line[6:] for line in stream.text.splitlines() if line.startswith("data: {")]
            assert {json.loads(event)["model"] for event in events} == {"renamed"}
        assert (await worker.http.post("/tokenize", json={"model": "renamed", "prompt": "hi"})).status_code == 200
        for path in ("renamed", "maker%2Frenamed", "maker/renamed"):
            assert (await worker.http.get(f"/v1/models/{path}")).json()["id"] == path.replace("%2F", "/")


async def test_without_keys_a_worker_knows_its_own_name_alone(start_worker: StartWorker, tokenizer: Any) -> None:
    async with start_worker(tokenizer) as worker:
        for path, body in (
            ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/v1/completions", {"prompt": "hi"}),
            ("/tokenize", {"prompt": "hi"}),
        ):
            answer = await worker.http.post(path, json={"model": "renamed", **body})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert (await worker.http.get("/v1/models/renamed")).status_code == 404
