"""The GPU quota of a namespace: read over real HTTP, and shared by models that follow demand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web
from api_double import api_client, serving
from tandem_api.fleet import FleetReport
from tandem_api.names import Role
from tandem_operator.autoscale.observed import ObservedModel
from tandem_operator.autoscale.plan.snapshots import PodStart, RoleCount
from tandem_operator.autoscale.plan.temper import Circumstances
from tandem_operator.autoscale.quotas import GPUBudget, GPUPool, Limit, QuotaWatch, find_budget, read_limits
from tandem_operator.autoscale.scaler import PERIOD_SECONDS, Scaler
from tandem_operator.gateways.fleet import FleetView, FleetWatch
from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.manifests import ModelKey
from test_scaler import SPEC, D, Load, P

GPU = "nvidia.com/gpu"
RESOURCE = f"requests.{GPU}"
A, B = GPUPool("a", GPU), GPUPool("b", GPU)


def quota(hard: Any = "8", used: Any = "0", **spec: Any) -> dict[str, Any]:
    return {"spec": {"hard": {RESOURCE: hard}} | spec, "status": {"used": {RESOURCE: used}}}


def test_quotas_that_hold_for_all_pods_and_name_gpus_count() -> None:
    assert read_limits(quota(8, "3")) == {GPU: Limit(8, 3)}
    assert read_limits({"spec": {"hard": {RESOURCE: "1k"}}}) == {GPU: Limit(1000, 0)}, "not counted yet"
    assert read_limits({"spec": {"hard": {"pods": "5", GPU: "5", "requests.cpu": "5"}}}) == {}
    assert read_limits(quota(scopes=["BestEffort"])) == {}
    assert read_limits(quota(scopeSelector={"matchExpressions": [{}]})) == {}
    with pytest.raises(ValueError, match="many"):
        read_limits(quota("many"))


def test_each_kind_of_gpus_has_a_limit_of_its_own() -> None:
    hard = {"requests.amd.com/gpu": "4", "requests.nvidia.com/mig-1g.10gb": "7", "requests.example.com/nic": "2"}
    used = {"requests.amd.com/gpu": "1"}
    assert read_limits({"spec": {"hard": hard}, "status": {"used": used}}) == {
        "amd.com/gpu": Limit(4, 1),
        "nvidia.com/mig-1g.10gb": Limit(7, 0),
    }


def test_what_others_use_is_not_there_for_models() -> None:
    assert find_budget([], 3) is None
    assert find_budget([Limit(8, 5)], 3) == 6
    assert find_budget([Limit(8, 5), Limit(20, 19)], 3) == 4, "the tightest"
    assert find_budget([Limit(8, 1)], 3) == 8, "pods that are not counted yet"
    assert find_budget([Limit(2, 9)], 3) == 0


class Server:
    """An API server that has quotas, and answers as a test says."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.status = 200
        self.asked: list[str] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        if self.status != 200:
            return web.json_response({"message": "resourcequotas is forbidden"}, status=self.status)
        return web.json_response({"items": self.items, "metadata": {}})


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, KubeClient]]:
    server = Server()
    async with serving(server.handle) as url:
        client = KubeClient(api_client(url, 2))
        yield server, client
        await client.close()


async def test_only_namespaces_of_models_are_read_and_the_last_answer_is_kept_for_a_minute(
    server: tuple[Server, KubeClient],
) -> None:
    api, client = server
    now, present = 0.0, {A: 3}
    watch = QuotaWatch(client, lambda: present, clock=lambda: now)
    assert watch.budget(A) == GPUBudget()
    api.items = [quota("8", "5"), {"spec": {"hard": {"pods": "5"}}}]
    await watch.read_all()
    assert api.asked == ["/api/v1/namespaces/a/resourcequotas"]
    assert (watch.budget(A), watch.budget(B)) == (GPUBudget(gpus=6), GPUBudget())
    api.status = 403
    await watch.read_all()
    assert watch.budget(A) == GPUBudget(gpus=6)
    now = 61.0
    assert watch.budget(A).gpus is None
    assert "forbidden" in watch.budget(A).problem
    api.status, api.items = 200, [quota("many")]
    await watch.read_all()
    assert "many" in watch.budget(A).problem, "what cannot be read is told and not taken for no quota"
    api.items = []
    await watch.read_all()
    assert watch.budget(A) == GPUBudget()
    present = {}
    await watch.read_all()
    assert len(api.asked) == 4, "nobody asks for it any more"


