"""kubeconform, kube-score and checkov against the rendered chart, the operator's objects and the examples.

    make lint-manifests

Nothing is asked of the network but Go's and Python's package proxies, when the tools are built. What was clean is not
looked at again until it, a rule or a tool changes (`.cache/manifests`).
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.commands import run
from e2e.cluster.errors import ClusterError
from e2e.cluster.gobuild import ENVIRONMENT, KUBERNETES, Builder, find_tool
from e2e.cluster.settings import ROOT, read_settings
from e2e.manifests.permits import PERMITS, Finding, judge
from e2e.manifests.schemas import file_name, of_crd, select

CHART = ROOT / "charts" / "tandem"
CRD = ROOT / "crds" / "tandem.dev_inferencemodels.yaml"
CHILDREN = ROOT / "tests" / "tandem_operator" / "golden"
CHECKOV = ROOT / ".cache" / "checkov" / "bin" / "checkov"
MINOR = KUBERNETES.rpartition(".")[0]
RELEASES = {
    "chart.yaml": (),
    "chart-namespaces.yaml": ("--set", "replicas=2", "--set-json", 'watchNamespaces=["a","b"]'),
}
"""Values to render the chart with."""
FOREIGN = ("PodMonitor", "PrometheusRule", "Gateway", "HTTPRoute", "ScaledObject", "Application")
"""Types of other projects, whose schemas are not on this machine; examples may have them."""
OWN = frozenset({"operator", "gateway", "worker"})
"""Containers of Tandem's. What a user's podTemplate adds is the user's."""

Json = dict[str, Any]


def read_documents(helm: Path) -> dict[str, list[Json]]:
    """All manifests by file name."""
    files = {name: run(helm, *_template(values)) for name, values in RELEASES.items()}
    files |= {f"children-{path.name}": path.read_text() for path in sorted(CHILDREN.glob("*.yaml"))}
    return {name: [_own(each) for each in yaml.safe_load_all(text) if each] for name, text in files.items()}


def _template(values: Iterable[str]) -> list[str | Path]:
    return ["template", "tandem", CHART, "--namespace", "tandem", "--kube-version", KUBERNETES, *values]


def _own(document: Json) -> Json:
    spec = document.get("spec", {}).get("template", {}).get("spec", {})
    if "containers" in spec:
        spec["containers"] = [each for each in spec["containers"] if each["name"] in OWN]
    return document


def check_schemas(program: Path, folder: Path, modules: Path) -> list[str]:
    """Of the manifests in the folder, and of the examples."""
    told = json.loads(run("go", "mod", "download", "-json", "k8s.io/kubernetes", cwd=modules, env=ENVIRONMENT))
    swagger = json.loads((Path(told["Dir"]) / "api" / "openapi-spec" / "swagger.json").read_text())
    read = {file: _read(file) for file in [*folder.glob("*.yaml"), *(ROOT / "examples").rglob("*.yaml")]}
    files = [file for file, documents in read.items() if all("apiVersion" in each for each in documents)]
    wanted = {(each["apiVersion"], each["kind"]) for file in files for each in read[file]}
    schemas = select(swagger, wanted) | of_crd(yaml.safe_load(CRD.read_text()))
    with tempfile.TemporaryDirectory() as location:
        for (version, kind), schema in schemas.items():
            (Path(location) / file_name(version, kind)).write_text(json.dumps(schema))
        command = [
            program, "-output", "json", "-skip", ",".join(FOREIGN),
            "-schema-location", f"{location}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json", *files,
        ]  # fmt: skip
        answer = json.loads(_output(command))
    return [
        f"{each['filename']}: {each['kind']} {each['name']}: {each['msg']}" for each in answer.get("resources") or ()
    ]


def _read(file: Path) -> list[Json]:
    return [each for each in yaml.safe_load_all(file.read_text()) if each]


def score(program: Path, folder: Path) -> Iterator[Finding]:
    files = sorted(folder.glob("*.yaml"))
    for file in files:  # together, objects of one name would be taken for one
        command = [program, "score", "--kubernetes-version", f"v{MINOR}", "--output-format", "json", file]
        for each in json.loads(_output(command)):
            for check in each["checks"]:
                if not check["skipped"] and check["grade"] < 10:
                    for comment in check["comments"] or ({"summary": check["check"]["name"]},):
                        yield Finding(
                            rule=check["check"]["id"], file=file.name, kind=each["type_meta"]["kind"],
                            name=each["object_meta"]["name"], text=comment["summary"],
                        )  # fmt: skip


def scan(program: Path, folder: Path) -> Iterator[Finding]:
    command = [
        program, "--directory", folder, "--framework", "kubernetes", "--compact", "--quiet", "--skip-download",
        "--output", "json",
    ]  # fmt: skip
    answer = json.loads(_output(command))
    if answer["summary"]["parsing_errors"] or not answer["summary"]["passed"]:
        raise ClusterError(f"checkov could not read the manifests: {answer['summary']}")
    for each in answer["results"]["failed_checks"]:
        kind, _, name = each["resource"].partition(".")
        file = Path(each["file_path"]).name
        yield Finding(rule=each["check_id"], file=file, kind=kind, name=name, text=each["check_name"])


def _output(command: list[Any]) -> str:
    """Linters end with 1 where they find something."""
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if result.returncode not in (0, 1) or not result.stdout:
        raise ClusterError(f"{command[0]} failed with {result.returncode}: {result.stderr[-2000:]}")
    return result.stdout


def digest(documents: dict[str, list[Json]], tools: Iterable[Path]) -> str:
    """16 hex digits over everything that the result depends on."""
    found = hashlib.sha256(json.dumps(documents, sort_keys=True, default=str).encode())
    own = [*Path(__file__).parent.glob("*.*"), *(ROOT / "examples").rglob("*.yaml"), CRD]
    for path in sorted(path for path in own if path.is_file()):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for tool in tools:
        found.update(re.sub(r".*/bin/", "", str(tool)).encode())  # the folder's name has the key of a built tool
    return found.hexdigest()[:16]


def main() -> None:
    settings = read_settings()
    builder = Builder(settings.go_modules, settings.cache)
    helm = find_tool("helm", builder)
    kubeconform, kube_score = builder.build("kubeconform"), builder.build("kube-score")
    documents = read_documents(helm)
    clean = settings.cache / "manifests" / digest(documents, (kubeconform, kube_score))
    if clean.exists():
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, each in documents.items():
            # JSON is YAML that every reader takes alike; PyYAML writes a namespace `n` that others read as false.
            (folder / name).write_text("\n---\n".join(map(json.dumps, each)))
        wrong = check_schemas(kubeconform, folder, settings.go_modules / "kubernetes")
        wrong += judge([*score(kube_score, folder), *scan(CHECKOV, folder)], PERMITS)
    if wrong:
        sys.exit("\n".join(sorted(wrong)))
    clean.parent.mkdir(parents=True, exist_ok=True)
    clean.touch()


if __name__ == "__main__":
    main()
