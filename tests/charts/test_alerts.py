"""What alerts judge, and where they lead. `e2e/suite/test_alerts.py` evaluates the same rules by promtool."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tandem_gateway.paths import COMPUTES, INFERENCE_PATHS
from tandem_gateway.records.metrics import Metrics

from tests.charts.test_chart import INSTALLED, needs_helm, of_kind, render
from tests.charts.test_dashboard import expressions
from tests.docs.test_claims import ROOT, slug

PAGE = ROOT / "docs" / "alerts.md"
BASE = "https://github.com/tandem-dev/tandem/blob/main/docs/alerts.md"


def read_alerts(*arguments: str) -> dict[str, dict[str, Any]]:
    (rules,) = of_kind(render(*INSTALLED, *arguments), "PrometheusRule")
    return {rule["alert"]: rule for group in rules["spec"]["groups"] for rule in group["rules"]}


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def matches(selector: str, labels: dict[str, str]) -> bool:
    """As Prometheus does: patterns hold for the whole value."""
    tests = re.findall(r'(\w+)(=~|!~|!=|=)"((?:[^"\\]|\\.)*)"', selector)
    for label, operator, value in tests:
        found = labels.get(label, "")
        same = re.fullmatch(value, found) is not None if "~" in operator else found == value
        if same == operator.startswith("!"):
            return False
    return True


def error_share(expression: str, rates: dict[tuple[str, str], float]) -> tuple[float, float]:
    """What the two sums of the alert's quotient come to, by requests a second of each path and code."""
    selectors = re.findall(r"tandem_gateway_requests_total\{([^}]*)\}", expression)
    assert len(selectors) == 2, expression
    sums = [
        sum(rate for (path, code), rate in rates.items() if matches(selector, {"path": path, "code": code}))
        for selector in selectors
    ]
    return sums[0], sums[1]


CHAT = "/v1/chat/completions"
OUTAGE = {(CHAT, "503"): 0.1, ("other", "200"): 3.0, ("/v1/models", "200"): 1.0, ("/tokenize", "200"): 1.0}
HEALTHY = {(CHAT, "200"): 0.1, ("other", "503"): 3.0, ("/v1/models", "500"): 1.0}


@needs_helm
@pytest.mark.parametrize(
    ("rates", "share"),
    [(OUTAGE, 1.0), (HEALTHY, 0.0), ({(CHAT, "200"): 9.0, ("/rerank", "502"): 1.0}, 0.1)],
    ids=["an outage beside probes", "probes that fail", "one of ten"],
)
def test_errors_are_judged_by_what_the_model_is_run_for(rates: dict[tuple[str, str], float], share: float) -> None:
    """Three probes a second do not hide that the one request in ten seconds fails."""
    failed, all_of_them = error_share(read_alerts()["TandemErrors"]["expr"], rates)
    assert failed / all_of_them == pytest.approx(share)


@needs_helm
def test_the_paths_are_those_that_the_gateway_counts_and_computes() -> None:
    expression = read_alerts()["TandemErrors"]["expr"]
    metrics = Metrics()
    for path in [*INFERENCE_PATHS, "/healthz", "/v1/models", "/v1/responses/resp_1"]:
        metrics.count(path, 500)
    judged = {path for path, code in metrics.requests if error_share(expression, {(path, str(code)): 1.0})[1]}
    assert judged == COMPUTES


def test_the_dashboard_shows_the_same_share() -> None:
    (shown,) = [
        expression for _, expression in expressions() if "requests_total" in expression and "/ sum" in expression
    ]
    failed, all_of_them = error_share(shown.replace('namespace=~"$namespace", inferencemodel=~"$model"', ""), OUTAGE)
    assert failed == all_of_them == 0.1


@needs_helm
def test_every_alert_leads_to_a_section_that_says_what_to_do() -> None:
    alerts = read_alerts()
    written = sections()
    assert list(written) == list(alerts)
    for name, alert in alerts.items():
        assert alert["annotations"]["runbook_url"] == f"{BASE}#{slug(name)}"
        assert len(written[name].split()) > 30, name
    moved = read_alerts("--set", "metrics.rules.runbooks=https://wiki.example.com/tandem")
    assert moved["TandemErrors"]["annotations"]["runbook_url"] == "https://wiki.example.com/tandem#tandemerrors"
