"""Reports of gateways, read from real HTTP servers on two loopback addresses."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from tandem_api.fleet import FleetReport, Traffic, WorkerReport
from tandem_api.names import Role
from tandem_api.telemetry import TierTelemetry, WeightsTelemetry
from tandem_operator.gateways import fleet
from tandem_operator.gateways.fleet import FleetView, FleetWatch, parse_report
from tandem_operator.objects.manifests import ModelKey
from tandem_operator.runtime.metrics import FLEET_REPORTS

from bench.gateway.telemetry import SAMPLE
from tests.ports import free_port

KEY = ModelKey("n", "m")
ONE, TWO = "127.0.0.1", "127.0.0.2"
GATEWAYS = {"m-one": ONE, "m-two": TWO}
FAST, SLOW = 0.05, 0.3


def worker(name: str, state: Any = "Admitted", reason: str | None = None, host: str = "10.0.0.1") -> WorkerReport:
    return WorkerReport(
        name=name, address=f"{host}:8000", role=Role.DECODE, revision="r", state=state, reason=reason
    )  # fmt: skip


def report(gateway: str, *workers: WorkerReport) -> FleetReport:
    return FleetReport(gateway=gateway, started_at=1.0, at=2.0, workers=list(workers))


class Gateways:
    """Two of them; each answers with what it was given."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[], web.StreamResponse]] = {}
        self.asked: Counter[str] = Counter()
        self.hangs = asyncio.Event()
        self.port = 0
        self.handler: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None

    def say(self, name: str, *workers: WorkerReport) -> None:
        text = report(name, *workers).to_json()
        self.answers[GATEWAYS[name]] = lambda: web.Response(text=text, content_type="application/json")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.handler is not None:
            return await self.handler(request)
        assert request.path == "/fleet"
        host = request.host.partition(":")[0]
        self.asked[host] += 1
        if host not in self.answers:
            await self.hangs.wait()
        return self.answers[host]()


@pytest.fixture
async def gateways() -> AsyncIterator[Gateways]:
    made = Gateways()
    made.port = free_port()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        for address in (ONE, TWO):
            await web.TCPSite(runner, address, made.port).start()
        yield made
    finally:
        made.hangs.set()
        await runner.cleanup()


class Watching:
    def __init__(self, port: int) -> None:
        self.late = 0.0
        self.changes: list[ModelKey] = []
        self.watch = FleetWatch(
            self.changes.append, port=port, clock=lambda: time.monotonic() + self.late, seconds=(FAST, SLOW)
        )

    async def until(self, holds: Callable[[FleetView], object]) -> FleetView:
        async with asyncio.timeout(60):
            while not holds(view := self.watch.view(KEY)):  # noqa: ASYNC110 -- the other end is a server
                await asyncio.sleep(0.01)
        return view


@pytest.fixture
async def watching(gateways: Gateways) -> AsyncIterator[Watching]:
    made = Watching(gateways.port)
    running = asyncio.create_task(made.watch.run())
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_worker_that_any_gateway_admits_is_admitted(gateways: Gateways, watching: Watching) -> None:
    gateways.say("m-one", worker("a", "Ejected", "silent"), worker("b", "Ejected", "error"))
    gateways.say("m-two", worker("a"), worker("b", "Ejected", "error"))
    assert not watching.watch.view(KEY).asked or not watching.watch.view(KEY).reporting
    watching.watch.follow(KEY, GATEWAYS, fast=True)
    view = await watching.until(lambda view: len(view.reporting) == 2)
    assert (view.asked, view.silent, view.unable) == (True, {}, frozenset())
    assert view.standings["a"].admitted
    assert (view.standings["b"].admitted, view.standings["b"].reason) == (False, "error")
    assert {found.gateway for found in watching.watch.reports(KEY)} == {"m-one", "m-two"}
    assert {found.gateway for found, age in watching.watch.heard(KEY) if 0 <= age < 10} == {"m-one", "m-two"}
    await watching.until(lambda view: view.standings["b"].rejected_seconds > 0)
    watching.late = 20.0
    rejected = await watching.until(lambda view: view.standings["b"].rejected_seconds >= 20.0)
    assert rejected.standings["a"].rejected_seconds == 0.0


