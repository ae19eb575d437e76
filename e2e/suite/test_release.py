"""A release out of a registry, by somebody who has no checkout: installed by two commands, and upgraded to the next.

`e2e.release` makes two of this checkout, which differ in their version, and pushes them to the cluster's registry.
Nodes know that by another name than this machine does, so charts are installed with `global.imageRegistry`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from e2e.cluster.images.catalog import MEMBERS, WORKSPACE
from e2e.install import HUB_ENDPOINT, NAMESPACE, ROOT, install_chart, settle_seconds, uninstall_chart
from e2e.release.version import read_version
from e2e.suite.fleet import Kubernetes, Say, until

pytestmark = [pytest.mark.alone, pytest.mark.timeout(2400)]
BEFORE, AFTER = "0.99.0", "0.99.1"
MODEL = "smollm2"
ANSWER_WITHIN = 180
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/inferencemodels.tandem.dev"


def copy_checkout(target: Path) -> Path:
    """What a release is made of."""
    skipped = shutil.ignore_patterns("__pycache__", "*.pyc", "*.so", "*.o", ".venv")
    for name in (*WORKSPACE, *MEMBERS, "charts", "crds"):
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy, ignore=skipped)
        else:
            shutil.copy2(ROOT / name, copy)
    return target


class Reader:
    """Has a shell, Helm and kubectl, in an empty folder."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self._folder = folder
        path = f"{Path(cluster.kubectl_path).parent}:{Path(cluster.helm).parent}:{os.environ['PATH']}"
        self._environment = os.environ | {"KUBECONFIG": str(cluster.kubeconfig), "PATH": path}

    def type(self, line: str, timeout: float = 900) -> str:
        done = subprocess.run(
            ["bash", "-c", line], cwd=self._folder, env=self._environment, capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def registry(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where both releases are, as this machine reaches it."""
    if cluster.backend.name != "binaries":
        pytest.skip("needs a registry that this machine and the nodes reach")
    address = cluster.backend.registry_address
    for version in (BEFORE, AFTER):
        tree = copy_checkout(tmp_path_factory.mktemp("tree") / version)
        command = ["--root", str(tree), "--registry", f"http://{address}", "--version", version, "--cpu-only"]
        subprocess.run([sys.executable, "-m", "e2e.release", *command], cwd=ROOT, check=True)
        assert read_version(tree) == version
        made = json.loads((tree / "dist" / f"release-{version}.json").read_text())
        assert re.fullmatch(rf"oci://{re.escape(address)}/charts/tandem@sha256:[0-9a-f]{{64}}", made["chart"])
        for part in ("operator", "gateway", "worker"):
            assert re.search(rf"tandem-{part}:{version}@sha256:[0-9a-f]{{64}}$", made["images"][part])
            listed = json.loads((tree / "dist" / f"tandem-{part}-{version}.cdx.json").read_text())
            assert {"tandem-api", "pydantic"} <= {each["name"] for each in listed["components"]}
    return address


@pytest.fixture
def reader(tandem: Any, kubernetes: Kubernetes, tmp_path: Path) -> Iterator[Reader]:
    uninstall_chart(tandem)
    yield Reader(tandem, tmp_path)
    tandem.kubectl("delete", "im", MODEL, "--ignore-not-found", "--wait=true")
    install_chart(tandem)


def operator_of(kubernetes: Kubernetes, version: str) -> bool:
    """Pods of this version's image alone, and they are ready."""
    pods = kubernetes.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    images = {pod["spec"]["containers"][0]["image"] for pod in pods}
    assert len(images) == 1, images
    assert f":{version}@sha256:" in images.pop()
    return all(pod["status"].get("containerStatuses", [{}])[0].get("ready") for pod in pods)


def test_two_commands_and_an_upgrade(
    tandem: Any, kubernetes: Kubernetes, registry: str, reader: Reader, say: Say
) -> None:
    options = (
        f"--plain-http -n {NAMESPACE} --set global.imageRegistry={tandem.backend.registry_name}"
        f" --set hub.endpoint={HUB_ENDPOINT},keys.settleSeconds={settle_seconds(tandem)}"
    )
    chart = f"oci://{registry}/charts/tandem"
    began = time.monotonic()
    told = reader.type(f"helm install tandem {chart} --version {BEFORE} --create-namespace {options}")
    (apply,) = re.findall(r"kubectl apply.*?\n  EOF\n", told, flags=re.DOTALL)
    reader.type(re.sub(r"(?m)^  ", "", apply))
    (wait,) = re.findall(r"kubectl wait .*", told)
    reader.type(wait)
    assert "Paris" in answer(tandem)
    took = time.monotonic() - began
    say(f"two commands out of a registry, then the first answer: {took:.0f} s")
    assert took < ANSWER_WITHIN
    until("the operator of the first release alone", lambda: operator_of(kubernetes, BEFORE), within=240)
    assert kubernetes.request("GET", CRD)["metadata"]["annotations"]["tandem.dev/version"] == BEFORE
    assert version_of_gateway(tandem) == BEFORE
    serving = pods_of_model(kubernetes)

    reader.type(f"helm upgrade tandem {chart} --version {AFTER} --reuse-values -n {NAMESPACE} --plain-http --wait")
    until("the operator of the next release", lambda: operator_of(kubernetes, AFTER), within=240)
    assert kubernetes.request("GET", CRD)["metadata"]["annotations"]["tandem.dev/version"] == AFTER
    assert f'tandem_operator_info{{version="{AFTER}"}} 1.0' in operator_metrics(kubernetes)

    reader.type(f"helm rollback tandem 1 -n {NAMESPACE} --wait")
    until("the operator of the first release", lambda: operator_of(kubernetes, BEFORE), within=240)
    reader.type(f"helm upgrade tandem {chart} --version {AFTER} {options} --wait")
    until("the operator of the next release", lambda: operator_of(kubernetes, AFTER), within=240)
    assert "Paris" in answer(tandem)
    assert pods_of_model(kubernetes) == serving, "an upgrade of the operator replaces nobody"


def answer(cluster: Any) -> str:
    with cluster.service_url("default", MODEL, 80) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x") as api:
        asked: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
        said = api.chat.completions.create(model=MODEL, messages=asked, max_tokens=24, temperature=0)
    return said.choices[0].message.content or ""


def version_of_gateway(cluster: Any) -> str:
    with cluster.service_url("default", MODEL, 80) as url, openai.OpenAI(base_url=url, api_key="x") as api:
        return api.get("/version", cast_to=dict[str, str])["version"]


def operator_metrics(kubernetes: Kubernetes) -> str:
    (pod,) = kubernetes.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    name = pod["metadata"]["name"]
    return kubernetes.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{name}:9090/proxy/metrics")


def pods_of_model(kubernetes: Kubernetes) -> dict[str, str]:
    found = kubernetes.request("GET", f"/api/v1/namespaces/default/pods?labelSelector=tandem.dev/model={MODEL}")[
        "items"
    ]
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found}
