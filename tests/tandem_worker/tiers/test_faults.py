"""Disks that are damaged, full, read-only, slow or frozen, and workers that are killed: no wrong token, and no wait."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tandem_worker.tiers import files
from tandem_worker.tiers.disk import DiskTier
from tandem_worker.tiers.errors import TierError, describe

from tests.tandem_worker.engine.history_model import greedy_answer
from tests.tandem_worker.tiers.rig import SLOT_BYTES, DiskRig, wait_until
from tests.tandem_worker.tiers.test_disk import make_prompt

PROMPTS = [make_prompt(seed, 61) for seed in range(6)]
Damage = Callable[[random.Random, list[Path]], None]


def fill(folder: Path) -> None:
    rig = DiskRig(folder, num_blocks=128)
    for number, prompt in enumerate(PROMPTS):
        rig.run(f"a{number}", prompt, max_tokens=1)
    assert rig.tier.flush(5.0)
    rig.close()


def segments(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def flip(rng: random.Random, paths: list[Path]) -> None:
    """A bit of what is used: header, names, sums or numbers."""
    path = rng.choice(paths)
    data = bytearray(path.read_bytes())
    slots = (len(data) - 2 * 4096) // SLOT_BYTES
    first = 8192 + rng.randrange(slots) * SLOT_BYTES
    spot = rng.choice(
        [
            rng.randrange(56),
            4096 + rng.randrange(24 * slots),
            first + rng.randrange(80),
            first + 4096 + rng.randrange(64),
        ]
    )
    data[spot] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(rng: random.Random, paths: list[Path]) -> None:
    path = rng.choice(paths)
    os.truncate(path, rng.randrange(path.stat().st_size))


def exchange_slots(rng: random.Random, paths: list[Path]) -> None:
    """Two whole slots, headers and sums included, of one segment or of two."""
    one, other = rng.choice(paths), rng.choice(paths)
    a, b = bytearray(one.read_bytes()), bytearray(other.read_bytes())
    i = 8192 + rng.randrange((len(a) - 8192) // SLOT_BYTES) * SLOT_BYTES
    j = 8192 + rng.randrange((len(b) - 8192) // SLOT_BYTES) * SLOT_BYTES
    if one == other:
        a[i : i + SLOT_BYTES], a[j : j + SLOT_BYTES] = a[j : j + SLOT_BYTES], a[i : i + SLOT_BYTES]
        one.write_bytes(a)
        return
    a[i : i + SLOT_BYTES], b[j : j + SLOT_BYTES] = b[j : j + SLOT_BYTES], a[i : i + SLOT_BYTES]
    one.write_bytes(a)
    other.write_bytes(b)


def exchange_layers(rng: random.Random, paths: list[Path]) -> None:
    path = rng.choice(paths)
    data = bytearray(path.read_bytes())
    block = 8192 + rng.randrange((len(data) - 8192) // SLOT_BYTES) * SLOT_BYTES + 4096
    data[block : block + 32], data[block + 32 : block + 64] = data[block + 32 : block + 64], data[block : block + 32]
    path.write_bytes(data)


def exchange_files(rng: random.Random, paths: list[Path]) -> None:
    one, other = rng.sample(paths, 2)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


DAMAGES: list[Damage] = [flip, flip, flip, cut, exchange_slots, exchange_layers, exchange_files]


def damage_and_look(tmp_path: Path, count: int, seed: int) -> None:
    """`count` damages, a few at a time, before and behind the start of a worker: tokens as ever, and nothing of what
    was damaged is used."""
    rng = random.Random(seed)
    fill(tmp_path / "whole")
    done = noticed = 0
    while done < count:
        shutil.rmtree(tmp_path / "disk", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "disk")
        later = rng.random() < 0.5
        rig = DiskRig(tmp_path / "disk", num_blocks=128) if later else None
        harmed = rng.randint(1, 3)
        before = [path.read_bytes() for path in segments(tmp_path / "disk")]
        for _ in range(harmed):
            paths = [path for path in segments(tmp_path / "disk") if path.stat().st_size >= 8192 + SLOT_BYTES]
            rng.choice(DAMAGES)(rng, paths)
        changed = before != [path.read_bytes() for path in segments(tmp_path / "disk")]
        done += harmed
        rig = rig or DiskRig(tmp_path / "disk", num_blocks=128)
        found = 0
        for number, prompt in enumerate(PROMPTS):
            assert rig.run(f"b{number}", prompt, max_tokens=4) == greedy_answer(prompt, 4)
            found += rig.cached(f"b{number}")
        if changed and found < 60 * len(PROMPTS):
            noticed += 1
        rig.close()
    assert noticed > 0


def test_damage_is_found_and_tokens_stay_the_same(tmp_path: Path) -> None:
    damage_and_look(tmp_path, 60, seed=1)


@pytest.mark.full
def test_a_thousand_damages(tmp_path: Path) -> None:
    damage_and_look(tmp_path, 1000, seed=2)


@pytest.mark.parametrize("harm", [exchange_slots, exchange_layers])
def test_damage_is_counted_and_what_is_damaged_goes(tmp_path: Path, harm: Damage) -> None:
    fill(tmp_path)
    paths = segments(tmp_path)
    rig = DiskRig(tmp_path, num_blocks=128)
    rng = random.Random(3)
    for path in paths:
        for _ in range(4):
            harm(rng, [path])
    for number, prompt in enumerate(PROMPTS):
        assert rig.run(f"b{number}", prompt, max_tokens=1) == greedy_answer(prompt, 1)
    stats = rig.tier.stats()
    assert stats.integrity_failures > 0
    assert len(segments(tmp_path)) < len(paths)
    assert rig.tier.health.on
    rig.close()


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "VolumeFull"),
        (errno.EDQUOT, "VolumeFull"),
        (errno.EFBIG, "VolumeFull"),
        (errno.EROFS, "VolumeReadOnly"),
        (errno.EACCES, "VolumeReadOnly"),
        (errno.ENOENT, "VolumeGone"),
        (errno.ESTALE, "VolumeGone"),
        (errno.EIO, "VolumeFailed"),
    ],
)
def test_what_the_system_says_has_a_reason(number: int, reason: str) -> None:
    error = describe(OSError(number, "words"), "x cannot be written")
    assert (error.reason, str(error)) == (reason, "x cannot be written: words")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_nothing_is_switched_off_and_on_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("tandem_worker.tiers.disk.RETRY_SECONDS", 0.2)
    rig = DiskRig(tmp_path, write_through=True)
    real, broken = os.pwrite, threading.Event()

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if broken.is_set():
            raise OSError(number, os.strerror(number))
        return real(descriptor, data, offset)

    monkeypatch.setattr("tandem_worker.tiers.files.os.pwrite", pwrite)
    broken.set()
    assert rig.run("a", PROMPTS[0]) == greedy_answer(PROMPTS[0], 8)
    wait_until(lambda: not rig.tier.health.on)
    assert os.strerror(number) in rig.tier.stats().message
    assert rig.run("b", PROMPTS[1]) == greedy_answer(PROMPTS[1], 8)
    broken.clear()
    wait_until(lambda: rig.tier.health.on)
    assert rig.run("c", PROMPTS[2]) == greedy_answer(PROMPTS[2], 8)
    wait_until(lambda: rig.written > 0)
    rig.close()


def test_a_read_that_fails_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    rig = DiskRig(tmp_path, num_blocks=128)

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr("tandem_worker.tiers.files.os.preadv", preadv)
    assert rig.run("b", PROMPTS[0]) == greedy_answer(PROMPTS[0], 8)
    assert rig.cached("b") == 0
    wait_until(lambda: rig.tier.stats().reason == "VolumeFailed")
    rig.close()


def test_a_disk_that_freezes_costs_a_tenth_of_computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing is taken to be 4 s for the prompt: the load is cut after 0.4 s, and its reader hangs on."""
    monkeypatch.setattr("tandem_worker.tiers.loads.FROZEN_SECONDS", 0.6)
    fill(tmp_path)
    rig = DiskRig(tmp_path, num_blocks=128, prefill_rate=15.0)
    real, release = os.preadv, threading.Event()

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        release.wait()
        return real(descriptor, buffers, offset)

    monkeypatch.setattr("tandem_worker.tiers.files.os.preadv", preadv)
    assert rig.run("b", PROMPTS[0]) == greedy_answer(PROMPTS[0], 8)
    assert rig.cached("b") == 0
    assert rig.tier.stats().loads_cut == 1
    wait_until(lambda: rig.tier.stats().reason == "VolumeFrozen")
    assert rig.run("c", PROMPTS[1]) == greedy_answer(PROMPTS[1], 8)
    assert rig.tier.stats().loads_cut == 1, "it is not asked any more"
    release.set()
    wait_until(lambda: not rig.tier._pool.hangs)
    assert rig.run("d", PROMPTS[0]) == greedy_answer(PROMPTS[0], 8), "what came late was written nowhere"
    rig.close()


