"""A namespace with InferenceModels in it, as a person with kubectl sees it.

Nothing here sleeps for a guessed time: `until` polls a condition and, when it never holds, says what it last saw.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import openai
from kubernetes import client, config
from tandem_api.names import WORKER_METRICS_PORT
from urllib3.exceptions import HTTPError, ProtocolError

from e2e.cluster.errors import ClusterError, CommandFailed

Object = dict[str, Any]
Say = Callable[[str], None]
"""Of the fixture `say`."""
T = TypeVar("T")
_SIGNAL = """
import contextlib, os, pathlib, signal, sys
for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdigit() and int(entry.name) != os.getpid():
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"tandem-worker" in command or b"tandem_worker" in command:
            with contextlib.suppress(ProcessLookupError):  # it has ended with one of those before
                os.kill(int(entry.name), signal.Signals[sys.argv[1]])
"""

WAITED: list[float] = []
"""Seconds of each wait of the test that runs: where a run's time goes is told at its end."""


class NotReached(AssertionError):
    """A condition did not hold in time; the message has what was last seen."""


def until(what: str, probe: Callable[[], T | None], *, within: float, every: float = 0.25) -> T:
    """First truthy value of `probe`. An exception from it counts as not yet, and is shown if time runs out.

    The last probe is one that begins when time is up: what probes take says nothing about the condition.
    """
    began = time.monotonic()
    last: object = None
    while True:
        is_last = time.monotonic() > began + within
        try:
            if result := probe():
                WAITED.append(time.monotonic() - began)
                return result
            last = result
        except (AssertionError, ClusterError, client.ApiException, httpx.HTTPError, HTTPError, KeyError) as error:
            last = error
        if is_last:
            raise NotReached(f"{what}: not within {within:g} s; last seen: {last!r}")
        time.sleep(every)


