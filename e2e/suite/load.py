"""Bounded load: many streams at once through the real OpenAI client, and what became of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import openai
from tandem_api.names import HEADER_DECODE_WORKER, HEADER_PREFILL_WORKER


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """How one request ended: either `finish_reason` and tokens, or `error`. `hung` means neither came in time."""

    text: str
    finish_reason: str | None
    completion_tokens: int | None
    error: str | None
    seconds: float
    first_token_seconds: float | None
    started: float
    hung: bool = False
    decode_worker: str | None = None
    prefill_worker: str | None = None
    """Pods that the answer names: the one that began to decode, and whoever computed the prompt."""

    @property
    def complete(self) -> bool:
        return self.error is None and self.finish_reason is not None and self.completion_tokens is not None


async def stream_once(
    api: openai.AsyncOpenAI, model: str, prompt: str, max_tokens: int, limit: float, cache_salt: str | None = None
) -> LoadOutcome:
    """One streamed chat, ended by its finish reason, an error, or the limit in seconds.

    With a `cache_salt` of its own nothing of the prompt is found in a cache.
    """
    started = time.monotonic()
    text, finish, tokens, first = "", None, None, None
    error, hung = None, False
    decode, prefill = None, None
    try:
        async with asyncio.timeout(limit):
            stream = await api.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=max_tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"cache_salt": cache_salt} if cache_salt else None,
            )
            decode = stream.response.headers.get(HEADER_DECODE_WORKER)
            prefill = stream.response.headers.get(HEADER_PREFILL_WORKER)
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    first = first or time.monotonic() - started
                    text += chunk.choices[0].delta.content
                if chunk.choices and chunk.choices[0].finish_reason:
                    finish = chunk.choices[0].finish_reason
                if chunk.usage:
                    tokens = chunk.usage.completion_tokens
    except TimeoutError:
        hung, error = True, f"no end within {limit:g} s"
    except openai.APIError as failure:
        error = f"{type(failure).__name__}: {failure}"
    seconds = time.monotonic() - started
    return LoadOutcome(text, finish, tokens, error, seconds, first, started, hung, decode, prefill)


async def run_load(
    base_url: str, model: str, prompts: Sequence[str], *, concurrency: int, max_tokens: int, limit: float = 240
) -> list[LoadOutcome]:
    """Send every prompt once, `concurrency` at a time; the outcomes in the order of the prompts."""
    gate = asyncio.Semaphore(concurrency)

    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0, timeout=limit) as api:

        async def one(prompt: str) -> LoadOutcome:
            async with gate:
                return await stream_once(api, model, prompt, max_tokens, limit)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def varied_prompts(count: int) -> list[str]:
    """Prompts of 20 to about 260 tokens; a third of them share their beginning with others."""
    shared = "You are reading the log of a small lighthouse. The keeper notes wind, visitors and repairs. " * 6
    tails = [
        "Name three colours.",
        "What is two plus two?",
        "Describe the sea in one sentence.",
        "Who was Ada Lovelace?",
    ]
    return [
        (shared if index % 3 == 0 else "Please answer briefly. " * (index % 20)) + f"Entry {index}: {tails[index % 4]}"
        for index in range(count)
    ]
