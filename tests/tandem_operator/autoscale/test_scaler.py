"""Replicas that follow demand: the loop against gateways whose reports a test makes up, and looks that follow it."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from api_double import serving
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes.aio.client import ApiClient, Configuration
from operator_objects import RELEASE, raw_model
from prometheus_client import REGISTRY
from tandem_api.fleet import TTFT_BOUNDS, FleetReport, Traffic, WorkerReport
from tandem_api.names import Role
from tandem_api.telemetry import WorkerTelemetry
from tandem_operator.autoscale.observed import ObservedModel
from tandem_operator.autoscale.plan.contract import Behavior, RoleSpec, ScalingSpec, Target
from tandem_operator.autoscale.plan.snapshots import PodStart, RoleCount
from tandem_operator.autoscale.plan.temper import Circumstances
from tandem_operator.autoscale.scaler import PERIOD_SECONDS, Scaler
from tandem_operator.gateways.fleet import FleetView, FleetWatch
from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.manifests import ModelKey
from test_desired import PREFILL, OwningServer, look
from test_reconciler import DECODE, KEY, MODEL, Operator

P, D = Role.PREFILL, Role.DECODE
SPEC = ScalingSpec(
    roles={P: RoleSpec(max=6), D: RoleSpec(max=6)}, ttft=Target(seconds=2.0), tpot=Target(seconds=0.05),
    behavior=Behavior(scale_down_seconds=120.0, falling_seconds=60.0),
)  # fmt: skip
BOTH = frozenset({P, D})
FASTEST = [1, *[0] * len(TTFT_BOUNDS)]


class Load(FleetWatch):
    """One gateway and its workers, under as many requests per second as a test says; 1000 prompt and 100 output tokens
    each. A prefill worker computes 1000 tokens per second."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.now, self.age = 0.0, 1000.0, 0.0
        self.requests = 0.0
        self.workers = {P: 1, D: 1}
        self.link_tokens = float("inf")
        """Prompt tokens per second that a decode worker's link takes in."""
        self.seconds: dict[str, float] = {}
        """In which each worker's link took some in, or it computed prompts."""
        self.silent: dict[str, str] = {}
        self.gateways = 1
        """Requests come to all of them alike."""
        self.lies: dict[str, dict[str, Any]] = {}
        """Figures that a worker tells, by pod."""
        self.broken: object = None

    def pass_time(self, seconds: float = PERIOD_SECONDS) -> None:
        self.now += seconds
        self.requests += self.rate * seconds
        for role, tokens in ((P, 1000.0), (D, self.link_tokens)):
            if role not in self.workers:
                continue
            share = min(1.0, 1000.0 * self.rate / self.workers[role] / tokens)
            for number in range(self.workers[role]):
                name = f"m-{role.value}-{number}"
                self.seconds[name] = self.seconds.get(name, 0.0) + share * seconds

    def silence(self, count: int) -> None:
        """So many gateways do not report any more."""
        self.silent = {f"g-{number}": "it answers 500" for number in range(count)}

    def heard(self, key: ModelKey) -> Sequence[tuple[FleetReport, float]]:
        if key.name == "garbage":
            return [(self.broken, 0.0)]  # type: ignore[list-item]
        names = [f"g-{number}" for number in range(self.gateways)]
        return [(self.report(name), self.age) for name in names if name not in self.silent]

    def view(self, key: ModelKey) -> FleetView:
        return FleetView(silent=self.silent)

    def report(self, gateway: str = "g-0") -> FleetReport:
        count = int(self.requests / self.gateways)
        traffic = Traffic(
            requests=count, prompt_tokens=1000 * count, prompt_squares=1.2e6 * count,
            computed_prompt_tokens=1000 * count, computed_tokens=1000 * count, finished=count,
            output_tokens=100 * count,
        )  # fmt: skip
        workers = [self.worker(role, number) for role in self.workers for number in range(self.workers[role])]
        return FleetReport(gateway=gateway, started_at=2000.0, at=0.0, workers=workers, traffic=traffic)

    def worker(self, role: Role, number: int) -> WorkerReport:
        name, held = f"m-{role.value}-{number}", 1050 * max(1.0, self.rate / self.workers[D])
        counted = self.seconds.get(name, 0.0)
        figures: dict[str, Any] = {"prefill_tokens_per_second": 1000.0, "busy_seconds_total": counted}
        if role is D:
            step = 0.01 + 1e-6 * held
            figures = {"running_requests": 1, "running_tokens": int(held), "decode_step_seconds": step}
            figures["kv_transfer_seconds_total"] = counted
        told = WorkerTelemetry(
            model_name="m", role=role, revision="r", pod=name, draining=False,
            **({"running_requests": 0, "running_tokens": 0} | figures | self.lies.get(name, {})),
            queued_requests=0, queued_prefill_tokens=0, kv_blocks_used=0, kv_blocks_cached=0, kv_blocks_total=1000,
            kv_eviction_horizon=0.0,
        )  # fmt: skip
        streams = [int(self.requests) * n for n in FASTEST] if role is D and not number else []
        return WorkerReport(
            name=name, address="10.0.0.1:8000", role=role, revision="r", state="Admitted", telemetry=told,
            telemetry_age=0.5, ttft_counts=streams,
        )  # fmt: skip


