from __future__ import annotations

import tomllib
from pathlib import Path

import yaml
from tandem_api.version import VERSION

ROOT = Path(__file__).parents[2]


def test_chart_and_type_are_of_one_release() -> None:
    chart = yaml.safe_load((ROOT / "charts/tandem/Chart.yaml").read_text())
    crd = yaml.safe_load((ROOT / "crds/tandem.dev_inferencemodels.yaml").read_text())
    told = {"chart": chart["version"], "chart's application": chart["appVersion"]}
    told |= {"CRD": crd["metadata"]["annotations"]["tandem.dev/version"]}
    assert told == dict.fromkeys(told, VERSION)


def test_packages_have_one_version_that_releases_leave_alone() -> None:
    projects = [path for path in ROOT.glob("*/pyproject.toml") if not path.parent.name.startswith(".")]
    told = {path.parent.name: tomllib.loads(path.read_text())["project"]["version"] for path in projects}
    assert len(told) >= 4
    assert len(set(told.values())) == 1