async def test_pods_that_the_quota_counts_sooner_or_later_than_the_operator_take_nothing_away(
    server: tuple[Server, KubeClient],
) -> None:
    api, client = server
    present = {A: 8}
    watch = QuotaWatch(client, lambda: present)
    budgets: list[int | None] = []
    for used, seen in (("8", 8), ("8", 7), ("7", 7), ("8", 7), ("8", 8), ("12", 8), ("12", 8), ("12", 8)):
        api.items, present[A] = [quota("8", used)], seen
        await watch.read_all()
        budgets.append(watch.budget(A).gpus)
    assert budgets == [8, 8, 8, 8, 8, 8, 8, 4], "a pod gone, one made; and others that use some for good"
    api.items = []
    await watch.read_all()
    assert watch.budget(A) == GPUBudget()
    api.items = [quota("6", "8")]
    await watch.read_all()
    assert watch.budget(A).gpus == 6, "of a quota that is new, the first look counts"


@pytest.mark.parametrize("body", [{"metadata": {}}, {"items": None, "metadata": {}}, [], {"items": [None]}])
async def test_an_answer_of_another_form_is_told_and_ends_nothing(body: Any) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response(body)

    async with serving(handle) as url:
        client, now = KubeClient(api_client(url, 2)), 61.0
        watch = QuotaWatch(client, lambda: {A: 3}, clock=lambda: now)
        await watch.read_all()
        assert (watch.budget(A).gpus, bool(watch.budget(A).problem)) == (None, True)
        await client.close()


class Loads(FleetWatch):
    """Each model has a load of its own."""

    def __init__(self, loads: dict[ModelKey, Load]) -> None:
        super().__init__()
        self.loads = loads

    def heard(self, key: ModelKey) -> Sequence[tuple[FleetReport, float]]:
        return self.loads[key].heard(key)

    def view(self, key: ModelKey) -> FleetView:
        return self.loads[key].view(key)


LOW, HIGH = ModelKey("n", "low"), ModelKey("n", "high")


class Namespace:
    """Two models; what is decided is there at the next look, and what goes drains for one."""

    def __init__(
        self,
        gpus: int | None,
        *,
        priorities: tuple[int, int] = (0, 10),
        problem: str = "",
        resource: str = GPU,
        each: int = 1,
    ) -> None:
        """`resource`: of the one with the high priority. `each`: how many of them a replica takes."""
        self.loads = {LOW: Load(), HIGH: Load()}
        self.gpus, self.problem = gpus, problem
        self.priorities = dict(zip((LOW, HIGH), priorities, strict=True))
        self.counts: dict[ModelKey, dict[Role, int]] = {key: {P: 1, D: 1} for key in (LOW, HIGH)}
        self.before = {key: dict(one) for key, one in self.counts.items()}
        self.resources = {LOW: GPU, HIGH: resource}
        self.each = each
        self.seen: list[tuple[int, int]] = []
        self.most = 0
        now = self.loads[LOW]
        self.scaler = Scaler(
            Loads(self.loads), clock=lambda: now.now,
            budget=lambda pool: (
                GPUBudget(gpus=self.gpus, problem=self.problem) if pool.namespace == "n" else GPUBudget()
            ),
        )  # fmt: skip
        self.follow()

    def follow(self) -> None:
        for key, load in self.loads.items():
            load.workers = dict(self.counts[key])
            present = {role: max(count, self.before[key][role]) for role, count in self.counts[key].items()}
            counts = {
                role: RoleCount(
                    replicas=count,
                    leaders=frozenset(f"m-{role.value}-{n}" for n in range(count)),
                    starts={f"m-{role.value}-0": PodStart(before=0.0, whole=20.0)},
                    present=present[role],
                )
                for role, count in self.counts[key].items()
            }  # fmt: skip
            circumstances = Circumstances(followed=frozenset({P, D}), steady=self.counts[key])
            self.scaler.follow(
                key,
                ObservedModel(
                    spec=SPEC, ttft=SPEC.ttft, tpot=SPEC.tpot, counts=counts, circumstances=circumstances,
                    priority=self.priorities[key], gpu_resource=self.resources[key],
                    gpus={P: self.each, D: self.each},
                ),
            )  # fmt: skip
        self.most = max(self.most, sum(self.scaler.present().values()))

    async def run(self, seconds: float, low: float, high: float) -> None:
        self.loads[LOW].rate, self.loads[HIGH].rate = low, high
        for _ in range(int(seconds / PERIOD_SECONDS)):
            for load in self.loads.values():
                load.pass_time()
            await self.scaler.decide_all()
            self.before = {key: dict(one) for key, one in self.counts.items()}
            for key in self.counts:
                outlook = self.scaler.outlook(key, 0)
                assert outlook is not None
                for role, recommendation in outlook.recommendations.items():
                    self.counts[key][role] = recommendation.replicas
            self.seen.append((self.gpus_of(LOW), self.gpus_of(HIGH)))
            self.follow()

    def gpus_of(self, key: ModelKey) -> int:
        return sum(self.counts[key].values())

    def told(self, key: ModelKey) -> tuple[set[str], str]:
        outlook = self.scaler.outlook(key, 0)
        assert outlook is not None
        assert outlook.decision is not None
        return {one.limit for one in outlook.decision.roles.values()}, outlook.decision.sentence


