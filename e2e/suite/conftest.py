"""Fixtures of the suite: the cluster, Tandem installed in it, a namespace a test, and one fleet that many tests share.

Tests run in several lanes at once (`lanes.py`). A failing test leaves pods, events and logs of every part in
`e2e/artifacts/<test>/`. The end of the run lists what tests measured, what conditions said, and where the time went.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import connect
from e2e.cluster.disk import check_disk
from e2e.cluster.errors import ClusterError
from e2e.install import install_chart
from e2e.suite import lanes
from e2e.suite.bare import nodes, plane, space
from e2e.suite.fleet import WAITED, Fleet, Kubernetes, Say, smollm2, until

__all__ = ["nodes", "plane", "space"]
"""Fixtures of other files."""
ARTIFACTS = Path(__file__).resolve().parent.parent / "artifacts"
_SAID, _TOOK, _GROUPS = "said", "waited", "groups"
_FAILURE_CHARACTERS = 4000
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


@pytest.fixture(scope="session")
def cluster() -> Any:
    return connect()


@pytest.fixture(scope="session")
def kubernetes(cluster: Any) -> Kubernetes:
    return Kubernetes(str(cluster.kubeconfig))


@pytest.fixture(scope="session")
def tandem(cluster: Any, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Any:
    """The chart, installed: by the first lane that comes here, while the others wait for it."""
    if worker_id == "master":
        install_chart(cluster)
        return cluster
    folder = tmp_path_factory.getbasetemp().parent
    with (folder / "tandem.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "tandem.installed").exists():
            install_chart(cluster)
            (folder / "tandem.installed").touch()
    return cluster


def pytest_configure_node(node: Any) -> None:
    """Tell each lane where to write down which tests are one group."""
    node.workerinput[_GROUPS] = str(_groups_file())


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> lanes.Scheduling:
    return lanes.Scheduling(config, log, _groups_file())


def _groups_file() -> Path:
    return Path(tempfile.gettempdir(), f"tandem-e2e-{os.getpid()}.json")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        _groups_file().unlink(missing_ok=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lanes.arrange(items)
    lane = getattr(config, "workerinput", None)
    if lane is not None:
        lanes.write_groups(items, Path(lane[_GROUPS]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A full disk fails a test with a sentence: the kubelet would evict pods one by one, and each test hang for it."""
    try:
        check_disk(ARTIFACTS.parent, "warm")
    except ClusterError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    WAITED.clear()
    return (yield)


def make_namespace(cluster: Any, kubernetes: Kubernetes, name: str) -> Fleet:
    """A namespace that admits pods: before it has its ServiceAccount the API server refuses them."""
    kubernetes.request(
        "POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": RESTRICTED | {"tandem-e2e": "true"}}}
    )
    made = Fleet(cluster, kubernetes, name)
    until(f"the ServiceAccount of {name}", lambda: made.exists("serviceaccounts", "default"), within=60, every=0.05)
    return made


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tandem: Any, kubernetes: Kubernetes) -> Iterator[Fleet]:
    """An empty namespace of the test's own, under the restricted Pod Security Standard."""
    short = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower())[:30].strip("-")
    made = make_namespace(tandem, kubernetes, f"e2e-{short}-{uuid.uuid4().hex[:5]}")
    yield made
    kubernetes.request("DELETE", f"/api/v1/namespaces/{made.namespace}")


@pytest.fixture(scope="session")
def main(tandem: Any, kubernetes: Kubernetes) -> Iterator[Fleet]:
    """The fleet that tests share: model `main`, one prefill and one decode worker, float32."""
    made = make_namespace(tandem, kubernetes, f"e2e-main-{uuid.uuid4().hex[:5]}")
    made.apply(smollm2("main"))
    made.wait_ready("main")
    yield made
    kubernetes.request("DELETE", f"/api/v1/namespaces/{made.namespace}")


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Say:
    """Adds a line to the list at the end of the run."""
    return lambda line: record_property(_SAID, line)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    # What is deselected is told as tests, not as reports.
    told = terminalreporter.stats.values()
    reports = [report for found in told for report in found if isinstance(report, pytest.TestReport)]
    lines = [
        text for report in reports if report.when == "call" for name, text in report.user_properties if name == _SAID
    ]
    if terminalreporter.config.option.durations is not None:
        lines += _durations(reports)
    lines += [_failure(report) for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
    if lines:
        terminalreporter.section("seen on the way")
        for line in lines:
            terminalreporter.write_line(line)


def _durations(reports: list[Any]) -> list[str]:
    """A line for each test, longest first: what it took with its fixtures, and how much of that was waiting."""
    took: dict[str, float] = {}
    waited: dict[str, float] = {}
    for report in reports:
        name = report.nodeid.rpartition("/")[2].partition("@")[0]
        took[name] = took.get(name, 0.0) + report.duration
        waited[name] = max([waited.get(name, 0.0), *(value for key, value in report.user_properties if key == _TOOK)])
    longest = sorted(took, key=lambda name: took[name], reverse=True)
    return [f"{took[name]:6.0f} s, {waited.get(name, 0.0):6.0f} s of it waiting: {name}" for name in longest]


def _failure(report: Any) -> str:
    """One line on what went wrong: whoever has the end of a run's output alone can begin with it."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = " ".join(str(report.longrepr if crash is None else crash.message).split())
    return f"failed in {report.when}: {report.nodeid.rpartition('::')[2]}: {text[:_FAILURE_CHARACTERS]}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    report.user_properties.append((_TOOK, sum(WAITED)))
    values: dict[str, Any] = getattr(item, "funcargs", {})
    if report.failed and "cluster" in values:
        # The test has failed: its time must not run out while the evidence is gathered, which would end the whole run.
        item.config.hook.pytest_timeout_cancel_timer(item=item)
        folder = ARTIFACTS / re.sub(r"[^\w.-]+", "_", item.nodeid.split("/")[-1])
        values["cluster"].artifacts_dump(folder)
        report.sections.append(("evidence", f"pods, events and logs are in {folder}"))
    return report
