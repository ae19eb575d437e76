"""A model that nobody uses sleeps, and wakes for a request: looks at it, and a scaler that hears of a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from api_double import serving
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client import ApiClient, Configuration
from operator_objects import raw_model
from prometheus_client import REGISTRY
from tandem_api.crd.resource import InferenceModel
from tandem_api.fleet import FleetReport
from tandem_api.launch import GatewayConfig, GatewayQueue
from tandem_gateway.process.server import Server
from tandem_gateway.process.settings import Settings
from tandem_operator.autoscale.desired import settle_replicas
from tandem_operator.autoscale.observed import ObservedModel
from tandem_operator.autoscale.plan.contract import Target
from tandem_operator.autoscale.plan.snapshots import RoleCount
from tandem_operator.autoscale.plan.temper import Circumstances
from tandem_operator.autoscale.scaler import PERIOD_SECONDS, Scaler
from tandem_operator.gateways.fleet import FleetWatch
from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.manifests import ChildKey, ModelKey
from test_desired import NOW, PREFILL, OwningServer, look, scaling
from test_kstatus import kstatus
from test_reconciler import DECODE, GATEWAY, KEY, MODEL
from test_scaler import SLO, Cluster, D, Load, P

IDLE_AFTER = 60.0


class Gateway(Load):
    """One gateway. Nothing is under way while nothing arrives, waits or is made to be so."""

    def __init__(self) -> None:
        super().__init__()
        self.used_at = self.now
        self.waiting = 0

    def pass_time(self, seconds: float = PERIOD_SECONDS) -> None:
        super().pass_time(seconds)
        if self.rate or self.waiting:
            self.used_at = self.now

    def heard(self, key: ModelKey) -> Sequence[tuple[FleetReport, float]]:
        return [] if self.silent else super().heard(key)

    def report(self, gateway: str = "g-0") -> FleetReport:
        report = super().report(gateway)
        assert report.traffic is not None
        idle = 0.0 if self.waiting else self.now - self.used_at
        workers = report.workers
        if not self.rate:
            rest = {"running_requests": 0, "running_tokens": 0}
            workers = [
                one.model_copy(update={"telemetry": one.telemetry.model_copy(update=rest)})
                for one in workers
                if one.telemetry is not None
            ]
        traffic = report.traffic.model_copy(update={"idle_seconds": idle, "waiting_requests": self.waiting})
        return report.model_copy(update={"traffic": traffic, "workers": workers})


class Sleeper(Cluster):
    load: Gateway

    def __init__(self, server: OwningServer, client: KubeClient) -> None:
        super().__init__(server, client)
        self.load = Gateway()
        self.start()

    async def request(self, count: int = 1) -> None:
        """Requests wait, and the gateway has answered the operator's question."""
        self.load.waiting = count
        self.scaler.decide(KEY)
        await look(self.server, self.operator, times=1)

    async def fall_asleep(self) -> None:
        await self.run(IDLE_AFTER + 30, 0.0)
        assert self.replicas == (0, 0)

    def change(self, **spec: Any) -> None:
        """What `spec` says instead, of a model that sleeps by default."""
        self.server.change(**(SLEEPS | spec))

    @property
    def awake(self) -> bool:
        return "asleepSince" not in self.scaling

    def conditions(self, *kinds: str) -> list[str]:
        found = self.server.conditions
        return [f"{found[k]['status']} {found[k]['reason']}" if k in found else "" for k in kinds]

    def events(self, reason: str) -> list[str]:
        kept = self.server.kept
        return [e["message"] for path, e in kept.items() if "/events/" in path and e["reason"] == reason]


SLEEPS: dict[str, Any] = {
    "prefill": scaling("SLO"), "decode": scaling("SLO", min=2), "slo": SLO,
    "autoscaling": {"scaleToZero": {"idleAfter": "1m"}, "behavior": {"scaleDownStabilization": "2m"}},
}  # fmt: skip


@pytest.fixture
async def sleeper() -> AsyncIterator[Sleeper]:
    server = OwningServer()
    server.kept[MODEL] = {"kind": "InferenceModel", **raw_model(**SLEEPS)}
    async with serving(server.handle) as server.url:
        configuration = Configuration()
        configuration.host = server.url
        client = KubeClient(ApiClient(configuration))
        sleeper = Sleeper(server, client)
        await look(server, sleeper.operator, times=4)
        assert sleeper.replicas == (1, 2)
        yield sleeper
        await client.close()