async def test_a_higher_priority_grows_at_the_cost_of_a_lower_one_and_gives_back() -> None:
    free, namespace = Namespace(None), Namespace(11)
    for one in (free, namespace):
        await one.run(500, 3.5, 0.4)
    assert free.gpus_of(LOW) == namespace.gpus_of(LOW) > 4, "there is room for it"
    for one in (free, namespace):
        await one.run(700, 3.5, 3.5)
    wanted = free.gpus_of(HIGH)
    assert free.gpus_of(LOW) + wanted > 11
    assert namespace.gpus_of(HIGH) == min(wanted, 11 - 2), "the lower one keeps its minimums"
    assert namespace.gpus_of(LOW) == 11 - namespace.gpus_of(HIGH)
    assert namespace.most <= 11, "pods on their way out counted"
    limits, sentence = namespace.told(LOW)
    assert "GPU quota" in limits
    assert f"Limited by the namespace's GPU quota: {namespace.gpus_of(LOW)} of " in sentence
    assert "(priority 0; the quota leaves models 11)" in sentence
    assert "GPU quota" not in namespace.told(HIGH)[0] or wanted > 9
    for one in (free, namespace):
        await one.run(1200, 3.5, 0.4)
    assert namespace.gpus_of(LOW) == free.gpus_of(LOW)
    assert "GPU quota" not in namespace.told(LOW)[1]


async def test_models_on_other_kinds_of_gpus_take_nothing_from_one_another() -> None:
    alone, namespace = Namespace(None), Namespace(11, resource="nvidia.com/mig-1g.10gb")
    for one in (alone, namespace):
        await one.run(700, 3.5, 3.5)
    assert alone.counts == namespace.counts
    assert alone.gpus_of(LOW) + alone.gpus_of(HIGH) > 11, "of one kind they would have had to share"


async def test_a_quota_is_shared_by_what_pods_ask_for() -> None:
    namespace = Namespace(16, each=2)
    await namespace.run(700, 3.5, 3.5)
    assert namespace.gpus_of(LOW) + namespace.gpus_of(HIGH) == 8, "replicas, of two each"
    assert namespace.most <= 16
    assert "Limited by the namespace's GPU quota" in namespace.told(LOW)[1]


async def test_a_model_that_is_scaled_no_longer_claims_nothing() -> None:
    namespace = Namespace(11)
    await namespace.run(700, 3.5, 3.5)
    before, scaler = namespace.gpus_of(LOW), namespace.scaler
    assert "GPU quota" in namespace.told(LOW)[0]
    static = ObservedModel(spec=None, ttft=SPEC.ttft, tpot=SPEC.tpot, circumstances=Circumstances(followed=frozenset()))
    scaler.follow(HIGH, static)
    assert scaler.present() == {GPUPool("n", GPU): before}, "its pods are another's now, in the quota's own count"
    for _ in range(30):
        namespace.loads[LOW].pass_time()
        scaler.decide(LOW)
    outlook = scaler.outlook(LOW, 0)
    assert outlook is not None
    assert {role: recommendation.replicas for role, recommendation in outlook.recommendations.items()}, (
        "there is room now"
    )


async def test_equals_do_not_take_turns_under_steady_demand() -> None:
    namespace = Namespace(8, priorities=(0, 0))
    await namespace.run(600, 3.5, 3.5)
    namespace.seen.clear()
    await namespace.run(900, 3.5, 3.5)
    assert sum(one != other for one, other in pairwise(namespace.seen)) <= 1
    assert sum(namespace.seen[-1]) <= 8 >= namespace.most
    assert abs(namespace.seen[-1][0] - namespace.seen[-1][1]) <= 2


async def test_minimums_that_do_not_fit_are_kept_and_told() -> None:
    namespace = Namespace(3)
    await namespace.run(500, 3.5, 3.5)
    assert (namespace.gpus_of(LOW), namespace.gpus_of(HIGH)) == (2, 2)
    assert "take 4 GPUs at least, by scaling.min or because they are held for now" in namespace.told(LOW)[1]
    assert "its quota leaves them 3: raise the quota" in namespace.told(LOW)[1]


async def test_a_quota_that_cannot_be_read_is_told_and_limits_nothing() -> None:
    unknown = Namespace(None, problem="resourcequotas is forbidden")
    await unknown.run(500, 3.5, 0.4)
    assert unknown.gpus_of(LOW) > 4
    assert "The namespace's GPU quota is not known: resourcequotas is forbidden." in unknown.told(LOW)[1]
