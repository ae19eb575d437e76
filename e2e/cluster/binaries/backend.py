"""The backend `binaries`: a single-node Kubernetes from plain programs, in a network namespace with no way out."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from ..base import ClusterStatus, constant_url
from ..caches import CachedPart, bound_cache, folder_part
from ..commands import run, wait_until
from ..errors import ClusterError
from ..gobuild import Builder, check_go, find_tool
from ..images.buildah import remove_interrupted
from ..images.catalog import Image
from ..leftovers import check_leftovers, list_leftovers
from ..progress import say, step
from ..settings import ClusterSettings
from . import components, images, machine, registry, teardown
from .api import Api, connects, dns_answers, http_body
from .components import REGISTRY_HOST, REGISTRY_PORT, ClusterPlan
from .network import Addresses, Namespace, observe_routes, plan_addresses
from .pki import NODE, write_pki
from .processes import Processes

PROGRAMS = (
    "etcd", "registry", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy",
    "coredns", "pause", "pull",
)  # fmt: skip
MAX_PATH = 60
"""The kubelet's sockets lie up to 45 characters below the state folder, and a socket's path ends at 107."""
_ROUTE_LIMIT = 120
"""Seconds for a Service's address to answer once its pods are ready. kube-proxy took up to 7 on a busy machine."""