async def test_only_changes_of_admission_cause_a_look(gateways: Gateways, watching: Watching) -> None:
    gateways.say("m-one", worker("a"))
    watching.watch.follow(KEY, {"m-one": ONE}, fast=True)
    await watching.until(lambda view: view.reporting)
    await until_asked(gateways, ONE, 5)
    assert watching.changes == [KEY]
    busier = report("m-one", worker("a").model_copy(update={"requests": 7})).to_json()
    gateways.answers[ONE] = lambda: web.Response(text=busier)
    await until_asked(gateways, ONE, gateways.asked[ONE] + 3)
    assert watching.changes == [KEY], "counts are no change"
    gateways.say("m-one", worker("a", "Ejected", "silent"))
    await watching.until(lambda view: not view.standings["a"].admitted)
    await until_asked(gateways, ONE, gateways.asked[ONE] + 2)
    assert watching.changes == [KEY], "busy for a moment is no change"
    watching.late = fleet.REJECTED_SECONDS[0]
    await until_asked(gateways, ONE, gateways.asked[ONE] + 3)
    assert watching.changes == [KEY, KEY]
    gateways.say("m-one", worker("a"))
    await watching.until(lambda view: view.standings["a"].admitted)
    await until_asked(gateways, ONE, gateways.asked[ONE] + 2)
    assert watching.changes == [KEY, KEY, KEY]
    gateways.say("m-one", worker("a"), worker("new", "Ejected", "kv"))
    await watching.until(lambda view: "new" in view.standings)
    await until_asked(gateways, ONE, gateways.asked[ONE] + 2)
    assert watching.changes == [KEY] * 4, "one that never was admitted is news at once"


async def test_who_tells_about_itself_and_not_of_its_weights_is_told_from_who_tells_nothing(
    gateways: Gateways, watching: Watching
) -> None:
    form = WeightsTelemetry(form="plain")
    told = {"a": SAMPLE.model_copy(update={"weights": form}), "b": SAMPLE.model_copy(update={"weights": None})}
    gateways.say("m-one", worker("c"), *(worker(name).model_copy(update={"telemetry": told[name]}) for name in told))
    watching.watch.follow(KEY, {"m-one": ONE}, fast=True)
    view = await watching.until(lambda view: view.reporting)
    assert view.weights == {"a": form, "b": None}


async def test_each_worker_of_whom_nothing_comes_causes_a_look_and_its_words_do_not(
    gateways: Gateways, watching: Watching
) -> None:
    def say(message: str, *failing: str) -> None:
        tier = TierTelemetry(tier="peer", message=message, failing=list(failing))
        sample = SAMPLE.model_copy(update={"kv_tiers": [tier]})
        others = [worker(name).model_copy(update={"address": each}) for name, each in zip("bc", addresses, strict=True)]
        gateways.say("m-one", worker("a").model_copy(update={"telemetry": sample}), *others)

    addresses = ("10.0.0.2:8000", "[fd00::3]:8000")
    say("")
    watching.watch.follow(KEY, {"m-one": ONE}, fast=True)
    looks = 0
    one, other, gone = "10.0.0.2:7000", "[fd00::3]:7000", "10.0.0.9:7000"
    for message, failing, causes in (
        ("", (), True),
        (f"{one}: timed out", (one,), True),
        (f"{one}: refused: no; it is full", (one,), False),
        (f"{one}: timed out; {other}: timed out", (one, other), True),
        (f"{other}: timed out", (other,), True),
        (f"{gone}: timed out; {other}: timed out", (gone, other), False),
        (f"{gone}: timed out", (gone,), True),
        (f"{gone}: refused", (gone,), False),
        ("", (), False),
        (f"{one}: timed out", (), True),  # of a release that has them in the sentence alone
        (f"{one}: timed out; {other}: timed out", (), True),
        ("", (), True),
    ):
        say(message, *failing)
        await until_asked(gateways, ONE, gateways.asked[ONE] + 3)
        looks += causes
        assert watching.changes == [KEY] * looks, message


async def until_asked(gateways: Gateways, host: str, count: int) -> None:
    async with asyncio.timeout(60):
        while gateways.asked[host] < count:  # noqa: ASYNC110 -- the other end is a server
            await asyncio.sleep(0.01)


def broken(**fields: Any) -> Callable[[], web.StreamResponse]:
    return lambda: web.Response(**fields)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (broken(status=500), "answers 500"),
        (broken(status=302, headers={"location": "http://127.0.0.1:1/"}), "answers 302"),
        (broken(text="not json"), "its report cannot be read"),
        (broken(text='{"gateway": "m-one", "startedAt": 1}'), "at: Field required"),
        (broken(text=report("m-one").to_json().replace('"workers":[]', '"workers":[{"state":"Fine"}]')), "workers.0"),
        (broken(text=report("m-other").to_json()), "answers as m-other"),
        (broken(body=b" " * (fleet.MAX_BYTES + 1)), "more than"),
        (None, "cannot be reached within"),
    ],
)
async def test_what_is_no_report_is_counted_and_told(
    gateways: Gateways,
    watching: Watching,
    answer: Callable[[], web.StreamResponse] | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "ANSWER_SECONDS", 1.5 if answer is None else 60.0)
    if answer is not None:
        gateways.answers[ONE] = answer
    gateways.say("m-two", worker("a"))
    before = FLEET_REPORTS.labels("error")._value.get()
    watching.watch.follow(KEY, GATEWAYS, fast=True)
    view = await watching.until(lambda view: view.asked)
    assert words in view.silent["m-one"]
    assert view.standings["a"].admitted, "another gateway's report counts nevertheless"
    assert FLEET_REPORTS.labels("error")._value.get() > before
    gateways.say("m-one")
    await watching.until(lambda view: not view.silent)


