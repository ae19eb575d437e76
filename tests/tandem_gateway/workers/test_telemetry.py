"""Workers' telemetry as the gateway reads it, from real sockets that behave well, badly and not at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.names import Role
from tandem_api.telemetry import MOST, Metric, RankTelemetry, TierTelemetry, WorkerTelemetry
from tandem_gateway.process.settings import parse_settings
from tandem_gateway.scheduling import Demand, Worker
from tandem_gateway.scheduling.scheduler import MOST_OTHERS
from tandem_gateway.workers import telemetry
from tandem_gateway.workers.telemetry import MAX_BYTES, TelemetryPoller, describe_cache

from tests.ports import free_port
from tests.tandem_gateway.conftest import until

SAMPLE = WorkerTelemetry(
    model_name="m", role=Role.PREFILL, revision="r1", pod="p-0", draining=False, running_requests=1,
    queued_requests=2, running_tokens=3, queued_prefill_tokens=4, kv_blocks_used=5, kv_blocks_cached=6,
    kv_blocks_total=7, kv_eviction_horizon=8.0, busy_seconds_total=9.5,
)  # fmt: skip
Behaviour = Callable[[asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body


def sends(data: bytes) -> Behaviour:
    async def behave(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return behave


def changed(**fields: Any) -> bytes:
    """A sample that says something else."""
    return answer(json.dumps(json.loads(SAMPLE.to_json()) | fields).encode())


async def drip(writer: asyncio.StreamWriter) -> None:
    for byte in answer(SAMPLE.to_json().encode()):
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0.05)


async def flood(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 X\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"400\r\n" + b" " * 1024 + b"\r\n")
        await writer.drain()


async def die(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


HEALTHY = sends(answer(SAMPLE.to_json().encode()))


@dataclass
class StatusPort:
    """A worker's metrics port."""

    behave: Behaviour = HEALTHY
    port: int = 0
    connections: int = 0
    reading: int = 0
    most: int = 0
    """Reads at a time."""
    asked: list[bytes] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    async def start(self) -> StatusPort:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port or free_port())
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def worker(self, name: str = "p-0") -> Worker:
        return Worker(
            name=name, address="127.0.0.1:1", role=Role.PREFILL, revision="r1",
            status_address=f"127.0.0.1:{self.port}",
        )  # fmt: skip

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while True:
                self.asked.append(await reader.readuntil(b"\r\n\r\n"))
                self.reading += 1
                self.most = max(self.most, self.reading)
                try:
                    await self.behave(writer)
                finally:
                    self.reading -= 1
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()


@pytest.fixture
async def open_port() -> AsyncIterator[Callable[..., Awaitable[StatusPort]]]:
    opened: list[StatusPort] = []

    async def start(behave: Behaviour = HEALTHY, port: int = 0) -> StatusPort:
        opened.append(await StatusPort(behave, port).start())
        return opened[-1]

    yield start
    for each in opened:
        await each.stop()