async def test_it_falls_asleep_and_wakes_for_a_request(sleeper: Sleeper) -> None:
    server = sleeper.server
    await sleeper.run(300, 0.2)
    assert sleeper.awake
    await sleeper.run(IDLE_AFTER - 10, 0.0)
    assert sleeper.awake, "not before its time"
    await sleeper.fall_asleep()
    await look(server, sleeper.operator)
    assert sleeper.conditions("Ready", "Available", "Stalled", "Reconciling", "ScalingActive", "SLOMet") == [
        "True ScaledToZero", "True ScaledToZero", "", "", "True ScaledToZero", "Unknown ScaledToZero",
    ]  # fmt: skip
    assert kstatus(server.kept[MODEL]) == "Current"
    assert server.kept[GATEWAY]["spec"]["replicas"] == 1
    assert sleeper.scaling["prefill"]["desired"] == sleeper.scaling["decode"]["desired"] == 0
    (told,) = sleeper.events("FellAsleep")
    assert told.endswith("→ 0. No request came for 60 s, so the model sleeps; the next one wakes it.")
    labels = {"namespace": "n", "model": "m", "type": "ScaledToZero"}
    assert REGISTRY.get_sample_value("tandem_operator_model_condition", labels) == 1
    for _ in range(3):
        await sleeper.run(60, 0.0)
        await look(server, sleeper.operator, times=1)
    assert server.written == [], "nothing is said again"
    await sleeper.request(20)
    assert sleeper.replicas == (1, 2)
    assert sleeper.awake
    assert sleeper.conditions("Ready", "Available", "Stalled", "Reconciling") == [
        "True Waking", "True Waking", "", "True Progressing",
    ]  # fmt: skip
    assert kstatus(server.kept[MODEL]) == "InProgress"
    assert sleeper.events("WokeUp") == [
        "prefill 0 → 1, decode 0 → 2. 20 requests wait in gateways, so the model wakes up."
    ]
    assert not any("0" in text.split(" (")[0].split() for text in sleeper.events("Autoscaled")), "told once"
    await look(server, sleeper.operator)
    sleeper.load.waiting = 0
    await sleeper.run(30, 0.2)
    assert sleeper.conditions("Ready", "Available") == ["True AllReplicasReady", "True Serving"]
    assert kstatus(server.kept[MODEL]) == "Current"
    assert REGISTRY.get_sample_value("tandem_operator_model_condition", labels) == 0


async def test_an_operator_that_begins_anew_leaves_it_asleep(sleeper: Sleeper) -> None:
    await sleeper.fall_asleep()
    sleeper.start()
    await look(sleeper.server, sleeper.operator)
    await sleeper.run(60, 0.0)
    assert sleeper.replicas == (0, 0)
    await sleeper.request()
    assert sleeper.replicas == (1, 2)


async def test_an_operator_that_ends_within_a_step_goes_on_with_it(sleeper: Sleeper) -> None:
    server = sleeper.server
    await sleeper.fall_asleep()
    server.kept[DECODE]["spec"]["replicas"] = 2  # it had decided, and was ended before it had followed that
    sleeper.start()
    await look(server, sleeper.operator)
    assert sleeper.replicas == (0, 0)
    await sleeper.request()
    server.kept[PREFILL]["spec"]["replicas"] = 0
    sleeper.start()
    await look(server, sleeper.operator)
    assert sleeper.replicas == (1, 2)


async def test_what_is_not_known_puts_nothing_to_sleep_and_wakes_nothing(sleeper: Sleeper) -> None:
    sleeper.load.silent = {"g": "it answers 500"}
    await sleeper.run(300, 0.0)
    assert sleeper.replicas == (1, 2)
    sleeper.load.silent = {}
    await sleeper.fall_asleep()
    sleeper.load.silent = {"g": "it answers 500"}
    await sleeper.run(300, 0.0)
    assert sleeper.replicas == (0, 0)
    assert sleeper.conditions("ScalingActive", "Ready") == ["False NoTelemetry", "True ScaledToZero"]
    assert "whether requests wait: g: it answers 500" in sleeper.server.conditions["ScalingActive"]["message"]