async def test_a_release_without_reports_is_told_apart(gateways: Gateways, watching: Watching) -> None:
    gateways.answers[ONE] = broken(status=404, text="try /metrics")
    watching.watch.follow(KEY, {"m-one": ONE}, fast=False)
    view = await watching.until(lambda view: view.asked)
    assert (view.unable, view.silent, view.reporting) == (frozenset({"m-one"}), {}, frozenset())


async def test_a_report_goes_stale_and_a_gateway_that_left_says_nothing(gateways: Gateways, watching: Watching) -> None:
    gateways.say("m-one", worker("a"))
    watching.watch.follow(KEY, {"m-one": ONE}, fast=False)
    await watching.until(lambda view: view.reporting)
    gateways.answers[ONE] = broken(status=503)
    await until_asked(gateways, ONE, gateways.asked[ONE] + 2)
    assert watching.watch.view(KEY).standings["a"].admitted, "one answer that did not come takes nothing back"
    watching.late = fleet.STALE_SECONDS + 1
    view = watching.watch.view(KEY)
    assert (view.standings, view.reporting, watching.watch.reports(KEY)) == ({}, frozenset(), ())
    assert "answers 503" in view.silent["m-one"]
    watching.watch.follow(KEY, {}, fast=False)
    assert watching.watch.view(KEY).silent == {}
    watching.watch.forget(KEY)
    assert watching.watch.view(KEY) == FleetView()


async def test_it_asks_often_only_while_something_is_under_way(gateways: Gateways, watching: Watching) -> None:
    gateways.say("m-one", worker("a"))
    watching.watch.follow(KEY, {"m-one": ONE}, fast=False)
    await watching.until(lambda view: view.reporting)
    began, seen = time.monotonic(), gateways.asked[ONE]
    await asyncio.sleep(4 * SLOW)
    assert gateways.asked[ONE] - seen <= (time.monotonic() - began) / SLOW + 1
    watching.watch.follow(KEY, {"m-one": ONE}, fast=True)
    began, seen = time.monotonic(), gateways.asked[ONE]
    await until_asked(gateways, ONE, seen + 10)
    assert time.monotonic() - began < 10 * SLOW, "faster than the slow pace"


async def test_gateways_that_hang_take_a_bounded_number_of_tasks(
    gateways: Gateways, watching: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "ANSWER_SECONDS", 60.0)
    for number in range(200):
        watching.watch.follow(ModelKey("n", f"m{number}"), {"m-one": ONE, "m-two": TWO}, fast=True)
    await until_asked(gateways, ONE, fleet._POLLERS)
    await asyncio.sleep(0.2)
    assert gateways.asked[ONE] <= fleet._POLLERS
    assert len(asyncio.all_tasks()) < 8 * fleet._POLLERS


def test_a_newer_gateway_may_say_more() -> None:
    text = report("g", worker("a")).to_json().replace('"gateway"', '"mood": "good", "gateway"')
    assert parse_report(text.encode(), gateway="g").workers[0].name == "a"


def test_a_report_of_a_thousand_workers_with_all_their_figures_is_read() -> None:
    """It has 1.2 MB: more than a report without telemetry, and well below what is read."""
    workers = [
        WorkerReport(
            name=f"llama-70b-production-decode-{index}", address="10.123.123.123:8000", role=Role.DECODE,
            revision="5f2c9d7e81", state="Admitted", requests=123_456_789, failures=123_456,
            ttft_counts=[123_456] * 14, telemetry=SAMPLE, telemetry_age=0.123456789,
        )
        for index in range(1000)
    ]  # fmt: skip
    text = FleetReport(gateway="g", started_at=1.0, at=2.0, workers=workers).to_json()
    assert 1024 * 1024 < len(text) < fleet.MAX_BYTES / 2
    assert FleetReport.model_validate_json(text).workers[-1].telemetry == SAMPLE