@pytest.fixture
async def poller(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TelemetryPoller]:
    """It must be alive at the end, and the event loop must have had nothing to complain about."""
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    monkeypatch.setattr(telemetry, "ANSWER_SECONDS", 0.4)
    monkeypatch.setattr(telemetry, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(telemetry, "LONGEST_PAUSE", 0.1)
    made = TelemetryPoller(connect_seconds=1.0, period=0.05, on_sample=lambda *_: None)
    task = asyncio.create_task(made.run())
    yield made
    assert not task.done(), task
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert not problems


async def test_a_worker_is_asked_again_and_again_over_one_connection(poller, open_port, monkeypatch) -> None:
    monkeypatch.setattr(telemetry, "ANSWER_SECONDS", 60.0)
    port = await open_port()
    poller.take([port.worker()])
    await until(lambda: len(port.asked) >= 5)
    found, age = poller.sample(port.worker())
    assert found == SAMPLE
    assert 0 <= age < 5
    assert port.connections == 1
    assert port.asked[0].startswith(b"GET /telemetry HTTP/1.1\r\n")
    assert set(poller.reads) == {"ok"}


async def test_a_replica_of_many_gpus_is_heard(poller, open_port) -> None:
    """Each rank tells of its GPU, and the names of prompts have 4 KiB."""
    figures = {name: 150_000_000_000 for name in RankTelemetry.model_fields if name not in {"rank", "active", "slowed"}}
    ranks = [RankTelemetry(rank=rank, active=0.93123456789, slowed=False, **figures) for rank in range(128)]
    sample = SAMPLE.model_copy(update={"ranks": ranks, "prompts": [f"{name:029}" for name in range(128)]})
    port = await open_port()
    port.behave = sends(answer(sample.to_json().encode()))
    poller.take([port.worker()])
    await until(lambda: poller.sample(port.worker()) is not None)
    assert poller.sample(port.worker())[0] == sample


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (hang, "timeout"),
        (drip, "timeout"),
        (flood, "size"),
        (sends(answer(b" " * (MAX_BYTES + 1))), "size"),
        (sends(answer(b"not json")), "garbage"),
        (sends(answer(b"[" * 10_000)), "garbage"),
        (sends(answer(b'{"role": "prefill"}')), "garbage"),
        (sends(changed(busySecondsTotal=-1)), "garbage"),
        (sends(changed(runningRequests=-1)), "garbage"),
        (sends(answer(SAMPLE.to_json().replace("9.5", "NaN").encode())), "garbage"),
        (sends(answer(SAMPLE.to_json().replace("9.5", "1e999").encode())), "garbage"),
        (sends(answer(b"There are no figures of this process (yet).", 503)), "status"),
        (sends(b"\x16\x03\x01 this is not HTTP\r\n\r\n"), "protocol"),
        (die, "reset"),
    ],
)
async def test_a_read_that_fails_is_counted_and_the_old_sample_ages(poller, open_port, behave, reason) -> None:
    port, other = await open_port(), await open_port()
    poller.take([port.worker("bad"), other.worker("good")])
    await until(lambda: poller.sample(port.worker("bad")) is not None)
    port.behave = behave
    await until(lambda: poller.reads[reason] >= 2)
    found, age = poller.sample(port.worker("bad"))
    assert found == SAMPLE
    before = len(other.asked)
    await until(lambda: len(other.asked) >= before + 3)
    assert poller.sample(port.worker("bad"))[1] > age
    assert set(poller.reads) - {"timeout"} == {"ok", reason} - {"timeout"}  # any read may be late on a busy machine
    port.behave = HEALTHY
    await until(lambda: poller.sample(port.worker("bad"))[1] < age)


async def test_a_worker_that_restarts_tells_its_new_figures(poller, open_port) -> None:
    port = await open_port()
    poller.take([port.worker()])
    await until(lambda: poller.sample(port.worker()) is not None)
    await port.stop()
    await until(lambda: poller.reads["refused"] >= 2)
    assert poller.sample(port.worker())[0].busy_seconds_total == 9.5
    await open_port(sends(changed(busySecondsTotal=0.5)), port.port)
    await until(lambda: poller.sample(port.worker())[0].busy_seconds_total == 0.5)


async def test_a_sample_that_is_too_old_is_none(poller, open_port, monkeypatch) -> None:
    port = await open_port()
    poller.take([port.worker()])
    await until(lambda: poller.sample(port.worker()) is not None)
    monkeypatch.setattr(telemetry, "KEEP_SECONDS", 0.3)
    port.behave = hang
    await until(lambda: poller.sample(port.worker()) is None)


async def test_who_has_gone_is_asked_no_more_and_who_stays_keeps_its_sample(poller, open_port, monkeypatch) -> None:
    monkeypatch.setattr(telemetry, "ANSWER_SECONDS", 60.0)
    port, other, slow = await open_port(), await open_port(), await open_port(hang)
    poller.take([port.worker(), other.worker("other"), slow.worker("slow")])
    await until(lambda: poller.sample(port.worker()) and poller.sample(other.worker("other")) and slow.reading)
    poller.take([other.worker("other")])
    assert poller.sample(port.worker()) is None
    assert poller.sample(other.worker("other")) is not None
    asked = len(port.asked)
    await until(lambda: not port._tasks)
    before = len(other.asked)
    await until(lambda: len(other.asked) >= before + 3)
    assert len(port.asked) == asked
    assert other.connections == 1
    moved = replace(other.worker("other"), status_address=f"127.0.0.1:{port.port}")
    poller.take([moved])
    assert poller.sample(moved) is None, "another address is another worker"


