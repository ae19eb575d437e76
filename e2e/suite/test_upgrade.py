"""The operator is upgraded under load, from earlier releases and to a later one: which pods are left alone.

Earlier releases are built from the history, which takes minutes the first time: `make e2e-upgrade`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from e2e.install import NAMESPACE, install_chart, uninstall_chart
from e2e.releases import (
    ADDED_DEFAULT,
    ADDED_FIELD,
    ROOT,
    WITH_KEYS,
    WITHOUT_KEYS,
    Release,
    earlier_release,
    later_release,
    present_release,
)
from e2e.suite.conftest import make_namespace
from e2e.suite.fleet import Fleet, Kubernetes, Object, Say, smollm2, until
from e2e.suite.load import LoadOutcome, run_load, varied_prompts
from e2e.suite.test_renames import lives

pytestmark = pytest.mark.upgrade
FOLDER = ROOT / ".cache" / "releases"
MODELS = "/apis/tandem.dev/v1alpha1/inferencemodels"
MODEL = "upgraded"
PROMPTS = varied_prompts(12)
CLIENTS = 4
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def releases(cluster: Any) -> Path:
    FOLDER.mkdir(parents=True, exist_ok=True)
    return FOLDER


def models_there(kubernetes: Kubernetes) -> list[str]:
    try:
        found = kubernetes.request("GET", MODELS)["items"]
    except client.ApiException as error:
        if error.status != 404:
            raise
        return []
    return [f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in found]


@pytest.fixture
def emptied(cluster: Any, kubernetes: Kubernetes) -> Iterator[Callable[[Release], Fleet]]:
    """Installs a release where none is, and makes a namespace. Afterwards this checkout's release is there again."""
    others = models_there(kubernetes)  # before anything is built
    assert not others, f"an earlier release would take over {', '.join(others)}: kubectl delete im --all -A first"
    made: list[Fleet] = []

    def begin(release: Release) -> Fleet:
        if operator_pods(kubernetes):
            uninstall_chart(cluster)
        release.install(cluster)
        made.append(make_namespace(cluster, kubernetes, "e2e-upgrade"))
        return made[0]

    yield begin
    for fleet in made:
        kubernetes.request("DELETE", f"/api/v1/namespaces/{fleet.namespace}")
        until("the namespace to be gone", lambda fleet=fleet: is_gone(kubernetes, fleet.namespace), within=400)
    install_chart(cluster)


def is_gone(kubernetes: Kubernetes, namespace: str) -> bool:
    try:
        kubernetes.request("GET", f"/api/v1/namespaces/{namespace}")
    except client.ApiException as error:
        return error.status == 404
    return False


def operator_pods(kubernetes: Kubernetes) -> list[Object]:
    return kubernetes.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]


def upgrade(fleet: Fleet, release: Release, deadline: str) -> None:
    """Upgrade, and wait until that release's operator alone is there and has seen a change that replaces nobody."""
    release.install(fleet.cluster)

    def alone() -> bool:
        images = [pod["spec"]["containers"][0]["image"] for pod in operator_pods(fleet.kubernetes)]
        assert images == [release.images["operator"]], images
        return True

    until("the operator of before to be gone", alone, within=240)
    fleet.patch(MODEL, {"rollout": {"progressDeadline": deadline}})
    fleet.wait_ready(MODEL, within=600)


def under_load(fleet: Fleet, what: Callable[[], None]) -> list[tuple[LoadOutcome, LoadOutcome]]:
    """Each stream that was asked for while `what` was done, beside what it says undisturbed."""
    pairs: list[tuple[LoadOutcome, LoadOutcome]] = []
    with fleet.url(MODEL) as url, ThreadPoolExecutor(1) as beside:

        def ask() -> list[LoadOutcome]:
            return asyncio.run(run_load(url, MODEL, PROMPTS, concurrency=CLIENTS, max_tokens=MAX_TOKENS))

        undisturbed = ask()
        assert all(outcome.complete for outcome in undisturbed), "nothing has happened yet"
        done = beside.submit(what)
        while not done.done():
            pairs += zip(undisturbed, ask(), strict=True)
        done.result()
        pairs += zip(undisturbed, ask(), strict=True)
    return pairs


