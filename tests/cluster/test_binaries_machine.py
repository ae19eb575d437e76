"""What is read off the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.cluster.binaries.machine import CAP_SYS_RESOURCE, ask_consent, parse_capability, parse_control_groups
from e2e.cluster.binaries.teardown import is_shim, parse_mounts_below
from e2e.cluster.errors import ClusterError


def test_version_1_has_a_root_for_each_controller() -> None:
    mounts = (
        "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n"
        "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"
        "cgroup /sys/fs/cgroup/systemd cgroup rw,name=systemd 0 0\n"
        "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
    )
    groups = parse_control_groups(mounts)
    assert groups.version == 1
    assert groups.roots == (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/systemd"))


def test_version_2_has_one_root() -> None:
    groups = parse_control_groups("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
    assert groups.version == 2
    assert groups.roots == (Path("/sys/fs/cgroup"),)


def test_a_machine_without_control_groups_is_refused() -> None:
    with pytest.raises(ClusterError, match="control groups"):
        parse_control_groups("proc /proc proc rw 0 0\n")


@pytest.mark.parametrize(("mask", "has"), [("000001fffeffffff", False), ("000001ffffffffff", True)])
def test_capabilities_are_read_from_the_effective_set(mask: str, has: bool) -> None:
    status = f"Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t{mask}\n"
    assert parse_capability(status, CAP_SYS_RESOURCE) is has


def test_mounts_below_a_folder_come_deepest_first() -> None:
    mounts = "a /s/x t rw 0 0\nb /s/x/y t rw 0 0\nc /sx t rw 0 0\nd /s/with\\040space t rw 0 0\n"
    assert parse_mounts_below(mounts, Path("/s")) == ["/s/with space", "/s/x/y", "/s/x"]


def test_only_the_own_containerds_shims_count() -> None:
    socket = Path("/state/containerd.sock")
    arguments = ["/usr/bin/containerd-shim-runc-v2", "-namespace", "k8s.io", "-address", "/state/containerd.sock"]
    assert is_shim(arguments, socket)
    assert not is_shim([*arguments[:-1], "/run/containerd/containerd.sock"], socket)
    assert not is_shim(["grep", "/state/containerd.sock"], socket)
    assert not is_shim([], socket)


@pytest.mark.parametrize(
    ("consent", "answer", "asked", "goes_on"),
    [(None, "y", True, True), (None, "Yes ", True, True), (None, "", True, False), (None, "n", True, False),
     (True, "n", False, True), (False, "y", False, False), (None, None, False, True)],
)  # fmt: skip
def test_packages_are_installed_after_a_question(
    consent: bool | None, answer: str | None, asked: bool, goes_on: bool
) -> None:
    """No answer: there is no terminal."""
    questions: list[str] = []

    def reply(question: str) -> str:
        questions.append(question)
        assert answer is not None
        return answer

    said = None
    try:
        ask_consent(["buildah", "socat"], consent, None if answer is None else reply)
    except ClusterError as error:
        said = str(error)
    assert bool(questions) is asked
    assert all("buildah socat" in each for each in questions)
    assert goes_on == (said is None)
    assert said is None or "apt-get install --no-install-recommends buildah socat" in said