class Following:
    """A scaler, and looks that do what it decides."""

    def __init__(self, load: Load, *, counts: dict[Role, int] | None = None, spec: ScalingSpec = SPEC) -> None:
        self.load, self.spec = load, spec
        self.looks: list[ModelKey] = []
        self.counts = dict(counts or load.workers)
        self.steps: list[dict[Role, int]] = []
        self.rolling, self.dry_run = False, False
        self.begin()

    def begin(self) -> None:
        """A process that starts."""
        self.scaler = Scaler(self.load, self.looks.append, clock=lambda: self.load.now)
        self.follow()

    def follow(self) -> None:
        self.load.workers = dict(self.counts)
        counts = {
            role: RoleCount(
                replicas=count,
                leaders=frozenset(f"m-{role.value}-{n}" for n in range(count)),
                starts={f"m-{role.value}-0": PodStart(before=0.0, whole=20.0)},
            )
            for role, count in self.counts.items()
        }
        self.scaler.follow(
            KEY,
            ObservedModel(
                spec=self.spec, ttft=self.spec.ttft, tpot=self.spec.tpot, counts=counts, dry_run=self.dry_run,
                circumstances=Circumstances(followed=BOTH, rolling=self.rolling, steady=self.counts),
            ),
        )  # fmt: skip

    async def run(self, seconds: float, rate: float) -> None:
        self.load.rate = rate
        for _ in range(int(seconds / PERIOD_SECONDS)):
            self.load.pass_time()
            self.looks.clear()
            await self.scaler.decide_all()
            outlook = self.scaler.outlook(KEY, 0)
            assert outlook is not None
            for role, recommendation in outlook.recommendations.items():
                assert self.looks == [KEY], "what is decided is followed at once"
                assert recommendation.observed == self.counts[role]
                self.counts[role] = recommendation.replicas
            self.steps.append(dict(self.counts))
            self.follow()

    @property
    def reason(self) -> str:
        outlook = self.scaler.outlook(KEY, 0)
        assert outlook is not None
        assert outlook.decision is not None
        return outlook.decision.reason


async def test_roles_follow_demand_up_and_down_apart() -> None:
    following = Following(Load())
    await following.run(400, 0.3)
    calm = dict(following.counts)
    await following.run(300, 3.5)
    busy = dict(following.counts)
    assert busy[P] > calm[P]
    assert busy[P] > busy[D]
    await following.run(1200, 0.3)
    assert following.counts == calm
    await following.run(1200, 0.0)
    assert following.counts == {P: 1, D: 1}


