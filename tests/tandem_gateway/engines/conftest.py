"""Doubles of other engines in the test's own loop, and the client that users have."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from tandem_api.names import Role

sys.path.insert(0, str(Path(__file__).parent))  # the doubles
from sglang_double import SGLangDouble
from vllm_double import VLLMDouble

DOUBLES = {"VLLM": VLLMDouble, "SGLang": SGLangDouble}
StartPair = Callable[..., Awaitable[Any]]


@pytest.fixture
async def start_double() -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    started: list[Any] = []

    async def start(kind: str, name: str = "pod-d", role: Role = Role.UNIFIED, **fields: Any) -> Any:
        double = DOUBLES[kind](name, role, **fields)
        await double.start()
        started.append(double)
        return double

    yield start
    for double in started:
        await double.stop()


@pytest.fixture
def start_pair(start_double, start_gateway) -> StartPair:
    """A gateway over `prefills` and `decodes` doubles of an engine; without prefills one that does both."""

    async def start(kind: str, *, prefills: int = 1, decodes: int = 1, timeouts: dict[str, float] | None = None,
                    config: dict[str, Any] | None = None, **fields: Any) -> Any:  # fmt: skip
        role = Role.DECODE if prefills else Role.UNIFIED
        workers = [await start_double(kind, f"pod-p{n}", Role.PREFILL, **fields) for n in range(prefills)]
        workers += [await start_double(kind, f"pod-d{n}", role, **fields) for n in range(decodes)]
        return await start_gateway(*workers, timeouts=timeouts, **(config or {}))

    return start


@pytest.fixture
async def client() -> AsyncIterator[Callable[[Any], openai.AsyncOpenAI]]:
    made: list[openai.AsyncOpenAI] = []

    def make(running: Any) -> openai.AsyncOpenAI:
        made.append(openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60))
        return made[-1]

    yield make
    for item in made:
        await item.close()