async def test_so_many_at_a_time(poller, open_port, monkeypatch) -> None:
    """And those that hang do not keep the others waiting for ever."""

    async def take_time(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        await HEALTHY(writer)

    monkeypatch.setattr(telemetry, "AT_ONCE", 3)
    slow, bad = await open_port(take_time), await open_port(hang)
    poller.take([slow.worker(f"slow-{index}") for index in range(9)])
    await until(lambda: poller.reads["ok"] >= 12)
    assert slow.most == 3
    known = [*(bad.worker(f"bad-{index}") for index in range(9)), slow.worker("slow-0")]
    poller.take(known)
    before = poller.reads["ok"]
    await until(lambda: poller.reads["timeout"] >= 9 and poller.reads["ok"] >= before + 2, wait=60)


async def test_connections_to_many_workers_are_not_kept(poller, open_port, monkeypatch) -> None:
    """A gateway has as many descriptors as its clients need, and a few more."""
    monkeypatch.setattr(telemetry, "MAX_KEPT", 3)
    port = await open_port()
    workers = [port.worker(f"p-{index}") for index in range(4)]
    poller.take(workers)
    await until(lambda: poller.reads["ok"] >= 12)
    assert port.connections >= 12
    await until(lambda: not poller._reading and not any(target.link._idle for target in poller._targets.values()))
    assert all(poller.sample(worker) for worker in workers)


async def test_without_a_period_or_a_port_nobody_is_asked(open_port) -> None:
    port = await open_port()
    off = TelemetryPoller(connect_seconds=1.0, period=0, on_sample=lambda *_: None)
    off.take([port.worker()])
    assert not off._targets
    on = TelemetryPoller(connect_seconds=1.0, on_sample=lambda *_: None)
    on.take([replace(port.worker(), status_address="")])
    assert not on._targets
    assert on.sample(port.worker()) is None


@given(st.integers(1, 1000), st.floats(0.1, 60))
def test_reads_are_spread_over_the_period(count: int, period: float) -> None:
    """However many appear at once: in no tenth of the period more than twice their share and one, and never more than
    MAX_PER_SECOND over a period."""

    async def due() -> list[float]:
        poller = TelemetryPoller(connect_seconds=1.0, period=period, on_sample=lambda *_: None)
        loop: Any = asyncio.get_running_loop()
        now = loop.time()
        loop.time = lambda: now  # to make so many workers takes time
        worker = StatusPort(port=1).worker()
        poller.take([replace(worker, name=f"p-{index}") for index in range(count)])
        return sorted(due - now for due, _, _ in poller._due)

    times = asyncio.run(due())
    span = max(period, count / telemetry.MAX_PER_SECOND)
    assert times[-1] <= span + 1
    for index in range(10):
        begin = index * span / 10
        assert sum(begin <= each < begin + span / 10 for each in times) <= count / 5 + 2


async def test_the_log_names_a_worker_that_cannot_be_read_once(poller, open_port, caplog) -> None:
    port = await open_port(die)
    poller.take([port.worker()])
    await until(lambda: poller.reads["reset"] >= telemetry.COMPLAIN_AFTER + 3)
    (said,) = [record for record in caplog.records if record.name == "tandem_gateway.workers.telemetry"]
    assert (said.worker, said.reason) == ("p-0", "reset")


@pytest.mark.parametrize(
    ("given", "seconds"), [([], 1.0), (["--telemetry-seconds", "0"], 0), (["--telemetry-seconds=5"], 5)]
)
def test_the_period_is_a_setting(given: list[str], seconds: float) -> None:
    assert parse_settings(["--worker=url=127.0.0.1:1", *given]).telemetry_seconds == seconds


@pytest.mark.parametrize("text", ["-1", "0.01", "nan", "inf", "often"])
def test_other_periods_are_refused(text: str, capsys) -> None:
    with pytest.raises(SystemExit):
        parse_settings(["--worker=url=127.0.0.1:1", f"--telemetry-seconds={text}"])
    assert "--telemetry-seconds" in capsys.readouterr().err


async def test_fleet_and_metrics_tell_what_was_read(start_gateway, start_worker, open_port, connect) -> None:
    port = await open_port()
    running = await start_gateway(await start_worker("d"))
    server = running.server
    known = running.workers[0].worker
    server.apply_workers([replace(known, status_address=f"127.0.0.1:{port.port}")])
    await until(lambda: server.telemetry.reads["ok"])
    (report,) = running.server.reports.describe_fleet().workers
    assert report.telemetry == SAMPLE
    assert report.telemetry_age is not None
    assert report.telemetry_age < 5
    text = running.server.reports.render_metrics().decode()
    assert f'{Metric.GATEWAY_TELEMETRY_READS_TOTAL}{{result="ok"}}' in text


async def test_what_a_worker_tells_decides_where_requests_go(start_gateway, start_worker, open_port) -> None:
    """Its queue, its room and what its cache forgot; a worker that tells nothing is taken at this gateway's count."""
    said: dict[str, Any] = {"queuedPrefillTokens": 30_000, "kvBlocksTotal": 100, "kvBlockSize": 16}
    port = await open_port(sends(changed(**said, kvEvictionHorizon=500.0, at=512.0)))
    running = await start_gateway(await start_worker("d"))
    server, scheduler = running.server, running.gateway.scheduler
    known = replace(running.workers[0].worker, status_address=f"127.0.0.1:{port.port}")
    other = replace(known, name="other", address="127.0.0.1:2", status_address="")
    server.apply_workers([known, other])
    endpoint = scheduler.endpoints[known.name]
    await until(lambda: endpoint.others == 30_000)
    now = asyncio.get_running_loop().time()
    assert endpoint.kv_tokens == 1600
    assert now - endpoint.evicted_until == pytest.approx(12.0, abs=2.0)
    for _ in range(4):
        choice = scheduler.choose(Demand(prompt_tokens=500, output_tokens=5, prefix=[], affinity=0), now)
        assert choice is not None
        assert choice.decode.worker.name == "other"
    (described,) = [one for one in running.server.reports.describe_endpoints() if one["name"] == known.name]
    assert (described["otherTokens"], described["kvTokens"]) == (30_000, 1600)

    port.behave = sends(changed(**said | {"queuedPrefillTokens": 2**63 - 1}, kvEvictionHorizon=0.0, at=513.0))
    await until(lambda: endpoint.others == MOST_OTHERS)
    assert endpoint.evicted_until == 0.0
    port.behave = die
    await until(lambda: endpoint.others == 0, wait=60)
    assert endpoint.load == 0


HOST = TierTelemetry(tier="host", capacity_tokens=5000, horizon=40.0)


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        ([], (50.0, 1600)),
        ([TierTelemetry(tier="disk", capacity_tokens=10_000)], (0.0, 11_600)),
        ([TierTelemetry(tier="disk", capacity_tokens=10_000, horizon=20.0)], (20.0, 11_600)),
        ([TierTelemetry(tier="disk", capacity_tokens=10_000, reason="VolumeFull")], (50.0, 1600)),
        ([HOST], (40.0, 6600)),
        ([HOST, TierTelemetry(tier="disk", capacity_tokens=10_000, horizon=20.0)], (20.0, 16_600)),
        ([HOST, TierTelemetry(tier="disk", capacity_tokens=10_000, reason="VolumeFull")], (40.0, 6600)),
    ],
)
def test_what_memory_gives_up_stays_on_a_disk_that_works(
    tiers: list[TierTelemetry], expected: tuple[float, int]
) -> None:
    figures = {"kv_eviction_horizon": 50.0, "kv_blocks_total": 100, "kv_block_size": 16, "kv_tiers": tiers}
    assert describe_cache(SAMPLE.model_copy(update=figures)) == expected
    assert describe_cache(SAMPLE.model_copy(update=figures | {"kv_block_size": None})) == (50.0, None)


async def test_a_cache_that_cannot_be_can_still_be_told_of(start_gateway, start_worker) -> None:
    running = await start_gateway(await start_worker())
    (endpoint,) = running.gateway.scheduler.endpoints.values()
    tiers = [TierTelemetry(tier="disk", capacity_tokens=MOST)]
    figures = {"kv_blocks_total": MOST, "kv_block_size": MOST, "kv_tiers": tiers, "queued_prefill_tokens": MOST}
    running.gateway.take_sample(endpoint.worker, SAMPLE.model_copy(update=figures | {"at": 1.0}))
    told = orjson.loads(orjson.dumps(running.server.reports.describe_endpoints()))
    assert told[0]["kvTokens"] == MOST
