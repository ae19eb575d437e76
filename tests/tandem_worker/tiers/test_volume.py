"""A folder that has what nobody should have left there, and a system that does things by halves."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tandem_worker.tiers import disk, files
from tandem_worker.tiers.files import Volume
from tandem_worker.tiers.format import plan_geometry
from tandem_worker.tiers.policy import DAY_SECONDS, WriteBudget
from tandem_worker.tiers.store import SegmentStore

from tests.tandem_worker.engine.history_model import greedy_answer
from tests.tandem_worker.tiers.rig import KEY, SLOT_BYTES, DiskRig, wait_until
from tests.tandem_worker.tiers.test_faults import PROMPTS, fill


def open_store(folder: Path) -> SegmentStore:
    store = SegmentStore(Volume(folder), KEY, plan_geometry((64, 64), 4 * SLOT_BYTES), max_segments=4)
    store.load()
    return store


def append(store: SegmentStore, name: bytes) -> None:
    places = store.plan(1)
    store.append(places, [name.ljust(16)], np.zeros((1, store.geometry.slot_bytes), np.uint8))


def make_file(path: Path) -> None:
    path.write_bytes(bytes(1 << 20))


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "x").write_text("x")


@pytest.mark.parametrize("make", [make_file, make_folder])
@pytest.mark.parametrize(
    "name", ["f" * 40, "-1", "+" + "0" * 15, "0x" + "0" * 14, "0000000000_0001", "99", "0" * 15 + "9"]
)
def test_a_name_that_lies_is_removed(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    store = open_store(tmp_path)
    append(store, b"a")
    store.close()
    make(store.folder / f"{name}.kv")
    again = open_store(tmp_path)
    assert not (store.folder / f"{name}.kv").exists()
    assert len(again.find([b"a".ljust(16)])) == 1
    append(again, b"b")
    again.close()


def test_a_copy_under_another_name_of_the_same_number_is_no_segment(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append(store, b"a")
    store.close()
    (path,) = store.folder.glob("*.kv")
    (store.folder / "1.kv").write_bytes(path.read_bytes())
    again = open_store(tmp_path)
    assert list(store.folder.glob("*.kv")) == [path]
    assert len(again.find([b"a".ljust(16)])) == 1


@pytest.mark.parametrize(
    "state",
    [
        '{"seconds_per_block": 0.1, "written": [[1.0, 1e999]]}',
        '{"seconds_per_block": 1e999, "written": []}',
        '{"seconds_per_block": NaN, "written": []}',
        '{"seconds_per_block": -3, "written": []}',
        '{"seconds_per_block": 0.1, "written": [[NaN, 5]]}',
        '{"seconds_per_block": 0.1, "written": [[1.0, -5]]}',
        '{"seconds_per_block": 0.1, "written": 7}',
        "[" * 100_000,
        "7",
        "",
    ],
)
def test_numbers_of_an_earlier_process_that_cannot_be_are_left_alone(tmp_path: Path, state: str) -> None:
    fill(tmp_path)
    (path,) = tmp_path.rglob("state.json")
    path.write_text(state)
    rig = DiskRig(tmp_path, num_blocks=128)
    assert rig.tier._pool.seconds_per_block is None
    assert rig.run("b", PROMPTS[0]) == greedy_answer(PROMPTS[0], 8)
    assert rig.cached("b") == 60
    rig.close()
    assert json.loads(path.read_text())["seconds_per_block"] > 0


def test_a_filesystem_that_knows_no_locks_costs_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at every 15 s."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", flock)
    volume, before = Volume(tmp_path), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(OSError, match="No locks"):
            volume.lock()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("lock", lambda volume, root: volume.lock()),
        ("probe", lambda volume, root: volume.probe(files.PAGE)),
        ("state.new", lambda volume, root: volume.save(root / "state.json", "{}")),
        ("1.kv", lambda volume, root: volume.open(root / "1.kv")),
    ],
)
def test_a_link_of_somebody_else_is_not_followed(
    tmp_path: Path, name: str, use: Callable[[Volume, Path], None]
) -> None:
    root, elsewhere = tmp_path / "disk", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.write_text("dear")
    (root / name).symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic"):
        use(Volume(root), root)
    assert elsewhere.read_text() == "dear"


def test_links_in_the_place_of_files_and_of_folders_are_replaced(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "disk", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    store = open_store(root)
    for name in ("key.json", "1.kv"):
        (elsewhere / name).write_text("dear")
    (store.folder / "key.json").unlink()
    (store.folder / "key.json").symlink_to(elsewhere / "key.json")
    (store.folder / "0000000000000001.kv").symlink_to(elsewhere / "1.kv")
    (root / "other").symlink_to(elsewhere)
    store.load()
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == {"key.json": "dear", "1.kv": "dear"}
    assert [path.name for path in store.folder.iterdir()] == ["key.json"]
    assert not (store.folder / "key.json").is_symlink()
    assert not (root / "other").is_symlink()


def test_a_disk_that_nobody_uses_and_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes to the page cache would go well for as long as nobody asks for them."""
    assert disk._SAVE_SECONDS + 1 + 2 <= 15, "with the ways to gateways and operator it is told within 15 s"
    monkeypatch.setattr(disk, "_SAVE_SECONDS", 0.01)
    rig = DiskRig(tmp_path)

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files.os, "pwrite", pwrite)
    wait_until(lambda: rig.tier.stats().reason == "VolumeFailed")
    monkeypatch.undo()
    rig.close()


