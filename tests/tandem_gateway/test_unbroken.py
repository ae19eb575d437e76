"""Real workers die, hang, are cut off and told to end under streams, and every stream is the undisturbed one."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.tandem_gateway.chaos import Run, open_fleet, storm


@pytest.mark.timeout(400)
async def test_streams_outlive_their_workers() -> None:
    async with open_fleet(3, idle_seconds=2.0, first_token_seconds=20.0) as fleet:
        run = Run(fleet)
        await run.learn()
        resumes = fleet.gateway.metrics.resumes

        async def during(seconds: float, *signals: int) -> None:
            """27 streams, and signals to the busiest worker while they run."""
            running = asyncio.create_task(run.run(len(run.requests), len(run.requests)))
            await asyncio.sleep(seconds)
            name = fleet.busiest()
            for number in signals:
                fleet.send(name, number)
                if number == signal.SIGSTOP:
                    await asyncio.sleep(5)
            await running
            if signal.SIGCONT not in signals:
                await fleet.remove(name)

        await run.run(len(run.requests), len(run.requests))
        assert not resumes, "nothing happened yet"
        fleet.set_share(0.7)
        await run.run(2 * len(run.requests), len(run.requests))
        fleet.set_share(0.0)
        assert sum(cutter.cuts for cutter in fleet.cutters.values()) > 10
        assert resumes["reset"] > 10
        await during(0.5, signal.SIGSTOP, signal.SIGCONT)
        assert resumes["timeout"] >= 1
        await during(0.5, signal.SIGTERM)
        assert resumes["draining"] >= 1
        before = resumes["reset"]
        await during(0.5, signal.SIGKILL)
        assert resumes["reset"] > before
        assert run.results == {"right": 6 * len(run.requests)}, run.problems
        assert not fleet.gateway.metrics.failed_resumes


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_no_stream_breaks_in_a_storm() -> None:
    figures = await storm(streams=200, workers=3, at_once=30, every=8.0, share=0.2)
    assert figures["results"] == {"right": 200}, figures
    assert sum(figures["resumes"].values()) > 20, figures
