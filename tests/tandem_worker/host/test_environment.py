from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tandem_worker.host.environment import (
    dies_with_container,
    find_interface,
    observe_pod,
    observe_threads,
    plan_threads,
    prepare_environment,
)


@pytest.mark.parametrize(
    ("affinity", "cpu_max", "threads"),
    [(8, "max 100000", 8), (8, "200000 100000", 2), (8, "150000 100000", 2), (8, "50000 100000", 1),
     (2, "800000 100000", 2), (4, "", 4), (4, "garbage", 4), (0, "max", 1)],
)  # fmt: skip
def test_threads_follow_the_quota(affinity: int, cpu_max: str, threads: int) -> None:
    assert plan_threads(affinity, cpu_max) == threads


def test_threads_are_read_from_the_cgroup(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert observe_threads(tmp_path) == 1
    assert observe_threads(tmp_path / "absent") >= 1


def test_what_a_person_has_set_stays() -> None:
    environment = {"OMP_NUM_THREADS": "3"}
    prepare_environment(environment, num_threads=8, cache_dir="/cache")
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "passive"
    assert environment["HF_HOME"] == "/cache/.huggingface"


PRODUCTS = """
import os, sys
if sys.argv[1] == "prepared":
    from tandem_worker.host.environment import prepare_environment
    prepare_environment(os.environ, num_threads=1, cache_dir="/cache")
import torch
from tandem_worker.model.layers.linear import can_pack
weight = torch.randn(64, 64)
packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64) if can_pack(weight) else None
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous:"))
before = anonymous()
for rows in range(1, 301 if packed is not None else 1):
    torch.ops.mkldnn._linear_pointwise(torch.randn(rows, 64), packed, None, "none", [], "")
print((anonymous() - before) >> 10)
"""


def test_compiled_products_take_bounded_memory() -> None:
    """One for every number of rows: 600 MiB with the caches that torch and oneDNN have by themselves."""

    def grown_mib(how: str) -> int:
        environment = {name: value for name, value in os.environ.items() if "CAPACITY" not in name} | {
            "OMP_NUM_THREADS": "1"
        }
        run = [sys.executable, "-c", PRODUCTS, how]
        return int(subprocess.run(run, capture_output=True, text=True, check=True, env=environment).stdout)

    usual, ours = grown_mib("usual"), grown_mib("prepared")
    print(f"{usual} MiB by themselves, {ours} MiB as a worker has them")
    assert ours < 60
    assert usual < 60 or ours < usual / 2


def test_pod_facts() -> None:
    pod = observe_pod({"POD_NAME": "m-decode-0", "HF_TOKEN": " secret\n", "POD_IP": "10.0.0.7"})
    assert (pod.pod, pod.namespace, pod.pod_ip, pod.token) == ("m-decode-0", "default", "10.0.0.7", "secret")
    assert observe_pod({"HF_TOKEN": " "}).token is None
    assert observe_pod({"HF_TOKEN": "one", "HF_TOKEN_DRAFT": " two\n"}).draft_token == "two"
    assert observe_pod({"HF_TOKEN": "one"}).draft_token is None
    assert observe_pod({}).termination_path == Path("/dev/termination-log")


def test_the_descriptor_limit_is_raised_to_the_hard_one() -> None:
    program = (
        "import resource, tandem_worker.host.environment as e; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256));"
        "print(e.raise_descriptor_limit(), resource.getrlimit(resource.RLIMIT_NOFILE), e.raise_descriptor_limit())"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "256 (256, 256) 256\n"


@pytest.mark.parametrize(
    ("address", "interface"), [("127.0.0.1", "lo"), ("127.0.0.7", "lo"), ("192.0.2.1", None), ("0.0.0.0", None),
                               ("localhost", None), ("::", None), ("2001:db8::1", None)],
)  # fmt: skip
def test_interfaces_are_found_by_their_address(address: str, interface: str | None) -> None:
    assert find_interface(address) == interface


_MOUNTS = """\
22 1 0:20 / / rw,relatime shared:1 - overlay overlay rw,lowerdir=/a
30 22 254:0 / /data rw,relatime - ext4 /dev/vda rw
31 22 254:0 /var/lib/kubelet/pods/7e/volumes/kubernetes.io~empty-dir/models /models rw - ext4 /dev/vda rw
32 31 0:50 / /models/claim rw,relatime - nfs4 server:/export rw
33 22 0:51 / /dev/shm rw - tmpfs shm rw
34 22 0:52 / /twice rw - tmpfs tmpfs rw
35 22 254:0 / /twice rw - ext4 /dev/vda rw
"""


@pytest.mark.parametrize(
    ("path", "dies"),
    [
        ("/", True),
        ("/home/cache", True),
        ("/data", False),
        ("/data/cache", False),
        ("/database", True),
        ("/models", True),
        ("/models/.prepared", True),
        ("/models/claim/x", False),
        ("/dev/shm/x", True),
        ("/twice/x", False),
    ],
)
def test_what_is_written_may_be_gone_with_the_container(path: str, dies: bool, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(_MOUNTS)
    assert dies_with_container(Path(path), mounts) is dies
    assert not dies_with_container(Path(path), tmp_path / "absent")
