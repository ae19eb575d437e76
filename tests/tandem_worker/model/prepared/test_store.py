"""The store of prepared things, with damaged files, full disks and processes that are killed."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.model.prepared import entry as entry_module
from tandem_worker.model.prepared.entry import CHUNK, file_size
from tandem_worker.model.prepared.store import PreparedStore, open_store
from xxhash import xxh64

MIB = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> PreparedStore:
    return PreparedStore(tmp_path / "prepared")


@pytest.mark.parametrize("size", [0, 1, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_what_was_written_is_read(store: PreparedStore, size: int) -> None:
    payload = random.Random(size).randbytes(size)
    assert store.read("a") is None
    assert store.write("a", payload)
    assert store.read("a") == payload
    assert (store.folder / "a").stat().st_size == file_size(size)
    assert [file.name for file in store.folder.iterdir()] == ["a"]


@given(cuts=st.lists(st.integers(0, 3 * CHUNK), max_size=6))
@settings(max_examples=10, deadline=None)
def test_it_does_not_matter_how_a_stream_is_cut(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    store = PreparedStore(tmp_path_factory.mktemp("cuts"))
    payload = random.Random(1).randbytes(3 * CHUNK)
    edges = [0, *sorted(cuts), len(payload)]
    view = memoryview(payload)
    assert store.stream("a", len(payload), (view[a:b] for a, b in itertools.pairwise(edges)))
    assert store.read("a") == payload


@pytest.mark.parametrize("size", [3, 5])
def test_a_stream_of_another_length_than_announced_is_a_mistake(store: PreparedStore, size: int) -> None:
    with pytest.raises(ValueError, match="bytes came for"):
        store.stream("a", size, [memoryview(b"four")])
    assert not list(store.folder.iterdir())


@pytest.mark.parametrize("name", ["", "../a", ".hidden", "a/b", "a\0", "ä", "x" * 201, "a\n"])
def test_names_stay_in_the_folder(store: PreparedStore, name: str) -> None:
    with pytest.raises(ValueError, match="no name"):
        store.read(name)


def test_every_flipped_bit_and_every_truncation_is_seen(store: PreparedStore, caplog: pytest.LogCaptureFixture) -> None:
    payload = random.Random(2).randbytes(500)
    store.write("a", payload)
    whole = (store.folder / "a").read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        (store.folder / "a").write_bytes(damaged)
        caplog.clear()
        assert store.read("a") is None, position
        assert "is damaged and is prepared anew" in caplog.text
        assert not (store.folder / "a").exists()
    for length in [*range(0, len(whole), 7), len(whole) - 1]:
        (store.folder / "a").write_bytes(whole[:length])
        assert store.read("a") is None, length
    (store.folder / "a").write_bytes(whole + b"\0")
    assert store.read("a") is None
    assert store.write("a", payload)
    assert store.read("a") == payload


def test_an_entry_under_anothers_name_is_not_believed(store: PreparedStore) -> None:
    store.write("a", b"one")
    (store.folder / "a").rename(store.folder / "b")
    assert store.read("b") is None


@pytest.mark.parametrize("size", [2**63, 2**40, 100, 0])
def test_a_trailer_that_lies_allocates_nothing(store: PreparedStore, size: int) -> None:
    """Right in its own sum, wrong about the file."""
    sums = bytes(8 * min(entry_module.num_chunks(size), 4))
    tail = entry_module._TRAILER.pack(
        entry_module._MAGIC, 1, CHUNK, size, entry_module.num_chunks(size), b"")[:-8]  # fmt: skip
    whole = xxh64(b"a\0" + sums + tail).digest()
    store.folder.mkdir()
    (store.folder / "a").write_bytes(b"x" * 50 + sums + tail + whole)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert store.read("a") is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_a_file_that_is_all_hole_is_not_read_into_memory(store: PreparedStore) -> None:
    store.folder.mkdir()
    size = 1 << 40
    tail = entry_module.make_tail("a", size, b"")
    with (store.folder / "a").open("wb") as file:
        file.truncate(file_size(size) - len(tail))
        file.seek(0, os.SEEK_END)
        file.write(tail)
    assert store.read("a") is None
    assert not (store.folder / "a").exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/hostname", path)])
def test_what_is_no_file_is_not_read(store: PreparedStore, make: object) -> None:
    store.folder.mkdir()
    make(store.folder / "a")  # type: ignore[operator]
    assert store.read("a") is None


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    store = PreparedStore(tmp_path, max_bytes=3 * file_size(1000))
    for age, name in enumerate(["a", "b", "c"]):
        assert store.write(name, bytes(1000))
        os.utime(tmp_path / name, (age, age))
    assert store.read("a") is not None  # used just now
    assert store.write("d", bytes(1000))
    assert {file.name for file in tmp_path.iterdir()} == {"a", "c", "d"}
    assert store.write("c", bytes(999))  # replaced by itself, with room for both


def test_what_is_being_read_is_not_removed(tmp_path: Path) -> None:
    store = PreparedStore(tmp_path, max_bytes=file_size(1000))
    assert store.write("a", bytes(1000))
    reading = store.open("a")
    assert reading is not None
    assert not store.write("b", bytes(1000))
    assert reading.read() == bytes(1000)
    reading.close()
    assert store.write("b", bytes(1000))
    assert {file.name for file in tmp_path.iterdir()} == {"b"}


def test_what_can_never_fit_removes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = PreparedStore(tmp_path, max_bytes=2000)
    assert store.write("a", bytes(1000))
    assert not store.write("b", bytes(5000))
    assert not store.write("b", bytes(5000))
    assert caplog.text.count("b is not kept") == 1
    assert store.read("a") == bytes(1000)


def test_a_disk_with_little_room_is_left_alone(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    assert not PreparedStore(tmp_path, free_share=1000 / free).write("a", bytes(100_000))
    assert PreparedStore(tmp_path, free_share=1e7 / free).write("a", bytes(100_000))


_FULL = """
import resource, sys
from tandem_worker.model.prepared.store import PreparedStore
from pathlib import Path
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6 << 20, 6 << 20))
store = PreparedStore(Path(sys.argv[1]))
assert store.write("small", b"kept")
assert not store.write("large", bytes(9 << 20))
assert not store.write("large", bytes(9 << 20))
assert store.read("small") == b"kept"
"""


def test_a_disk_that_runs_full_only_costs_time(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FULL, tmp_path], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be kept") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["small"]


@pytest.mark.parametrize("call", ["fsync", "fdatasync", "rename", "mkdir"])
def test_no_space_at_any_call_only_costs_time(store: PreparedStore, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if call in {"rename", "mkdir"}:
        monkeypatch.setattr(Path, call, refuse)
    else:
        monkeypatch.setattr(os, call, refuse)
    assert not store.write("a", bytes(40 * MIB))
    monkeypatch.undo()
    assert store.read("a") is None
    assert not store.folder.exists() or not list(store.folder.iterdir())


def test_a_folder_that_cannot_be_made_only_costs_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    store = open_store(tmp_path / "file")
    assert store.read("a") is None
    assert not store.write("a", b"")
    assert not store.write("b", b"")
    assert caplog.text.count("cannot be kept") == 1


_READ_ONLY = """
import ctypes, os, sys
from pathlib import Path
from tandem_worker.model.prepared.store import PreparedStore
store = PreparedStore(Path(sys.argv[1]))
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
assert store.read("a") == b"there"
assert not store.write("b", b"not there")
"""


def test_a_read_only_folder_is_read(tmp_path: Path) -> None:
    folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    try:
        PreparedStore(folder).write("a", b"there")
        folder.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", _READ_ONLY, folder], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "cannot be kept" in done.stderr
    finally:
        folder.chmod(0o755)
        (folder / "a").unlink()
        folder.rmdir()


_WRITE_FOREVER = """
import sys
from pathlib import Path
from tandem_worker.model.prepared.store import PreparedStore
store = PreparedStore(Path(sys.argv[1]))
print("ready", flush=True)
turn = 0
while True:
    turn += 1
    store.write("a", bytes([turn % 256]) * (5 << 20))
    print("written", flush=True)