def test_a_slow_disk_is_cut_and_what_came_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    monkeypatch.setattr("tandem_worker.tiers.disk.NUM_READERS", 1)
    rig = DiskRig(tmp_path, num_blocks=128, prefill_rate=10.0)  # a block takes 0.4 s
    monkeypatch.setattr(rig.tier._pool, "_most", 2)
    real, calls, release = os.preadv, list[int](), threading.Event()

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) > 2:
            release.wait()
        return real(descriptor, buffers, offset)

    monkeypatch.setattr("tandem_worker.tiers.files.os.preadv", preadv)
    assert rig.run("b", PROMPTS[0], max_tokens=1) == greedy_answer(PROMPTS[0], 1)
    release.set()
    assert 0 < rig.cached("b") < 60
    assert rig.tier.stats().loads_cut == 1
    rig.close()


def test_a_disk_that_freezes_at_the_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_worker.tiers.disk.FROZEN_SECONDS", 0.2)
    monkeypatch.setattr("tandem_worker.tiers.disk.RETRY_SECONDS", 0.05)
    real, release = os.statvfs, threading.Event()

    def statvfs(path: Path) -> os.statvfs_result:
        release.wait()
        return real(path)

    monkeypatch.setattr("tandem_worker.tiers.files.os.statvfs", statvfs)
    rig = DiskRig(tmp_path, usable=False)
    wait_until(lambda: rig.tier.stats().reason == "VolumeFrozen")
    assert rig.run("a", PROMPTS[0]) == greedy_answer(PROMPTS[0], 8)
    release.set()
    wait_until(lambda: rig.tier.health.on)
    rig.close()


