"""What the small parts weigh: no torch in their images, and little memory."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.install import NAMESPACE
from e2e.suite.fleet import Fleet, Kubernetes, Say, until

RSS = """
from pathlib import Path
here = {str(Path('/proc/self').resolve()), '/proc/self', '/proc/thread-self'}
found = (p / 'status' for p in Path('/proc').iterdir() if p.name.isdigit() and str(p) not in here)
print(sum(int(l.split()[1]) for p in found for l in p.read_text().splitlines() if l.startswith('VmRSS')))
"""
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
    megabytes = until("memory figure", lambda: int(run(RSS)) / 1000, within=10)
    say(f"{part}: {megabytes:.0f} MB resident (limit {limit_mb}), no torch in the image")
    assert megabytes < limit_mb
