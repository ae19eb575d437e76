"""What this machine is: the packages it has, what its kernel allows, where its control groups are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..commands import run, succeeds
from ..errors import ClusterError
from ..progress import say, step

CAP_SYS_RESOURCE = 24
CNI_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni")
SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")

PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "ipset": "ipset",
    "ethtool": "ethtool",
    "socat": "socat",
    "nsenter": "util-linux",
    "sysctl": "procps",
    "openssl": "openssl",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
}
"""Debian's package for each program that is used."""
CNI_PACKAGE = "containernetworking-plugins"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlGroups:
    version: int
    roots: tuple[Path, ...]
    """Mount points: one for each controller in version 1, a single one in version 2."""


def parse_control_groups(mounts: str) -> ControlGroups:
    """From the text of /proc/mounts. A hybrid machine (version 1 with a bare version 2 tree) counts as version 1."""
    lines = [line.split() for line in mounts.splitlines()]
    first = tuple(Path(line[1]) for line in lines if line[2] == "cgroup")
    second = tuple(Path(line[1]) for line in lines if line[2] == "cgroup2")
    if first:
        return ControlGroups(version=1, roots=first)
    if second:
        return ControlGroups(version=2, roots=second[:1])
    raise ClusterError("no control groups are mounted under /sys/fs/cgroup; the kubelet needs them")


def parse_capability(status: str, bit: int) -> bool:
    """Whether the effective set in the text of /proc/self/status contains the capability."""
    line = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(line.split()[1], 16) >> bit & 1)


def can_lower_oom_score() -> bool:
    return parse_capability(Path("/proc/self/status").read_text(), CAP_SYS_RESOURCE)


def add_sbin_to_path() -> None:
    """A user's PATH often lacks the folders where Debian keeps administrators' programs."""
    present = os.environ.get("PATH", "").split(":")
    os.environ["PATH"] = ":".join([*present, *(folder for folder in SBIN if folder not in present)])


def find_cni_plugins() -> Path | None:
    return next((Path(folder) for folder in CNI_FOLDERS if (Path(folder) / "bridge").exists()), None)


def missing_packages() -> list[str]:
    missing = {package for program, package in PACKAGES.items() if not shutil.which(program)}
    if find_cni_plugins() is None:
        missing.add(CNI_PACKAGE)
    return sorted(missing)


def check_machine() -> None:
    """Raise ClusterError where this can never work."""
    if not sys.platform.startswith("linux"):
        raise ClusterError("a cluster of plain binaries needs Linux; start a Docker engine, and kind is used instead")
    if os.geteuid() != 0:
        raise ClusterError(
            "a cluster of plain binaries needs root (network namespaces, containerd); run this as root, start a Docker "
            "engine for kind, or set TANDEM_CLUSTER=existing and KUBECONFIG"
        )
    parse_control_groups(Path("/proc/mounts").read_text())
    if missing_packages() and not shutil.which("apt-get"):
        raise ClusterError(f"install these programs (Debian's package names): {' '.join(missing_packages())}")


def ask_consent(missing: Sequence[str], consent: bool | None, ask: Callable[[str], str] | None) -> None:
    """Raise ClusterError where nobody wants these packages. `ask` is None where nobody sits at a terminal."""
    names = " ".join(missing)
    if consent is None and ask is not None:
        question = f"  this needs Debian packages that are not installed: {names}\n  install them with apt-get? [y/N] "
        consent = ask(question).strip().lower() in {"y", "yes"}
    if consent is False:
        raise ClusterError(
            f"nothing was installed. Type `apt-get install --no-install-recommends {names}` yourself, start a Docker "
            "engine (kind is used then), or set KUBECONFIG and TANDEM_REGISTRY to use a cluster that you have"
        )


def install_packages(consent: bool | None) -> None:
    """Install what is missing with apt-get, after a question where somebody can answer. Services that packages would
    start stay off. Raises ClusterError where the answer is no."""
    missing = missing_packages()
    if not missing:
        return
    ask_consent(missing, consent, input if sys.stdin.isatty() else None)
    say(f"installing Debian packages: {' '.join(missing)}")
    with step("installed packages"), tempfile.TemporaryDirectory() as folder:
        env = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        log = Path(folder) / "apt.log"
        run("apt-get", "update", "-q", env=env, log=log)
        run("apt-get", "install", "-q", "-y", "--no-install-recommends", *missing, env=env, log=log)
    if still := missing_packages():
        raise ClusterError(f"apt-get installed its packages, but these programs are still missing: {' '.join(still)}")


def find_snapshotter(folder: Path) -> str:
    """`overlayfs` where `folder`'s file system carries overlays, else `native`, which copies."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as base:
        for name in ("lower", "upper", "work", "merged"):
            (Path(base) / name).mkdir()
        options = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
        if not succeeds("mount", "-t", "overlay", "overlay", "-o", options, f"{base}/merged"):
            return "native"
        run("umount", f"{base}/merged")
        return "overlayfs"


def create_control_group(groups: ControlGroups, name: str) -> None:
    """The group that holds all pods of one cluster. The kubelet wants it to exist."""
    for root in groups.roots:
        (root / name).mkdir(exist_ok=True)
    if groups.version == 2:
        for folder in (groups.roots[0], groups.roots[0] / name):
            available = (folder / "cgroup.controllers").read_text().split()
            wanted = [c for c in available if c in {"cpu", "cpuset", "memory", "pids", "io", "hugetlb"}]
            (folder / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in wanted))
        return
    _inherit_cpuset(groups, name)


def _inherit_cpuset(groups: ControlGroups, name: str) -> None:
    """In version 1 a new cpuset is empty, and no process can join it."""
    for root in groups.roots:
        for file in ("cpuset.cpus", "cpuset.mems"):
            target = root / name / file
            if target.exists() and not target.read_text().strip():
                target.write_text((root / file).read_text())


def processes_in_group(groups: ControlGroups, name: str) -> set[int]:
    """Ids of all processes in the group and below: the containers of one cluster."""
    found: set[int] = set()
    for root in groups.roots:
        for folder, _, _ in os.walk(root / name):  # passes over folders that go away meanwhile, as rglob does not
            try:
                found.update(int(line) for line in Path(folder, "cgroup.procs").read_text().split())
            except OSError:  # this one went away between the two
                continue
    return found


def remove_control_group(groups: ControlGroups, name: str) -> None:
    """Only empty groups can be removed; deepest first."""
    for root in groups.roots:
        top = root / name
        if not top.exists():
            continue
        for folder, _, _ in reversed(list(os.walk(top))):
            subprocess.run(["rmdir", folder], check=False, capture_output=True)