class BinariesBackend:
    name = "binaries"

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        self.state = settings.state
        self.builder = Builder(settings.go_modules, settings.cache)
        self.namespace = Namespace(settings.id)
        self.group = f"tandem-{settings.id}"
        self.processes = Processes(self.state / "processes.json", self.state / "logs")

    @property
    def kubeconfig(self) -> Path:
        return self.state / "pki" / "admin.kubeconfig"

    def check(self) -> None:
        machine.check_machine()
        check_go()
        if len(str(self.state)) > MAX_PATH:
            raise ClusterError(
                f"the path {self.state} is longer than {MAX_PATH} characters: the kubelet's sockets do not fit"
            )

    # --- up ---

    def up(self) -> None:
        machine.add_sbin_to_path()
        machine.install_packages(self.settings.install_packages)
        programs = {name: self.builder.build(name) for name in PROGRAMS}
        if self._runs_as_built(programs):
            say("the cluster is up already")
            return
        if self.processes.read() or self.namespace.exists():
            with step("removed what an earlier cluster left"):
                self._remove()
        try:
            self._start(self._plan(programs))
        except ClusterError as error:
            raise ClusterError(f"{error}\nthe logs are in {self.processes.log_folder}") from error

    def _runs_as_built(self, programs: dict[str, Path]) -> bool:
        recorded = self._read_plan()
        if recorded is None or self.processes.dead() or not self.namespace.exists():
            return False
        plan = self._plan(programs, Addresses(slot=recorded["slot"]), Path(recorded["containerd_root"]))
        if plan_key(plan) != recorded["key"]:
            say("the cluster runs with an older configuration: starting it anew")
            return False
        api = Api(plan.pki, plan.addresses.node)
        return api.is_ready() and api.node_is_ready(NODE)

    def _read_plan(self) -> dict | None:
        file = self.state / "plan.json"
        return json.loads(file.read_text()) if file.exists() else None

    def _plan(
        self, programs: dict[str, Path], addresses: Addresses | None = None, containerd_root: Path | None = None
    ) -> ClusterPlan:
        cni_plugins, containerd = machine.find_cni_plugins(), shutil.which("containerd")
        assert cni_plugins is not None
        assert containerd is not None
        return ClusterPlan(
            state=self.state,
            addresses=addresses or plan_addresses(self.settings.id, observe_routes()),
            programs={**programs, "containerd": Path(containerd)},
            containerd_root=containerd_root or images.choose_containerd_root(self.settings.cache, self.state),
            registry_storage=self.settings.cache / "registry",
            cni_plugins=cni_plugins,
            snapshotter=machine.find_snapshotter(self.settings.cache / "tmp"),
            can_lower_oom_score=machine.can_lower_oom_score(),
            cgroup_root=f"/{self.group}",
        )

    def _start(self, plan: ClusterPlan) -> None:
        self.state.mkdir(parents=True, exist_ok=True)
        self._bound_registry()
        with step("prepared network, keys and configuration"):
            self.namespace.create(plan.addresses)
            machine.create_control_group(control_groups(), self.group)
            write_pki(plan.pki, plan.addresses)
            for path, text in components.files(plan).items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        commands = components.commands(plan)
        with step("control plane answers"):
            for name in ("etcd", "kube-apiserver", "registry", "containerd"):
                self._start_component(name, commands[name])
            images.prepare_containerd(plan, lambda: self._restart("containerd", commands["containerd"]))
            api = Api(plan.pki, plan.addresses.node)
            wait_until(lambda: self._alive() and api.is_ready(), "the API server's readiness", 60)
        with step("node is Ready"):
            for name in ("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"):
                self._start_component(name, commands[name])
            self._grant_dns()
            self._start_component("coredns", commands["coredns"])
            wait_until(lambda: self._alive() and api.node_is_ready(NODE), "the node's readiness", 90)
        with step("Services and DNS answer"):
            self._wait_for_network(plan)
        record = {"slot": plan.addresses.slot, "containerd_root": str(plan.containerd_root), "key": plan_key(plan)}
        (self.state / "plan.json").write_text(json.dumps(record))

    def _start_component(self, name: str, command: list[str]) -> None:
        self.processes.start(name, self.namespace.enter(*command), command[0])

    def _restart(self, name: str, command: list[str]) -> None:
        self.processes.stop(name)
        self._start_component(name, command)

    def _alive(self) -> bool:
        """True; raises ClusterError with the log's end when a component has died, instead of waiting for it."""
        if dead := self.processes.dead():
            raise ClusterError(f"{dead[0]} ended:\n{self.processes.tail(dead[0])}")
        return True

    def _grant_dns(self) -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": components.dns_permissions()}
        kubectl = find_tool("kubectl", self.builder)
        run(kubectl, "--kubeconfig", self.kubeconfig, "apply", "-f", "-", stdin=json.dumps(items))

    def _wait_for_network(self, plan: ClusterPlan) -> None:
        addresses = plan.addresses
        wait_until(lambda: connects(addresses.api_service, 443), "the ClusterIP of `kubernetes`", 30)
        dns_name = "kubernetes.default.svc.cluster.local"
        wait_until(lambda: self._alive() and dns_answers(addresses.node, dns_name), "the cluster's DNS", 30)
        wait_until(lambda: http_body(f"http://{plan.registry_address}/v2/") is not None, "the image registry", 30)
        images.push_pause(plan)

    # --- down, status ---

    def down(self) -> None:
        machine.add_sbin_to_path()
        if not shutil.which("ip"):
            return  # without it, no cluster was ever started here
        self._remove()
        registry.Leases(self.settings.cache).end(self.settings.id)
        check_leftovers(self.leftovers)
        bound_cache(self.settings.cache, self._cache_parts())

    def leftovers(self, whole: Path | None = None) -> list[str]:
        """What is still on this machine of the cluster, or of all that runs out of a folder, a line each."""
        return list_leftovers(self.state, self.namespace, control_groups(), whole)

    def _cache_parts(self) -> list[CachedPart]:
        """What of the cache can go, cheapest first. Another cluster's image store is not ours to remove."""
        cache, parts = self.settings.cache, []
        if not images.is_locked(cache):
            parts.append(folder_part(cache / "containerd", "unpacked images", "unpacked again in half a minute"))
        if not registry.Leases(cache).needed():
            parts.append(folder_part(cache / "registry", "the registry's images", "pushed again in one to two minutes"))
        return parts

    def _remove(self) -> None:
        teardown.remove_cluster(self.state, self.processes, control_groups(), self.group, self.namespace)

    def status(self) -> ClusterStatus:
        records = self.processes.read()
        if not records:
            return ClusterStatus(running=False, detail="not started")
        if dead := self.processes.dead():
            return ClusterStatus(running=False, detail=f"ended: {', '.join(dead)}; `up` starts the cluster anew")
        plan = self._read_plan()
        if plan is None:
            return ClusterStatus(running=False, detail="an earlier `up` did not finish")
        node = Addresses(slot=plan["slot"]).node
        ready = Api(self.state / "pki", node).node_is_ready(NODE)
        return ClusterStatus(running=ready, detail=f"{len(records)} processes, API server on https://{node}:6443")

    # --- what runs in it ---

    def load(self, wanted: list[Image]) -> dict[str, str]:
        references = images.load(self.settings, self.builder.build("pull"), self._addresses(), wanted)
        self._bound_registry()
        return references

    def _bound_registry(self) -> None:
        leases = registry.Leases(self.settings.cache)
        with leases.removing() as alone:
            if alone:
                remove_interrupted(self.settings.cache)
        if told := registry.bound(self.settings.cache / "registry", leases, self.builder.build("registry")):
            say(told)

    def add(self, image: Image, root: Path) -> str:
        """The kubelet pulls it when the first pod wants it."""
        return images.publish(replace(self.settings, root=root), self._addresses(), image)

    def _addresses(self) -> Addresses:
        plan = self._read_plan()
        if plan is None:
            raise ClusterError("no cluster is up; start it with `python -m e2e.cluster up`")
        return Addresses(slot=plan["slot"])

    @property
    def registry_address(self) -> str:
        """The local registry as this machine reaches it; nodes call it `registry_name`."""
        return f"{self._addresses().node}:{REGISTRY_PORT}"

    @property
    def registry_name(self) -> str:
        return REGISTRY_HOST

    def service_url(self, namespace: str, service: str, port: int) -> AbstractContextManager[str]:
        address = run(
            find_tool("kubectl", self.builder),
            "--kubeconfig", self.kubeconfig, "-n", namespace, "get", "service", service,
            "-o", "jsonpath={.spec.clusterIP}",
        )  # fmt: skip
        if address in {"", "None"}:
            raise ClusterError(f"Service {namespace}/{service} has no ClusterIP")
        # kube-proxy learns of a ready pod apart from whoever reads the pod's status, on a busy machine seconds later.
        # Until then the node has no route for the ClusterIP.
        wait_until(
            lambda: connects(address, port),
            f"a connection to Service {namespace}/{service} ({address}:{port}), which has no ready pod or is not "
            f"known to kube-proxy yet ({self.processes.log_folder / 'kube-proxy.log'})",
            _ROUTE_LIMIT,
        )
        return constant_url(f"http://{address}:{port}")

    def logs(self) -> dict[str, Path]:
        return {path.stem: path for path in sorted(self.processes.log_folder.glob("*.log"))}


def control_groups() -> machine.ControlGroups:
    return machine.parse_control_groups(Path("/proc/mounts").read_text())


def plan_key(plan: ClusterPlan) -> str:
    """Changes when any command line or file would."""
    content = repr((components.commands(plan), sorted(components.files(plan).items()), os.getuid()))
    return hashlib.sha256(content.encode()).hexdigest()[:16]
