"""Builds the Go programs that the cluster consists of, once per content.

Each program is pinned by a `go.mod` and `go.sum` under `go/`. A result lies in `<cache>/bin/<program>-<key>/`, where
the key covers everything that decides what comes out: module files, own sources, flags and the Go version.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from .commands import run
from .errors import ClusterError
from .progress import step

KUBERNETES = "1.35.4"
MINIMUM_GO = (1, 21)
"""From this version on Go fetches the newer toolchain that a go.mod asks for."""

ENVIRONMENT = {"CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false"}
"""Static programs: they run in images without a C library, and no C compiler is needed."""

KEPT_RESULTS = 3
"""Results of each program that stay."""

VERSION = "k8s.io/component-base/version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    name: str
    module: str
    """Folder under `go/`."""
    package: str
    ldflags: str = "-s -w"
    tags: str = field(default="", repr=False)
    """Build tags, with commas between them."""


def _kubernetes(name: str) -> Program:
    major, minor, _ = KUBERNETES.split(".")
    stamps = {"gitVersion": f"v{KUBERNETES}", "gitMajor": major, "gitMinor": minor}
    flags = " ".join(f"-X {VERSION}.{key}={value}" for key, value in stamps.items())
    return Program(name=name, module="kubernetes", package=f"k8s.io/kubernetes/cmd/{name}", ldflags=f"-s -w {flags}")


PROGRAMS = {
    program.name: program
    for program in (
        *map(
            _kubernetes,
            ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"),
        ),
        # In one module with Kubernetes: what they have in common is compiled once.
        Program(name="etcd", module="kubernetes", package="go.etcd.io/etcd/server/v3"),
        Program(name="coredns", module="kubernetes", package="./coredns"),
        Program(name="helm", module="kubernetes", package="helm.sh/helm/v3/cmd/helm"),
        Program(name="pull", module="kubernetes", package="./pull"),
        Program(name="registry", module="registry", package="."),
        Program(name="pause", module="pause", package="."),
        Program(name="kind", module="kind", package="sigs.k8s.io/kind"),
        Program(name="kwok", module="kwok", package="sigs.k8s.io/kwok/cmd/kwok"),
        Program(name="kustomize-controller", module="gitops", package="github.com/fluxcd/kustomize-controller"),
        Program(name="health", module="gitops", package="./health"),
        Program(
            name="prometheus-adapter", module="prometheus-adapter", package="sigs.k8s.io/prometheus-adapter/cmd/adapter"
        ),
        Program(
            name="prometheus",
            module="prometheus",
            package="github.com/prometheus/prometheus/cmd/prometheus",
            tags="remove_all_sd,enable_kubernetes_sd",  # of the ways to find targets, those of clouds are left out
        ),
        Program(
            name="promtool",
            module="prometheus",
            package="github.com/prometheus/prometheus/cmd/promtool",
            tags="remove_all_sd",
        ),
        Program(name="kubeconform", module="lint", package="github.com/yannh/kubeconform/cmd/kubeconform"),
        Program(name="kube-score", module="lint", package="github.com/zegl/kube-score/cmd/kube-score"),
    )
}


def content_key(program: Program, module: Path, go_version: str) -> str:
    """16 hex digits over everything the result depends on."""
    digest = hashlib.sha256(repr((program, go_version, sorted(ENVIRONMENT.items()))).encode() + program.tags.encode())
    own = module.joinpath(program.package).glob("*.go") if program.package.startswith(".") else ()
    for path in sorted([module / "go.mod", module / "go.sum", *own]):
        if path.exists():
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def parse_go_version(text: str) -> tuple[int, int]:
    """(1, 26) from `go version go1.26.8 linux/amd64`. Raises ValueError for anything else."""
    found = re.search(r"\bgo(\d+)\.(\d+)", text)
    if not found:
        raise ValueError(f"not a Go version: {text!r}")
    return int(found[1]), int(found[2])


def check_go() -> str:
    """What `go version` prints. Raises ClusterError when Go is missing or too old to fetch a newer one itself."""
    if not shutil.which("go"):
        raise ClusterError(
            "Go is not installed; Kubernetes is built with it. Install Go 1.26 or newer (`go` on the PATH)."
        )
    version = run("go", "env", "GOVERSION", "GOOS", "GOARCH").strip().replace("\n", " ")
    if parse_go_version(version) < MINIMUM_GO:
        raise ClusterError(f"Go is too old ({version}); install Go 1.26 or newer.")
    return version


class Builder:
    """Turns program names into paths of built programs."""

    def __init__(self, modules: Path, cache: Path) -> None:
        self.modules = modules
        self.results = cache / "bin"
        self._version = ""

    def path(self, name: str) -> Path:
        """Where the program lies once built."""
        program = PROGRAMS[name]
        self._version = self._version or check_go()
        return self.results / f"{name}-{content_key(program, self.modules / program.module, self._version)}" / name

    def build(self, name: str) -> Path:
        """The program's path; builds it if this content never was."""
        target = self.path(name)
        if target.exists():
            os.utime(target.parent)  # what was used last stays
            return target
        program = PROGRAMS[name]
        with step(f"built {name}"):
            unfinished = target.with_name(f".{name}.unfinished")
            run(
                "go", "build", "-p", "2", "-trimpath", "-mod=readonly", "-tags", program.tags,
                "-ldflags", program.ldflags, "-o", unfinished, program.package,
                cwd=self.modules / program.module, env=ENVIRONMENT, log=self.results / f"{name}.log",
            )  # fmt: skip
            unfinished.rename(target)
        self._remove_oldest(name)
        return target

    def _remove_oldest(self, name: str) -> None:
        """Keep a few: other checkouts may share the folder, and their clusters may run from it."""
        folders = sorted(self.results.glob(f"{name}-" + "?" * 16), key=lambda folder: folder.stat().st_mtime)
        for folder in folders[:-KEPT_RESULTS]:
            shutil.rmtree(folder)


def find_tool(name: str, builder: Builder) -> Path:
    """The tool on the PATH if there is one, else built. Helm 4 has other flags, so only Helm 3 counts."""
    found = shutil.which(name)
    if found and (name != "helm" or run(found, "version", "--short").startswith("v3.")):
        return Path(found)
    return builder.build(name)