async def test_a_request_while_pods_leave_wakes_it_at_once(sleeper: Sleeper) -> None:
    server = sleeper.server
    kept = {f"m-{role.value}-{n}": server.kept[f"/api/v1/namespaces/n/pods/m-{role.value}-{n}"] for role, n in
            ((P, 0), (D, 0), (D, 1))}  # fmt: skip
    sleeper.load.used_at = -1000.0
    await sleeper.run(IDLE_AFTER + 20, 0.0)
    assert sleeper.replicas == (0, 0)
    for name, pod in kept.items():
        leaving = pod | {"metadata": pod["metadata"] | {"deletionTimestamp": datetime.now(UTC).isoformat()}}
        server.kept[f"/api/v1/namespaces/n/pods/{name}"] = leaving
    await sleeper.operator.look()
    assert sleeper.conditions("Ready", "Reconciling", "Stalled") == ["True ScaledToZero", "True ScaledToZero", ""]
    sleeper.load.waiting = 1
    sleeper.scaler.decide(KEY)
    await sleeper.operator.look()
    assert sleeper.replicas == (1, 2)


async def test_a_new_template_leaves_it_asleep(sleeper: Sleeper) -> None:
    server = sleeper.server
    await sleeper.fall_asleep()
    before = server.kept[MODEL]["status"]["rollout"]["completeRevision"]
    sleeper.change(engine={"image": "w:2"})
    await look(server, sleeper.operator, times=6)
    await sleeper.run(60, 0.0)
    assert sleeper.replicas == (0, 0)
    assert server.kept[DECODE]["spec"]["template"]["spec"]["containers"][0]["image"] == "w:2"
    rollout = server.kept[MODEL]["status"]["rollout"]
    assert (rollout["phase"], rollout["completeRevision"]) == ("Complete", before + 1)
    assert kstatus(server.kept[MODEL]) == "Current"
    await sleeper.request()
    await look(server, sleeper.operator, times=4)
    assert sleeper.replicas == (1, 2)
    assert sleeper.conditions("Ready") == ["True AllReplicasReady"]


async def test_a_canary_waits_for_somebody_to_try_it_with(sleeper: Sleeper) -> None:
    server = sleeper.server
    await sleeper.fall_asleep()
    trial = {"canary": {"steps": [{"weight": 50, "duration": "1m"}]}}
    sleeper.change(rollout=trial, engine={"image": "w:2"})
    await look(server, sleeper.operator, times=6)
    await sleeper.run(60, 0.0)
    assert sleeper.replicas == (0, 0)
    assert server.kept[MODEL]["status"]["rollout"]["phase"] == "Preparing"
    assert kstatus(server.kept[MODEL]) == "Current"
    await sleeper.request()
    sleeper.load.waiting = 0
    phases: set[str] = set()
    for _ in range(4):
        await look(server, sleeper.operator)
        phases.add(server.kept[MODEL]["status"]["rollout"]["phase"])
    assert "Canary" in phases
    await sleeper.run(300, 0.0)
    assert sleeper.awake, "not while something is tried"


async def test_a_dry_run_puts_nothing_to_sleep_and_keeps_nobody_waiting(sleeper: Sleeper) -> None:
    dry = SLEEPS["autoscaling"] | {"dryRun": True}
    sleeper.change(autoscaling=dry)
    await sleeper.run(300, 0.0)
    assert sleeper.replicas == (1, 2)
    assert sleeper.awake
    assert sleeper.conditions("ScalingActive") == ["False DryRun"]
    assert "No request came for 60 s" in sleeper.server.conditions["ScalingActive"]["message"]
    sleeper.change()
    await sleeper.fall_asleep()
    sleeper.change(autoscaling=dry)
    await sleeper.run(60, 0.0)
    assert sleeper.replicas == (0, 0), "it moves nothing"
    await sleeper.request()
    assert sleeper.replicas == (1, 2)


async def test_suspension_holds_and_sleep_comes_back(sleeper: Sleeper) -> None:
    server = sleeper.server
    await sleeper.fall_asleep()
    sleeper.change(suspend=True)
    await look(server, sleeper.operator)
    assert sleeper.conditions("Ready", "Stalled", "ScalingActive") == ["False Suspended", "True Suspended",
                                                                       "False Suspended"]  # fmt: skip
    assert kstatus(server.kept[MODEL]) == "Failed"
    sleeper.change(suspend=False)
    await look(server, sleeper.operator)
    assert sleeper.replicas == (0, 0)
    assert server.kept[GATEWAY]["spec"]["replicas"] == 1
    assert sleeper.conditions("Ready", "Stalled") == ["True ScaledToZero", ""]
    await sleeper.run(10, 0.0)
    await sleeper.request()
    assert sleeper.replicas == (1, 2)


