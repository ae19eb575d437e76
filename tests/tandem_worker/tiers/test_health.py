"""What is told of a tier that fails: one failure is one, however often the tier is tried again while it lasts."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tandem_worker.tiers.errors import TierError
from tandem_worker.tiers.files import Volume
from tandem_worker.tiers.health import TierHealth, Work
from tandem_worker.tiers.store import Place, SegmentStore

from tests.tandem_worker.engine.history_model import greedy_answer
from tests.tandem_worker.tiers.rig import SLOT_BYTES, DiskRig, wait_until
from tests.tandem_worker.tiers.test_disk import make_prompt
from tests.tandem_worker.tiers.test_faults import fill, segments

LOOK, READ, WRITE, SPEED = Work
PROMPTS = [make_prompt(seed, 61) for seed in range(6)]
LOOKS = 4


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([], ["Starting"]),
        (["look"], [None]),
        # What no look passes is told from the first to the last.
        (["look", (LOOK, "Gone"), (LOOK, "Gone"), (LOOK, "Gone"), "look"], [None, "Gone", "Gone", "Gone", None]),
        ([(LOOK, "Gone"), "look"], ["Gone", None]),
        # A look finds nothing wrong, and what failed fails again: nobody is told otherwise meanwhile.
        (["look", (READ, "Io"), "look", (READ, "Io"), "look"], [None, "Io", "Io", "Io", "Io"]),
        (["look", (READ, "Io"), "look", READ], [None, "Io", "Io", None]),
        (["look", (READ, "Io"), "look", WRITE, SPEED, READ], [None, "Io", "Io", "Io", "Io", None]),
        (["look", (SPEED, "Slow"), "look", READ, SPEED], [None, "Slow", "Slow", "Slow", None]),
        # What had begun before it was switched off, and ends well, says nothing of what comes.
        (["look", (READ, "Io"), READ, "look", READ], [None, "Io", "Io", "Io", None]),
        # All that has failed has to go through.
        (["look", (READ, "Io"), (WRITE, "Full"), "look", READ, WRITE], [None, "Io", "Full", "Full", "Full", None]),
        (["look", (READ, "Io"), "look", (WRITE, "Full"), "look", WRITE], [None, "Io", "Io", "Full", "Full", "Full"]),
        # A look may show that what failed goes through.
        (["look", (WRITE, "Io"), {WRITE}], [None, "Io", None]),
        (["look", (WRITE, "Io"), (READ, "Io"), {WRITE}, READ], [None, "Io", "Io", "Io", None]),
        (["look", READ, WRITE, (READ, "Io"), {READ}, (READ, "Io")], [None, None, None, "Io", None, "Io"]),
    ],
)
def test_what_is_told(events: list[object], told: list[str | None]) -> None:
    """After each event; before the first one it is `Starting`."""
    now = [0.0]
    offs: list[int] = []
    health = TierHealth(on_off=lambda: offs.append(len(seen)), wall=lambda: now[0])
    seen: list[str | None] = []
    was_on, expected_offs = False, 0
    for event in events:
        now[0] += 1
        if event == "look":
            health.recover()
        elif isinstance(event, set):
            health.recover(*event)
        elif isinstance(event, Work):
            health.passed(event)
        else:
            work, reason = event  # type: ignore[misc]
            expected_offs += was_on
            health.fail(TierError(reason, f"words {now[0]:g}"), work)
        was_on = health.on
        seen.append(None if health.cause is None else health.cause.reason)
    assert (seen or ["Starting"]) == told
    assert len(offs) == expected_offs, "its loads are cut each time it is switched off"


def test_the_first_time_and_words_of_a_failure_are_kept() -> None:
    now = [1_800_000_000.0]
    health = TierHealth(wall=lambda: now[0])
    health.recover()
    for _ in range(3):
        health.fail(TierError("Io", f"words {now[0]:.0f}"), Work.READ)
        health.recover()
        now[0] += 60
    assert health.on
    cause = health.cause
    assert cause is not None
    assert cause.describe() == "words 1800000000 (since 2027-01-15T08:00:00Z)"
    health.fail(TierError("Gone", "it is gone"))
    assert health.cause is not None
    assert health.cause.describe() == "it is gone (since 2027-01-15T08:00:00Z)", "it has not been well in between"


class Looks:
    """Counts looks at volumes, and how often somebody was told that one is in use again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self.count, self._log, real = 0, caplog, Volume.probe
        caplog.set_level(logging.INFO, "tandem_worker.tiers.health")
        self.seconds: float | None = None

        def probe(volume: Volume, num_bytes: int) -> float:
            seconds = real(volume, num_bytes)
            self.count += 1
            return seconds if self.seconds is None else self.seconds

        monkeypatch.setattr(Volume, "probe", probe)

    @property
    def told_well(self) -> int:
        return sum("is in use" in record.message for record in self._log.records)

    def wait_told(self, number: int) -> int:
        """Somebody is told so often that a disk is in use, just after it is."""
        wait_until(lambda: self.told_well >= number)
        return self.told_well

    @property
    def told_off(self) -> int:
        return sum("is switched off" in record.message for record in self._log.records)

    def wait(self, number: int = LOOKS) -> None:
        """So many more."""
        wanted = self.count + number
        wait_until(lambda: self.count >= wanted)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Looks:
    monkeypatch.setattr("tandem_worker.tiers.disk.RETRY_SECONDS", 0.05)
    return Looks(monkeypatch, caplog)


