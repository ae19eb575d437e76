"""Reaches a Service through `kubectl port-forward`, where its ClusterIP is out of this machine's reach."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .commands import run
from .errors import ClusterError

ROUTED_SECONDS = 1.0
"""Within which a routed address takes a connection."""


@contextmanager
def forward(kubectl: Path, kubeconfig: Path, namespace: str, service: str, port: int) -> Iterator[str]:
    """A URL on the loopback address for the time of the block. A forward holds one pod: it does not balance."""
    command = [kubectl, "--kubeconfig", kubeconfig, "-n", namespace, "port-forward", f"service/{service}", f":{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.match(r"Forwarding from 127\.0\.0\.1:(\d+)", line)
            if not found:
                raise ClusterError(f"kubectl port-forward to {namespace}/{service}: {line.strip() or 'ended at once'}")
            yield f"http://127.0.0.1:{found[1]}"
        finally:
            process.terminate()


@contextmanager
def reach(kubectl: Path, kubeconfig: Path, namespace: str, service: str, port: int) -> Iterator[str]:
    """A URL of a Service: its own address where packets to it find their way, else a forward."""
    address = run(
        kubectl, "--kubeconfig", kubeconfig, "-n", namespace, "get", "service", service,
        "-o", "jsonpath={.spec.clusterIP}",
    ).strip()  # fmt: skip
    try:
        with suppress(ConnectionRefusedError):  # a Service without a ready pod says so
            socket.create_connection((address, port), timeout=ROUTED_SECONDS).close()
    except OSError:
        with forward(kubectl, kubeconfig, namespace, service, port) as url:
            yield url
    else:
        yield f"http://{address}:{port}"
