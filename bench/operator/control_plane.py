"""A Kubernetes of real API server, controllers and scheduler whose nodes are kwok's: pods become ready, nothing runs.

It has a state folder and a network namespace of its own and stands beside the test cluster.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from e2e.cluster.binaries import components, machine
from e2e.cluster.binaries.api import Api
from e2e.cluster.binaries.components import ClusterPlan
from e2e.cluster.binaries.network import Namespace, observe_routes, plan_addresses
from e2e.cluster.binaries.pki import write_pki
from e2e.cluster.binaries.processes import Processes
from e2e.cluster.commands import run, succeeds, wait_until
from e2e.cluster.gobuild import Builder, check_go
from e2e.cluster.settings import read_settings

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kwok")
CLIENT_RATE = ("--kube-api-qps=200", "--kube-api-burst=400")
"""Of controllers and scheduler: their defaults, 20 to 50 a second, would be what is measured."""
NODES = 10
POD_NETWORK = "10.200.0.0/16"
FAKE_NODE = "kwok.x-k8s.io/node"

_READY = """\
{{ $now := Now }}
phase: Running
startTime: {{ $now | Quote }}
hostIP: {{ NodeIPWith .spec.nodeName | Quote }}
podIP: {{ PodIPWith .spec.nodeName false .metadata.uid .metadata.name .metadata.namespace | Quote }}
conditions:
{{ range $type := list "Initialized" "ContainersReady" "Ready" }}
- {type: {{ $type }}, status: "True", lastTransitionTime: {{ $now | Quote }}}
{{ end }}
{{ range .spec.readinessGates }}
- {type: {{ .conditionType | Quote }}, status: "True", lastTransitionTime: {{ $now | Quote }}}
{{ end }}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  ready: true
  restartCount: 0
  state: {running: {startedAt: {{ $now | Quote }}}}
{{ end }}
"""
_NODE_READY = """\
{{ $now := Now }}
phase: Running
addresses:
- {type: InternalIP, address: {{ NodeIP | Quote }}}
allocatable: {cpu: 1k, memory: 1Ti, pods: 10k}
capacity: {cpu: 1k, memory: 1Ti, pods: 10k}
conditions:
- {type: Ready, status: "True", reason: KubeletReady, message: kwok, lastHeartbeatTime: {{ $now | Quote }}, lastTransitionTime: {{ $now | Quote }}}
"""  # noqa: E501


def _stage(name: str, kind: str, expressions: list[dict[str, Any]], step: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": kind},
            "selector": {"matchExpressions": expressions},
            "next": step,
        },
    }


def stages() -> list[dict[str, Any]]:
    """What becomes of nodes and pods: ready at once, and gone at once."""
    deletion = ".metadata.deletionTimestamp"
    not_ready = {
        "key": '.status.conditions.[] | select( .type == "Ready" ) | .status',
        "operator": "NotIn",
        "values": ["True"],
    }
    return [
        _stage("node-ready", "Node", [not_ready], {"statusTemplate": _NODE_READY}),
        _stage(
            "pod-ready", "Pod", [{"key": deletion, "operator": "DoesNotExist"}, not_ready], {"statusTemplate": _READY}
        ),
        _stage("pod-gone", "Pod", [{"key": deletion, "operator": "Exists"}], {"delete": True}),
    ]


def node(number: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": f"kwok-{number}", "annotations": {FAKE_NODE: "fake"}, "labels": {"type": "kwok"}},
    }


class ControlPlane:
    """Started and removed as a whole."""

    def __init__(self) -> None:
        settings = read_settings()
        settings = replace(settings, state=settings.root / ".cache" / "bench-operator")
        self.state: Path = settings.state
        self.builder = Builder(settings.go_modules, settings.cache)
        self.namespace = Namespace(settings.id)
        self.processes = Processes(self.state / "processes.json", self.state / "logs")

    @property
    def kubeconfig(self) -> Path:
        return self.state / "pki" / "admin.kubeconfig"

    def up(self) -> None:
        """Raises ClusterError with the reason."""
        machine.add_sbin_to_path()
        check_go()
        self.down()
        programs = {name: self.builder.build(name) for name in PROGRAMS}
        self.state.mkdir(parents=True)
        plan = ClusterPlan(
            state=self.state,
            addresses=plan_addresses(self.namespace.name.rpartition("-")[2], observe_routes()),
            programs=programs,
            containerd_root=self.state,
            registry_storage=self.state,
            cni_plugins=self.state,
            snapshotter="native",
            can_lower_oom_score=False,
            cgroup_root="/",
        )
        self.namespace.create(plan.addresses)
        run("ip", "route", "add", "unreachable", POD_NETWORK)  # pods that are asked for reports are not there
        write_pki(plan.pki, plan.addresses)
        self._start("etcd", programs["etcd"], components.etcd(plan))
        self._start("kube-apiserver", programs["kube-apiserver"], components.apiserver(plan))
        api = Api(plan.pki, plan.addresses.node)
        wait_until(api.is_ready, "the API server's readiness", 120)
        for name, arguments in (
            ("kube-controller-manager", components.controller_manager(plan)),
            ("kube-scheduler", components.scheduler(plan)),
        ):
            self._start(name, programs[name], [*arguments, *CLIENT_RATE])
        config = self.state / "kwok.yaml"
        config.write_text("\n---\n".join(json.dumps(stage) for stage in stages()))
        flags = [f"--kubeconfig={self.kubeconfig}", f"--config={config}", f"--cidr={POD_NETWORK}"]
        flags.append(f"--manage-nodes-with-annotation-selector={FAKE_NODE}=fake")
        flags.append("--node-lease-duration-seconds=40")  # without it the nodes are taken for lost after 50 s
        self._start("kwok", programs["kwok"], flags)

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time that each program has taken so far."""
        ticks = os.sysconf("SC_CLK_TCK")
        found: dict[str, float] = {}
        for record in self.processes.read():
            fields = Path(f"/proc/{record.pid}/stat").read_text().rpartition(")")[2].split()
            found[record.name] = (int(fields[11]) + int(fields[12])) / ticks
        return found

    def _start(self, name: str, program: Path, arguments: list[str]) -> None:
        self.processes.start(name, self.namespace.enter(program, *arguments), str(program))

    def down(self) -> None:
        if self.state.exists():
            self.processes.stop()
            self.namespace.remove()
            succeeds("ip", "route", "del", "unreachable", POD_NETWORK)
            shutil.rmtree(self.state)
