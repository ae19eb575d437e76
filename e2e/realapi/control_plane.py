"""Starts etcd, kube-apiserver and kube-controller-manager, of the programs that `make cluster` builds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from kubernetes import client

from e2e.cluster.gobuild import Builder
from e2e.cluster.settings import ROOT, read_settings
from e2e.suite.fleet import Kubernetes, until
from tests.ports import free_port

_CONTROLLERS = (
    "statefulset", "deployment", "replicaset", "garbage-collector-controller", "serviceaccount-controller",
    "namespace-controller", "disruption-controller", "resourcequota-controller", "job-controller",
)  # fmt: skip
_POLICIES = (
    "--feature-gates=MutatingAdmissionPolicy=true",
    "--runtime-config=admissionregistration.k8s.io/v1beta1=true",
)
_TOKEN = "admin-of-a-cluster-without-nodes"
_OPERATOR = "tandem-system"


@dataclass
class ControlPlane:
    """What runs, and where."""

    folder: Path
    kubeconfig: Path
    kubernetes: Kubernetes
    operators: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    def start_operator(self, *arguments: str) -> subprocess.Popen[bytes]:
        """An operator of this checkout that serves every namespace."""
        ports = [f"--health-port={free_port()}", f"--metrics-port={free_port()}"]
        images = () if any(a.startswith("--worker-image") for a in arguments) else ("--worker-image=worker:1",)
        fixed = (
            "--gateway-image=gateway:1",
            "--gateway-cluster-role=gateway",
            "--hub-resolve=false",
            "--network-policies=none",
            "--lease-name=tandem",
        )
        command = [sys.executable, "-m", "tandem_operator", *ports, *images, *fixed, *arguments]
        environment = {"KUBECONFIG": str(self.kubeconfig), "POD_NAMESPACE": _OPERATOR, "POD_NAME": "operator"}
        log = (self.folder / f"operator-{len(self.operators)}.log").open("wb")
        with log:
            process = subprocess.Popen(command, env=_environment() | environment, stdout=log, stderr=log)
        self.operators.append(process)
        return process

    def stop_operators(self, *, but: subprocess.Popen[bytes] | None = None) -> None:
        """Each gives its lease back."""
        for process in self.operators:
            if process is not but:
                _end(process)
        self.operators = [process for process in self.operators if process is but]


@contextmanager
def start(folder: Path) -> Iterator[ControlPlane]:
    """A control plane with the CRD, in an empty folder; it ends with the context."""
    settings = read_settings()
    builder = Builder(settings.go_modules, settings.cache)
    etcd, server = free_port(), free_port()
    kubeconfig = _write_access(folder, server)
    with ExitStack() as stack:
        run = lambda name, arguments: stack.enter_context(_running(builder, name, arguments, folder))  # noqa: E731
        run("etcd", _etcd(folder, etcd))
        run("kube-apiserver", _api_server(folder, etcd, server))
        kubernetes = Kubernetes(str(kubeconfig))
        until("the API server to be ready", lambda: _is_ready(kubernetes), within=180)
        run("kube-controller-manager", _controllers(folder, kubeconfig))
        made = ControlPlane(folder=folder, kubeconfig=kubeconfig, kubernetes=kubernetes)
        stack.callback(made.stop_operators)
        crd = yaml.safe_load((ROOT / "crds" / "tandem.dev_inferencemodels.yaml").read_text())
        kubernetes.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
        kubernetes.request("POST", "/api/v1/namespaces", {"metadata": {"name": _OPERATOR}})
        until("the CRD to be served", lambda: _serves_models(kubernetes), within=120)
        yield made


def _is_ready(kubernetes: Kubernetes) -> bool:
    try:
        return kubernetes.request("GET", "/readyz") == "ok"
    except client.ApiException:
        return False
    except Exception as error:  # no listener yet
        raise AssertionError(str(error)) from error


def _serves_models(kubernetes: Kubernetes) -> bool:
    return "items" in kubernetes.request("GET", "/apis/tandem.dev/v1alpha1/inferencemodels")


def _write_access(folder: Path, port: int) -> Path:
    keys = folder / "pki"
    keys.mkdir()
    openssl = shutil.which("openssl") or "openssl"
    for arguments in (
        ("genrsa", "-out", "sa.key", "2048"),
        ("rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub"),
        ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "tls.key", "-out", "tls.crt", "-days", "2",
         "-subj", "/CN=no-nodes", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
    ):  # fmt: skip
        subprocess.run([openssl, *arguments], cwd=keys, check=True, capture_output=True)
    (keys / "tokens").write_text(f'{_TOKEN},admin,1,"system:masters"\n')
    access = {
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "c", "cluster": {"server": f"https://127.0.0.1:{port}",
                                               "certificate-authority": str(keys / "tls.crt")}}],
        "users": [{"name": "u", "user": {"token": _TOKEN}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    }  # fmt: skip
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(access))
    return path


def _etcd(folder: Path, port: int) -> list[str]:
    own, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    return [
        f"--data-dir={folder / 'etcd'}", f"--listen-client-urls={own}", f"--advertise-client-urls={own}",
        f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
    ]  # fmt: skip


def _api_server(folder: Path, etcd: int, port: int) -> list[str]:
    keys = folder / "pki"
    return [
        f"--etcd-servers=http://127.0.0.1:{etcd}", "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
        f"--secure-port={port}", f"--tls-cert-file={keys / 'tls.crt'}", f"--tls-private-key-file={keys / 'tls.key'}",
        "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={keys / 'sa.pub'}",
        f"--service-account-signing-key-file={keys / 'sa.key'}", f"--token-auth-file={keys / 'tokens'}",
        "--authorization-mode=RBAC", "--service-cluster-ip-range=10.99.0.0/16", "--endpoint-reconciler-type=none",
        "--enable-priority-and-fairness=false", *_POLICIES,
    ]  # fmt: skip


def _controllers(folder: Path, kubeconfig: Path) -> list[str]:
    keys = folder / "pki"
    return [
        f"--kubeconfig={kubeconfig}", "--bind-address=127.0.0.1", f"--secure-port={free_port()}",
        "--leader-elect=false", "--use-service-account-credentials=false", f"--root-ca-file={keys / 'tls.crt'}",
        f"--service-account-private-key-file={keys / 'sa.key'}", f"--controllers={','.join(_CONTROLLERS)}",
    ]  # fmt: skip


@contextmanager
def _running(builder: Builder, name: str, arguments: Sequence[str], folder: Path) -> Iterator[None]:
    with (folder / f"{name}.log").open("wb") as log:
        command = [str(builder.build(name)), *arguments]
        process = subprocess.Popen(command, env=_environment() | {"GOMAXPROCS": "1"}, stdout=log, stderr=log)
    try:
        yield
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes], *, within: float = 30.0) -> None:
    process.terminate()
    deadline = time.monotonic() + within
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if process.poll() is None:
        process.kill()
    process.wait()


def _environment() -> dict[str, str]:
    """Without proxies: everything is on this machine."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