async def test_full_links_bring_decode_replicas_and_keep_them() -> None:
    """A decode worker could hold far more than its link takes in."""
    free, full = Following(Load()), Following(Load())
    full.load.link_tokens = 1000.0
    for following in (free, full):
        await following.run(900, 3.5)
    assert free.counts[D] == 2
    assert 4 <= full.counts[D] <= 5, "3500 tokens per second need four links that are not full"
    assert full.counts[P] == free.counts[P]
    assert max(step[D] for step in full.steps) <= 5, "what old replicas took in is no share of new ones"
    await full.run(1800, 3.5)
    assert min(step[D] for step in full.steps[-300:]) == full.counts[D], "it does not go up and down"
    await full.run(2400, 0.3)
    assert full.counts[D] == 1


SLOW, FAST = {"decode_step_seconds": 1.5}, {"decode_step_seconds": 1e-5}


@pytest.mark.parametrize(
    ("pod", "lie"),
    [("m-decode-1", SLOW), ("m-decode-1", FAST), ("m-prefill-1", {"prefill_tokens_per_second": 10.0}),
     ("m-prefill-1", {"prefill_tokens_per_second": 1e8})],
)  # fmt: skip
async def test_one_worker_that_lies_moves_nothing_and_is_named(pod: str, lie: dict[str, Any]) -> None:
    spec = replace(SPEC, roles={P: RoleSpec(min=3, max=12), D: RoleSpec(min=3, max=12)})
    honest, lying = (Following(Load(), counts={P: 3, D: 3}, spec=spec) for _ in range(2))
    lying.load.lies = {pod: lie}
    for following in (honest, lying):
        await following.run(600, 2.0)
        await following.run(600, 4.0)
    assert lying.steps == honest.steps
    assert {P: 3, D: 3} != honest.counts != {P: 12, D: 12}
    outlook = lying.scaler.outlook(KEY, 0)
    assert outlook is not None
    assert outlook.decision is not None
    assert outlook.decision.sentence.endswith(f"the speed that {pod} told.")


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([60, 200]), st.sampled_from([0.0, 0.5, 4.0, 30.0])), max_size=5),
    st.integers(1, 3), st.integers(0, 4), st.integers(1, 3), st.integers(0, 4),
)  # fmt: skip
async def test_never_below_min_or_above_max_and_always_the_same(
    story: list[tuple[int, float]], low_p: int, more_p: int, low_d: int, more_d: int
) -> None:
    roles = {P: RoleSpec(min=low_p, max=low_p + more_p), D: RoleSpec(min=low_d, max=low_d + more_d)}
    spec, runs = replace(SPEC, roles=roles), []
    for _ in range(2):
        following = Following(Load(), counts={P: low_p, D: low_d}, spec=spec)
        for seconds, rate in story:
            await following.run(seconds, rate)
        assert all(roles[role].min <= step[role] <= roles[role].max for step in following.steps for role in BOTH)
        runs.append(following.steps)
    assert runs[0] == runs[1]


async def test_nothing_moves_on_what_is_old() -> None:
    following = Following(Load(), counts={P: 4, D: 4})
    await following.run(600, 3.5)
    before = dict(following.counts)
    following.load.age = 31.0
    await following.run(900, 30.0)
    assert (following.counts, following.reason) == (before, "TelemetryStale")
    await following.run(900, 0.0)
    assert following.counts == before
    following.load.age = 0.0
    await following.run(55, 0.5)
    assert following.counts == before, "what was needed meanwhile is not known"
    await following.run(300, 0.5)
    assert following.counts[P] < before[P]


@pytest.mark.parametrize("others", [1, 7])
async def test_while_a_gateway_is_silent_the_others_may_add_replicas_and_none_goes(others: int) -> None:
    load = Load()
    load.gateways = 1 + others
    following = Following(load, counts={P: 3, D: 3})
    await following.run(600, 2.0)
    before = dict(following.counts)
    load.silence(1)
    await following.run(300, 2.0)
    assert following.counts == before, "what the others tell is less than all there is"
    assert following.reason == "DemandPartlyKnown"
    outlook = following.scaler.outlook(KEY, 0)
    assert outlook is not None
    assert outlook.decision is not None
    assert "g-0: it answers 500" in outlook.decision.sentence
    assert {one.limit for one in outlook.decision.roles.values()} <= {"telemetry", "TTFT target", "TPOT target"}
    await following.run(300, 5.0 * (1 + others) / others)
    grown = dict(following.counts)
    assert grown[P] == 6, "five times the load at the others alone is more than three carry"
    await following.run(400, 0.1)
    assert following.counts == grown
    load.silence(0)
    await following.run(55, 0.1)
    assert following.counts == grown, "what was needed meanwhile is not known"
    assert following.reason != "DemandPartlyKnown"
    await following.run(300, 0.5)
    assert following.counts[P] < grown[P]


