"""GitOps tools beside the cluster: Flux's kustomize-controller as a process, and how kstatus and Argo CD read objects.

The controller takes its manifests from what a source-controller would have fetched. That one is not here: the sources'
objects are written by hand, and name an archive that this process serves on the loopback interface.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from e2e.cluster.commands import run
from e2e.cluster.gobuild import Builder
from e2e.cluster.settings import read_settings

Object = dict[str, Any]
HEALTH_CHECK = Path(__file__).parents[1] / "examples" / "argocd" / "health.lua"
SOURCE_GROUP, KUSTOMIZE_GROUP = "source.toolkit.fluxcd.io", "kustomize.toolkit.fluxcd.io"
SOURCE_KINDS = {"GitRepository": "gitrepositories", "OCIRepository": "ocirepositories", "Bucket": "buckets"}
_STOP_SECONDS = 20


def _build(program: str) -> Path:
    settings = read_settings()
    return Builder(settings.go_modules, settings.cache).build(program)


def read_health(objects: Sequence[Object]) -> list[dict[str, str]]:
    """What kstatus and our health check in Argo CD's Lua say of each object."""
    text = run(_build("health"), HEALTH_CHECK, stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    return json.loads(text)


class Flux:
    """kustomize-controller for one namespace, with one source and one Kustomization, both named `fleet`.

    What it applied is pruned when the block ends.
    """

    def __init__(self, fleet: Any, log: Path, *, interval: str = "5s") -> None:
        self.fleet = fleet
        self._log = log
        self._interval = interval
        self._archives = _Archives()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Flux:
        program = _build("kustomize-controller")
        # Their own type, and as much of the sources' as the controller reads.
        settings = read_settings()
        folder = Path(
            run("go", "list", "-m", "-f", "{{.Dir}}", "github.com/fluxcd/kustomize-controller",
                cwd=settings.go_modules / "gitops").strip()
        )  # fmt: skip
        own = (folder / "config/crd/bases/kustomize.toolkit.fluxcd.io_kustomizations.yaml").read_text()
        types = [yaml.safe_load(own), *map(_source_type, SOURCE_KINDS)]
        self.fleet.cluster.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(types))
        for kind in types:
            self.fleet.cluster.kubectl("wait", "--for=condition=Established", f"crd/{kind['metadata']['name']}")
        self._archives.start()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program, "--watch-all-namespaces=false",
                    "--metrics-addr=0", "--health-addr=0", "--interval-jitter-percentage=0",
                    "--requeue-dependency=2s",
                ],
                env=os.environ
                | {"RUNTIME_NAMESPACE": self.fleet.namespace, "KUBECONFIG": str(self.fleet.cluster.kubeconfig)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        try:
            self._kubectl("delete", f"kustomizations.{KUSTOMIZE_GROUP}", "fleet", "--ignore-not-found", "--timeout=90s")
        finally:
            self._process.terminate()
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._archives.stop()

    def publish(self, *manifests: Object) -> str:
        """Make these manifests the content of the source. Returns its revision."""
        revision, artifact = self._archives.add(manifests)
        source = {
            "apiVersion": f"{SOURCE_GROUP}/v1",
            "kind": "GitRepository",
            "metadata": {"name": "fleet", "namespace": self.fleet.namespace},
            "spec": {"url": "https://git.invalid/fleet", "interval": "1h"},
        }
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "Succeeded", "message": "", "lastTransitionTime": now}
        status = {"artifact": artifact | {"lastUpdateTime": now}, "conditions": [ready], "observedGeneration": 1}
        sync = {
            "apiVersion": f"{KUSTOMIZE_GROUP}/v1",
            "kind": "Kustomization",
            "metadata": {"name": "fleet", "namespace": self.fleet.namespace},
            "spec": {
                "interval": self._interval,
                "retryInterval": self._interval,
                "timeout": "4m",
                "sourceRef": {"kind": "GitRepository", "name": "fleet"},
                "path": "./",
                "prune": True,
                "wait": True,
                "targetNamespace": self.fleet.namespace,
            },
        }
        self._apply(source)
        self._apply({key: source[key] for key in ("apiVersion", "kind", "metadata")} | {"status": status}, "status")
        self._apply(sync)
        return revision

    def conditions(self) -> dict[str, Object]:
        """Of the Kustomization, by type."""
        return {condition["type"]: condition for condition in self._status().get("conditions", [])}

    def is_done(self, revision: str) -> bool:
        """Whether all of this revision is applied and, as Flux reads it, ready."""
        status = self._status()
        ready = next((c for c in status.get("conditions", []) if c["type"] == "Ready"), {})
        return status.get("lastAppliedRevision") == revision and ready.get("status") == "True"

    def _status(self) -> Object:
        text = self._kubectl("get", f"kustomizations.{KUSTOMIZE_GROUP}", "fleet", "-o", "json")
        return json.loads(text).get("status", {})

    def _kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.fleet.cluster.kubectl("-n", self.fleet.namespace, *arguments, stdin=stdin)

    def _apply(self, manifest: Object, subresource: str = "") -> None:
        more = [f"--subresource={subresource}"] if subresource else []
        self._kubectl("apply", "--server-side", "--field-manager=e2e", *more, "-f", "-", stdin=yaml.safe_dump(manifest))


def _source_type(kind: str) -> Object:
    plural = SOURCE_KINDS[kind]
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": anything, "status": anything}}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{SOURCE_GROUP}"},
        "spec": {
            "group": SOURCE_GROUP,
            "scope": "Namespaced",
            "names": {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()},
            "versions": [version],
        },
    }


class _Archives:
    """Serves archives of manifests."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        files = self._files

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = files.get(self.path)
                self.send_response(404 if data is None else 200)
                self.send_header("Content-Length", str(len(data or b"")))
                self.end_headers()
                self.wfile.write(data or b"")

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, name="archives", daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, manifests: Sequence[Mapping[str, Any]]) -> tuple[str, Object]:
        """The revision, and what a source's status says of it."""
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w") as archive:
            for number, manifest in enumerate(manifests):
                text = yaml.safe_dump(dict(manifest)).encode()
                entry = tarfile.TarInfo(f"{number}.yaml")
                entry.size, entry.mode = len(text), 0o644
                archive.addfile(entry, io.BytesIO(text))
        data = gzip.compress(raw.getvalue(), mtime=0)
        digest = hashlib.sha256(data).hexdigest()
        path, revision = f"/{digest}.tar.gz", f"main@sha1:{digest[:40]}"
        self._files[path] = data
        url = f"http://127.0.0.1:{self._server.server_address[1]}{path}"
        return revision, {
            "path": path, "url": url, "revision": revision, "digest": f"sha256:{digest}", "size": len(data),
        }  # fmt: skip
