"""What goes from a registry that has grown: never what a living cluster needs."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from e2e.cluster.binaries.processes import Processes
from e2e.cluster.binaries.registry import Leases, Tag, bound, mark_used, observe_tags, plan_removal

TAGS = st.lists(
    st.builds(
        Tag, repository=st.sampled_from("ab"), name=st.sampled_from("123456"), used=st.floats(0, 9, allow_nan=False)
    ),
    unique_by=lambda tag: (tag.repository, tag.name),
)


@given(TAGS, st.sets(st.tuples(st.sampled_from("ab"), st.sampled_from("123456"))))
def test_what_is_needed_or_was_last_used_stays(tags: list[Tag], needed: set[tuple[str, str]]) -> None:
    removed = plan_removal(tags, needed)
    left = [tag for tag in tags if tag not in removed]
    assert not {(tag.repository, tag.name) for tag in removed} & needed
    for repository in {tag.repository for tag in tags}:
        of_it = [tag for tag in tags if tag.repository == repository]
        assert max(of_it, key=lambda tag: tag.used).used in {tag.used for tag in left if tag.repository == repository}
    assert len([tag for tag in left if (tag.repository, tag.name) not in needed]) <= len({t.repository for t in tags})


def make_tag(storage: Path, repository: str, name: str, used: float) -> Path:
    folder = storage / "docker/registry/v2/repositories" / repository / "_manifests/tags" / name
    (folder / "current").mkdir(parents=True)
    link = folder / "current" / "link"
    link.write_text("sha256:0")
    os.utime(link, (used, used))
    return folder


def collector(folder: Path) -> Path:
    """A program in the registry's place that notes how it was called."""
    program = folder / "collector"
    program.write_text(f"#!/bin/sh\necho \"$@\" >> '{folder / 'called'}'\n")
    program.chmod(0o755)
    return program


def record_cluster(state: Path, *, alive: bool) -> None:
    """A cluster of one process: this one, or one that is no more."""
    processes = Processes(state / "processes.json", state / "logs")
    processes.start("sleeper", [sys.executable, "-c", "import time; time.sleep(60)"], sys.executable)
    if not alive:
        processes_file = (state / "processes.json").read_text()
        processes.stop()
        (state / "processes.json").write_text(processes_file)


def test_images_of_living_clusters_stay_and_those_of_dead_ones_go(tmp_path: Path) -> None:
    storage, leases = tmp_path / "registry", Leases(tmp_path)
    for name, used in (("old", 1.0), ("dead", 2.0), ("alive", 3.0), ("new", 4.0)):
        make_tag(storage, "tandem-worker", name, used)
    (storage / "blob").write_bytes(b"x" * 100)
    for cluster in ("dead", "alive"):
        record_cluster(tmp_path / cluster, alive=cluster == "alive")
        leases.write(cluster, tmp_path / cluster, [f"tandem-worker:{cluster}"])
    try:
        assert bound(storage, leases, collector(tmp_path), limit=10**6) is None, "it has not grown"
        assert len(observe_tags(storage)) == 4
        told = bound(storage, leases, collector(tmp_path), limit=50)
    finally:
        Processes(tmp_path / "alive" / "processes.json", tmp_path / "alive" / "logs").stop()
    assert {tag.name for tag in observe_tags(storage)} == {"alive", "new"}
    assert told is not None
    assert "that clusters need or used last" in told, "what cannot be removed is told"
    assert (tmp_path / "called").read_text().startswith("garbage-collect --delete-untagged ")
    assert json.loads((tmp_path / "registry-bound.json").read_text())["storage"]["filesystem"]
    assert not (tmp_path / "clusters" / "dead").exists()


def test_nothing_is_removed_while_somebody_pushes(tmp_path: Path) -> None:
    storage, leases = tmp_path / "registry", Leases(tmp_path)
    for name in ("old", "new"):
        make_tag(storage, "tandem-worker", name, 1.0)
    (storage / "blob").write_bytes(b"x" * 100)
    pushing, over = threading.Event(), threading.Event()

    def push() -> None:
        with leases.pushing():
            pushing.set()
            over.wait(30)

    other = threading.Thread(target=push)
    other.start()
    pushing.wait(30)
    try:
        with leases.pushing():  # several push at the same time
            pass
        assert bound(storage, leases, collector(tmp_path), limit=50) is None
        assert len(observe_tags(storage)) == 2
    finally:
        over.set()
        other.join()
    assert bound(storage, leases, collector(tmp_path), limit=50) is not None
    assert len(observe_tags(storage)) == 1


def test_what_is_asked_for_again_is_used(tmp_path: Path) -> None:
    for name, used in (("old", 1.0), ("newer", 2.0)):
        make_tag(tmp_path, "tandem-worker", name, used)
    began = time.time()
    mark_used(tmp_path, "tandem-worker", "old")
    used = {tag.name: tag.used for tag in observe_tags(tmp_path)}
    assert used["old"] >= began - 1 > used["newer"]


def test_a_cluster_that_has_ended_needs_nothing(tmp_path: Path) -> None:
    leases = Leases(tmp_path)
    record_cluster(tmp_path / "one", alive=True)
    leases.write("one", tmp_path / "one", ["tandem-worker:1", "pause:1"])
    try:
        assert leases.needed() == {("tandem-worker", "1"), ("pause", "1")}
        assert leases.read("one") == {"tandem-worker:1", "pause:1"}
        leases.end("one")
        leases.end("one")
        assert leases.needed() == set()
    finally:
        Processes(tmp_path / "one" / "processes.json", tmp_path / "one" / "logs").stop()
