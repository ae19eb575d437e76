"""Fixtures of the suite: the cluster, Tandem installed in it, a namespace a test, and one fleet that many tests share.

A failing test leaves pods, events and logs of every part in `e2e/artifacts/<test>/`. The end of the run lists what
tests measured and what conditions said.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster import connect
from e2e.install import install_chart
from e2e.suite.fleet import Fleet, Kubernetes, Say, smollm2

ARTIFACTS = Path(__file__).resolve().parent.parent / "artifacts"
_SAID = "said"
_FAILURE_CHARACTERS = 4000
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


@pytest.fixture(scope="session")
def cluster() -> Any:
    return connect()


@pytest.fixture(scope="session")
def kubernetes(cluster: Any) -> Kubernetes:
    return Kubernetes(str(cluster.kubeconfig))


@pytest.fixture(scope="session")
def tandem(cluster: Any) -> Any:
    """The chart, installed."""
    install_chart(cluster)
    return cluster


def make_namespace(cluster: Any, kubernetes: Kubernetes, name: str) -> Fleet:
    kubernetes.request(
        "POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": RESTRICTED | {"tandem-e2e": "true"}}}
    )
    return Fleet(cluster, kubernetes, name)


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
    reports = [report for found in terminalreporter.stats.values() for report in found if hasattr(report, "nodeid")]
    lines = [
        text
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, text in report.user_properties
        if name == _SAID
    ]
    lines += [_failure(report) for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
    if lines:
        terminalreporter.section("seen on the way")
        for line in lines:
            terminalreporter.write_line(line)


def _failure(report: Any) -> str:
    """One line on what went wrong: whoever has the end of a run's output alone can begin with it."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = " ".join(str(report.longrepr if crash is None else crash.message).split())
    return f"failed in {report.when}: {report.nodeid.rpartition('::')[2]}: {text[:_FAILURE_CHARACTERS]}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.failed and "cluster" in getattr(item, "funcargs", {}):
        # The test has failed: its time must not run out while the evidence is gathered, which would end the whole run.
        item.config.hook.pytest_timeout_cancel_timer(item=item)
        folder = ARTIFACTS / re.sub(r"[^\w.-]+", "_", item.nodeid.split("/")[-1])
        item.funcargs["cluster"].artifacts_dump(folder)
        report.sections.append(("evidence", f"pods, events and logs are in {folder}"))
    return report
