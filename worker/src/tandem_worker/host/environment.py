"""What the process learns from its surroundings, and what it sets before torch is loaded.

The environment is read here and in `__main__` only; everything else is handed what it needs.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import math
import os
import resource
import socket
import struct
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from tandem_api import names

logger = logging.getLogger(__name__)

_MAX_DESCRIPTORS = 1 << 20
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """Per-pod facts: the downward API's, the Secret's, the kubelet's."""

    pod: str
    namespace: str
    pod_ip: str
    token: str | None
    """Opens the model's repository."""
    log_level: str
    termination_path: Path
    draft_token: str | None = None
    """Opens that of the draft head; None: `token` does, if anything."""
    cuda_graphs: bool = True
    """Record decode steps on a GPU. Without, each kernel is launched by itself, so that an error names it."""


def observe_pod(environment: Mapping[str, str]) -> PodFacts:
    """What the pod's environment says, with defaults for a process outside Kubernetes."""
    return PodFacts(
        pod=environment.get("POD_NAME") or socket.gethostname(),
        namespace=environment.get("POD_NAMESPACE", "default"),
        pod_ip=environment.get("POD_IP", "127.0.0.1"),
        token=environment.get("HF_TOKEN", "").strip() or None,
        draft_token=environment.get("HF_TOKEN_DRAFT", "").strip() or None,
        log_level=environment.get("TANDEM_LOG_LEVEL", "INFO"),
        cuda_graphs=environment.get("TANDEM_CUDA_GRAPHS", "1") != "0",
        termination_path=Path(environment.get("TERMINATION_MESSAGE_PATH") or names.TERMINATION_MESSAGE_PATH),
    )


def wants_native_kernels() -> bool:
    """Unless a person rules them out, to compare with torch's operations or to find an error."""
    return os.environ.get("TANDEM_NATIVE_KERNELS", "1") != "0"


def plan_threads(affinity: int, cpu_max: str) -> int:
    """Threads for torch: the CPUs this process may run on, or as many as its quota pays for.

    `cpu_max` is the text of cgroup v2's `cpu.max`: quota and period in microseconds, or `max`.
    """
    quota, _, period = cpu_max.strip().partition(" ")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return max(1, min(affinity, math.ceil(int(quota) / int(period))))
    return max(1, affinity)


def observe_threads(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """`plan_threads` of this process's affinity and control group."""
    try:
        cpu_max = (cgroup / "cpu.max").read_text()
    except OSError:
        cpu_max = "max"
    return plan_threads(len(os.sched_getaffinity(0)), cpu_max)


def dies_with_container(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether what is written to `path` is gone with this pod or container, or is no disk at all: an emptyDir, the
    container's own layer, memory. False where the system does not tell."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return False
    found, longest = False, -1
    for line in lines:
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        if path.is_relative_to(point) and len(point) >= longest:  # a later mount of one place lies on top
            found = right.split()[0] in {"overlay", "tmpfs"} or "/kubernetes.io~empty-dir/" in root
            longest = len(point)
    return found


def raise_descriptor_limit() -> int:
    """Let this process, and those it starts, open as many files as the system allows. Returns how many.

    Each connection is one: the usual soft limit of 1024 is less than a busy worker needs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        logger.info("the limit on open files was raised from %d to %d", soft, wanted)
        return wanted
    logger.info("the limit on open files is %d", soft)
    return soft


def find_interface(address: str) -> str | None:
    """The network interface that has this IP address; None where none has it, or where it is a name."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    return _find_ipv6(wanted) if wanted.version == 6 else _find_ipv4(wanted)


def _find_ipv4(wanted: ipaddress.IPv4Address) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if answer[20:24] == wanted.packed:
                return name
    return "lo" if wanted.is_loopback else None


def _find_ipv6(wanted: ipaddress.IPv6Address) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:  # no IPv6 here
        return None
    return next((line.split()[-1] for line in lines if line.split()[0] == wanted.packed.hex()), None)


def prepare_environment(
    environment: MutableMapping[str, str], *, num_threads: int, cache_dir: str, interface: str | None = None
) -> None:
    """Settings that libraries read when they are imported. What a person has set stays.

    `interface` is the one over which the ranks of a group connect on CPUs.
    """
    defaults = {
        "OMP_NUM_THREADS": str(num_threads),
        # A thread that waits for its next parallel region must not keep its core for long, for pods share cores; but
        # waking a sleeping core costs 30 to 100 us on a virtual machine, and a decode step has some 200 regions. 3000
        # turns outlast the gaps within a step, and little more. Measured with SmolLM2 on two cores and torch's
        # operations, tokens/s of one worker alone and of two at once: 41 and 30; with 2000 turns 34 and 33, with 1000
        # turns 32 and 41. The CPU kernels have threads of their own (`model/backends/native/pool.h`).
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "3000",
        "KMP_BLOCKTIME": "0",
        # Torch and oneDNN each keep a compiled product for every number of rows it has had with every shape of
        # weights, 0.6 MiB together, and 1024 of them unless told otherwise: prompts of all lengths grew a worker by
        # 600 MiB. 64 are those of some 15 numbers of rows. Compiling one takes a millisecond: with SmolLM2's shapes in
        # float32 and 1 to 64 rows at random, a step's CPU time with 64, 256 and 1024 of them cannot be told apart.
        "LRU_CACHE_CAPACITY": "64",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        "TOKENIZERS_PARALLELISM": "false",
        # The root file system is read-only; the cache folder is the one place to write to.
        "HF_HOME": str(Path(cache_dir, ".huggingface")),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        # The container's own: what others wrote is put there verified (`model/prepared/kernels.py`).
        "TRITON_CACHE_DIR": str(Path(tempfile.gettempdir(), f"tandem-kernels-{os.getuid()}")),
    }
    if interface is not None:
        defaults["GLOO_SOCKET_IFNAME"] = interface
    for name, value in defaults.items():
        environment.setdefault(name, value)
