"""Every command that pages, examples, the chart's notes and the demo print is run, where it can be.

Those of kubectl and helm against a real API server with the operator and stand-ins for nodes (`e2e.realapi`), with the
models of the examples in it; what would change them is asked of the server without being done. `e2e.pages` says why the
others are only shown.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.gobuild import Builder, find_tool
from e2e.cluster.settings import ROOT, read_settings
from e2e.pages import API, HELM, Command, fill_in, judge, list_commands
from e2e.realapi import ControlPlane, Nodes, start
from e2e.suite.fleet import until

MODELS = (
    "quickstart", "exposed", "kv-tiers", "sglang", "shared-store", "suspended", "tensor-parallel", "tls",
    "two-nodes", "vllm",
)  # fmt: skip
"""Examples whose models the commands name."""
ALL = [(command, judge(command)[0]) for command in list_commands()]
ON_THE_SERVER = [command for command, where in ALL if where == API]
OF_HELM = [command for command, where in ALL if where == HELM]
WATCH_SECONDS = 3
CHANGES = r"kubectl (-n \S+ )?(patch|annotate|label|scale|delete) "


def name(command: Command) -> str:
    return re.sub(r"[^\w./=-]+", "_", str(command))[:100]


class Shell:
    """Runs lines as somebody types them in the repository."""

    def __init__(self, plane: ControlPlane) -> None:
        settings = read_settings()
        builder = Builder(settings.go_modules, settings.cache)
        folders = [str(find_tool(tool, builder).parent) for tool in ("kubectl", "helm")]
        path = ":".join([*folders, os.environ["PATH"]])
        self._environment = os.environ | {"KUBECONFIG": str(plane.kubeconfig), "PATH": path}

    def run(self, line: str, *, watch_seconds: int = WATCH_SECONDS) -> str:
        """What it prints. A line that watches runs for some seconds. AssertionError with its words where it fails."""
        watches = re.search(r" (-w|--watch)\b", line)
        command = ["timeout", str(watch_seconds), "bash", "-c", line] if watches else ["bash", "-c", line]
        done = subprocess.run(
            command, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=400, check=False
        )
        fine = {124} if watches else {0, 1} if "| grep" in line else {0}  # grep that finds nothing ends with 1
        assert done.returncode in fine, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with start(Path(tmp_path_factory.mktemp("plane"))) as plane, Nodes(plane.kubernetes, load_seconds=0.1):
        plane.start_operator()
        made = Shell(plane)
        made.run("kubectl create namespace monitoring; kubectl create clusterrole tandem-tandem-system-gateway "
                 "--verb=get --resource=pods")  # fmt: skip
        for example in MODELS:
            made.run(f"kubectl apply -f examples/{example}.yaml")
        (of_page,) = (ROOT / "docs" / "engines.md").read_text().split("```yaml\n")[1].split("```")[:1]
        made.run(f"kubectl apply -f - <<'EOF'\n{of_page}\nEOF")
        until(
            "a record of the model's revision", lambda: made.run("kubectl get controllerrevision smollm2-1"), within=120
        )
        yield made


@pytest.mark.parametrize("command", ON_THE_SERVER, ids=name)
def test_a_command_of_kubectl_runs(shell: Shell, command: Command) -> None:
    line = re.sub(r"--timeout=\d+m", "--timeout=300s", fill_in(command.line))
    shell.run(f"{line} --dry-run=server" if re.match(CHANGES, line) else line)


INSTALL = "helm install tandem charts/tandem -n tandem-system --create-namespace"


def test_commands_of_helm_run(shell: Shell) -> None:
    """Each on a release that is there."""
    lines = sorted({command.line for command in OF_HELM})
    assert len(lines) >= 4
    # What the chart makes is not there yet.
    shell.run("kubectl delete crd/inferencemodels.tandem.dev clusterrole/tandem-tandem-system-gateway")
    for line in lines:
        if "tandem" not in shell.run("helm list -n tandem-system -q"):
            shell.run(INSTALL)
        shell.run(line)


def test_a_line_that_fails_is_noticed(shell: Shell) -> None:
    with pytest.raises(AssertionError, match="single resource type"):
        shell.run("kubectl get im,pods -w", watch_seconds=120)  # a busy machine begins it after some seconds
