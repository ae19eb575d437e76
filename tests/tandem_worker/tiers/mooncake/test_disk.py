"""What memory has given up is on the holder's disk; what changes there is found; it outlives the holder's process and
what the master knows. Settings are those of a pod."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.mooncake.processes import Program, build_holder, build_master, run_store
from tests.tandem_worker.engine.rig import BLOCK_SIZE
from tests.tandem_worker.tiers.mooncake.rig import StoreRig
from tests.tandem_worker.tiers.mooncake.test_faults import (
    BLOCK_BYTES,
    MAGIC,
    check_found,
    check_found_damaged,
    refill,
    serve,
)
from tests.tandem_worker.tiers.rig import wait_until

FILE, NAMES = "kv_cache.data", "kv_cache.meta"
FORGOTTEN_SECONDS = 3.0
"""The master of these tests forgets a holder after two."""


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.fixture
def store(tmp_path: Path, disk: Path) -> Iterator[tuple[Program, Program]]:
    with run_store(tmp_path, disk=disk) as programs:
        yield programs


def find_blocks(disk: Path) -> list[int]:
    """Where blocks begin in the file of a disk."""
    data, places = (disk / FILE).read_bytes(), list[int]()
    place = data.find(MAGIC)
    while place >= 0:
        places.append(place)
        place = data.find(MAGIC, place + len(MAGIC))
    return places


def fill(store: tuple[Program, Program], disk: Path, num_prompts: int) -> None:
    """Prompts of ten blocks each and more are on the disk, and there alone: the holder is another process now."""
    _, holder = store
    writer = StoreRig(holder.address, num_blocks=64 + 16 * num_prompts)
    for seed in range(num_prompts):
        refill(writer, seed)
    wait_until(lambda: len(find_blocks(disk)) >= writer.written)
    writer.close()
    names = disk / NAMES
    wait_until(lambda: names.exists() and names.stat().st_mtime_ns >= (disk / FILE).stat().st_mtime_ns)
    restart(holder)


def restart(holder: Program) -> None:
    holder.kill()
    time.sleep(FORGOTTEN_SECONDS)
    holder.start()


@pytest.mark.full
def test_blocks_outlive_the_process_that_holds_them(store: tuple[Program, Program], disk: Path) -> None:
    fill(store, disk, 3)
    rig = StoreRig(store[1].address)
    for seed in range(3):
        serve(rig, f"r{seed}", seed)
        assert rig.cached(f"r{seed}") == 40
    assert rig.tier.stats().integrity_failures == 0
    rig.close()


def test_a_master_that_was_started_again_is_told_what_is_on_disks(
    store: tuple[Program, Program], disk: Path, limit_calls: Callable[[float], None]
) -> None:
    master, holder = store
    writer = StoreRig(holder.address)
    refill(writer, 1)
    wait_until(lambda: len(find_blocks(disk)) >= writer.written)
    limit_calls(1.0)
    master.kill()
    wait_until(lambda: not writer.tier.health.on)
    limit_calls(15.0)
    master.start()
    wait_until(lambda: writer.tier.health.on)
    writer.close()
    rig = StoreRig(holder.address)

    def is_known() -> bool:
        serve(rig, f"a{time.monotonic()}", 1)
        return rig.tier.stats().tokens_read >= 40

    wait_until(is_known)
    rig.close()


def check_flips(store: tuple[Program, Program], disk: Path, num_prompts: int) -> None:
    fill(store, disk, num_prompts)
    places, rng = find_blocks(disk), random.Random(num_prompts)
    with (disk / FILE).open("r+b") as file:
        for place in places:
            target = place + rng.choice([rng.randrange(48), 4096 + rng.randrange(BLOCK_BYTES)])
            file.seek(target)
            (byte,) = file.read(1)
            file.seek(target)
            file.write(bytes([byte ^ (1 << rng.randrange(8))]))
    assert len(places) >= 10 * num_prompts
    check_found_damaged(store[1].address, num_prompts)


def test_bytes_that_change_on_a_disk_are_found_and_computed_again(store: tuple[Program, Program], disk: Path) -> None:
    check_flips(store, disk, num_prompts=4)


@pytest.mark.full
def test_a_thousand_bytes_that_change_are_found(store: tuple[Program, Program], disk: Path) -> None:
    check_flips(store, disk, num_prompts=100)


@pytest.mark.full
def test_a_record_that_mooncake_cannot_read_costs_itself_alone(store: tuple[Program, Program], disk: Path) -> None:
    """It answers so for all that is read together, and would again and again."""
    fill(store, disk, 1)
    first = StoreRig(store[1].address)
    serve(first, "a", 0)
    assert first.cached("a") == 40
    names = list(first.tier._slots._known)
    first.close()
    damage_record(disk, first.tier._slots._name(names[3:4])[0].encode())
    second = StoreRig(store[1].address)
    serve(second, "b", 0)
    assert second.cached("b") == 3 * BLOCK_SIZE
    assert second.tier.stats().integrity_failures == 1
    assert second.tier.health.on
    wait_until(lambda: second.tier._slots.has(names[3]))  # it was written anew
    second.close()
    third = StoreRig(store[1].address)
    serve(third, "c", 0)
    assert (third.cached("c"), third.tier.stats().integrity_failures) == (40, 0)
    third.close()


def test_a_disk_without_room_costs_nothing_but_what_it_lacks(tmp_path: Path, disk: Path) -> None:
    """Its file is larger than its volume, as where a file system allocates none before it is written."""
    command = f'mount -t tmpfs -o size=1m none {disk} && exec "$@"'
    above = ["unshare", "--mount", "sh", "-c", command, "sh"]
    master = build_master(tmp_path, takes_disks=True)
    holder = build_holder(tmp_path, master, disk=disk, above=above)
    try:
        rig, seeds = StoreRig(holder.address, num_blocks=400), count(1)
        there = f"/proc/{holder.pid}/root{disk}"

        def is_full() -> bool:
            serve(rig, f"fill{time.monotonic()}", next(seeds))
            return os.statvfs(there).f_bavail < 8

        wait_until(is_full)
        wait_until(lambda: rig.tier.health.on)
        refill(rig, 99)
        check_found(holder.address, 99)
        rig.close()
    finally:
        holder.kill()
        master.kill()


@pytest.mark.full
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_another_holders_disk_that_goes_costs_what_is_there(
    store: tuple[Program, Program], disk: Path, tmp_path: Path, how: str
) -> None:
    master, holder = store
    fill(store, disk, 2)
    folder = tmp_path / "own"
    folder.mkdir()
    own = build_holder(tmp_path, master, disk=folder)
    try:
        first = StoreRig(own.address)
        serve(first, "a", 0)
        assert first.cached("a") == 40  # from the other one's disk
        first.close()
        getattr(holder, how)()
        rig = StoreRig(own.address, usable=False)
        wait_until(lambda: rig.tier.health.on)
        assert serve(rig, "b", 1) < 10.0
        wait_until(lambda: rig.tier.health.on)
        refill(rig, 9)
        rig.close()
    finally:
        if how == "freeze":
            holder.thaw()
        own.kill()


def damage_record(disk: Path, key: bytes) -> None:
    """The name by which Mooncake knows the object again."""
    place = (disk / FILE).read_bytes().find(key)
    assert place > 0
    with (disk / FILE).open("r+b") as file:
        file.seek(place + len(key) - 1)
        file.write(b"z")
