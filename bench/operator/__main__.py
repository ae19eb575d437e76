"""A thousand pods in two hundred InferenceModels: how long they take, what the operator asks for and what it holds up.

    make bench-operator

The same workloads made without an operator are the floor: what API server, controllers, scheduler and kwok take alone.
The last line is one JSON object; its `asked` has each figure that is asked for, and whether it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from prometheus_client.parser import text_string_to_metric_families
from tandem_api import names
from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.errors import APIError
from tandem_operator.objects.manifests import INFERENCE_MODEL

from bench.operator.control_plane import NODES, ControlPlane, node
from bench.operator.verdict import judge
from tests.ports import free_port

NAMESPACES = 10
DECODE = 3
PODS_PER_MODEL = DECODE + 2
"""And one prefill pod, and one gateway."""
PARALLEL = 32
LIMIT_SECONDS = 600.0
SETTLE_SECONDS = 10.0
CRD = Path(__file__).parents[2] / "crds" / "tandem.dev_inferencemodels.yaml"
NAMESPACE = "bench-operator"

Manifest = dict[str, Any]


def namespace_of(number: int) -> str:
    return f"bench-{number % NAMESPACES}"


def model(number: int) -> Manifest:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": f"m{number}", "namespace": namespace_of(number)},
        "spec": {
            "model": {"uri": "file:///models/none"},
            "prefill": {"replicas": 1},
            "decode": {"replicas": DECODE},
        },
    }


def bare_workloads(number: int) -> list[tuple[str, Manifest]]:
    """What a model comes to, without anything that makes it one: paths and objects."""
    namespace = namespace_of(number)
    template = {"containers": [{"name": "c", "image": "none"}]}
    found: list[tuple[str, Manifest]] = []
    for role, kind, replicas in (("a", "Deployment", 1), ("b", "StatefulSet", 1), ("c", "StatefulSet", DECODE)):
        name = f"bare-{number}-{role}"
        labels = {"bare": name}
        spec = {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": template},
        }
        if kind == "StatefulSet":
            spec |= {"serviceName": name, "podManagementPolicy": "Parallel"}
        body = {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        found.append((f"/apis/apps/v1/namespaces/{namespace}/{kind.lower()}s", body))
    return found


async def connect(kubeconfig: Path) -> KubeClient:
    configuration = Configuration()
    loader: Any = config
    await loader.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)
    configuration.connection_pool_maxsize = 2 * PARALLEL
    return KubeClient(ApiClient(configuration))


async def at_once(work: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """All of it, so many at a time."""
    room = asyncio.Semaphore(PARALLEL)

    async def one(task: Coroutine[Any, Any, Any]) -> None:
        async with room:
            await task

    await asyncio.gather(*(one(task) for task in work))


async def wait(condition: Callable[[], Awaitable[bool]], what: str) -> float:
    """Seconds until it holds, looked at once a second."""
    began = time.monotonic()
    while not await condition():
        if time.monotonic() - began > LIMIT_SECONDS:
            raise SystemExit(f"{what}: not within {LIMIT_SECONDS:.0f} s")
        await asyncio.sleep(1.0)
    return time.monotonic() - began


async def list_all(client: KubeClient, path: str) -> list[Manifest]:
    """From the API server's cache and in one piece: what looks on should cost it little."""
    return (await client.get(path, resourceVersion="0"))["items"]


def spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: round(after[name] - before[name], 1) for name in after}


async def count_pods(client: KubeClient) -> tuple[int, int]:
    """All, and ready ones."""
    pods = await list_all(client, "/api/v1/pods")
    return len(pods), sum(
        any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ())) for pod in pods
    )


async def prepare(client: KubeClient) -> None:
    crd = yaml.safe_load(CRD.read_text())
    path = f"/apis/{crd['apiVersion']}/customresourcedefinitions/{crd['metadata']['name']}"
    await client.apply(path, crd, force=True)
    for number in range(NODES):
        await client.create("/api/v1/nodes", node(number))
    for name in (NAMESPACE, *(namespace_of(number) for number in range(NAMESPACES))):
        await client.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    async def served() -> bool:
        try:
            await client.get(f"/apis/{names.API_VERSION}/{names.PLURAL}")
        except APIError:
            return False
        return True

    await wait(served, "the InferenceModel type")


async def measure_floor(client: KubeClient, plane: ControlPlane, models: int) -> dict[str, Any]:
    """The workloads alone."""
    pods, cpu = models * PODS_PER_MODEL, plane.cpu_seconds()
    began = time.monotonic()
    await at_once(client.create(path, body) for number in range(models) for path, body in bare_workloads(number))
    created = time.monotonic() - began

    async def all_ready() -> bool:
        return (await count_pods(client))[1] >= pods

    await wait(all_ready, "the bare workloads' pods")
    ready, cpu = time.monotonic() - began, spent(cpu, plane.cpu_seconds())
    await at_once(
        client.delete(f"{path}/{body['metadata']['name']}")
        for number in range(models)
        for path, body in bare_workloads(number)
    )

    async def all_gone() -> bool:
        return (await count_pods(client))[0] == 0

    await wait(all_gone, "the end of the bare workloads")
    return {"created_seconds": created, "ready_seconds": ready, "cpu_seconds": cpu}


