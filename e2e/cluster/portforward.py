"""Reaches a Service through `kubectl port-forward`, where its ClusterIP is out of this machine's reach."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import ClusterError


@contextmanager
def forward(kubectl: Path, kubeconfig: Path, namespace: str, service: str, port: int) -> Iterator[str]:
    """A URL on the loopback address for the time of the block. A forward holds one pod: it does not balance."""
    process = subprocess.Popen(
        [kubectl, "--kubeconfig", kubeconfig, "-n", namespace, "port-forward", f"service/{service}", f":{port}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"Forwarding from 127\.0\.0\.1:(\d+)", line)
        if not found:
            raise ClusterError(f"kubectl port-forward to {namespace}/{service}: {line.strip() or 'ended at once'}")
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        process.terminate()
        process.wait()