@pytest.mark.parametrize(
    ("field", "item", "says"),
    [
        ("workers", "{}", "workers.0.name"),
        ("workers", '{"name":"a","address":"","role":"decode","revision":"","state":"Admitted"}', "at most 10000"),
        ("workers", '{"name":"a","ttftCounts":[' + "-1," * 500_000 + "-1]}", "workers.0"),
        ("servedNames", "0", "servedNames.0"),
    ],
)
def test_a_large_report_that_is_none_is_refused_at_once(field: str, item: str, says: str) -> None:
    """Every error of it, told one by one, would hold up the operator for minutes."""
    items = ",".join([item] * min(1_000_000, fleet.MAX_BYTES // (len(item) + 1)))
    data = f'{{"gateway":"g","startedAt":1,"at":1,"{field}":[{items}]}}'.encode()
    began = time.process_time()
    with pytest.raises(ValueError, match=says) as refused:
        parse_report(data, gateway="g")
    assert time.process_time() - began < 1.5
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("field", ["name", "address", "revision", "reason"])
def test_a_report_has_no_text_that_a_status_could_not_hold(field: str) -> None:
    with pytest.raises(ValueError, match=rf"workers\.0\.{field}"):
        parse_report(report("g", worker("a").model_copy(update={field: "x" * 1001})).to_json().encode(), gateway="g")


async def test_gateways_of_a_model_that_sleeps_are_asked_to_tell_of_a_request(gateways: Gateways) -> None:
    """One question each, for as long as there is none; then an answer at once, and again while the model sleeps."""
    told: list[ModelKey] = []
    held, waits = asyncio.Event(), Traffic(waiting_requests=1, idle_seconds=0.0)
    asked: Counter[str] = Counter()

    async def handle(request: web.Request) -> web.StreamResponse:
        host = request.host.partition(":")[0]
        name = next(name for name, address in GATEWAYS.items() if address == host)
        quiet = report(name).model_copy(update={"traffic": Traffic(idle_seconds=100.0)})
        if request.path != "/fleet/waiting":
            return web.Response(text=quiet.to_json())
        asked[name] += 1
        if name == "m-one":
            await held.wait()
        else:
            await asyncio.Event().wait()
        return web.Response(text=quiet.model_copy(update={"traffic": waits}).to_json())

    gateways.handler = handle
    watch = FleetWatch(port=gateways.port, seconds=(FAST, SLOW), on_request=told.append)
    watch.follow(KEY, GATEWAYS, fast=False, asleep=True)
    running = asyncio.create_task(watch.run())
    try:
        await reach(lambda: asked == {"m-one": 1, "m-two": 1})
        await asyncio.sleep(3 * SLOW)
        assert (asked, told) == ({"m-one": 1, "m-two": 1}, [])
        held.set()
        await reach(lambda: len(told) >= 2)
        assert set(told) == {KEY}
        heard = {found.gateway: found.traffic for found, _ in watch.heard(KEY)}
        assert heard["m-one"] in (waits, Traffic(idle_seconds=100.0))
        watch.follow(KEY, GATEWAYS, fast=True, asleep=False)
        told.clear()
        await asyncio.sleep(1.0)
        assert told == []
        count = asked["m-two"]
        watch.follow(KEY, {"m-two": TWO}, fast=False, asleep=True)
        await reach(lambda: asked["m-two"] == count + 1)
        watch.forget(KEY)
        await asyncio.sleep(0.1)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    left = [task for task in asyncio.all_tasks() if "_wait_for_requests" in repr(task.get_coro())]
    assert left == []


async def reach(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 -- the other end is a server
            await asyncio.sleep(0.01)


async def test_a_gateway_that_cannot_tell_of_requests_is_asked_again(gateways: Gateways) -> None:
    asked: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return web.Response(status=404 if len(asked) % 2 else 200, text="what?")

    gateways.handler = handle
    watch = FleetWatch(port=gateways.port, seconds=(FAST, SLOW), on_request=lambda _: pytest.fail("nobody asked"))
    running = asyncio.create_task(watch.run())
    watch.follow(KEY, {"m-one": ONE}, fast=False, asleep=True)
    await reach(lambda: asked.count("/fleet/waiting") >= 4)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_two_hundred_models_that_sleep_cost_three_questions_a_minute_each(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "ANSWER_SECONDS", 60.0)  # a busy machine connects late, and nobody is asked twice for it
    asked: Counter[str] = Counter()

    async def handle(request: web.Request) -> web.StreamResponse:
        asked[request.path] += 1
        if request.path == "/fleet/waiting":
            await asyncio.Event().wait()
        return web.Response(text=report("m-one").to_json())

    gateways.handler = handle
    watch = FleetWatch(port=gateways.port)
    for number in range(200):
        watch.follow(ModelKey("n", f"m{number}"), {"m-one": ONE}, fast=False, asleep=True)
    running = asyncio.create_task(watch.run())
    await reach(lambda: asked == {"/fleet": 200, "/fleet/waiting": 200})
    await asyncio.sleep(1.0)
    assert asked == {"/fleet": 200, "/fleet/waiting": 200}, "once each: the rest is patience"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