@pytest.mark.parametrize(
    ("change", "replicas"),
    [
        ({"autoscaling": {}}, (1, 2)),
        ({"autoscaling": {"dryRun": True}}, (1, 2)),
        ({"decode": scaling("SLO", min=3), "prefill": scaling("SLO", min=2)}, (0, 0)),
        ({"decode": {"replicas": 4}, "prefill": {"replicas": 3}}, (3, 4)),
        ({"decode": {"replicas": 4}, "prefill": {"replicas": 3}, "autoscaling": {}}, (3, 4)),
        ({"decode": {"replicas": 4}, "autoscaling": {}}, (1, 4)),
        ({"decode": scaling("External"), "prefill": scaling("External"), "autoscaling": {}}, (1, 1)),
    ],
    ids=["off", "off, dry", "other bounds", "Static", "Static, off", "one Static", "External"],
)  # fmt: skip
async def test_a_change_of_the_spec_while_it_sleeps(
    sleeper: Sleeper, change: dict[str, Any], replicas: tuple[int, int]
) -> None:
    await sleeper.fall_asleep()
    sleeper.change(**change)
    await look(sleeper.server, sleeper.operator)
    assert sleeper.replicas == replicas
    told = sleeper.server.kept[MODEL]["status"].get("scaling", {})
    assert ("asleepSince" in told) == (replicas == (0, 0))
    assert sleeper.conditions("Stalled") == [""]
    await sleeper.run(20, 0.2 if any(replicas) else 0.0)
    await look(sleeper.server, sleeper.operator)
    assert sleeper.conditions("Ready") == ["True AllReplicasReady" if any(replicas) else "True ScaledToZero"]
    if not any(replicas):
        await sleeper.request()
        assert sleeper.replicas == (2, 3)


async def test_what_fails_elsewhere_does_not_keep_it_from_waking(sleeper: Sleeper) -> None:
    """One child cannot be written, so every look ends with an error."""
    server = sleeper.server
    server.refuse[("PATCH", "/poddisruptionbudgets/m-decode")] = (500, "no")
    server.refuse[("POST", "/poddisruptionbudgets/m-decode")] = (500, "no")
    del server.kept["/apis/policy/v1/namespaces/n/poddisruptionbudgets/m-decode"]
    sleeper.operator.forget(
        {"kind": "PodDisruptionBudget", "metadata": {"name": "m-decode", "namespace": "n",
                                                     "labels": {"tandem.dev/model": "m"}}}
    )  # fmt: skip
    for _ in range(40):
        sleeper.load.pass_time()
        await sleeper.scaler.decide_all()
        with pytest.raises(Exception, match="no"):
            await look(server, sleeper.operator, times=1)
    assert sleeper.replicas == (0, 0)
    with pytest.raises(Exception, match="no"):
        await sleeper.request()
    assert sleeper.replicas == (1, 2)


async def test_waking_that_fails_is_not_ready(sleeper: Sleeper) -> None:
    server = sleeper.server
    await sleeper.fall_asleep()
    await sleeper.request()
    for path in list(server.kept):
        if "/pods/m-" in path and path.endswith(("prefill-0", "decode-0", "decode-1")):
            del server.kept[path]
    server.add_pod(
        "m-decode-0",
        containerStatuses=[{"name": "worker", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "x"}}}],
    )
    server.add_pod(
        "m-prefill-0",
        containerStatuses=[{"name": "worker", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "x"}}}],
    )
    await sleeper.operator.look()
    assert sleeper.conditions("Stalled", "Ready", "Available") == [
        "True ImagePullFailed", "False ImagePullFailed", "False NothingServed",
    ]  # fmt: skip


MODES = st.sampled_from(["Static", "SLO", "External"])
ROLES = st.none() | st.builds(lambda mode, desired: {"mode": mode, "desired": desired}, MODES, st.integers(0, 4))


