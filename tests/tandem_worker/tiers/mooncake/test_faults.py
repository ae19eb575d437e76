"""Master and holder are killed, frozen and started again, bytes change, memory is full: every answer is right, nothing
waits for what does not come, and what has failed comes back without a hand."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tandem_worker.tiers.errors import (
    STORE_DISK_FULL,
    STORE_FROZEN,
    STORE_FULL,
    STORE_HOLDER_FAILED,
    STORE_UNREACHABLE,
    TierError,
)
from tandem_worker.tiers.health import Cause
from tandem_worker.tiers.mooncake import client, tier
from tandem_worker.tiers.mooncake.notes import Note, Notes
from tandem_worker.tiers.mooncake.program import is_answered
from tandem_worker.tiers.mooncake.tier import RESTART_AFTER, StoreTier

from tests.mooncake.processes import Program, build_holder, build_master, run_store
from tests.ports import free_port
from tests.tandem_worker.engine.history_model import greedy_answer
from tests.tandem_worker.tiers.mooncake.rig import StoreRig
from tests.tandem_worker.tiers.mooncake.test_program import IMPATIENT, find_children
from tests.tandem_worker.tiers.mooncake.test_tier import make_prompt
from tests.tandem_worker.tiers.rig import KEY, wait_until

MAGIC = b"TNDMKVSL"
BLOCK_BYTES = 64
"""Of the history model, about: the first layer of a block at least."""
NOTHING = Cause("", "")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[Program, Program]]:
    with run_store(tmp_path) as programs:
        yield programs


def serve(rig: StoreRig, request_id: str, seed: int) -> float:
    """A right answer; how long it took."""
    prompt = make_prompt(seed)
    began = time.monotonic()
    assert rig.run(request_id, prompt) == greedy_answer(prompt, 8)
    return time.monotonic() - began


def refill(rig: StoreRig, seed: int) -> None:
    """A prompt that nobody knows is written."""
    before = rig.written
    serve(rig, f"fill{seed}", seed)
    wait_until(lambda: rig.written >= before + 10)


def check_found(address: str, seed: int) -> None:
    """A worker that has not computed the prompt has it from the store."""
    other = StoreRig(address)
    serve(other, "again", seed)
    assert other.cached("again") == 40
    other.close()


def check_found_damaged(address: str, num_prompts: int) -> None:
    """Prompts whose blocks were damaged are computed, each of them is counted, and the store stays in use."""
    rig = StoreRig(address, num_blocks=16 * num_prompts)
    for seed in range(num_prompts):
        serve(rig, f"f{seed}", seed)
        assert rig.cached(f"f{seed}") < 40
    assert rig.tier.stats().integrity_failures >= num_prompts
    assert rig.tier.health.on
    rig.close()


@pytest.mark.parametrize("which", [0, 1], ids=["master", "holder"])
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_side_that_goes_is_found_and_comes_back(
    store: tuple[Program, Program], limit_calls: Callable[[float], None], which: int, how: str
) -> None:
    rig, program = StoreRig(store[1].address), store[which]
    refill(rig, 1)
    limit_calls(1.0)
    getattr(program, how)()
    assert serve(rig, "during", 2) < 5.0
    wait_until(lambda: not rig.tier.health.on)
    cause = rig.tier.health.cause
    assert cause is not None
    assert cause.reason in (STORE_UNREACHABLE, STORE_FROZEN, "StoreFailed"), cause
    assert serve(rig, "off", 3) < 5.0
    assert measure_cpu(rig) < 0.5
    limit_calls(15.0)
    if how == "freeze":
        program.thaw()
    else:
        program.start()
    wait_until(lambda: rig.tier.health.on)
    refill(rig, 4)
    check_found(store[1].address, 4)
    rig.close()


def measure_cpu(rig: StoreRig) -> float:
    """Cores that this process and the helper of its tier keep busy while nobody asks for anything."""

    def read(pid: int | None) -> float:
        try:
            return sum(map(int, Path(f"/proc/{pid}/stat").read_text().split()[13:15])) / os.sysconf("SC_CLK_TCK")
        except FileNotFoundError:
            return 0.0

    helper, own, began = rig.tier.helper_pid, time.process_time(), time.monotonic()
    before = read(helper)
    time.sleep(1.0)
    spent = time.process_time() - own + max(0.0, read(helper) - before if helper == rig.tier.helper_pid else 0.0)
    return spent / (time.monotonic() - began)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_helper_that_goes_is_replaced(
    store: tuple[Program, Program], limit_calls: Callable[[float], None], how: signal.Signals
) -> None:
    rig = StoreRig(store[1].address)
    refill(rig, 1)
    first = rig.tier.helper_pid
    assert first is not None
    limit_calls(1.0)
    os.kill(first, how)
    assert serve(rig, "during", 2) < 5.0
    wait_until(lambda: rig.tier.health.on and rig.tier.helper_pid not in (None, first))
    limit_calls(15.0)
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    refill(rig, 3)
    rig.close()


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_another_workers_holder_that_goes_takes_its_blocks_along_and_nothing_else(
    store: tuple[Program, Program], limit_calls: Callable[[float], None], tmp_path: Path, how: str
) -> None:
    other = build_holder(tmp_path, store[0])
    try:
        writer = StoreRig(store[1].address)
        for seed in range(4):
            refill(writer, seed)
        limit_calls(1.0)
        getattr(other, how)()
        rig = StoreRig(store[1].address, usable=False)
        for seed in range(4):
            assert serve(rig, f"r{seed}", seed) < 10.0
        limit_calls(15.0)
        wait_until(lambda: rig.tier.health.on)
        refill(rig, 9)
        rig.close()
        writer.close()
    finally:
        if how == "freeze":
            other.thaw()
        other.kill()


def test_a_holder_that_is_slow_delays_nothing_and_is_used_again(
    store: tuple[Program, Program], limit_calls: Callable[[float], None]
) -> None:
    """It runs for two of a hundred milliseconds."""
    rig = StoreRig(store[1].address)
    refill(rig, 1)
    limit_calls(1.0)
    over = threading.Event()

    def slow() -> None:
        while not over.is_set():
            store[1].freeze()
            over.wait(0.098)
            store[1].thaw()
            over.wait(0.002)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        for seed in range(2, 8):
            assert serve(rig, f"s{seed}", seed) < 5.0
            assert serve(rig, f"again{seed}", seed) < 5.0
    finally:
        over.set()
        thread.join()
    limit_calls(15.0)
    wait_until(lambda: rig.tier.health.on)
    refill(rig, 9)
    rig.close()


def test_one_that_takes_connections_and_answers_nothing_is_to_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_calls: Callable[[float], None]
) -> None:
    """A queue that is wedged: nothing that listens looks at it."""
    limit_calls(1.0)
    monkeypatch.setattr(client, "START_SECONDS", 1.0)
    monkeypatch.setattr(tier, "RESTART_AFTER", 2)
    notes = Notes(tmp_path)
    notes.touch()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        rig = StoreRig(f"127.0.0.1:{silent.getsockname()[1]}", usable=False, notes=tmp_path)
        wait_until(lambda: (rig.tier.health.cause or NOTHING).reason == STORE_FROZEN)
        assert serve(rig, "a", 1) < 5.0
        wait_until(notes.take_restart)
        rig.close()


def test_a_frozen_holder_is_started_again_and_used_without_a_hand(
    tmp_path: Path, limit_calls: Callable[[float], None]
) -> None:
    health, notes = free_port(), tmp_path / "notes"
    above = [*IMPATIENT, f"--alive={health}", f"--notes={notes}"]
    master = build_master(tmp_path)
    holder = build_holder(tmp_path, master, above=above, more=["--enable_http_server=true", f"--http_port={health}"])
    try:
        rig = StoreRig(holder.address, notes=notes)
        refill(rig, 1)
        (program,) = find_children(holder.pid)
        wait_until(lambda: is_answered(health))
        time.sleep(0.5)  # it has been heard
        limit_calls(1.0)
        os.kill(program, signal.SIGSTOP)
        assert serve(rig, "during", 2) < 5.0
        wait_until(lambda: not rig.tier.health.on)
        limit_calls(15.0)
        wait_until(lambda: rig.tier.health.on)
        assert program not in find_children(holder.pid)
        refill(rig, 3)
        rig.close()
    finally:
        holder.end()
        master.kill()


def test_why_nobody_answers_is_told_in_the_words_of_who_knows(tmp_path: Path) -> None:
    Notes(tmp_path).say(Note(STORE_HOLDER_FAILED, "no master answers at mooncake.kv:1"))
    memory: Any = SimpleNamespace(layer_bytes=(32,))
    unstarted = StoreTier("127.0.0.1:9", KEY, memory, 4, notes=tmp_path)
    unstarted._fail(TierError(STORE_UNREACHABLE, "no mooncake_client answers at 127.0.0.1:9"), hangs=False)
    text = "no mooncake_client answers at 127.0.0.1:9: no master answers at mooncake.kv:1"
    assert unstarted.health.cause == Cause(STORE_HOLDER_FAILED, text)
    unstarted._fail(TierError(STORE_FROZEN, "put has not returned for 3 s"), hangs=True)
    assert unstarted.health.cause == Cause(STORE_FROZEN, "put has not returned for 3 s")


def test_a_worker_that_cannot_leave_word_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(notes: Notes) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Notes, "ask_restart", fail)
    memory: Any = SimpleNamespace(layer_bytes=(32,))
    unstarted = StoreTier("127.0.0.1:9", KEY, memory, 4, notes=tmp_path)
    for _ in range(RESTART_AFTER + 1):
        unstarted._fail(TierError(STORE_FROZEN, "put has not returned for 3 s"), hangs=True)
    assert unstarted.health.cause == Cause(STORE_FROZEN, "put has not returned for 3 s")


def test_a_disk_that_runs_full_is_told_and_what_has_room_again_is_used(
    store: tuple[Program, Program], tmp_path: Path
) -> None:
    notes = Notes(tmp_path / "notes")
    rig = StoreRig(store[1].address, notes=tmp_path / "notes")
    refill(rig, 1)
    notes.say(Note(STORE_DISK_FULL, "the disk is full"))
    wait_until(lambda: rig.tier.stats().reason == STORE_DISK_FULL)
    assert serve(rig, "during", 2) < 5.0
    notes.say(None)
    wait_until(lambda: rig.tier.health.on)
    refill(rig, 3)
    rig.close()


def flip(pid: int, seed: int) -> int:
    """Change one bit in each of the blocks that a process has in its memory. How many."""
    rng, count = random.Random(seed), 0
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for line in maps:
            span, rights, *_ = line.split()
            first, end = (int(each, 16) for each in span.split("-"))
            if not rights.startswith("rw") or end - first < 64 << 20:
                continue
            memory.seek(first)
            data = memory.read(end - first)
            place = data.find(MAGIC)
            while place >= 0:
                target = place + rng.choice([rng.randrange(48), 4096 + rng.randrange(BLOCK_BYTES)])
                memory.seek(first + target)
                memory.write(bytes([data[target] ^ (1 << rng.randrange(8))]))
                count += 1
                place = data.find(MAGIC, place + 4096)
    return count


def check_flips(store: tuple[Program, Program], num_prompts: int) -> None:
    writer = StoreRig(store[1].address, num_blocks=16 * num_prompts)
    for seed in range(num_prompts):
        refill(writer, seed)
    assert flip(store[1].pid, num_prompts) >= 10 * num_prompts
    check_found_damaged(store[1].address, num_prompts)
    writer.close()


def test_bytes_that_change_in_a_holder_are_found_and_computed_again(store: tuple[Program, Program]) -> None:
    check_flips(store, num_prompts=4)


@pytest.mark.full
def test_a_thousand_bytes_that_change_are_found(store: tuple[Program, Program]) -> None:
    check_flips(store, num_prompts=100)


def test_what_was_damaged_is_written_again(store: tuple[Program, Program]) -> None:
    first = StoreRig(store[1].address)
    refill(first, 1)
    assert flip(store[1].pid, 1) >= 10
    second = StoreRig(store[1].address)
    serve(second, "a", 1)
    assert second.tier.stats().integrity_failures == 1
    wait_until(lambda: second.written > 0)
    third = StoreRig(store[1].address)
    serve(third, "b", 1)
    assert third.tier.stats().integrity_failures <= 1
    for rig in (first, second, third):
        rig.close()


def test_a_store_without_room_says_so(store: tuple[Program, Program], tmp_path: Path) -> None:
    with run_store(tmp_path, megabytes=16) as (_, holder):
        rig = StoreRig(holder.address, usable=False)
        wait_until(lambda: rig.tier.health.on or (rig.tier.health.cause or NOTHING).reason == STORE_FULL)
        serve(rig, "a", 1)
        rig.close()


def test_a_wrong_address_is_named() -> None:
    rig = StoreRig("127.0.0.1:9", usable=False)
    wait_until(lambda: (rig.tier.health.cause or NOTHING).reason == STORE_UNREACHABLE)
    cause = rig.tier.health.cause
    assert cause is not None
    assert "no mooncake_client answers at 127.0.0.1:9" in cause.message
    assert serve(rig, "a", 1) < 5.0
    rig.close()


def test_the_library_stays_out_of_the_worker(store: tuple[Program, Program]) -> None:
    if "mooncake" in sys.modules:
        pytest.skip("other tests of this process have loaded it, those of the transport")
    rig = StoreRig(store[1].address)
    refill(rig, 1)
    assert "mooncake" not in {name.partition(".")[0] for name in sys.modules}
    assert "mooncake/store.so" not in Path("/proc/self/maps").read_text()
    rig.close()