class OperatorProcess:
    """One run of the operator."""

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self.report = plane.state / f"{name}.json"
        self.metrics_port = free_port()
        log = (plane.state / "logs" / f"{name}.log").open("wb")
        arguments = [
            "--worker-image=worker", "--gateway-image=gateway", "--gateway-cluster-role=tandem-gateway",
            f"--lease-namespace={NAMESPACE}",
            f"--metrics-port={self.metrics_port}", f"--health-port={free_port()}",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.operator.watched", str(self.report), *arguments],
            env=os.environ | {"KUBECONFIG": str(plane.kubeconfig)},
            stdout=log,
            stderr=log,
        )

    def read_report(self) -> dict[str, Any]:
        return json.loads(self.report.read_text())

    def counts(self, metric: str, label: str) -> dict[str, float]:
        """Of a counter, by the values of one label."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"{metric}_total":
                    key = sample.labels[label]
                    found[key] = found.get(key, 0.0) + sample.value
        return found

    async def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self.process.wait, 30)

    async def settle(self) -> None:
        """Until it writes nothing for a while."""
        before = -1.0
        while (now := sum(self.counts("tandem_operator_writes", "verb").values())) != before:
            before = now
            await asyncio.sleep(SETTLE_SECONDS)


async def measure_operator(client: KubeClient, plane: ControlPlane, models: int, events: int) -> dict[str, Any]:
    operator = OperatorProcess(plane, "first")
    await asyncio.sleep(3.0)
    path = f"/apis/{names.API_VERSION}/{names.PLURAL}"
    began, cpu = time.monotonic(), plane.cpu_seconds()
    await at_once(client.create(INFERENCE_MODEL.path(namespace_of(number)), model(number)) for number in range(models))
    created = time.monotonic() - began

    async def all_ready() -> bool:
        found = await list_all(client, path)
        return len(found) == models and all(
            any(c["type"] == "Ready" and c["status"] == "True" for c in item.get("status", {}).get("conditions", ()))
            for item in found
        )

    await wait(all_ready, "Ready on every model")
    figures: dict[str, Any] = {"created_seconds": created, "ready_seconds": time.monotonic() - began}
    figures["cpu_seconds"] = spent(cpu, plane.cpu_seconds())
    print(f"operator: {models} models Ready in {figures['ready_seconds']:.1f} s")
    await operator.settle()
    writes = operator.counts("tandem_operator_writes", "verb")
    requests = operator.counts("tandem_operator_requests", "method")
    figures |= {"writes_per_model": {verb: round(count / models, 2) for verb, count in writes.items()}}
    figures |= {"requests_per_model": {method: round(count / models, 2) for method, count in requests.items()}}
    figures |= {f"first_{key}": value for key, value in operator.read_report().items()}
    figures |= await measure_events(client, operator, events)
    figures["events_holds_ms"] = operator.read_report()["holds_ms"]
    await operator.stop()

    again = OperatorProcess(plane, "second")
    await asyncio.sleep(3 * SETTLE_SECONDS)
    figures["restart_writes"] = again.counts("tandem_operator_writes", "verb")
    figures["restart_requests"] = again.counts("tandem_operator_requests", "method")
    figures |= {f"restart_{key}": value for key, value in again.read_report().items()}
    await again.stop()
    return figures


async def measure_events(client: KubeClient, operator: OperatorProcess, events: int) -> dict[str, float]:
    """Memory before, between and after changes of pods that mean nothing."""
    pods = await list_all(client, "/api/v1/pods")
    paths = [f"/api/v1/namespaces/{p['metadata']['namespace']}/pods/{p['metadata']['name']}" for p in pods]

    async def change(first: int, last: int) -> float:
        await at_once(
            client.merge(paths[n % len(paths)], {"metadata": {"annotations": {"n": str(n)}}})
            for n in range(first, last)
        )
        await asyncio.sleep(SETTLE_SECONDS)
        return float(operator.read_report()["rss_mib"])

    before = float(operator.read_report()["rss_mib"])
    cpu = float(operator.read_report()["cpu_seconds"])
    middle = await change(0, events // 2)
    after = await change(events // 2, events)
    spent = float(operator.read_report()["cpu_seconds"]) - cpu
    return {"events": events, "rss_mib_before": before, "rss_mib_half": middle, "rss_mib_after": after} | {
        "cpu_ms_per_event": spent / max(1, events) * 1e3
    }


async def run(models: int, events: int) -> dict[str, Any]:
    plane = ControlPlane()
    async with AsyncExitStack() as stack:
        stack.callback(plane.down)
        plane.up()
        client = await connect(plane.kubeconfig)
        stack.push_async_callback(client.close)
        await prepare(client)
        floor = await measure_floor(client, plane, models)
        print(f"floor: {models * PODS_PER_MODEL} pods ready in {floor['ready_seconds']:.1f} s")
        figures = await measure_operator(client, plane, models, events)
        asked = judge(floor, figures)
        return {"models": models, "pods": models * PODS_PER_MODEL, "asked": asked, "floor": floor, "operator": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--record", type=Path, help="folder for the results")
    options = parser.parse_args()
    figures = asyncio.run(run(options.models, options.events))
    text = json.dumps({"bench": "operator", "machine": platform.machine(), **figures})
    if options.record:
        name = f"operator-{platform.machine()}-{os.cpu_count()}cores-{time.strftime('%Y-%m-%d')}.json"
        (options.record / name).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