async def test_what_a_gateway_counted_while_it_was_silent_is_no_jump_when_it_is_back() -> None:
    load = Load()
    load.gateways = 2
    following = Following(load, counts={P: 3, D: 3})
    await following.run(600, 2.0)
    before = dict(following.counts)
    load.silence(1)
    await following.run(100, 2.0)
    load.silence(0)
    await following.run(100, 2.0)
    assert following.counts == before


async def test_nothing_moves_where_every_gateway_is_silent_or_the_others_do_not_count() -> None:
    following = Following(Load(), counts={P: 3, D: 3})
    await following.run(600, 2.0)
    before = dict(following.counts)
    following.load.silence(1)
    await following.run(300, 9.0)
    assert (following.counts, following.reason) == (before, "NoTelemetry")


async def test_a_process_that_starts_anew_takes_nothing_away_before_it_has_watched() -> None:
    following = Following(Load(), counts={P: 6, D: 6}, spec=replace(SPEC, behavior=Behavior(scale_down_seconds=600.0)))
    await following.run(580, 1.0)
    following.begin()
    following.steps.clear()
    await following.run(580, 1.0)
    assert following.steps[-1] == following.steps[0] == {P: 6, D: 6}
    await following.run(100, 1.0)
    assert following.counts[P] < 6


