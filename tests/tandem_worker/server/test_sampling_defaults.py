"""A model's sampling settings below the requests of the real OpenAI client."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tandem_worker.server.dialects.openai.options import SamplingDefaults

from tests.tandem_worker.server.conftest import Worker

USER: Any = [{"role": "user", "content": "hi"}]
MODEL = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1)
NAMES = [field.name for field in dataclasses.fields(SamplingDefaults)]


@pytest.fixture
async def worker(start_worker: Callable[..., Any], tokenizer: Any) -> AsyncIterator[Worker]:
    async with start_worker(tokenizer, sampling=MODEL) as running:
        yield running


def asked(worker: Worker) -> dict[str, float]:
    """The newest request, as the engine was asked."""
    sampling = worker.engine.requests[-1].sampling
    return {name: getattr(sampling, name) for name in NAMES}


async def test_what_a_request_leaves_out_is_the_models(worker: Worker) -> None:
    await worker.client.chat.completions.create(model="tiny", messages=USER)
    assert asked(worker) == dataclasses.asdict(MODEL)
    await worker.client.completions.create(model="tiny", prompt="hi", temperature=None)
    assert asked(worker) == dataclasses.asdict(MODEL)
    async for _ in await worker.client.chat.completions.create(model="tiny", messages=USER, stream=True, top_p=0.5):
        pass
    assert asked(worker) == dataclasses.asdict(MODEL) | {"top_p": 0.5}


async def test_a_request_says_the_last_word(worker: Worker) -> None:
    extensions = {"top_k": -1, "min_p": 0, "repetition_penalty": 1}
    await worker.client.chat.completions.create(
        model="tiny", messages=USER, temperature=0, top_p=1, extra_body=extensions
    )
    own = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert asked(worker) == own


async def test_responses_tell_what_they_were_made_with(worker: Worker) -> None:
    response = await worker.client.responses.create(model="tiny", input="hi", top_p=0.7)
    assert (response.temperature, response.top_p) == (0.6, 0.7)
    assert asked(worker) == dataclasses.asdict(MODEL) | {"top_p": 0.7}