@given(
    mode=st.sampled_from(["Static", "SLO"]),
    least=st.integers(1, 3),
    sleeps=st.booleans(),
    dry=st.booleans(),
    suspended=st.booleans(),
    was_asleep=st.booleans(),
    roles=st.tuples(ROLES, ROLES),
    rest=st.none() | st.booleans(),
    present=st.integers(0, 3),
)
def test_numbers_of_a_model_that_may_sleep(
    mode: str, least: int, sleeps: bool, dry: bool, suspended: bool, was_asleep: bool, roles: tuple[Any, Any],
    rest: bool | None, present: int,
) -> None:  # fmt: skip
    """Both roles sleep or none does, until something says otherwise, and nothing but sleep takes the last one."""
    each = {"replicas": 2} | (scaling("SLO", min=least) if mode == "SLO" else {})
    raw = raw_model(prefill=each, decode=each, slo=SLO, suspend=suspended,
                    autoscaling={"dryRun": dry} | ({"scaleToZero": {}} if sleeps else {}))  # fmt: skip
    before = {name: role for name, role in zip(("prefill", "decode"), roles, strict=True) if role is not None}
    if was_asleep:
        before = {name: {"mode": "SLO", "desired": 0} for name in ("prefill", "decode")} | {"asleepSince": NOW}  # type: ignore[assignment]
    model = InferenceModel.model_validate(raw | {"status": {"scaling": before}})
    live = {ChildKey("StatefulSet", f"m-{name}"): {"spec": {"replicas": present}} for name in ("prefill", "decode")}
    found = settle_replicas(model, live, {}, now=NOW, rest=rest)
    assert found.model.spec.prefill is not None
    counts = [role.replicas for role in (found.model.spec.prefill, found.model.spec.decode)]
    if mode == "Static":
        assert (counts, found.scaling) == ([2, 2], None)
        return
    assert found.scaling is not None
    asleep = found.scaling.asleep_since is not None
    if asleep:
        assert counts == [0, 0]
        assert sleeps
        assert rest is not False
        assert was_asleep or (rest and not dry and not suspended)
    elif not dry or was_asleep:
        assert min(counts) >= least
    again = settle_replicas(
        model.model_copy(update={"status": model.status.model_copy(update={"scaling": found.scaling})}),
        live,
        {},
        now="x",
    )
    assert (again.model.spec, again.scaling, again.moved) == (found.model.spec, found.scaling, False), "it stays so"


async def test_a_request_is_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real gateway without workers, the questions to it, and the decision."""
    monkeypatch.setenv("POD_NAME", "m-gateway")
    config = GatewayConfig(
        model_name="m", served_name="m", namespace="n", disaggregated=True, http_port=0, metrics_port=0,
        queue=GatewayQueue(wakes=True),
    )  # fmt: skip
    server = Server(
        Settings(
            config=config, host="127.0.0.1", workers=(), workers_file=Path("/nowhere"), lame_duck_seconds=0.0,
            log_level="info", access_log=False,
        )
    )  # fmt: skip
    await server.start()
    looks: list[ModelKey] = []

    def tell(key: ModelKey) -> None:
        scaler.decide(key)

    watch = FleetWatch(port=server.metrics_port, on_request=tell)
    scaler = Scaler(watch, looks.append)
    target = Target(seconds=1.0)
    observed = ObservedModel(
        spec=None, ttft=target, tpot=target, counts={P: RoleCount(replicas=0), D: RoleCount(replicas=0)},
        circumstances=Circumstances(followed=frozenset({P, D})), idle_after=60.0, asleep=True, fewest={P: 1, D: 2},
    )  # fmt: skip
    scaler.follow(KEY, observed)
    watch.follow(KEY, {"m-gateway": "127.0.0.1"}, fast=False, asleep=True)
    running = asyncio.create_task(watch.run())
    try:
        async with asyncio.timeout(60):
            while not (server.admin._questions and watch.view(KEY).asked):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await scaler.decide_all()
        outlook = scaler.outlook(KEY, 0)
        assert outlook is not None
        assert (outlook.asleep, outlook.decision and outlook.decision.reason) == (None, "ScaledToZero")
        looks.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", server.http_port)
        body = b'{"model": "m", "prompt": "x"}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        began = asyncio.get_running_loop().time()
        writer.write(head + body)
        async with asyncio.timeout(60):
            while not looks:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        took = asyncio.get_running_loop().time() - began
        outlook = scaler.outlook(KEY, 0)
        assert outlook is not None
        assert outlook.asleep is False
        assert outlook.decision is not None
        assert outlook.decision.replicas == {P: 1, D: 2}
        assert took < 8.0, "some 0.1 s on a machine that has nothing else to do"
        writer.transport.abort()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop()
