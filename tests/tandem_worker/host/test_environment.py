from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tandem_worker.host.environment import (
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


def test_pod_facts() -> None:
    pod = observe_pod({"POD_NAME": "m-decode-0", "HF_TOKEN": " secret\n", "POD_IP": "10.0.0.7"})
    assert (pod.pod, pod.namespace, pod.pod_ip, pod.token) == ("m-decode-0", "default", "10.0.0.7", "secret")
    assert observe_pod({"HF_TOKEN": " "}).token is None
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
