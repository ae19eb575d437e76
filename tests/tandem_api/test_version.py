from __future__ import annotations

import tomllib
from pathlib import Path

import yaml
from tandem_api.version import VERSION

ROOT = Path(__file__).parents[2]


def test_all_packages_and_the_chart_are_of_one_release() -> None:
    projects = [path for path in ROOT.glob("*/pyproject.toml") if not path.parent.name.startswith(".")]
    told = {path.parent.name: tomllib.loads(path.read_text())["project"]["version"] for path in projects}
    assert len(told) >= 4
    chart = yaml.safe_load((ROOT / "charts/tandem/Chart.yaml").read_text())
    told |= {"chart": chart["version"], "chart's application": chart["appVersion"]}
    assert told == dict.fromkeys(told, VERSION)