def test_a_system_that_takes_less_than_a_page_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a limit of the file's size or small blocks of the filesystem make it."""
    calls: list[int] = []

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        assert len(calls) < 9, "it tries the same again and again"
        return min(len(data), 6000 - offset)

    monkeypatch.setattr("tandem_worker.tiers.files.os.pwrite", pwrite)
    with pytest.raises(OSError, match="nothing more") as raised:
        files.write(-1, memoryview(bytes(3 * 4096)), 0)
    assert raised.value.errno == errno.ENOSPC


def test_a_segment_whose_end_fails_is_ended_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of its file may be another file's by then."""
    store = open_store(tmp_path)
    append(store, b"a")
    closed: list[int] = []

    def close(descriptor: int, real: Callable[[int], None] = os.close) -> None:
        real(descriptor)
        closed.append(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr("tandem_worker.tiers.store.os.close", close)
        with pytest.raises(OSError, match="Input/output"):
            store.close()
    assert len(closed) == 1
    store.load()
    assert len(store.find([b"a".ljust(16)])) == 1


def test_a_disk_that_freezes_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_worker.tiers.disk.FROZEN_SECONDS", 0.2)
    rig = DiskRig(tmp_path)
    rig.run("a", PROMPTS[0])
    wait_until(lambda: rig.engine._scheduler.blocks.num_held == 0)
    real, release = os.pwrite, threading.Event()

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        release.wait()
        return real(descriptor, data, offset)

    monkeypatch.setattr("tandem_worker.tiers.files.os.pwrite", pwrite)
    ended = threading.Event()
    threading.Thread(target=lambda: (rig.tier.flush(60.0), ended.set()), daemon=True).start()
    assert ended.wait(60), "it waits for a disk that is known to hang"
    assert rig.tier.stats().reason == "VolumeFrozen"
    release.set()
    rig.close()


def test_what_was_written_is_told_while_there_is_always_something_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_SAVE_SECONDS", 0.0)
    rig = DiskRig(tmp_path, write_through=True)
    monkeypatch.setattr(rig.tier._writer, "wait", lambda seconds: rig.tier._closed.wait(0.01) or True)
    rig.run("a", PROMPTS[0])
    wait_until(lambda: rig.written > 0)

    def told() -> bool:
        paths = list(tmp_path.rglob("state.json"))
        return bool(paths) and bool(json.loads(paths[0].read_text())["written"])

    wait_until(told)
    rig.close()


def test_a_disk_that_freezes_while_it_is_told_what_was_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def rename(source: Path, target: Path, real: Callable[..., None] = os.rename) -> None:
        release.wait()
        real(source, target)

    monkeypatch.setattr(disk, "_SAVE_SECONDS", 0.01)
    rig = DiskRig(tmp_path)
    monkeypatch.setattr(disk, "FROZEN_SECONDS", 0.2)
    monkeypatch.setattr("tandem_worker.tiers.files.os.rename", rename)
    wait_until(lambda: rig.tier.stats().reason == "VolumeFrozen")
    release.set()
    rig.close()


def test_a_clock_that_was_ahead_does_not_stop_writing_for_good() -> None:
    budget = WriteBudget(100, [(3_000_000_000.0, 100)])
    assert budget.admits(reused=False, now=1_800_000_000.0)
    budget.record(100, 1_800_000_000.0)
    assert not budget.admits(reused=True, now=1_800_000_000.0)
    assert not budget.admits(reused=True, now=1_800_000_000.0 - 5), "set back a little, it counts on"
    assert budget.admits(reused=True, now=1_800_000_000.0 + DAY_SECONDS)