def different(pairs: list[tuple[LoadOutcome, LoadOutcome]]) -> list[tuple[LoadOutcome, LoadOutcome]]:
    """Streams that ended, and say something else."""
    return [
        (one, other)
        for one, other in pairs
        if other.complete and (one.text, one.finish_reason) != (other.text, other.finish_reason)
    ]


@pytest.mark.timeout(2400)
def test_an_upgrade_and_a_later_one_that_adds_a_default_restart_nobody(
    emptied: Callable[[Release], Fleet], cluster: Any, releases: Path, say: Say
) -> None:
    """A model that names its images, made by the first release whose digests are kept."""
    earlier = earlier_release(cluster, WITH_KEYS, releases)
    later = later_release(cluster, releases)
    fleet = emptied(earlier)
    manifest = smollm2(MODEL, gateway={"image": earlier.images["gateway"]})
    manifest["spec"]["engine"] |= {"image": earlier.images["worker"]}
    fleet.apply(manifest)
    fleet.wait_ready(MODEL, within=600)
    before = lives(fleet, MODEL)
    assert len(before) == 3, before
    seen: list[dict[str, tuple[str, int]]] = []

    def change() -> None:
        for release, deadline in ((present_release(cluster), "11m"), (later, "12m")):
            upgrade(fleet, release, deadline)
            seen.append(lives(fleet, MODEL))

    pairs = under_load(fleet, change)
    assert seen == [before, before]
    engine = fleet.get("inferencemodels", MODEL)["spec"]["engine"]
    assert engine[ADDED_FIELD] == ADDED_DEFAULT, "the added field is there, by its default"
    broken = [other for _, other in pairs if not other.complete]
    assert not broken, f"{len(broken)} of {len(pairs)} streams failed; the first: {broken[0]}"
    assert not different(pairs), different(pairs)[0]
    say(f"two upgrades of the operator under {len(pairs)} streams: no pod restarted")


@pytest.mark.timeout(2400)
def test_pods_of_a_release_without_keys_are_replaced_once_while_they_serve(
    emptied: Callable[[Release], Fleet], cluster: Any, releases: Path, say: Say
) -> None:
    """Gateways and workers of it know no keys, so nothing of it may stay; the images are those of each release."""
    fleet = emptied(earlier_release(cluster, WITHOUT_KEYS, releases))
    fleet.apply(smollm2(MODEL))
    fleet.wait_ready(MODEL, within=600)
    before = lives(fleet, MODEL)
    made: dict[str, str] = {}

    def change() -> None:
        upgrade(fleet, present_release(cluster), "20m")
        made.update({name: uid for name, (uid, _) in lives(fleet, MODEL).items()})

    pairs = under_load(fleet, change)
    assert len(made) == 3, made
    assert not {uid for uid, _ in before.values()} & set(made.values()), "all are new"
    fleet.patch(MODEL, {"rollout": {"progressDeadline": "21m"}})
    fleet.wait_ready(MODEL)
    assert {name: uid for name, (uid, _) in lives(fleet, MODEL).items()} == made, "and stay"
    broken = [other for _, other in pairs if not other.complete]
    # A gateway of that release closes, when it ends, connections of which it said that they stay.
    closed = [other for other in broken if (other.error or "").startswith("APIConnectionError") and not other.text]
    assert len(closed) <= CLIENTS, f"more than one for each client: {closed}"
    refused = [other for other in broken if (other.error or "").startswith("AuthenticationError")]
    unexpected = [other for other in broken if other not in closed and other not in refused]
    assert not unexpected, f"{len(unexpected)} of {len(pairs)} streams failed; the first: {unexpected[0]}"
    assert not different(pairs), different(pairs)[0]
    say(
        f"upgrade from a release without keys: {len(pairs)} streams, {len(refused)} answered 401,"
        f" {len(closed)} on a connection that the old gateway had closed"
    )