class Kubernetes:
    """The API server, read as plain JSON."""

    def __init__(self, kubeconfig: str) -> None:
        self._client = config.new_client_from_config(config_file=kubeconfig)

    def request(self, method: str, path: str, body: object = None, content_type: str = "application/json") -> Any:
        """Response body: parsed when it is JSON, text otherwise. Raises client.ApiException."""
        headers = {"Content-Type": content_type, "Accept": "application/json, text/plain"}
        method, url, headers, body, _ = self._client.param_serialize(
            method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            response = self._client.call_api(method, url, header_params=headers, body=body)
        except ProtocolError:  # the server ends connections that were idle for 90 s, some just when they are used again
            if method == "POST":
                raise
            response = self._client.call_api(method, url, header_params=headers, body=body)
        text = response.read().decode()
        if not 200 <= response.status < 300:
            raise client.ApiException(status=response.status, reason=response.reason, body=text)
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text


PATHS = {
    "jobs": "/apis/batch/v1",
    "inferencemodels": "/apis/tandem.dev/v1alpha1",
    "statefulsets": "/apis/apps/v1",
    "deployments": "/apis/apps/v1",
    "poddisruptionbudgets": "/apis/policy/v1",
    "networkpolicies": "/apis/networking.k8s.io/v1",
    "horizontalpodautoscalers": "/apis/autoscaling/v2",
    "roles": "/apis/rbac.authorization.k8s.io/v1",
    "rolebindings": "/apis/rbac.authorization.k8s.io/v1",
}
CHILD_KINDS = (
    "statefulsets", "deployments", "services", "configmaps", "secrets", "serviceaccounts", "poddisruptionbudgets",
    "networkpolicies", "roles", "rolebindings",
)  # fmt: skip


@dataclass(frozen=True)
class Fleet:
    """One namespace of the cluster under test."""

    cluster: Any
    kubernetes: Kubernetes
    namespace: str

    def path(self, kind: str, name: str = "") -> str:
        return f"{PATHS.get(kind, '/api/v1')}/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    def get(self, kind: str, name: str) -> Object:
        return self.kubernetes.request("GET", self.path(kind, name))

    def find(self, kind: str, selector: str = "") -> list[Object]:
        suffix = f"?labelSelector={selector}" if selector else ""
        return self.kubernetes.request("GET", self.path(kind) + suffix)["items"]

    def apply(self, manifest: Object) -> Object:
        """Server-side apply, as `kubectl apply --server-side` with strict validation does it."""
        kind = {
            "InferenceModel": "inferencemodels",
            "Secret": "secrets",
            "PersistentVolumeClaim": "persistentvolumeclaims",
        }[manifest["kind"]]
        name = manifest["metadata"]["name"]
        return self.kubernetes.request(
            "PATCH",
            self.path(kind, name) + "?fieldManager=e2e&force=true&fieldValidation=Strict",
            body=manifest,
            content_type="application/apply-patch+yaml",
        )

    def patch(self, name: str, spec: Mapping[str, Any]) -> Object:
        """Merge-patch an InferenceModel's spec."""
        return self.kubernetes.request(
            "PATCH", self.path("inferencemodels", name), {"spec": spec}, "application/merge-patch+json"
        )

    def annotate(self, name: str, annotations: Mapping[str, str | None]) -> Object:
        """Merge-patch an InferenceModel's annotations; None removes one."""
        body = {"metadata": {"annotations": annotations}}
        return self.kubernetes.request(
            "PATCH", self.path("inferencemodels", name), body, "application/merge-patch+json"
        )

    def delete(self, kind: str, name: str) -> None:
        self.kubernetes.request("DELETE", self.path(kind, name))

    def exists(self, kind: str, name: str) -> bool:
        try:
            self.get(kind, name)
        except client.ApiException as error:
            if error.status == 404:
                return False
            raise
        return True

    def children(self, model: str) -> dict[str, Object]:
        """`kind/name` → object, of everything the operator made for a model."""
        return {
            f"{kind}/{child['metadata']['name']}": child
            for kind in CHILD_KINDS
            for child in self.find(kind, f"tandem.dev/model={model}")
        }

    def pods(self, model: str, role: str = "") -> list[Object]:
        return self.find("pods", f"tandem.dev/model={model}" + (f",tandem.dev/role={role}" if role else ""))

    def condition(self, model: str, kind: str) -> Object | None:
        conditions = self.get("inferencemodels", model).get("status", {}).get("conditions", [])
        return next((condition for condition in conditions if condition["type"] == kind), None)

    def wait_ready(self, model: str, within: float = 300) -> Object:
        """The object, once Ready is true for its present generation and nothing is at work any more: a rollout and a
        role that grows do not take Ready away."""

        def probe() -> Object | None:
            live = self.get("inferencemodels", model)
            status = live.get("status", {})
            conditions = {c["type"]: c for c in status.get("conditions", [])}
            assert status.get("observedGeneration") == live["metadata"]["generation"], status
            assert conditions.get("Ready", {}).get("status") == "True", conditions
            assert not {"Reconciling", "Stalled"} & conditions.keys(), conditions
            return live

        return until(f"{self.namespace}/{model} ready", probe, within=within)

    def wait_role(self, model: str, role: str, count: int, within: float = 300) -> None:
        """Exactly `count` pods of the role exist and all are ready."""

        def probe() -> bool:
            pods = self.pods(model, role)
            states = {p["metadata"]["name"]: is_ready(p) for p in pods}
            assert len(states) == count, states
            assert all(states.values()), states
            return True

        until(f"{count} ready {role} pods of {model}", probe, within=within)

    def may(self, account: str, verb: str, resource: str, *, group: str = "", name: str = "") -> bool:
        """Whether a service account, `NAMESPACE:NAME`, may do something in this namespace."""
        asked = {"namespace": self.namespace, "verb": verb, "group": group, "resource": resource, "name": name}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": f"system:serviceaccount:{account}", "resourceAttributes": asked},
        }
        answer = self.kubernetes.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return answer["status"]["allowed"]

    def run_python(self, pod: str, container: str, code: str, *arguments: str) -> str:
        """What a piece of Python prints inside a container."""
        command = ["python3", "-c", code, *arguments]
        return self.cluster.kubectl("-n", self.namespace, "exec", pod, "-c", container, "--", *command)

    def send_signal(self, pod: str, name: str) -> None:
        """To every process of a worker, in a pod whose containers share their processes."""
        try:
            self.run_python(pod, "worker", _SIGNAL, name)
        except CommandFailed as error:
            if name != "SIGKILL" or error.code != 128 + signal.SIGKILL:  # the container's end takes the sender along
                raise

    def telemetry(self, pod: str) -> Object:
        """The worker's own figures, read through the API server so that it works on any cluster."""
        return self.kubernetes.request("GET", self.path("pods", f"{pod}:{WORKER_METRICS_PORT}") + "/proxy/telemetry")

    def blocks_in_use(self, model: str) -> dict[str, int]:
        workers = [
            p
            for p in self.pods(model)
            if p["metadata"]["labels"]["tandem.dev/role"] != "gateway" and is_ready(p) and leads(p)
        ]
        return {p["metadata"]["name"]: self.telemetry(p["metadata"]["name"])["kvBlocksUsed"] for p in workers}

    def wait_blocks_free(self, model: str, within: float = 60) -> None:
        def probe() -> bool:
            used = self.blocks_in_use(model)
            assert not any(used.values()), used
            return True

        until(f"no KV block in use on any worker of {model}", probe, within=within, every=0.1)

    @contextmanager
    def url(self, model: str) -> Iterator[str]:
        with self.cluster.service_url(self.namespace, model, 80) as url:
            yield url.rstrip("/")

    @contextmanager
    def openai(self, model: str, **options: Any) -> Iterator[openai.OpenAI]:
        with (
            self.url(model) as url,
            openai.OpenAI(
                base_url=f"{url}/v1", api_key="unused", **{"max_retries": 0, "timeout": 300.0} | options
            ) as api,
        ):
            yield api


def is_ready(pod: Object) -> bool:
    if pod["metadata"].get("deletionTimestamp"):
        return False
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod.get("status", {}).get("conditions", []))


def leads(pod: Object) -> bool:
    """Whether it is the first pod of its replica: the one that keeps the replica's figures."""
    nodes = int(pod["metadata"]["labels"].get("tandem.dev/nodes-per-replica", 1))
    return int(pod["metadata"]["name"].rpartition("-")[2]) % nodes == 0


def smollm2(name: str, *, prefill: int | None = 1, decode: int = 1, **overrides: Any) -> Object:
    """A manifest of the demo model in float32, small enough for many workers on two cores."""
    resources = {"requests": {"cpu": "50m", "memory": "1Gi"}}
    spec: Object = {
        "model": {"uri": "hf://HuggingFaceTB/SmolLM2-135M-Instruct", "servedName": name},
        "decode": {"replicas": decode, "resources": resources},
        "engine": {"device": "CPU", "dtype": "Float32"},
        "kv": {"memory": "512Mi"},
    }
    if prefill is not None:
        spec["prefill"] = {"replicas": prefill, "resources": resources}
    return {
        "apiVersion": "tandem.dev/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"name": name},
        "spec": spec | overrides,
    }