"""


def test_processes_killed_at_any_time_leave_nothing_that_is_believed(tmp_path: Path) -> None:
    rng = random.Random(7)
    store, seen = PreparedStore(tmp_path), 0
    for _ in range(12):
        writers = [
            subprocess.Popen([sys.executable, "-c", _WRITE_FOREVER, tmp_path], stdout=subprocess.PIPE) for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            for _ in range(rng.randrange(1, 4)):  # so much has been written, however long it took
                writer.stdout.readline()
        time.sleep(rng.random() * 0.05)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
        value = store.read("a")
        if value is not None:
            seen += 1
            assert value == value[:1] * (5 * MIB)
    assert seen
    left = [file for file in tmp_path.iterdir() if file.name != "a"]
    assert left, "no kill came in the middle of a write: this test shows nothing"
    assert store.write("b", b"")
    assert all(file.exists() for file in left), "others may still be writing them"
    for file in left:
        os.utime(file, (1, 1))
    assert store.write("b", b"")
    assert {file.name for file in tmp_path.iterdir()} == {"a", "b"}


def test_a_damaged_entry_that_was_replaced_meanwhile_stays(store: PreparedStore) -> None:
    store.write("a", b"first")
    entry = store.open("a")
    assert entry is not None
    store.write("a", b"second")
    store.discard(entry, "it was read wrong")
    entry.close()
    assert store.read("a") == b"second"


def test_the_lengths_of_the_format_are_fixed() -> None:
    """Another layout has another version: old files must be told apart from new ones."""
    tail = entry_module.make_tail("name", CHUNK + 1, b"\1" * 16)
    assert struct.unpack_from("<IIQQ", tail, 16 + 16) == (1, CHUNK, CHUNK + 1, 2)
    assert len(tail) == 16 + 64
