"""Which of several operators serves a model."""

from __future__ import annotations

from typing import Any, cast

import pytest
from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.errors import ForbiddenError
from tandem_operator.objects.manifests import Manifest, ModelKey
from tandem_operator.reconcile.claims import GONE_SECONDS, LOOK_SECONDS, Claims

ME, OTHER = "one/tandem", "two/tandem"


class Leases:
    """Stands for the API server."""

    def __init__(self, lease: Manifest | None) -> None:
        self.lease = lease
        self.forbidden = False
        self.asked: list[str] = []

    async def find(self, path: str) -> Manifest | None:
        self.asked.append(path)
        if self.forbidden:
            raise ForbiddenError(403, "no")
        return self.lease


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lease(version: int) -> Manifest:
    return {"metadata": {"resourceVersion": str(version)}, "spec": {"holderIdentity": "pod"}}


def model(operator: str | None = None, **spec: Any) -> Manifest:
    status = {} if operator is None else {"operator": {"lease": operator}}
    return {"metadata": {"uid": "u"}, "spec": spec, "status": status}


def claims(leases: Leases, clock: Clock, **more: Any) -> Claims:
    return Claims(cast(KubeClient, leases), ME, clock=clock, **more)


@pytest.mark.parametrize("raw", [model(), model(ME), model(operator=None, replicas=1)])
async def test_what_nobody_else_has_claimed_is_served(raw: Manifest) -> None:
    leases = Leases(lease(1))
    assert await claims(leases, Clock()).find_other(raw) is None
    assert leases.asked == []


async def test_another_operators_model_is_left_until_its_lease_stands_still() -> None:
    leases, clock = Leases(lease(0)), Clock()
    mine = claims(leases, clock)
    for version in range(40):
        leases.lease = lease(version)
        assert await mine.find_other(model(OTHER)) == f"the operator of the Lease {OTHER}"
        clock.now += LOOK_SECONDS / 2
    assert len(leases.asked) == 20, "one look is for all models"
    assert set(leases.asked) == {"/apis/coordination.k8s.io/v1/namespaces/two/leases/tandem"}
    last = clock.now
    while await mine.find_other(model(OTHER)) is not None:
        clock.now += LOOK_SECONDS
    assert GONE_SECONDS - LOOK_SECONDS <= clock.now - last <= GONE_SECONDS + 2 * LOOK_SECONDS


async def test_a_lease_that_was_deleted_has_nobody_and_one_that_cannot_be_read_has() -> None:
    assert await claims(Leases(None), Clock()).find_other(model(OTHER)) is None
    leases = Leases(None)
    leases.forbidden = True
    assert await claims(leases, Clock()).find_other(model(OTHER)) is not None


@pytest.mark.parametrize(
    ("own", "named", "other"),
    [
        (None, None, None),
        (None, "blue", "the operator with managedBy blue"),
        ("blue", "blue", None),
        ("blue", None, "an operator without managedBy"),
        ("blue", "green", "the operator with managedBy green"),
    ],
)
async def test_people_divide_models_up(own: str | None, named: str | None, other: str | None) -> None:
    raw = model() if named is None else model(managedBy=named)
    assert await claims(Leases(None), Clock(), managed_by=own).find_other(raw) == other


async def test_a_model_that_was_given_to_another_operator_is_claimed_anew() -> None:
    mine = claims(Leases(lease(1)), Clock(), managed_by="blue")
    raw = model(OTHER, managedBy="blue")
    assert await mine.find_other(raw) is None
    raw["status"]["operator"]["managedBy"] = "blue"
    assert await mine.find_other(raw) is not None


async def test_it_is_news_once() -> None:
    mine, key, raw = claims(Leases(None), Clock()), ModelKey("space", "m"), model()
    told = [mine.is_news(key, raw, other) for other in ("a", "a", None, "a", "b", "b")]
    assert told == [True, False, False, True, True, False]
    assert mine.is_news(key, raw | {"metadata": {"uid": "v"}}, "b"), "another model of that name"
