"""Real workers behind native links: asked by the `openai` client, stopped, killed and told to end under streams."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.tandem_gateway.chaos import MODEL, Fleet, Run, open_fleet
from tests.tandem_gateway.conftest import until
from tests.tandem_worker.process.forking import Forker

WAIT = 60.0


async def ask_like_clients_do(fleet: Fleet) -> None:
    client = AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)
    options: dict[str, Any] = {"model": MODEL, "seed": 1, "max_tokens": 20}
    messages: Any = [{"role": "user", "content": "hello"}]
    whole = await client.chat.completions.create(messages=messages, **options)
    parts = [
        chunk.choices[0].delta.content or ""
        async for chunk in await client.chat.completions.create(messages=messages, stream=True, **options)
        if chunk.choices
    ]
    assert "".join(parts) == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 0
    with pytest.raises(BadRequestError, match="temperature"):
        await client.chat.completions.create(messages=messages, temperature=9, **options)
    stream = await client.chat.completions.create(messages=messages, stream=True, **(options | {"max_tokens": 1000}))
    async for _ in stream:
        break
    await stream.close()
    await until(lambda: not fleet.gateway.exchanges, wait=WAIT)
    await client.close()


async def test_streams_over_native_links_outlive_their_workers(forker: Forker) -> None:
    # Idle for long: whatever is noticed here, it is not by a stream's own deadline.
    async with open_fleet(3, forker, native=True, idle_seconds=200.0, first_token_seconds=200.0) as fleet:
        run = Run(fleet, seeds=1)
        await run.learn()
        gateway, resumes = fleet.gateway, fleet.gateway.metrics.resumes
        await ask_like_clients_do(fleet)

        async def during(number: int, noticed: Any) -> str:
            """Streams of all kinds, and a signal to the busiest worker once some of them come from it."""
            running = asyncio.create_task(run.run(len(run.requests), len(run.requests)))
            await until(lambda: fleet.streams_of(fleet.busiest()) >= 3, wait=WAIT)
            name = fleet.busiest()
            fleet.send(name, number)
            await until(noticed, wait=WAIT)
            await running
            return name

        await run.run(len(run.requests), len(run.requests))
        before = gateway.native.ends["hung"], resumes["reset"]
        stopped = await during(signal.SIGSTOP, lambda: gateway.native.ends["hung"] > before[0])
        assert resumes["reset"] > before[1]
        fleet.send(stopped, signal.SIGCONT)
        await until(lambda: fleet.reports.render_metrics().count(b'links{state="native"} 3'), wait=WAIT)

        await fleet.remove(await during(signal.SIGTERM, lambda: resumes["draining"]))
        killed = resumes["reset"]
        await fleet.remove(await during(signal.SIGKILL, lambda: resumes["reset"] > killed))

        assert run.results == {"right": 4 * len(run.requests)}, run.problems
        assert not gateway.metrics.failed_resumes
        assert not resumes["timeout"]