@pytest.mark.parametrize("trouble", ["failed", "stood still"])
async def test_who_has_not_watched_for_a_while_takes_nothing_away_before_it_has(
    monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    following = Following(Load(), counts={P: 4, D: 4})
    await following.run(600, 3.5)
    before = dict(following.counts)
    if trouble == "failed":
        with monkeypatch.context() as patch:
            patch.setattr(following.load, "heard", lambda key: [(object(), 0.0)])
            await following.run(600, 0.5)
            assert following.reason == "PlannerFailed"
    else:
        following.load.rate = 0.5
        following.load.pass_time(600)
    await following.run(55, 0.5)
    assert following.counts == before, "what was needed meanwhile is not known"
    await following.run(300, 0.5)
    assert following.counts[P] < before[P]


async def test_while_replicas_are_replaced_none_is_taken_away_and_more_may_come() -> None:
    following = Following(Load(), counts={P: 4, D: 4})
    following.rolling = True
    following.follow()
    await following.run(600, 0.3)
    assert following.counts == {P: 4, D: 4}
    await following.run(200, 5.0)
    assert following.counts[P] > 4
    following.rolling = False
    following.follow()
    await following.run(900, 0.3)
    assert following.counts[P] < 4


async def test_a_dry_run_decides_and_moves_nothing() -> None:
    following = Following(Load())
    following.dry_run = True
    following.follow()
    await following.run(300, 3.5)
    outlook = following.scaler.outlook(KEY, 0)
    assert outlook is not None
    assert outlook.decision is not None
    assert outlook.decision.replicas[P] > following.counts[P] == 1


async def test_garbage_about_one_model_stops_no_other() -> None:
    following = Following(Load())
    garbage = ModelKey("n", "garbage")
    observed = ObservedModel(spec=SPEC, ttft=SPEC.ttft, tpot=SPEC.tpot, circumstances=Circumstances(followed=BOTH))
    following.scaler.follow(garbage, observed)
    following.load.broken = object()
    following.load.rate = 3.5
    for _ in range(60):
        following.load.pass_time()
        await following.scaler.decide_all()
    outlook, other = following.scaler.outlook(garbage, 0), following.scaler.outlook(KEY, 0)
    assert outlook is not None
    assert outlook.decision is not None
    assert (outlook.decision.reason, dict(outlook.recommendations)) == ("PlannerFailed", {})
    assert following.looks.count(garbage) == 1, "told once"
    assert other is not None
    assert other.recommendations[P].replicas > 1
    assert REGISTRY.get_sample_value("tandem_operator_scaled_models") == 2
    following.scaler.forget(garbage)
    assert REGISTRY.get_sample_value("tandem_operator_scaled_models") == 1


async def test_steady_demand_causes_a_look_every_half_a_minute_at_most() -> None:
    following = Following(Load())
    await following.run(600, 0.4)
    looks = 0
    for _ in range(60):
        await following.run(PERIOD_SECONDS, 0.4)
        looks += len(following.looks)
    assert looks <= 10


SLO = {"ttft": {"seconds": 2}, "tpot": {"seconds": 0.05}}
AUTOMATIC = {"scaling": {"mode": "SLO", "max": 6}}


class Cluster:
    """A model, looks at it, and a scaler that hears of a made-up load."""

    def __init__(self, server: OwningServer, client: KubeClient, load: Load | None = None) -> None:
        self.server, self.client, self.load = server, client, load or Load()
        self.statuses = 0
        self.start()

    def start(self) -> None:
        """An operator begins."""
        self.asked = True
        self.scaler = Scaler(self.load, self.ask, clock=lambda: self.load.now)
        self.operator = Operator(self.server, self.client, release=RELEASE, scaler=self.scaler)

    def ask(self, key: ModelKey) -> None:
        """A decision is to be followed or told."""
        self.asked = True

    async def run(self, seconds: float, rate: float) -> None:
        """The model is looked at when a decision or something that was written says so, and once in six decisions."""
        self.load.rate = rate
        for period in range(int(seconds / PERIOD_SECONDS)):
            self.load.pass_time()
            await self.scaler.decide_all()
            if not (self.asked or self.server.written or period % 6 == 0):
                continue
            self.asked = False
            await look(self.server, self.operator, times=1)
            self.statuses += self.server.written.count(f"{MODEL}/status")
            self.load.workers = {
                role: max(1, self.server.kept[path]["spec"]["replicas"])
                for role, path in ((P, PREFILL), (D, DECODE))
                if path in self.server.kept
            }

    @property
    def scaling(self) -> dict[str, Any]:
        return self.server.kept[MODEL]["status"]["scaling"]

    @property
    def replicas(self) -> tuple[int, int]:
        return tuple(self.server.kept[path]["spec"]["replicas"] for path in (PREFILL, DECODE))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with serve(Load(), prefill=AUTOMATIC) as cluster:
        yield cluster


@asynccontextmanager
async def serve(load: Load, **spec: Any) -> AsyncIterator[Cluster]:
    """A model whose decode workers follow demand, and what else a test says."""
    server = OwningServer()
    behavior = {"behavior": {"scaleDownStabilization": "2m"}}
    made = raw_model(**({"decode": AUTOMATIC, "slo": SLO, "autoscaling": behavior} | spec))
    server.kept[MODEL] = {"kind": "InferenceModel", **made}
    async with serving(server.handle) as server.url:
        configuration = Configuration()
        configuration.host = server.url
        client = KubeClient(ApiClient(configuration))
        cluster = Cluster(server, client, load)
        try:
            await look(server, cluster.operator, times=4)
            yield cluster
        finally:
            await client.close()


async def test_bounds_that_change_are_followed_and_told(cluster: Cluster) -> None:
    cluster.server.change(prefill={"scaling": {"mode": "SLO", "min": 2, "max": 6}})
    await look(cluster.server, cluster.operator)
    assert cluster.replicas == (2, 1)
    events = [found for path, found in cluster.server.kept.items() if "/events/" in path]
    assert "prefill 1 → 2 for its scaling.min and scaling.max" in [event["message"] for event in events]


async def test_looks_follow_decisions_and_say_why(cluster: Cluster) -> None:
    server = cluster.server
    assert server.conditions["ScalingActive"]["reason"] == "NotDecidedYet"
    await cluster.run(30, 0.4)
    assert server.conditions["ScalingActive"]["reason"] == "NothingMeasured"
    assert server.conditions["SLOMet"]["status"] == "Unknown"
    await cluster.run(200, 3.5)
    prefill, decode = cluster.replicas
    assert prefill > 2
    assert prefill > decode
    told = cluster.scaling["prefill"]
    assert (told["mode"], told["desired"]) == ("SLO", prefill)
    assert told["required"] >= told["observed"]
    assert cluster.scaling["lastScaleTime"]
    assert "prompt tokens/s arrive" in cluster.scaling["message"]
    assert server.conditions["ScalingActive"] == server.conditions["ScalingActive"] | {
        "status": "True", "reason": "DemandFollowed", "message": cluster.scaling["message"],
    }  # fmt: skip
    assert (server.conditions["SLOMet"]["status"], server.conditions["Ready"]["status"]) == ("True", "True")
    events = [found for path, found in server.kept.items() if "/events/" in path and found["reason"] == "Autoscaled"]
    assert events
    assert all(" → " in event["message"] for event in events)
    assert sum(event["count"] for event in events) == sum(
        found["count"] for path, found in server.kept.items() if "/events/" in path and found["reason"] == "Scaled"
    )
    labels = {"namespace": "n", "model": "m", "role": "prefill", "kind": "desired"}
    assert REGISTRY.get_sample_value("tandem_operator_scaling_replicas", labels) == prefill


class SharedLoad(Load):
    """Workers that compute prompts beside answers, 1000 tokens per second of a mixed step."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = {D: 1}

    def worker(self, role: Role, number: int) -> WorkerReport:
        one = super().worker(role, number)
        assert one.telemetry is not None
        told = {"prefill_tokens_per_second": 1000.0, "mixed_step_seconds": 0.04, "role": Role.UNIFIED}
        return one.model_copy(update={"role": Role.UNIFIED, "telemetry": one.telemetry.model_copy(update=told)})


async def test_workers_that_do_both_follow_demand_and_say_why() -> None:
    async with serve(SharedLoad()) as cluster:
        server = cluster.server
        assert PREFILL not in server.kept
        await cluster.run(200, 3.5)
        count, told = server.kept[DECODE]["spec"]["replicas"], cluster.scaling
        assert count > 3, "one computes 1000 prompt tokens per second, and 3500 come"
        assert (told["decode"]["mode"], told["decode"]["desired"]) == ("SLO", count)
        assert "prefill" not in told
        assert "per replica beside its answers" in told["message"]
        assert server.conditions["ScalingActive"]["reason"] == "DemandFollowed"
        assert server.conditions["SLOMet"]["status"] == server.conditions["Ready"]["status"] == "True"
        events = [found for path, found in server.kept.items() if "/events/" in path]
        assert any(one["reason"] == "Autoscaled" and "decode 1 → " in one["message"] for one in events)
        await cluster.run(600, 0.4)
        assert server.kept[DECODE]["spec"]["replicas"] < count


async def test_a_status_is_written_when_there_is_something_to_say(cluster: Cluster) -> None:
    await cluster.run(300, 0.4)
    cluster.statuses = 0
    await cluster.run(300, 0.4)
    assert cluster.statuses <= 10


async def test_a_decision_is_kept_before_it_is_followed(cluster: Cluster) -> None:
    server = cluster.server
    for _ in range(60):
        await cluster.run(PERIOD_SECONDS, 3.5)
        writes = [path for path in server.written if path in (PREFILL, f"{MODEL}/status")]
        if PREFILL in writes:
            assert writes[0] == f"{MODEL}/status"
            assert server.conditions["Ready"]["status"] == "True", "new pods are not there yet"
            assert server.conditions["Reconciling"]["reason"] == "Progressing"
            return
    raise AssertionError("nothing was scaled")


async def test_what_was_decided_for_another_spec_is_not_followed(cluster: Cluster) -> None:
    """The budget shrinks between a decision and the look that would follow it."""
    cluster.load.rate = 3.5
    for _ in range(60):
        cluster.load.pass_time()
        await cluster.scaler.decide_all()
        outlook = cluster.scaler.outlook(KEY, cluster.server.kept[MODEL]["metadata"]["generation"])
        assert outlook is not None
        if outlook.recommendations:
            break
    else:
        raise AssertionError("nothing was decided")
    cluster.server.change(autoscaling={"gpuBudget": 2})
    await look(cluster.server, cluster.operator)
    assert cluster.replicas == (1, 1)


async def test_an_operator_that_restarts_in_the_middle_decides_nothing_anew(cluster: Cluster) -> None:
    server = cluster.server
    await cluster.run(200, 3.5)
    before = cluster.replicas
    assert before[0] > 2
    cluster.start()
    for path in (PREFILL, DECODE):
        server.kept[path]["spec"]["replicas"] = 1  # it had decided, and was ended before it had followed that
    await look(server, cluster.operator, times=2)
    assert cluster.replicas == before
    for _ in range(20):
        await cluster.run(PERIOD_SECONDS, 3.5)
        assert cluster.replicas >= before, "it takes none away: it has not watched for long"


async def test_suspension_wins_over_every_decision(cluster: Cluster) -> None:
    server = cluster.server
    await cluster.run(200, 3.5)
    before = cluster.replicas
    server.change(suspend=True)
    await cluster.run(60, 30.0) if cluster.scaler.follows(KEY) else None
    assert cluster.replicas == (0, 0)
    assert server.conditions["ScalingActive"]["reason"] == "Suspended"
    server.change(suspend=False)
    await look(server, cluster.operator)
    assert cluster.replicas == before
    assert server.conditions["ScalingActive"]["reason"] == "NotDecidedYet"


async def test_one_role_alone_is_followed_and_the_other_one_left(cluster: Cluster) -> None:
    cluster.server.change(decode={"replicas": 2})
    await cluster.run(300, 3.5)
    prefill, decode = cluster.replicas
    assert (prefill > 2, decode) == (True, 2)
    assert "decode" not in cluster.scaling


async def test_a_dry_run_tells_what_it_would_do(cluster: Cluster) -> None:
    cluster.server.change(autoscaling={"dryRun": True})
    await cluster.run(300, 3.5)
    assert cluster.replicas == (1, 1)
    assert cluster.scaling["prefill"]["desired"] == 1
    assert cluster.server.conditions["ScalingActive"]["reason"] == "DryRun"
    assert "prefill 1 → " in cluster.server.conditions["ScalingActive"]["message"]
    cluster.server.change(autoscaling={})
    await cluster.run(60, 3.5)
    assert cluster.replicas[0] > 1


async def test_targets_are_judged_where_nothing_is_scaled(cluster: Cluster) -> None:
    cluster.server.change(prefill={"replicas": 1}, decode={"replicas": 1})
    await cluster.run(200, 0.4)
    assert "ScalingActive" not in cluster.server.conditions
    assert cluster.server.conditions["SLOMet"]["status"] == "True"
    labels = {"namespace": "n", "model": "m"}
    figures = [
        REGISTRY.get_sample_value("tandem_operator_model_condition", labels | {"type": kind})
        for kind in ("SLOMet", "ScalingActive")
    ]
    assert figures == [1, None]
    assert "scaling" not in cluster.server.kept[MODEL]["status"]


async def test_shrinking_never_takes_ready_away(cluster: Cluster) -> None:
    await cluster.run(200, 3.5)
    before, seen = cluster.replicas, []
    for _ in range(120):
        await cluster.run(PERIOD_SECONDS, 0.4)
        seen.append(copy.copy(cluster.server.conditions["Ready"]["status"]))
    assert cluster.replicas[0] < before[0]
    assert set(seen) == {"True"}
