"""Whatever a holder does, no stream fails and no token is another; what was damaged is found and counted."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tandem_api.telemetry import MAX_ADDRESS, MAX_FAILING
from tandem_worker.engine.tiers import LoadOrder
from tandem_worker.process.tiers import describe_tier
from tandem_worker.tiers import peer_link
from tandem_worker.tiers.book import Load
from tandem_worker.tiers.peers import find_failing
from tandem_worker.tiers.stats import TierStats

from tests.ports import free_port
from tests.tandem_worker.engine.history_model import greedy_answer
from tests.tandem_worker.tiers import peer_rig
from tests.tandem_worker.tiers.peer_rig import SLOT_BYTES, Middle, PeerRig
from tests.tandem_worker.tiers.rig import wait_until
from tests.tandem_worker.tiers.test_peers import MakePeer, make_peer, make_prompt

__all__ = ["make_peer"]

HEAD_BYTES = 36
"""Before the blocks of a frame, of which there are two."""


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks at a time."""
    monkeypatch.setattr("tandem_worker.tiers.wire.PIECE_BYTES", 2 * SLOT_BYTES)


@contextmanager
def between(holder: PeerRig, alter: Callable[[bytes, int], bytes | None]) -> Iterator[Middle]:
    middle = Middle(holder, alter)
    try:
        yield middle
    finally:
        middle.close()


def flip_at(place: int) -> Callable[[bytes, int], bytes]:
    def alter(data: bytes, offset: int) -> bytes:
        if not offset <= place < offset + len(data):
            return data
        flipped = bytearray(data)
        flipped[place - offset] ^= 1 << place % 8
        return bytes(flipped)

    return alter


