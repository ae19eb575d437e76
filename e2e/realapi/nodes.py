"""Stands for kubelets and gateways: makes pods ready some time after they were made, and answers `/fleet`.

Pods whose launch configuration says standby start and do not get ready before a request waits, which gateways wake them
for.
"""

from __future__ import annotations

import errno
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kubernetes import client
from tandem_api import names
from tandem_api.fleet import FLEET_PATH, WAITING_PATH

from e2e.suite.fleet import Kubernetes, Object

BAD = "bad"
"""Pods with an image whose name begins so are never ready."""


class Nodes:
    """Works through all pods several times a second, in a thread, and remembers the fewest that were ready."""

    def __init__(self, kubernetes: Kubernetes, *, load_seconds: float = 1.0) -> None:
        self.load_seconds = load_seconds
        self.pods: dict[tuple[str, str], Object] = {}
        self._kubernetes = kubernetes
        self.waiting: set[str] = set()
        """Namespaces in whose gateways a request waits."""
        self._used: dict[str, float] = {}
        self._made: dict[str, float] = {}
        self._resting: dict[str, bool] = {}
        self._workers: dict[str, int] = {}
        self._gateways: dict[str, tuple[str, ThreadingHTTPServer]] = {}
        self._tried = 0
        self._lowest: Counter[tuple[str, str]] = Counter()
        self._watched: set[tuple[str, str]] = set()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Nodes:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.set()
        self._thread.join()
        for _, server in self._gateways.values():
            server.shutdown()
            server.server_close()

    def ask(self, namespace: str) -> None:
        """A request comes to the gateways of a namespace, and waits until a worker is ready."""
        self._used[namespace] = time.time()
        self.waiting.add(namespace)

    def ready(self, namespace: str, workload: str) -> list[Object]:
        """Pods of a StatefulSet that serve."""
        return [p for p in self.of(namespace, workload) if _is_true(p, "Ready") and not _leaves(p)]

    def of(self, namespace: str, workload: str) -> list[Object]:
        prefix = f"{workload}-"
        return [p for (space, name), p in list(self.pods.items()) if space == namespace and name.startswith(prefix)]

    def lowest(self, namespace: str, workload: str, during: Callable[[], None]) -> int:
        """The fewest ready pods of a StatefulSet while something is done."""
        return self.lowest_of(namespace, [workload], during)[workload]

    def lowest_of(self, namespace: str, workloads: Iterable[str], during: Callable[[], None]) -> dict[str, int]:
        """The fewest ready pods of each StatefulSet while something is done."""
        keys = {(namespace, workload) for workload in workloads}
        for key in keys:
            self._lowest[key] = len(self.ready(*key))
        self._watched |= keys
        try:
            during()
        finally:
            self._watched -= keys
        return {workload: self._lowest[namespace, workload] for _, workload in keys}

    def _run(self) -> None:
        while not self._ends.wait(0.1):
            try:
                items = self._kubernetes.request("GET", "/api/v1/pods")["items"]
                self.pods = {(p["metadata"]["namespace"], p["metadata"]["name"]): p for p in items}
                for namespace, workload in list(self._watched):
                    found = len(self.ready(namespace, workload))
                    self._lowest[namespace, workload] = min(found, self._lowest[namespace, workload])
            except client.ApiException:
                continue
            for pod in items:
                with suppress(client.ApiException):  # it was changed or has gone meanwhile, and others wait
                    self._treat(pod)

    def _treat(self, pod: Object) -> None:
        metadata, now = pod["metadata"], time.monotonic()
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        if _leaves(pod):
            body = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
            self._kubernetes.request("DELETE", path, body)
            return
        if pod["status"].get("phase") in ("Succeeded", "Failed"):
            return
        born = self._made.setdefault(metadata["uid"], now)
        bad = any(container["image"].startswith(BAD) for container in pod["spec"]["containers"])
        if bad or now - born < self.load_seconds:
            return
        if self._rests(pod) and metadata["namespace"] not in self.waiting:
            if not _has_started(pod):
                self._say(path, self._status(pod, ready=False, rests=True))
            return
        self._resting[metadata["uid"]] = False
        gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates", [])]
        ready = all(_is_true(pod, gate) for gate in gates)
        if _is_true(pod, "ContainersReady") and _is_true(pod, "Ready") == ready:
            return
        self._say(path, self._status(pod, ready=ready))

    def _say(self, path: str, status: Object) -> None:
        body = {"status": status}
        self._kubernetes.request("PATCH", f"{path}/status", body, "application/strategic-merge-patch+json")

    def _rests(self, pod: Object) -> bool:
        """Whether it is on standby: by the launch configuration that it was started with, until it is woken."""
        uid, space = pod["metadata"]["uid"], pod["metadata"]["namespace"]
        if uid not in self._resting:
            volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
            found = volumes.get("config", {}).get("configMap", {}).get("name")
            path = f"/api/v1/namespaces/{space}/configmaps/{found}"
            text = "{}" if found is None else self._kubernetes.request("GET", path)["data"]["config.json"]
            self._resting[uid] = bool(json.loads(text).get("standby"))
        return self._resting[uid]

    def _status(self, pod: Object, *, ready: bool, rests: bool = False) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        address = self._address(pod)
        said = {"PodScheduled": True, "ContainersReady": not rests, "Ready": ready}
        conditions = [
            {"type": name, "status": str(holds), "lastTransitionTime": now} | ({} if holds else {"reason": _WAITS})
            for name, holds in said.items()
        ]
        containers = [
            {
                "name": container["name"], "image": container["image"], "imageID": "x", "ready": not rests,
                "started": True, "restartCount": 0, "state": {"running": {"startedAt": now}},
            }
            for container in pod["spec"]["containers"]
        ]  # fmt: skip
        return {
            "phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": conditions,
            "containerStatuses": containers,
        }  # fmt: skip

    def _address(self, pod: Object) -> str:
        """Each pod has an address of its own, so that one is not taken for another that had its name. Gateways have
        loopback addresses, and answer there."""
        uid = pod["metadata"]["uid"]
        if _component(pod) != "gateway":
            number = self._workers.setdefault(uid, len(self._workers))
            return f"192.0.2.{number % 250 + 1}"
        if uid not in self._gateways:
            address, server = self._bind(self._handler(pod))
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self._gateways[uid] = address, server
        return self._gateways[uid][0]

    def _bind(self, handler: type[BaseHTTPRequestHandler]) -> tuple[str, ThreadingHTTPServer]:
        """A server at an address that nobody has: other runs on this machine have some."""
        for number in itertools.count(self._tried):
            self._tried, address = number + 1, f"127.77.{number // 250 % 250}.{number % 250 + 1}"
            try:
                return address, ThreadingHTTPServer((address, names.GATEWAY_METRICS_PORT), handler)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        raise AssertionError("unreachable")

    def _handler(self, gateway: Object) -> type[BaseHTTPRequestHandler]:
        nodes, started = self, time.time()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == WAITING_PATH:
                    ends = time.monotonic() + 5.0
                    while not nodes._ends.wait(0.05) and not nodes._waits(gateway) and time.monotonic() < ends:
                        pass
                known = self.path in (FLEET_PATH, WAITING_PATH)
                body = json.dumps(nodes._report(gateway, started)).encode() if known else b"{}"
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with suppress(BrokenPipeError):  # who asked has left
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        return Handler

    def _report(self, gateway: Object, started: float) -> Object:
        metadata = gateway["metadata"]
        model = metadata["labels"][names.LABEL_MODEL]
        workers = [
            {
                "name": p["metadata"]["name"], "address": f"{p['status']['podIP']}:8000",
                "role": p["metadata"]["labels"][names.LABEL_ROLE],
                "revision": p["metadata"]["labels"].get(names.LABEL_REVISION, ""), "state": "Admitted",
            }
            for p in list(self.pods.values())
            if p["metadata"]["namespace"] == metadata["namespace"]
            and p["metadata"]["labels"].get(names.LABEL_MODEL) == model
            and _component(p) in ("prefill", "decode")
            and _is_true(p, "ContainersReady")
        ]  # fmt: skip
        space = metadata["namespace"]
        if any(worker["role"] != "prefill" for worker in workers):
            self.waiting.discard(space)  # it is answered
        waits = self._waits(gateway)
        if waits:
            self._used[space] = time.time()
        idle = time.time() - max(started, self._used.get(space, 0.0))
        traffic = {"waitingRequests": int(waits), "idleSeconds": 0.0 if waits else idle}
        told = {"gateway": metadata["name"], "startedAt": started, "at": time.time(), "workers": workers}
        return told | {"traffic": traffic}

    def _waits(self, gateway: Object) -> bool:
        return gateway["metadata"]["namespace"] in self.waiting


_WAITS = "ReadinessGatesNotReady"


def _component(pod: Object) -> str | None:
    return pod["metadata"].get("labels", {}).get("app.kubernetes.io/component")


def _has_started(pod: Object) -> bool:
    return any(status.get("started") for status in pod.get("status", {}).get("containerStatuses", []))


def _leaves(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _is_true(pod: Object, kind: str) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)
