"""The chart's alerts, evaluated by promtool over made-up series: which ones fire, and when.

promtool is built with Prometheus, for minutes: `make e2e-external`.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.gobuild import Builder, find_tool
from e2e.cluster.settings import ROOT, read_settings

pytestmark = pytest.mark.external
CHART = ROOT / "charts" / "tandem"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def builder() -> Builder:
    settings = read_settings()
    return Builder(settings.go_modules, settings.cache)


@pytest.fixture(scope="module")
def rules(builder: Builder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = [
        str(find_tool("helm", builder)), "template", "tandem", str(CHART), "--kube-version", "1.35.0",
        "--api-versions", "monitoring.coreos.com/v1/PrometheusRule",
    ]  # fmt: skip
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = [each for each in yaml.safe_load_all(rendered) if each and each["kind"] == "PrometheusRule"]
    file = tmp_path_factory.mktemp("rules") / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": found["spec"]["groups"]}))
    return file


def counter(path: str, code: str, each_minute: float) -> dict[str, str]:
    labels = {"namespace": "n", "inferencemodel": "m", "pod": "g", "path": path, "code": code}
    text = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
    return {"series": f"tandem_gateway_requests_total{{{text}}}", "values": f"0+{each_minute:g}x60"}


def fires(builder: Builder, rules: Path, alert: str, series: list[dict[str, str]]) -> bool:
    """After half an hour."""
    asked: dict[str, Any] = {"eval_time": "30m", "alertname": alert, "exp_alerts": []}
    test = {"interval": "1m", "input_series": series, "alert_rule_test": [asked]}
    file = rules.parent / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [rules.name], "evaluation_interval": "1m", "tests": [test]}))
    promtool = builder.build("promtool")
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or f"alertname: {alert}" in done.stdout + done.stderr, done.stdout + done.stderr
    return done.returncode != 0  # none was expected


def test_the_rules_are_well_formed(builder: Builder, rules: Path) -> None:
    subprocess.run([builder.build("promtool"), "check", "rules", "--lint=all", rules], check=True)


@pytest.mark.parametrize(
    ("series", "fires_then"),
    [
        ([counter(CHAT, "503", 6), counter("other", "200", 180)], True),
        ([counter(CHAT, "503", 6), counter("/v1/models", "200", 180), counter("/tokenize", "200", 60)], True),
        ([counter(CHAT, "200", 6), counter("other", "503", 180), counter("/v1/models", "500", 60)], False),
        ([counter(CHAT, "200", 97), counter(CHAT, "503", 3)], False),
        ([counter(CHAT, "200", 90), counter("/v1/embeddings", "502", 10)], True),
        ([counter(CHAT, "499", 60), counter(CHAT, "429", 60), counter(CHAT, "200", 60)], False),
        ([counter("other", "200", 180)], False),
    ],
    ids=["outage beside probes", "outage beside lists", "probes that fail", "3%", "10%", "clients' own", "nobody asks"],
)
def test_errors(builder: Builder, rules: Path, series: list[dict[str, str]], fires_then: bool) -> None:
    assert fires(builder, rules, "TandemErrors", series) == fires_then