def test_a_flipped_bit_is_found_counted_and_computed_again(make_peer: MakePeer) -> None:
    """The blocks before it stay."""
    holder, puller = make_peer(), make_peer()
    prompt = make_prompt(1)
    answer = holder.run("a", prompt)
    for number, block in enumerate((0, 3, 9)):
        # A prompt of its own in each round, which shares nothing.
        prompt = make_prompt(10 + number)
        answer = holder.run(f"a{number}", prompt)
        with between(holder, flip_at(HEAD_BYTES + 4096 + block * (SLOT_BYTES + HEAD_BYTES // 2) + number)) as middle:
            assert puller.run(f"b{number}", prompt, kv_source=middle.endpoint) == answer == greedy_answer(prompt, 8)
            assert puller.cached(f"b{number}") == block * 4
        assert puller.source.stats().integrity_failures == number + 1
    assert puller.source.stats().tokens_read > 0


def test_a_holder_that_dies_in_the_middle_is_done_without(make_peer: MakePeer) -> None:
    holder, puller = make_peer(), make_peer()
    prompt = make_prompt(1)
    answer = holder.run("a", prompt)
    cut = 5 * SLOT_BYTES

    def alter(data: bytes, offset: int) -> bytes | None:
        return data if offset + len(data) < cut else data[: max(0, cut - offset)] or None

    with between(holder, alter) as middle:
        assert puller.run("b", prompt, kv_source=middle.endpoint) == answer
    assert 8 <= puller.cached("b") < 40
    wait_until(lambda: holder.engine._scheduler.blocks.num_held == 0)


def test_a_frozen_holder_is_cut_and_left_alone(make_peer: MakePeer) -> None:
    now = [0.0]
    holder, puller = make_peer(), make_peer(clock=lambda: now[0])
    prompt, other = make_prompt(1), make_prompt(2)
    answer = holder.run("a", prompt)
    thaw, asked = threading.Event(), threading.Event()

    def alter(data: bytes, offset: int) -> bytes:
        asked.set()
        thaw.wait(60)
        return data

    with between(holder, alter) as middle:
        puller.submit("b", prompt, kv_source=middle.endpoint)
        assert asked.wait(60)
        now[0] = 1e6  # far later than computing would be
        puller.wait()
        assert puller.out.tokens("b") == answer
        assert (puller.cached("b"), puller.source.stats().loads_cut) == (0, 1)
        wait_until(lambda: puller.source._records[middle.endpoint].failures == 1)
        assert puller.run("c", other, kv_source=middle.endpoint) == greedy_answer(other, 8)
        assert (puller.source.stats().loads_cut, middle.connections) == (1, 1)  # nobody has asked it again
        thaw.set()
    wait_until(lambda: holder.engine._scheduler.blocks.num_held == 0)


def test_a_late_one_is_cut_and_what_has_come_stays(make_peer: MakePeer) -> None:
    now = [0.0]
    holder, puller = make_peer(), make_peer(clock=lambda: now[0])
    prompt = make_prompt(1)
    answer = holder.run("a", prompt)
    stop = threading.Event()
    most = 2 * (SLOT_BYTES * 2 + HEAD_BYTES)  # two frames

    def alter(data: bytes, offset: int) -> bytes:
        if offset + len(data) <= most:
            return data
        if offset < most:
            return data[: most - offset]
        stop.wait(60)
        return data

    with between(holder, alter) as middle:
        puller.submit("b", prompt, kv_source=middle.endpoint)
        wait_until(lambda: puller.source.stats().bytes_read == 4 * SLOT_BYTES)
        now[0] = 1e6
        puller.wait()
        assert puller.out.tokens("b") == answer
        assert (puller.cached("b"), puller.source.stats().loads_cut) == (16, 1)
        stop.set()


@pytest.mark.parametrize("seed", range(3))
def test_a_holder_that_talks_nonsense(make_peer: MakePeer, seed: int) -> None:
    rng = random.Random(seed)
    holder, puller = make_peer(), make_peer()
    prompt = make_prompt(seed)
    answer = holder.run("a", prompt)

    def alter(data: bytes, offset: int) -> bytes:
        return rng.randbytes(len(data))

    with between(holder, alter) as middle:
        assert puller.run("b", prompt, kv_source=middle.endpoint) == answer
    assert puller.cached("b") == 0
    assert puller.source.stats().integrity_failures == 1


def test_a_holder_that_is_closed_ends_nothing_but_its_gifts(make_peer: MakePeer) -> None:
    holder, puller = make_peer(), make_peer()
    first, second = make_prompt(1), make_prompt(2)
    holder.run("a", first)
    holder.run("b", second)
    assert puller.run("c", first, kv_source=holder.kv) == greedy_answer(first, 8)
    holder.server.close()
    assert puller.run("d", second, kv_source=holder.kv) == greedy_answer(second, 8)
    assert (puller.cached("c"), puller.cached("d")) == (40, 0)


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(make_peer: MakePeer) -> None:
    holder, puller = make_peer(), make_peer()
    prompt = make_prompt(1)
    holder.run("a", prompt)
    gate = threading.Event()

    def alter(data: bytes, offset: int) -> bytes:
        gate.wait(60)
        return data

    with between(holder, alter) as middle:
        puller.submit("b", prompt, kv_source=middle.endpoint)
        wait_until(lambda: bool(puller.engine._scheduler.queues.loading))
        puller.engine.abort("b")
        puller.wait()
        gate.set()
    assert puller.engine._scheduler.blocks.num_held == 0
    assert puller.run("c", prompt) == greedy_answer(prompt, 8)


def test_who_has_failed_is_asked_again_after_a_while() -> None:
    record = peer_link.PeerRecord()
    pauses = []
    for _ in range(9):
        record.note_failure("gone", 100.0)
        pauses.append(record.retry_at - 100.0)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    record.note_success(150.0)
    record.note_failure("gone", 200.0)
    assert record.retry_at == 201.0


def make_record(failures: int, at: float, *, is_well: bool = False) -> peer_link.PeerRecord:
    record = peer_link.PeerRecord()
    record.note_success(at)
    for _ in range(failures):
        record.note_failure("refused", at, is_well=is_well)
    return record


def test_who_declines_is_there() -> None:
    """One that is late after it has declined twice has failed once."""
    record = make_record(2, 100.0, is_well=True)
    for failing in (False, False, True):
        record.note_failure("late", 100.0)
        assert record.is_failing() is failing
    record.note_failure("too many", 100.0, is_well=True)
    assert not record.is_failing()


def test_those_that_wait_behind_one_that_fails_are_no_further_failures(make_peer: MakePeer) -> None:
    """A holder that is away for a moment while many wait for it is left alone for a second, not for a minute."""
    record, reported, tried = peer_link.PeerRecord(), list[Load](), list[Load]()
    link = peer_link.PeerLink(
        "a", record, make_peer().terms, reported.append, lambda *_: None, lambda: None, lambda: 100.0
    )

    def fail(load: Load) -> None:
        tried.append(load)
        raise ConnectionRefusedError("gone")

    link._fetch = fail  # type: ignore[method-assign]
    for number in range(8):
        assert link.submit(Load(LoadOrder(load=number, names=(b"",), block_ids=(0,), seconds_per_block=1.0), 100.0))
    thread = threading.Thread(target=link.run)
    thread.start()
    wait_until(lambda: len(reported) == 8)
    link.close()
    thread.join(60)
    assert (len(tried), record.failures, record.retry_at, record.queued_bytes) == (1, 1, 101.0, 0)


@pytest.mark.parametrize(
    ("records", "failing", "retry_at"),
    [
        ({}, {}, None),
        ({"a": make_record(0, 100.0)}, {}, None),
        ({"a": make_record(2, 100.0)}, {}, None),  # the next one may do
        ({"a": make_record(3, 100.0)}, {"a": "refused"}, 104.0),
        ({"b": make_record(3, 100.0), "a": make_record(4, 99.0)}, {"a": "refused", "b": "refused"}, 104.0),
        ({"a": make_record(9, 100.0, is_well=True)}, {}, None),  # it answers, and has other things to do
        ({"b": make_record(3, 100.0), "a": make_record(0, 100.0)}, {"b": "refused"}, None),
        ({"b": make_record(3, 100.0), "a": make_record(0, 39.0)}, {"b": "refused"}, 104.0),  # asked long ago
        ({"b": make_record(3, 35.0), "a": make_record(0, 100.0)}, {}, None),
        ({"a": make_record(9, 0.0)}, {"a": "refused"}, 60.0),  # nobody could ask it meanwhile
        ({"a": make_record(3, -9e6)}, {"a": "refused"}, -9e6 + 4),  # nobody has asked since, and nobody has given
        ({"b": make_record(3, -9e6), "a": make_record(0, -8e6)}, {}, None),
        ({"b": make_record(3, -9e6), "a": make_record(1, -8e6)}, {}, None),
        ({"b": make_record(3, -9e6), "a": make_record(3, -8e6)}, {"a": "refused"}, -8e6 + 4),
    ],
)
def test_who_fails_again_and_again_is_told(
    records: dict[str, peer_link.PeerRecord], failing: dict[str, str], retry_at: float | None
) -> None:
    assert find_failing(records, 100.0) == (failing, retry_at)


@pytest.mark.parametrize(
    ("failing", "told"),
    [
        ([f"10.0.{number // 256}.{number % 256}:8003" for number in range(1024)], MAX_FAILING),
        (["x" * 295 + ":8003"] * 3, 3),
        (["x" * 295 + ":8003"] * 1024, 7),
    ],
)
def test_whoever_is_asked_in_vain_a_sample_stays_small(failing: list[str], told: int) -> None:
    """A rollout of many workers, and requests that name whom they like."""
    tier = describe_tier(TierStats(tier="peer", failing=tuple(failing)))
    assert tier.failing == [address[:MAX_ADDRESS] for address in failing[:told]]
    assert len(tier.to_json()) < 2300


@pytest.mark.parametrize(
    ("gave_at", "retry_at"),
    [
        (99.0, 160.0),
        (110.0, None),  # while the other one failed
        (156.0, None),  # lately
    ],
)
def test_one_that_is_asked_seldom_counts_until_it_fails(gave_at: float, retry_at: float | None) -> None:
    """What is told must not change each time that a minute has passed without a word of the one that is well."""
    records = {"a": make_record(0, gave_at), "b": make_record(9, 100.0)}
    assert find_failing(records, 215.0) == ({"b": "refused"}, retry_at)
    records["a"] = make_record(1, 150.0)  # which did not come to anything either, and was long ago
    assert find_failing(records, 215.0) == ({"b": "refused"}, 160.0)
    records["a"] = make_record(3, 214.0)
    assert find_failing(records, 215.0) == ({"a": "refused", "b": "refused"}, 160.0)


def test_that_nobody_gives_is_told_on_while_others_are_asked_that_give_nothing_either() -> None:
    """Gateways name one after another: each would be unknown until it has failed as often as the first."""
    records, now = {"a": make_record(3, 100.0)}, 101.0
    records["a"].answered_at = float("-inf")
    for name in ("b", "c"):
        records[name] = peer_link.PeerRecord()
        for _ in range(peer_link.FAILING):
            now += 10.0
            records[name].note_failure("refused", now)
            failing, retry_at = find_failing(records, now)
            assert "a" in failing
            assert retry_at is not None
            assert retry_at <= records[name].retry_at, "it may be asked again sooner than those that have failed longer"
    records["b"].note_success(now)
    assert find_failing(records, now)[1] is None


def test_one_that_gives_a_part_before_it_is_late_gives(make_peer: MakePeer) -> None:
    record, reported = peer_link.PeerRecord(), list[Load]()
    for _ in range(peer_link.FAILING):
        record.note_failure("late", 90.0)
    link = peer_link.PeerLink(
        "a", record, make_peer().terms, reported.append, lambda *_: None, lambda: None, lambda: 100.0
    )

    def give_a_part(load: Load) -> None:
        load.valid, load.ended = 1, True
        link._check(load)

    link._fetch = give_a_part  # type: ignore[method-assign]
    link._try(Load(LoadOrder(load=1, names=(b"", b""), block_ids=(0, 1), seconds_per_block=1.0), 100.0))
    assert find_failing({"a": record}, 100.0) == ({}, None)


def test_a_worker_tells_of_those_that_cannot_be_reached_until_one_can(make_peer: MakePeer) -> None:
    now = [0.0]
    holder, puller = make_peer(), make_peer(clock=lambda: now[0])
    nobody = f"127.0.0.1:{free_port()}"
    for number in range(peer_link.FAILING):
        assert puller.source.stats().reason is None
        prompt = make_prompt(number)
        assert puller.run(f"a{number}", prompt, kv_source=nobody) == greedy_answer(prompt, 8)
        wait_until(lambda number=number: puller.source._records[nobody].failures == number + 1)
        now[0] = puller.source._records[nobody].retry_at
    stats = puller.source.stats()
    assert (stats.reason, stats.message.startswith(f"{nobody}: ")) == ("PeersFailing", True)
    assert stats.failing == (nobody,)
    assert stats.tokens_per_second == 0.0, "it may be asked again, and gateways name it"
    now[0] -= 0.1
    assert (puller.source.stats().reason, puller.source.stats().tokens_per_second) == ("PeersFailing", None)
    now[0] += 0.1
    prompt = make_prompt(10)
    holder.run("b", prompt)
    puller.run("c", prompt, kv_source=holder.kv)
    assert puller.cached("c") == 40
    wait_until(lambda: puller.source.stats().reason is None)
    assert puller.source.stats().message.startswith(f"{nobody}: "), "it is still one of those that were asked lately"
    now[0] += peer_link.STALE_SECONDS + 1
    assert (puller.source.stats().reason, puller.source.stats().message) == (None, "")


@pytest.mark.parametrize(
    ("measured_at", "usual", "seconds"),
    [(float("-inf"), None, 0.0), (float("-inf"), 1e6, 1.0), (30.0, 1e6, 0.5 + 4.0), (-70.0, 1e6, 1.0)],
)
def test_what_is_measured_counts_for_a_minute(measured_at: float, usual: float | None, seconds: float) -> None:
    record = peer_link.PeerRecord()
    record.meter.observe(500_000, 1.0)
    record.latency, record.measured_at, record.queued_bytes = 0.5, measured_at, 1_000_000
    assert record.predict(1_000_000, usual, 40.0) == seconds
    assert peer_rig.KEY.shard == "whole"


def spoil(seed: int, holder: PeerRig, puller: PeerRig) -> None:
    """A bit flipped, bytes cut out, or two blocks exchanged, anywhere in what the holder sends: the answer is right."""
    rng = random.Random(seed)
    prompt = make_prompt(1000 + seed)
    holder.run(f"a{seed}", prompt, max_tokens=1)
    place, kind = rng.randrange(10 * SLOT_BYTES), rng.randrange(3)

    spoilt: list[int] = []

    def alter(data: bytes, offset: int) -> bytes:
        if not offset <= place < offset + len(data):
            return data
        spoilt.append(place)
        if kind == 0:
            return flip_at(place)(data, offset)
        if kind == 1:
            return data[: place - offset] + data[place - offset + 1 + rng.randrange(64) :]
        half = len(data) // 2
        return data[half:] + data[:half]

    found = puller.source.stats().integrity_failures, puller.source.stats().loads_cut
    with between(holder, alter) as middle:
        assert puller.run(f"b{seed}", prompt, kv_source=middle.endpoint) == greedy_answer(prompt, 8)
    if spoilt and puller.cached(f"b{seed}") < 40:  # else it took computing to be sooner, or padding was hit
        now = puller.source.stats()
        assert (now.integrity_failures, now.loads_cut) != found


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_spoilt_no_token_is_another(make_peer: MakePeer, seed: int) -> None:
    spoil(seed, make_peer(num_blocks=512), make_peer(num_blocks=512, prefill_rate=2000.0))


@pytest.mark.full
def test_a_thousand_flips_cuts_and_exchanges(make_peer: MakePeer) -> None:
    holder, puller = make_peer(num_blocks=512), make_peer(num_blocks=512, prefill_rate=2000.0)
    for seed in range(1000):
        spoil(seed, holder, puller)
    assert puller.source.stats().integrity_failures > 100


def test_who_gave_what_it_could_in_the_time_there_was_is_asked_again(
    make_peer: MakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt over a slow network takes longer than a fetch may."""
    monkeypatch.setattr("tandem_worker.transfer.protocol.MAX_FETCH_SECONDS", 2.0)
    monkeypatch.setattr("tandem_worker.transfer.fetches.MAX_FETCH_SECONDS", 2.0)
    monkeypatch.setattr("tandem_worker.transfer.channel._MAX_BURST_BYTES", 1)
    holder, puller = make_peer(), make_peer()
    prompt = make_prompt(1)
    answer = holder.run("a", prompt)
    copy = holder.shelf.copy

    def copy_slowly(*arguments: Any) -> int:
        time.sleep(0.8)
        return copy(*arguments)

    monkeypatch.setattr(holder.shelf, "copy", copy_slowly)
    assert puller.run("b", prompt, kv_source=holder.kv) == answer
    assert 8 <= puller.cached("b") < 40
    (record,) = puller.source._records.values()
    assert (record.failures, record.message) == (0, "")
