"""What parts weigh, and what starts take: no torch in the small images, memory only where it is used."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from e2e.install import NAMESPACE
from e2e.suite.fleet import Fleet, Kubernetes, Object, Say, smollm2, until

RSS = """
from pathlib import Path
here = {str(Path('/proc/self').resolve()), '/proc/self', '/proc/thread-self'}
found = (p / 'status' for p in Path('/proc').iterdir() if p.name.isdigit() and str(p) not in here)
print(sum(int(l.split()[1]) for p in found for l in p.read_text().splitlines() if l.startswith('VmRSS')))
"""
LARGEST = """
from pathlib import Path
found = (p / 'status' for p in Path('/proc').iterdir() if p.name.isdigit())
print(max(int(l.split()[1]) for p in found for l in p.read_text().splitlines() if l.startswith('VmRSS')))
"""
WORKER_LIMIT_GB = 1.5
"""Of one idle worker. What is measured is 1.3; the libraries' own part differs with the CPU they run on."""
NO_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"


def pod_of(kubernetes: Kubernetes, namespace: str, part: str) -> str:
    pods = kubernetes.request("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]
    return next(p["metadata"]["name"] for p in pods if p["spec"]["containers"][0]["name"] == part)


@pytest.mark.parametrize(("part", "limit_mb"), [("operator", 120), ("gateway", 80)])
def test_memory_and_contents(
    main: Fleet, tandem: Any, kubernetes: Kubernetes, say: Say, part: str, limit_mb: int
) -> None:
    namespace = NAMESPACE if part == "operator" else main.namespace

    def run(code: str) -> str:
        pod = pod_of(kubernetes, namespace, part)
        return tandem.kubectl("-n", namespace, "exec", pod, "-c", part, "--", "python3", "-c", code)

    run(NO_TORCH)
    megabytes = until("memory figure", lambda: int(run(RSS)) / 1000, within=60)
    say(f"{part}: {megabytes:.0f} MB resident (limit {limit_mb}), no torch in the image")
    assert megabytes < limit_mb


def seconds_to_ready(pod: Object) -> float:
    """From the pod's creation to its Ready condition, both as the API server keeps them: whole seconds."""
    created = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    conditions = {each["type"]: each for each in pod["status"]["conditions"]}
    return (datetime.fromisoformat(conditions["Ready"]["lastTransitionTime"]) - created).total_seconds()


@pytest.mark.alone
def test_two_workers_that_start_at_once(fleet: Fleet, say: Say) -> None:
    """With 4 GiB of KV space each, as is the default: what an idle worker holds is its libraries and its weights."""
    manifest = smollm2("starting")
    del manifest["spec"]["kv"], manifest["spec"]["engine"]["dtype"]
    fleet.apply(manifest)
    fleet.wait_ready("starting")
    pods = [*fleet.pods("starting", "prefill"), *fleet.pods("starting", "decode")]
    assert len(pods) == 2
    for pod in pods:
        name = pod["metadata"]["name"]
        gigabytes = int(fleet.run_python(name, "worker", LARGEST)) * 1024 / 1e9
        say(f"{name}: created to ready {seconds_to_ready(pod):.0f} s, two at once; {gigabytes:.2f} GB resident")
        assert gigabytes < WORKER_LIMIT_GB
