"""New decode workers are held back until blocks have reached them; nobody is, where that would serve nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from tandem_api.names import Role
from tandem_gateway.scheduling import Worker
from tandem_gateway.workers import probation
from tandem_gateway.workers.probation import PATIENCE, Probation

PREFILL = Worker(name="p", address="10.0.0.1:8000", role=Role.PREFILL, revision="r1", kv_address="10.0.0.1:7000")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  (what is waited for has no event to wait on)
            await asyncio.sleep(0.005)


def answers(status: int = 200, used: str | None = None) -> Callable[..., Any]:
    """As a decode worker that says who computed the prompt."""

    async def behave(worker: Any, request: Any, writer: asyncio.StreamWriter) -> None:
        told = "" if used is None else f"x-tandem-prefill-worker: {used}\r\n"
        writer.write(f"HTTP/1.1 {status} X\r\n{told}content-length: 2\r\n\r\n{{}}".encode())
        await writer.drain()

    return behave


class Trial:
    def __init__(self) -> None:
        self.applied: list[list[str]] = []
        self.urgent = False
        self.probation = Probation(
            lambda workers: self.applied.append([worker.name for worker in workers]),
            served_name="toy",
            token_line=lambda: b"x-tandem-token: secret\r\n",
            connect_seconds=1.0,
            backoff=(0.02,),
            is_urgent=lambda: self.urgent,
        )
        self.probation.take([])

    @property
    def passed(self) -> list[str]:
        return self.applied[-1]

    @property
    def reasons(self) -> dict[str, str | None]:
        return {report.name: report.reason for report in self.probation.reports()}


@pytest.fixture
async def trial() -> AsyncIterator[Trial]:
    made = Trial()
    running = asyncio.create_task(made.probation.run())
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
def decode(start_worker: Any) -> Callable[..., Any]:
    async def start(name: str, behaviour: Callable[..., Any]) -> Any:
        return await start_worker(name, default=behaviour)

    return start


async def test_a_new_worker_serves_once_a_prompt_has_come_from_a_prefill_worker(trial: Trial, decode: Any) -> None:
    first = await decode("d0", answers(used="p"))
    trial.probation.take([PREFILL, first.worker])
    assert trial.passed == ["p"]
    assert trial.reasons == {"d0": "kv: not probed yet"}
    await until(lambda: trial.passed == ["p", "d0"])
    assert trial.reasons == {}
    (probe,) = first.received
    assert (probe.headers["x-tandem-prefill"], probe.headers["x-tandem-token"]) == ("10.0.0.1:7000", "secret")
    assert probe.headers["x-request-id"].startswith("probe-")
    assert (probe.json["max_tokens"], len(probe.json["prompt"])) == (1, 256)
    trial.probation.take([PREFILL, first.worker])
    await asyncio.sleep(0.1)
    assert len(first.received) == 1, "it is asked once"


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        (answers(used="d1"), "kv: the prompt was to come from p, and came from d1"),
        (answers(503), "kv: it answers 503"),
        (answers(401), "kv: it answers 401"),
        (answers(used="x" * 9000), ("kv: the prompt was to come from p, and came from " + "x" * 1000)[:1000]),
    ],
)
async def test_who_gets_no_blocks_is_held_back_with_the_reason_and_asked_again(
    trial: Trial, decode: Any, behaviour: Callable[..., Any], words: str
) -> None:
    good, bad = await decode("d0", answers(used="p")), await decode("d1", behaviour)
    trial.probation.take([PREFILL, good.worker, bad.worker])
    await until(lambda: len(bad.received) >= 3)
    assert trial.passed == ["p", "d0"]
    assert trial.reasons == {"d1": words}
    bad.default = answers(used="p")
    await until(lambda: trial.passed == ["p", "d0", "d1"])


async def test_a_worker_that_does_not_answer_is_held_back(
    trial: Trial, decode: Any, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probation, "PROBE_SECONDS", 1.0)
    good, bad = await decode("d0", answers(used="p")), await decode("d1", fault.hang)
    trial.probation.take([PREFILL, good.worker, bad.worker])
    await until(lambda: "no answer within" in (trial.reasons.get("d1") or ""))
    await until(lambda: bad.answering <= 1 and bad.cancelled >= 1)
    await until(lambda: trial.passed == ["p", "d0"])


async def test_the_last_one_serves_though_no_block_reaches_it(trial: Trial, decode: Any) -> None:
    bad = await decode("d0", answers(used="d0"))
    trial.probation.take([PREFILL, bad.worker])
    assert trial.passed == ["p"]
    await until(lambda: trial.passed == ["p", "d0"])
    good = await decode("d1", answers(used="p"))
    trial.probation.take([PREFILL, bad.worker, good.worker])
    await until(lambda: trial.passed == ["p", "d1"])


async def test_while_requests_wait_the_only_one_serves_before_it_is_probed(
    trial: Trial, decode: Any, fault: Any
) -> None:
    trial.urgent = True
    first = await decode("d0", fault.hang)
    trial.probation.take([PREFILL, first.worker])
    assert trial.passed == ["p", "d0"]
    await until(lambda: first.received)
    second = await decode("d1", fault.hang)
    trial.probation.take([PREFILL, first.worker, second.worker])
    assert trial.passed == ["p", "d0"], "the other one is not the only one"


async def test_without_a_prefill_worker_of_its_build_nobody_waits_and_is_asked_when_one_comes(
    trial: Trial, decode: Any
) -> None:
    first = await decode("d0", answers(used="p2"))
    trial.probation.take([replace(PREFILL, revision="other"), first.worker])
    assert trial.passed == ["p", "d0"]
    await asyncio.sleep(0.05)
    assert not first.received
    trial.probation.take([replace(PREFILL, name="p2"), first.worker])
    assert trial.passed == ["p2", "d0"], "it serves meanwhile"
    await until(lambda: len(first.received) == 1)
    assert trial.reasons == {}


async def test_those_that_serve_when_the_gateway_starts_are_not_held_back_until_they_fail_again_and_again(
    decode: Any,
) -> None:
    good, bad = await decode("d0", answers(used="p")), await decode("d1", answers(used="d1"))
    made = Trial()
    made.probation._workers = None  # as before any list
    made.probation.take([PREFILL, good.worker, bad.worker])
    assert made.passed == ["p", "d0", "d1"]
    running = asyncio.create_task(made.probation.run())
    await until(lambda: made.passed == ["p", "d0"])
    assert len(bad.received) >= PATIENCE
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_model_without_completions_is_not_held_to_them(trial: Trial, decode: Any) -> None:
    first = await decode("d0", answers(404))
    trial.probation.take([PREFILL, first.worker])
    await until(lambda: trial.passed == ["p", "d0"])


async def test_a_container_that_restarts_proves_itself_anew_and_workers_that_prefill_themselves_never(
    trial: Trial, decode: Any
) -> None:
    first = await decode("d0", answers(used="p"))
    unified = replace(PREFILL, name="u", role=Role.UNIFIED)
    trial.probation.take([PREFILL, unified, first.worker])
    assert trial.passed == ["p", "u"]
    await until(lambda: "d0" in trial.passed)
    trial.probation.take([PREFILL, unified])
    trial.probation.take([PREFILL, unified, first.worker])
    assert trial.passed == ["p", "u"]
    await until(lambda: "d0" in trial.passed and len(first.received) == 2)


async def test_how_blocks_reach_another_engine_is_not_tried(trial: Trial, decode: Any) -> None:
    other = await decode("d0", answers(503))
    trial.probation.take([PREFILL, replace(other.worker, engine="VLLM")])
    assert trial.passed == ["p", "d0"]
    assert trial.reasons == {}
    await asyncio.sleep(0.1)
    assert not other.received
