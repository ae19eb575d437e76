"""Charts of releases out of a registry, on an API server without nodes: installed, and upgraded in both ways.

What the images then do is for `test_release.py`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from e2e.cluster.errors import ClusterError
from e2e.cluster.gobuild import Builder, find_tool
from e2e.cluster.settings import ROOT, read_settings
from e2e.realapi import ControlPlane, start
from e2e.release.chart import push_chart, write_chart
from e2e.releases import WITH_KEYS, export
from e2e.suite.fleet import Object, until
from e2e.suite.test_release import CRD
from tests.ports import free_port

PARTS = ("operator", "gateway", "worker")
BEFORE, AFTER = "0.99.0", "0.99.1"
NAMESPACE = "tandem-system"


class Charts:
    """Helm, an API server and a registry with two releases and an old chart."""

    def __init__(self, plane: ControlPlane, folder: Path, registry: str) -> None:
        settings = read_settings()
        self.helm = find_tool("helm", Builder(settings.go_modules, settings.cache))
        self.plane, self.folder, self.registry = plane, folder, registry

    def publish(self, version: str) -> dict[str, str]:
        """Push this checkout's chart as a release. Its images, which nobody pulls here."""
        digest = version.replace(".", "").ljust(64, "0")
        images = {part: f"{self.registry}/tandem-{part}:{version}@sha256:{digest}" for part in PARTS}
        chart = write_chart(ROOT / "charts" / "tandem", self.folder / version / "tandem", version, images)
        push_chart(self.helm, chart, self.registry, self.folder, plain=True)
        return images

    def run(self, *arguments: str) -> str:
        command = [str(self.helm), "--kubeconfig", str(self.plane.kubeconfig), "-n", NAMESPACE, *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def released(self, *arguments: str, version: str) -> str:
        chart = f"oci://{self.registry}/charts/tandem"
        return self.run(arguments[0], "tandem", chart, "--plain-http", "--version", version, *arguments[1:])

    @property
    def container(self) -> Object:
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/tandem-operator"
        return self.plane.kubernetes.request("GET", path)["spec"]["template"]["spec"]["containers"][0]

    def shown(self) -> list[str]:
        """The three images, as the operator's Deployment has them."""
        told = dict(each.lstrip("-").split("=", 1) for each in self.container["args"])
        return [self.container["image"], told["gateway-image"], told["worker-image"]]

    def end(self) -> None:
        self.run("uninstall", "tandem")
        self.remove_crd()

    def remove_crd(self) -> None:
        """Until it has gone: a chart that is installed before takes it for its own, and loses it then."""
        self.plane.kubernetes.request("DELETE", CRD)
        until("the CRD to be gone", lambda: not self.has_crd(), within=120)

    def has_crd(self) -> bool:
        path, _, name = CRD.rpartition("/")
        return any(found["metadata"]["name"] == name for found in self.plane.kubernetes.request("GET", path)["items"])


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Charts]:
    folder = Path(tmp_path_factory.mktemp("registry"))
    address = f"127.0.0.1:{free_port()}"
    config = {
        "version": 0.1, "http": {"addr": address},
        "storage": {"filesystem": {"rootdirectory": str(folder / "storage")}},
    }  # fmt: skip
    (folder / "registry.json").write_text(json.dumps(config))
    settings = read_settings()
    program = Builder(settings.go_modules, settings.cache).build("registry")
    with start(Path(tmp_path_factory.mktemp("plane"))) as plane:
        with (folder / "registry.log").open("wb") as log:
            served = subprocess.Popen([program, "serve", folder / "registry.json"], stdout=log, stderr=log)
        try:
            until(
                "the registry to answer",
                lambda: httpx.get(f"http://{address}/v2/", trust_env=False).is_success,
                within=120,
            )
            made = Charts(plane, folder, address)
            made.remove_crd()  # charts bring it
            yield made
        finally:
            served.terminate()
            served.wait()


@pytest.fixture(scope="module")
def released(charts: Charts) -> dict[str, dict[str, str]]:
    return {version: charts.publish(version) for version in (BEFORE, AFTER)}


def crd_version(charts: Charts) -> str | None:
    return charts.plane.kubernetes.request("GET", CRD)["metadata"]["annotations"].get("tandem.dev/version")


@pytest.mark.parametrize(
    "how", [["--reuse-values"], ["--reset-values", "--set", "logLevel=debug"]], ids=["reused", "anew"]
)
def test_from_one_release_to_the_next(charts: Charts, released: dict[str, dict[str, str]], how: list[str]) -> None:
    told = charts.released("install", "--set", "logLevel=debug", version=BEFORE)
    assert "kubectl apply -f -" in told
    assert set(charts.shown()) == set(released[BEFORE].values())
    charts.released("upgrade", *how, version=AFTER)
    assert set(charts.shown()) == set(released[AFTER].values())
    assert "--log-level=debug" in charts.container["args"], "what somebody set stays"
    charts.end()


def test_from_a_chart_of_long_ago_with_its_values_alone(charts: Charts) -> None:
    """It lacks most groups of values that today's templates read."""
    try:
        old = export(WITH_KEYS, charts.folder) / "charts" / "tandem"
    except ClusterError as error:
        pytest.skip(str(error))
    missing = yaml.safe_load((ROOT / "charts/tandem/values.yaml").read_text()).keys()
    missing -= yaml.safe_load((old / "values.yaml").read_text()).keys()
    assert len(missing) >= 5
    images = charts.publish("0.99.2")
    charts.run("install", "tandem", str(old), "--set", "replicas=2")
    charts.released("upgrade", "--reuse-values", version="0.99.2")
    assert set(charts.shown()) == set(images.values())
    until("the CRD to be this release's", lambda: crd_version(charts), within=60)
    charts.end()
