"""Real workers die, hang, are cut off and told to end under streams, and every stream is the undisturbed one."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.tandem_gateway.chaos import Run, open_fleet, storm
from tests.tandem_gateway.conftest import until
from tests.tandem_worker.process.forking import Forker


@pytest.mark.timeout(600)
async def test_streams_outlive_their_workers(forker: Forker) -> None:
    async with open_fleet(3, forker, idle_seconds=10.0, first_token_seconds=20.0) as fleet:
        run = Run(fleet, seeds=1)
        await run.learn()
        resumes = fleet.gateway.metrics.resumes

        async def strike(cause: str, *signals: int) -> None:
            """Streams of all kinds, and signals to the busiest worker once some of them come from it. Again, where it
            had sent everything before they came: how fast a worker is, and when, is the machine's affair."""
            before = resumes[cause]
            for _ in range(6):
                running = asyncio.create_task(run.run(len(run.requests), len(run.requests)))
                await until(lambda: fleet.streams_of(fleet.busiest()) >= 3, wait=60)
                name = fleet.busiest()
                for number in signals:
                    fleet.send(name, number)
                    if number == signal.SIGSTOP:
                        await asyncio.sleep(13)
                await running
                if signal.SIGCONT not in signals:
                    await fleet.remove(name)
                    await fleet.add()  # where two are left, one that is slow for a moment is all
                if resumes[cause] > before:
                    return
            raise AssertionError(f"no stream was moved for {cause}: {resumes}")

        await run.run(len(run.requests), len(run.requests))
        assert not resumes, "nothing happened yet"
        fleet.set_share(0.7)
        await run.run(2 * len(run.requests), 2 * len(run.requests))
        fleet.set_share(0.0)
        assert sum(cutter.cuts for cutter in fleet.cutters.values()) > 10
        assert resumes["reset"] > 10
        await strike("timeout", signal.SIGSTOP, signal.SIGCONT)
        await strike("draining", signal.SIGTERM)
        await strike("reset", signal.SIGKILL)
        assert set(run.results) == {"right"}, run.problems
        assert not fleet.gateway.metrics.failed_resumes


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_no_stream_breaks_in_a_storm() -> None:
    figures = await storm(streams=200, workers=3, at_once=30, every=8.0, share=0.2)
    assert figures["results"] == {"right": 200}, figures
    assert sum(figures["resumes"].values()) > 20, figures