def break_writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Blocks cannot be written; all else can."""

    def append(store: SegmentStore, *arguments: object) -> None:
        raise OSError(errno.EIO, "input/output error")

    real = SegmentStore.append
    monkeypatch.setattr(SegmentStore, "append", append)
    return lambda: monkeypatch.setattr(SegmentStore, "append", real)


def test_a_disk_whose_blocks_cannot_be_written_is_told_until_one_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: Looks
) -> None:
    rig = DiskRig(tmp_path, write_through=True)
    assert looks.wait_told(1) == 1
    mend = break_writes(monkeypatch)
    for number, prompt in enumerate(PROMPTS[:2]):
        assert rig.run(f"a{number}", prompt) == greedy_answer(prompt, 8)
        wait_until(lambda: rig.tier.stats().reason == "VolumeFailed")
        looks.wait()
    assert (looks.told_well, rig.tier.stats().reason) == (1, "VolumeFailed"), "looks have found nothing wrong"
    mend()
    wait_until(lambda: rig.tier.stats().reason is None)
    rig.run("b", PROMPTS[3])
    wait_until(lambda: rig.written > 0)
    assert looks.wait_told(2) == 2
    rig.close()


def ask_all(rig: DiskRig) -> None:
    """Every prompt is answered as without a disk, which is in use again after each."""
    for number, prompt in enumerate(PROMPTS):
        assert rig.run(f"a{number}", prompt) == greedy_answer(prompt, 8)
        wait_until(lambda: rig.tier.stats().reason is None)


@pytest.mark.parametrize("slot", [0, 2])
def test_a_disk_whose_blocks_cannot_be_read_gives_up_the_spot_and_is_told_as_well_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: Looks, slot: int
) -> None:
    """What fails again is not read a third time, and one bad spot is not the end of the disk, wherever it is in what
    one call reads."""
    fill(tmp_path)
    rig, real = DiskRig(tmp_path, num_blocks=128), SegmentStore.read
    before, well = len(segments(tmp_path)), looks.wait_told(2)
    (bad, _), *_ = rig.tier._store._places.values()
    reads: list[int] = []

    def read(store: SegmentStore, place: Place, count: int, rows: np.ndarray) -> int | None:
        if place.segment == bad and place.slot <= slot < place.slot + count and bad in store._segments:
            reads.append(place.segment)
            raise OSError(errno.EIO, "input/output error")
        return real(store, place, count, rows)

    monkeypatch.setattr(SegmentStore, "read", read)
    ask_all(rig)
    assert (looks.told_off, looks.wait_told(well + 1)) == (1, well + 1)
    assert len(segments(tmp_path)) >= before - 1
    assert bad not in {place.segment for place in rig.tier._store._places.values()}
    assert len(reads) >= 2
    rig.close()


def test_a_spot_that_hangs_whenever_it_is_read_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: Looks
) -> None:
    """As sectors do that a device reads again and again. Else it would hang, and be told, each time it is asked for."""
    fill(tmp_path)
    for module in ("loads", "disk"):
        monkeypatch.setattr(f"tandem_worker.tiers.{module}.FROZEN_SECONDS", 1.5)
    rig, real = DiskRig(tmp_path, num_blocks=128), SegmentStore.read
    well = looks.wait_told(2)
    (bad, _), *_ = rig.tier._store._places.values()

    def read(store: SegmentStore, place: Place, count: int, rows: np.ndarray) -> int | None:
        if place.segment == bad and place.slot <= 2 < place.slot + count and bad in store._segments:
            wait_until(lambda: not rig.tier.health.on)
            time.sleep(1.6)
        return real(store, place, count, rows)

    monkeypatch.setattr(SegmentStore, "read", read)
    ask_all(rig)
    assert (looks.told_off, looks.wait_told(well + 1)) == (1, well + 1)
    assert bad not in {place.segment for place in rig.tier._store._places.values()}
    rig.close()


def test_a_look_that_takes_too_long_does_not_show_that_all_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: Looks
) -> None:
    """Blocks would take as long: it would be told as frozen and as well by turns."""
    rig, seconds = DiskRig(tmp_path), [0.15]
    monkeypatch.setattr("tandem_worker.tiers.disk.FROZEN_SECONDS", 0.1)
    well, real = looks.wait_told(1), os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        time.sleep(seconds[0])
        return real(path)

    monkeypatch.setattr("tandem_worker.tiers.files.os.statvfs", statvfs)
    rig.tier.health.fail(TierError("VolumeFrozen", "once"))
    looks.wait(2)
    assert (looks.told_well, rig.tier.stats().reason) == (well, "VolumeFrozen")
    seconds[0] = 0.0
    wait_until(lambda: rig.tier.stats().reason is None)
    rig.close()


def test_a_disk_with_many_segments_is_not_frozen_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: Looks
) -> None:
    """Each answers within the time that is allowed to one answer."""
    fill(tmp_path)
    assert len(segments(tmp_path)) >= 4
    monkeypatch.setattr("tandem_worker.tiers.disk.FROZEN_SECONDS", 2.0)
    real = Volume.open

    def open_slowly(volume: Volume, path: Path) -> int:
        time.sleep(0.55)
        return real(volume, path)

    monkeypatch.setattr(Volume, "open", open_slowly)
    rig = DiskRig(tmp_path)
    assert (looks.told_off, rig.tier.stats().reason) == (0, None)
    rig.close()


def test_a_disk_that_a_look_finds_slow_is_not_used_meanwhile(tmp_path: Path, looks: Looks) -> None:
    rig = DiskRig(tmp_path)
    rig.run("a", PROMPTS[0])
    well, looks.seconds = looks.wait_told(1), 1e6
    rig.tier.health.fail(TierError("VolumeFailed", "once"))
    wait_until(lambda: rig.tier.stats().reason == "VolumeSlow")
    looks.wait()
    assert (looks.told_well, rig.tier.health.on) == (well, False)
    looks.seconds = None
    wait_until(lambda: rig.tier.stats().reason is None)
    rig.close()


def test_a_disk_that_only_looks_fast_is_told_as_slow_until_blocks_have_come_fast(tmp_path: Path, looks: Looks) -> None:
    """A probe has the device for itself, or comes out of a cache."""
    fill(tmp_path)
    looks.seconds = 1e-6
    rig = DiskRig(tmp_path, num_blocks=128)
    well, pool = looks.wait_told(2), rig.tier._pool
    pool.seconds_per_block = 1e-3
    for _ in range(2):
        seen = looks.count
        pool._meter.observe(1 << 40, 1e9)  # blocks that were read
        wait_until(lambda seen=seen: looks.count > seen and rig.tier.health.on)
        assert rig.tier.stats().reason == "VolumeSlow"
    assert looks.told_well == well
    assert rig.run("b", PROMPTS[0], max_tokens=1) == greedy_answer(PROMPTS[0], 1)
    wait_until(lambda: rig.tier.stats().reason is None)
    assert rig.cached("b") > 0, "it was used while it was told as slow"
    rig.close()


def test_a_disk_that_looks_fast_and_is_not_is_told_as_slow_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: Looks
) -> None:
    """What a probe had in a second outweighs the blocks of minutes; and blocks that come too late are slow too."""
    fill(tmp_path)
    looks.seconds = 1e-6
    rig, real, seconds = DiskRig(tmp_path, num_blocks=128, prefill_rate=1000.0), SegmentStore.read, 0.1
    well, pool = looks.wait_told(2), rig.tier._pool
    rig.tier.health.fail(TierError("VolumeSlow", "once"), Work.SPEED)
    wait_until(lambda: rig.tier.health.on)

    def read(store: SegmentStore, place: Place, count: int, rows: np.ndarray) -> int | None:
        time.sleep(seconds)
        return real(store, place, count, rows)

    monkeypatch.setattr(SegmentStore, "read", read)
    assert rig.run("a", PROMPTS[0]) == greedy_answer(PROMPTS[0], 8)
    wait_until(lambda: pool.blocks_rate is not None)
    rig.tier._watch_speed(3, SLOT_BYTES, "VolumeSlow")
    assert (looks.told_well, rig.tier.stats().reason) == (well, "VolumeSlow")
    rate = pool.blocks_rate
    assert rate is not None
    assert rate < 15 * SLOT_BYTES / seconds
    pool._note_rate(1 << 30, 1.0)
    rig.tier._watch_speed(3, SLOT_BYTES, "VolumeSlow")
    assert rig.tier.stats().reason is None
    rig.close()


def test_what_cannot_be_saved_keeps_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: Looks) -> None:
    """It is saved now and then: looks that did without would find all well in between."""
    rig, real, broken = DiskRig(tmp_path), os.rename, [True]
    well = looks.wait_told(1)

    def rename(source: Path, target: Path) -> None:
        if broken and target.name == "state.json":
            raise OSError(errno.EIO, "input/output error")
        real(source, target)

    monkeypatch.setattr("tandem_worker.tiers.files.os.rename", rename)
    rig.tier._save_state()
    looks.wait()
    assert (looks.told_well, rig.tier.stats().reason) == (well, "VolumeFailed")
    broken.clear()
    wait_until(lambda: rig.tier.stats().reason is None)
    rig.close()
