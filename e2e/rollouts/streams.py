"""Clients that ask without end, and what they are to be answered."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

import openai

from e2e.rollouts.tables import Expected
from e2e.suite.load import LoadOutcome, stream_once, varied_prompts

MAX_TOKENS = 24
LIMIT = 150.0
"""Seconds after which a stream counts as one that hangs."""
CANDIDATES = 36
ENOUGH, FEWEST = 12, 6
MARGIN = 0.02
"""Between the logarithms of the two best tokens' probabilities: prompts with a closer choice are left out, because
another order of sums may choose otherwise. Noise of float32 is a hundredth of it."""


def margins(tokens: Sequence[Any]) -> list[float]:
    """Of each token of an answer with two alternatives, as the client library gives them."""
    found: list[float] = []
    for token in tokens:
        best, second = sorted((entry.logprob for entry in token.top_logprobs), reverse=True)[:2]
        found.append(best - second)
    return found


def is_clear(choice: Any) -> bool:
    """Whether every token of an answer was chosen by far, so that the same is said each time."""
    tokens = [] if choice.logprobs is None else choice.logprobs.content or []
    return choice.finish_reason == "length" and bool(tokens) and min(margins(tokens)) >= MARGIN


def learn(url: str, model: str) -> dict[str, Expected]:
    """Prompts, and what they are answered undisturbed. Raises AssertionError where too few have a clear answer."""
    found: dict[str, Expected] = {}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=LIMIT) as api:
        for prompt in varied_prompts(CANDIDATES):
            if len(found) == ENOUGH:
                break
            answer = api.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=MAX_TOKENS,
                temperature=0,
                logprobs=True,
                top_logprobs=2,
            )
            (choice,) = answer.choices
            if answer.usage is not None and is_clear(choice):
                text, finish = choice.message.content or "", choice.finish_reason
                found[prompt] = Expected(text, finish, answer.usage.completion_tokens)
    assert len(found) >= FEWEST, f"only {len(found)} of {CANDIDATES} prompts have a clear answer"
    return found


class Clients:
    """So many clients, each of which asks, waits for the end, pauses and asks again.

    No prompt is found in a cache, so each is sent to a prefill worker.
    """

    def __init__(self, url: str, model: str, expected: dict[str, Expected], *, count: int, pause: float) -> None:
        self.url, self.model, self.expected = url, model, expected
        self.count, self.pause = count, pause
        self.asked: list[tuple[LoadOutcome, Expected]] = []
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="clients")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask no more and wait for the streams that are open. Raises what ended the clients before, if anything did."""
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            asyncio.run(self._ask_all())
        except BaseException as error:
            self._failure = error

    async def _ask_all(self) -> None:
        prompts = itertools.cycle(self.expected)
        async with (
            openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=LIMIT) as api,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(self.count):
                group.create_task(self._ask(api, prompts))

    async def _ask(self, api: openai.AsyncOpenAI, prompts: Any) -> None:
        while not self._stop.is_set():
            prompt = next(prompts)
            salt = f"{time.time_ns()}-{next(self._numbers)}"
            outcome = await stream_once(api, self.model, prompt, MAX_TOKENS, LIMIT, cache_salt=salt)
            self.asked.append((outcome, self.expected[prompt]))
            await asyncio.sleep(self.pause if outcome.complete else max(self.pause, 1.0))