def test_a_disk_that_was_full_stays_off_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_worker.tiers.disk.RETRY_SECONDS", 0.05)
    rig = DiskRig(tmp_path)
    room = [1 << 20]
    monkeypatch.setattr(files.Volume, "free_bytes", property(lambda self: room[0]))
    rig.tier.health.fail(TierError("VolumeFull", "nothing more can be written"))
    time.sleep(0.3)
    assert rig.tier.stats().reason == "VolumeFull"
    room[0] = 1 << 30
    wait_until(lambda: rig.tier.health.on)
    rig.close()


def test_a_disk_that_is_slower_than_computing_is_not_asked(tmp_path: Path) -> None:
    fill(tmp_path)
    rig = DiskRig(tmp_path, num_blocks=128, prefill_rate=1e12)
    assert rig.run("b", PROMPTS[0]) == greedy_answer(PROMPTS[0], 8)
    assert rig.cached("b") == 0
    wait_until(lambda: rig.tier.stats().reason == "VolumeSlow")
    assert "MB/s" in rig.tier.stats().message
    rig.close()


def test_a_folder_that_vanishes_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    fill(folder)
    rig = DiskRig(folder, num_blocks=128, write_through=True)
    folder.rename(tmp_path / "elsewhere")
    for number, prompt in enumerate(PROMPTS):
        assert rig.run(f"b{number}", prompt) == greedy_answer(prompt, 8)
    wait_until(lambda: rig.tier.stats().reason == "VolumeGone")
    rig.close()


def test_a_volume_without_room_for_a_segment_says_so(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, size=SLOT_BYTES, usable=False)
    wait_until(lambda: rig.tier.stats().reason == "VolumeTooSmall")
    assert rig.run("a", PROMPTS[0]) == greedy_answer(PROMPTS[0], 8)
    rig.close()


def test_leftovers_are_removed_and_others_files_are_not(tmp_path: Path) -> None:
    fill(tmp_path)
    (inner,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    (inner / "0000000000000099.new").write_bytes(b"x" * 100)
    (inner / "00000000000000aa.kv").write_bytes(b"")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "lost+found" / "x").write_text("x")
    rig = DiskRig(tmp_path, num_blocks=128)
    rig.run("b", PROMPTS[0])
    assert rig.cached("b") == 60
    rig.close()
    names = {path.name for path in inner.iterdir()}
    assert not {name for name in names if name.endswith(".new")}
    assert "00000000000000aa.kv" not in names
    assert (tmp_path / "lost+found" / "x").read_text() == "x"


def kill(rig: DiskRig) -> None:
    """As SIGKILL leaves it: nothing more is written, and the lock is gone with the process."""
    rig.tier.flush = lambda seconds: False  # type: ignore[method-assign]
    rig.tier._save_state = lambda: None  # type: ignore[method-assign]
    rig.close()


def test_kills_and_restarts_over_one_folder(tmp_path: Path) -> None:
    """Each worker dies in the middle of writing; the next finds a part, and nothing wrong."""
    rng = random.Random(7)
    found = 0
    torn = False
    for turn in range(25):
        rig = DiskRig(tmp_path, num_blocks=48, size=1 << 20, write_through=True)
        for number in range(6):
            prompt = PROMPTS[rng.randrange(len(PROMPTS))]
            assert rig.run(f"{turn}-{number}", prompt, max_tokens=2) == greedy_answer(prompt, 2)
        found += rig.tier.stats().tokens_read
        assert torn or rig.tier.stats().integrity_failures == 0
        rig.tier._writer.close()
        kill(rig)
        paths = segments(tmp_path)
        if turn > 12 and paths and rng.random() < 0.5:  # what a machine loses with its power
            torn = True
            path = paths[-1]
            data = np.fromfile(path, np.uint8)
            data[-rng.randrange(1, len(data)) :] = 0
            data.tofile(path)
    assert found > 0


def test_the_daily_budget_stops_writing(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, write_through=True, max_daily_writes=20 * SLOT_BYTES)
    for number, prompt in enumerate(PROMPTS):
        rig.run(f"a{number}", prompt, max_tokens=1)
        wait_until(lambda: not rig.is_due)
    time.sleep(0.1)
    assert 16 <= rig.written <= 24
    rig.close()
    again = DiskRig(tmp_path, write_through=True, max_daily_writes=20 * SLOT_BYTES)
    again.run("b", make_prompt(99, 61))
    time.sleep(0.1)
    assert again.written <= 4, "what an earlier process has written counts"
    again.close()


def test_a_tier_is_closed_twice_without_harm(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path)
    tier: DiskTier = rig.tier
    tier.close()
    rig.close()
