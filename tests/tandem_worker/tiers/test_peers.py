"""What one worker has computed another need not, where it is told of it; tokens are those of an engine without any
cache."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tandem_api.keys import KeyRing
from tandem_worker.engine.lending import MOST_SHARE
from tandem_worker.tiers import peer_link
from tandem_worker.transfer.contract import TransferStats, join_stats

from tests.tandem_worker.engine.history_model import greedy_answer
from tests.tandem_worker.tiers.peer_rig import KEY, SLOT_BYTES, PeerRig
from tests.tandem_worker.tiers.rig import DiskRig, wait_until

MakePeer = Callable[..., PeerRig]


@pytest.fixture
def make_peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePeer]:
    """Workers that let others in however late a busy machine does."""
    monkeypatch.setattr(peer_link, "CONNECT_SECONDS", 15.0)
    rigs: list[PeerRig] = []

    def make(name: str = "", **options: object) -> PeerRig:
        rigs.append(PeerRig(name or f"worker-{len(rigs)}", **options))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def make_prompt(seed: int, length: int = 41) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(64) for _ in range(length))


def test_what_another_worker_has_computed_is_not_computed(make_peer: MakePeer) -> None:
    holder, puller = make_peer(), make_peer()
    prompt = make_prompt(1)
    answer = holder.run("a", prompt)
    assert puller.run("b", prompt, kv_source=holder.kv) == answer == greedy_answer(prompt, 8)
    assert puller.cached("b") == 40
    assert puller.model.num_tokens == 1 + 7  # type: ignore[attr-defined]
    assert puller.source.stats().tokens_read == holder.source.stats().tokens_written == 40
    wait_until(lambda: holder.engine._scheduler.blocks.num_held == 0)


def test_a_tenant_learns_nothing_of_another(make_peer: MakePeer) -> None:
    holder, puller = make_peer(), make_peer()
    prompt = make_prompt(1)
    holder.run("a", prompt, cache_salt="one")
    for number, salt in enumerate(("two", "", "one")):
        assert puller.run(f"b{number}", prompt, kv_source=holder.kv, cache_salt=salt) == greedy_answer(prompt, 8)
        assert puller.cached(f"b{number}") == (40 if salt == "one" else 0)


@pytest.mark.parametrize("other", [{"revision": "canary"}, {"model_digest": "other weights"}])
def test_another_build_is_neither_asked_nor_given_anything(make_peer: MakePeer, other: dict[str, str]) -> None:
    holder, puller = make_peer(key=replace(KEY, **other)), make_peer()
    prompt = make_prompt(1)
    holder.run("a", prompt)
    assert puller.run("b", prompt, kv_source=holder.kv) == greedy_answer(prompt, 8)
    assert puller.cached("b") == 0
    assert holder.source.stats().tokens_written == 0


def test_what_memory_has_given_up_comes_from_the_holders_disk(make_peer: MakePeer, tmp_path: Path) -> None:
    writer = DiskRig(tmp_path, key=KEY, model_digest=KEY.model_digest)
    prompt = make_prompt(1)
    answer = writer.run("a", prompt)
    assert writer.tier.flush(5.0)
    holder, puller = make_peer(below=writer.tier), make_peer()
    holder.run("half", prompt[:21])
    assert puller.run("b", prompt, kv_source=holder.kv) == answer
    assert puller.cached("b") == 40
    (segment,) = (path for path in tmp_path.rglob("*.kv"))
    damaged = bytearray(segment.read_bytes())
    for place in range(len(damaged) - 16 * SLOT_BYTES, len(damaged), SLOT_BYTES):
        damaged[place + 4096] ^= 1
    segment.write_bytes(damaged)
    third = make_peer()
    assert third.run("c", prompt, kv_source=holder.kv) == answer
    assert third.cached("c") == 20
    assert (writer.tier.stats().integrity_failures, third.source.stats().integrity_failures) == (1, 0)
    writer.close()


def test_many_ask_a_popular_worker_at_once(make_peer: MakePeer) -> None:
    """Some may be refused, and compute: nobody fails."""
    holder = make_peer(num_blocks=256)
    prompts = [make_prompt(seed) for seed in range(6)]
    for number, prompt in enumerate(prompts):
        holder.run(f"a{number}", prompt)
    pullers = [make_peer(num_blocks=256) for _ in range(3)]
    for puller in pullers:
        for number, prompt in enumerate(prompts):
            puller.submit(f"b{number}", prompt, kv_source=holder.kv)
    for puller in pullers:
        puller.wait()
        for number, prompt in enumerate(prompts):
            assert puller.out.tokens(f"b{number}") == greedy_answer(prompt, 8)
            assert puller.cached(f"b{number}") == 40
    wait_until(lambda: holder.engine._scheduler.blocks.num_held == 0)


def test_two_workers_have_what_the_other_wants(make_peer: MakePeer) -> None:
    one, two = make_peer(), make_peer()
    first, second = make_prompt(1), make_prompt(2)
    one.run("a", first)
    two.run("a", second)
    one.submit("b", second, kv_source=two.kv)
    two.submit("b", first, kv_source=one.kv)
    for rig, prompt in ((one, second), (two, first)):
        rig.wait()
        assert rig.out.tokens("b") == greedy_answer(prompt, 8)
        assert rig.cached("b") == 40


def test_a_worker_that_is_busy_lends_no_more_than_a_quarter(make_peer: MakePeer) -> None:
    holder, puller = make_peer(num_blocks=48), make_peer()
    prompt = make_prompt(1, 101)
    holder.run("a", prompt)
    assert puller.run("b", prompt, kv_source=holder.kv) == greedy_answer(prompt, 8)
    assert puller.cached("b") == 4 * int(48 * MOST_SHARE)


def test_what_comes_slower_than_computing_is_not_asked_for(make_peer: MakePeer) -> None:
    holder, puller = make_peer(), make_peer(prefill_rate=1e9)
    prompt = make_prompt(1)
    holder.run("a", prompt)
    puller.source._usual.observe(1_000_000, 1.0)  # 1 MB/s: 80 kB take 80 ms
    assert puller.run("b", prompt, kv_source=holder.kv) == greedy_answer(prompt, 8)
    assert (puller.cached("b"), holder.source.stats().tokens_written) == (0, 0)


def test_keys_are_for_blocks_too(make_peer: MakePeer) -> None:
    ours, theirs = (KeyRing(primary="k", keys={"k": bytes([number] * 32)}) for number in (1, 2))
    holder, friend, stranger = (make_peer(ring=lambda ring=ring: ring) for ring in (ours, ours, theirs))
    prompt = make_prompt(1)
    holder.run("a", prompt)
    for puller, cached in ((stranger, 0), (friend, 40)):
        assert puller.run("b", prompt, kv_source=holder.kv) == greedy_answer(prompt, 8)
        assert puller.cached("b") == cached
    assert holder.server.stats().refusals["wrong_proof"] == 1


@pytest.mark.parametrize("wanted", ["Auto", "TCP", "Mooncake"])
def test_who_gives_blocks_away_says_nothing_of_what_orders_move_by(make_peer: MakePeer, wanted: str) -> None:
    given = make_peer().server.stats()
    assert join_stats(given, TransferStats(wanted=wanted)).wanted == wanted


def test_a_worker_that_drains_gives_until_it_ends_and_ends_while_it_lends(
    make_peer: MakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, puller = make_peer(), make_peer()
    prompt = make_prompt(1)
    answer = holder.run("a", prompt)
    holder.engine.drain()
    holder.server.drain()
    assert puller.run("b", prompt, kv_source=holder.kv) == answer
    assert puller.cached("b") == 40
    lent = threading.Event()
    copy = holder.shelf.copy

    def copy_late(*arguments: Any) -> int:
        lent.set()
        time.sleep(0.2)
        return copy(*arguments)

    monkeypatch.setattr(holder.shelf, "copy", copy_late)
    third = make_peer()
    third.submit("c", prompt, kv_source=holder.kv)
    assert lent.wait(60)
    holder.server.close()
    third.wait()
    assert third.out.tokens("c") == answer
    wait_until(lambda: holder.engine._scheduler.blocks.num_held == 0)
