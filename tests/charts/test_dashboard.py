"""The dashboard for Grafana: its form, and that it asks for series and labels that there are."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import jsonschema
import pytest
from prometheus_client import REGISTRY
from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from tandem_gateway.http.tls import Certificate
from tandem_gateway.records.metrics import Metrics
from tandem_operator.objects.manifests import ModelKey
from tandem_operator.runtime import metrics as operator_metrics

from tests.charts.test_chart import CHART, ROOT, needs_helm, of_kind, render, schema
from tests.tandem_gateway.http.test_tls import make_certificate

FILE = CHART / "dashboards" / "tandem.json"
WORKER_TEXT = ROOT / "tests" / "tandem_worker" / "process" / "metrics.txt"
"""Everything that a worker exports: its own test compares."""
SCRAPED = {
    "tandem_worker": {"namespace", "pod", "inferencemodel", "tandem_role"},
    "tandem_gateway": {"namespace", "pod", "inferencemodel", "tandem_role"},
    "tandem_operator": {"pod"},
}
"""Labels that monitors add."""
SERIES = re.compile(r"\b(tandem_(?:operator|gateway|worker)_[a-z_]+)(?:\{([^}]*)\})?")
KEYWORDS = r"\b(?:by|without|on|ignoring|group_left|group_right) *\(([^)]*)\)"


def dashboard() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def expressions() -> list[tuple[str, str]]:
    """Title of the panel, and what it asks for."""
    return [(p["title"], target["expr"]) for p in dashboard()["panels"] for target in p.get("targets", [])]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Names of all series that parts of Tandem export, each with its labels."""
    gateway = Metrics()
    certificate = Certificate(str(make_certificate(tmp_path_factory.mktemp("tls") / "a", "a")), min_version="TLS1.2")
    certificate.loads["ok"] += 1
    certificate.handshakes["ok"] += 1
    gateway.count("/v1/models", 200)
    for counts in (gateway.retries, gateway.resumes, gateway.failed_resumes, gateway.queue_waits):
        counts["x"] += 1
    text = gateway.render(
        endpoints={("decode", "available"): 1}, tokens={"decode": 1}, failures={"x": 1}, ejections={"x": 1},
        canary={(True, True): 1}, telemetry={"ok": 1}, more=certificate.families(),
    ).decode()  # fmt: skip
    key = ModelKey("of the dashboard", "m")
    operator_metrics.note_conditions(key, {"Ready"})
    operator_metrics.note_replicas(key, "decode", desired=1, required=1)
    for counter in (operator_metrics.SCALING_DECISIONS, operator_metrics.RECONCILES, operator_metrics.FLEET_REPORTS):
        counter.labels("x")
    operator_metrics.WATCH_FAILURES.labels("x")
    families: list[Family] = [
        *text_string_to_metric_families(text),
        *text_string_to_metric_families(WORKER_TEXT.read_text()),
        *(family for family in REGISTRY.collect() if family.name.startswith("tandem_operator_")),
    ]
    found: defaultdict[str, set[str]] = defaultdict(set)
    for family in families:
        for sample in family.samples:
            found[sample.name] |= sample.labels.keys()
    operator_metrics.forget_model(key)
    return found


def test_it_asks_for_series_and_labels_that_there_are(exported: dict[str, set[str]]) -> None:
    known = exported
    asked = expressions()
    assert len(asked) >= 40
    wrong: list[str] = []
    for title, expression in asked:
        found = SERIES.findall(expression)
        assert found, title
        for name, selector in found:
            if name not in known:
                wrong.append(f"{title}: {name}")
                continue
            there = known[name] | SCRAPED["_".join(name.split("_")[:2])]
            named = re.findall(r'(\w+) *(?:=~|!~|!=|=) *"', selector)
            named += [label for labels in re.findall(KEYWORDS, expression) for label in re.findall(r"\w+", labels)]
            wrong += [f"{title}: {name} has no label {label}" for label in named if label not in there]
    assert wrong == []


def test_every_alert_asks_for_series_that_are_exported(exported: dict[str, set[str]]) -> None:
    text = (CHART / "templates" / "monitoring.yaml").read_text()
    asked = {name for line in text.splitlines() if not line.strip().startswith(("description", "summary"))
             for name, _ in SERIES.findall(line)}  # fmt: skip
    assert len(asked) >= 10
    assert asked - exported.keys() == set()


def test_legends_name_labels_that_are_left() -> None:
    """A label that a sum has dropped shows as nothing."""
    for title, panel in ((p["title"], p) for p in dashboard()["panels"]):
        for target in panel.get("targets", []):
            kept = set(re.findall(r"\w+", " ".join(re.findall(KEYWORDS, target["expr"]))))
            for label in re.findall(r"\{\{ *(\w+) *\}\}", target["legendFormat"]):
                assert not kept or label in kept, f"{title}: {label}"


def test_what_it_shows() -> None:
    rows = [panel["title"] for panel in dashboard()["panels"] if panel["type"] == "row"]
    assert rows == [
        "Fleet", "SLO", "Scaling decisions", "Key-value cache", "Disks and stores for key-value blocks",
        "GPU and NVLink", "Operator",
    ]  # fmt: skip


def test_its_form_is_grafanas() -> None:
    board = dashboard()
    assert {"uid", "title", "panels", "templating", "time", "schemaVersion"} <= board.keys()
    assert "id" not in board, "it is the instance's"
    assert board["schemaVersion"] >= 36
    assert len(board["uid"]) <= 40
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert all(each["datasource"] == source for name, each in variables.items() if name != "datasource")
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("timeseries", "stat")
        assert panel["datasource"] == source
        assert {"fieldConfig", "options", "targets", "title", "description"} <= panel.keys()
        assert [target["refId"] for target in panel["targets"]] == [chr(65 + i) for i in range(len(panel["targets"]))]
        for target in panel["targets"]:
            assert target["datasource"] == source
            assert target["expr"].count("(") == target["expr"].count(")")
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {*variables, "__rate_interval"}


def test_counters_are_rates() -> None:
    for title, asked in expressions():
        expression = asked.replace("tandem_worker_kv_blocks_total", "")  # how many there are
        for name in re.findall(r"\b\w+(?:_total|_bucket|_sum|_count)\b(?=[{\[])", expression):
            assert re.search(rf"(?:rate|increase)\({name}", expression), f"{title}: {name}"


@pytest.mark.parametrize("wrong", [{"enabled": "yes"}, {"namespace": "A b"}, {"labels": {"a": 1}}, {"folder": "x"}])
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"metrics": {"dashboards": wrong}}, schema())


@needs_helm
def test_it_is_made_where_it_is_asked_for() -> None:
    assert not of_kind(render(), "ConfigMap")
    (made,) = of_kind(render("--set", "metrics.dashboards.enabled=true"), "ConfigMap")
    assert (made["metadata"]["name"], made["metadata"]["namespace"]) == ("tandem-dashboard", "ns")
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(made["data"]["tandem.json"]) == dashboard()
    other = ("--set", "metrics.dashboards.enabled=true,metrics.dashboards.namespace=monitoring",
             "--set", "metrics.dashboards.annotations.grafana_folder=LLM")  # fmt: skip
    (made,) = of_kind(render(*other), "ConfigMap")
    assert made["metadata"]["namespace"] == "monitoring"
    assert made["metadata"]["annotations"] == {"grafana_folder": "LLM"}
