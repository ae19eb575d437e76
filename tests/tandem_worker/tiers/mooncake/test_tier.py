"""What one worker computed another one finds in Mooncake's store, and tokens are those of an engine without any cache.

Master and holder are Mooncake's own processes."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tandem_worker.tiers import written
from tandem_worker.tiers.errors import TierError
from tandem_worker.tiers.format import TierKey

from tests.mooncake.processes import Program, run_store
from tests.tandem_worker.engine.history_model import greedy_answer
from tests.tandem_worker.engine.rig import BLOCK_SIZE
from tests.tandem_worker.tiers.mooncake.rig import StoreRig
from tests.tandem_worker.tiers.rig import KEY, wait_until


def make_prompt(seed: int, length: int = 41) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(64) for _ in range(length))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Program, Program]]:
    with run_store(tmp_path_factory.mktemp("mooncake")) as programs:
        yield programs


@pytest.fixture
def address(store: tuple[Program, Program]) -> str:
    return store[1].address


def test_what_one_worker_computed_another_one_loads(address: str) -> None:
    prompt = make_prompt(1)
    first, second = StoreRig(address), StoreRig(address)
    answer = first.run("a", prompt)
    wait_until(lambda: first.written == 12)
    assert second.run("b", prompt) == answer == greedy_answer(prompt, 8)
    assert second.cached("b") == 40
    assert second.tier.stats().tokens_read == 40
    assert second.engine.stats().cached_tokens_total == 40
    first.close()
    second.close()


def test_it_tells_gateways_how_fast_it_loads_and_for_how_much_its_pod_makes_room(address: str) -> None:
    rig, silent = StoreRig(address, given_bytes=64 << 20), StoreRig(address)
    stats, slot_bytes = rig.tier.stats(), rig.tier._slots.geometry.slot_bytes
    assert stats.tokens_per_second is not None
    assert stats.tokens_per_second > 0
    assert 0.8 * (64 << 20) < stats.capacity_tokens // BLOCK_SIZE * slot_bytes < 0.9 * (64 << 20)
    assert silent.tier.stats().capacity_tokens == 0
    rig.close()
    silent.close()


def test_a_follow_up_finds_the_answer_too(address: str) -> None:
    prompt = make_prompt(2, 16)
    first, second = StoreRig(address), StoreRig(address)
    answer = first.run("a", prompt, max_tokens=9)
    wait_until(lambda: first.written == 6)
    follow_up = (*prompt, *answer, 7)
    assert second.run("b", follow_up) == greedy_answer(follow_up, 8)
    assert second.cached("b") == 24
    first.close()
    second.close()


def test_a_longer_prompt_is_asked_for_though_its_beginning_is_known(address: str) -> None:
    prompt = make_prompt(3, 61)
    first, second = StoreRig(address), StoreRig(address, num_blocks=32)
    second.run("a", prompt[:21])
    wait_until(lambda: second.written >= 5)
    first.run("a", prompt)
    wait_until(lambda: first.written >= 10)
    for seed in range(100, 104):
        second.run(f"other{seed}", make_prompt(seed))  # memory gives the beginning up
    wait_until(lambda: second.engine._scheduler.blocks.num_held == 0)
    assert second.run("b", prompt) == greedy_answer(prompt, 8)
    assert second.cached("b") == 60
    first.close()
    second.close()


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, revision="r2"),
        replace(KEY, layout="x"),
        replace(KEY, model_digest="y"),
        replace(KEY, shard="1"),
        replace(KEY, format=99),
    ],
    ids=["revision", "layout", "digest", "shard", "format"],
)
def test_workers_of_another_key_meet_nowhere(address: str, other: TierKey) -> None:
    prompt = make_prompt(int.from_bytes(other.digest[:4], "big"))
    first, second = StoreRig(address), StoreRig(address, key=other)
    first.run("a", prompt)
    wait_until(lambda: first.written == 12)
    assert second.run("b", prompt) == greedy_answer(prompt, 8)
    assert second.cached("b") == 0
    assert second.tier.stats().integrity_failures == 0
    first.close()
    second.close()


def test_tenants_meet_nowhere(address: str) -> None:
    prompt = make_prompt(5)
    first, second = StoreRig(address), StoreRig(address)
    first.run("a", prompt, cache_salt="one")
    wait_until(lambda: first.written == 12)
    second.run("b", prompt, cache_salt="two")
    assert second.cached("b") == 0
    second.run("c", prompt, cache_salt="one")
    assert second.cached("c") == 40
    first.close()
    second.close()


def test_many_at_once_get_right_answers_and_load_what_they_share_once(address: str) -> None:
    prompts = [(*make_prompt(6), seed) for seed in range(12)]
    first, second = StoreRig(address), StoreRig(address, num_blocks=400)
    first.run("a", prompts[0])
    wait_until(lambda: first.written == 12)
    for number, prompt in enumerate(prompts):
        second.submit(f"b{number}", prompt)
    second.wait()
    for number, prompt in enumerate(prompts):
        assert second.out.tokens(f"b{number}") == greedy_answer(prompt, 8)
    assert second.tier.stats().tokens_read == 40
    first.close()
    second.close()


def test_a_worker_that_ends_writes_what_is_left(address: str) -> None:
    prompt = make_prompt(7)
    first = StoreRig(address)
    first.run("a", prompt)
    assert first.tier.flush(10.0)
    assert first.written == 12
    first.close()
    second = StoreRig(address)
    second.run("b", prompt)
    assert second.cached("b") == 40
    second.close()


def test_what_would_be_late_is_not_waited_for(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing is taken to be so fast that a look-up is cut after 10 ms, and no answer comes."""
    monkeypatch.setattr(written, "is_slow", lambda *_: False)  # which it is, where the machine is busy
    rig = StoreRig(address, prefill_rate=1e4)
    pid = rig.tier.helper_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    prompt = make_prompt(8)
    assert rig.run("a", prompt) == greedy_answer(prompt, 8)
    assert rig.cached("a") == 0
    assert rig.tier.stats().loads_cut == 1
    rig.close()


def test_one_that_is_off_has_nothing_and_takes_nothing(address: str) -> None:
    rig = StoreRig(address, retry_seconds=1000.0)
    rig.tier.health.fail(TierError("StoreFailed", "for a test"))
    prompt = make_prompt(9)
    assert rig.run("a", prompt) == greedy_answer(prompt, 8)
    stats = rig.tier.stats()
    assert (stats.tier, stats.reason) == ("store", "StoreFailed")
    assert stats.message.startswith("for a test (since ")
    assert not rig.tier.wants_blocks
    assert rig.written == 0
    rig.close()
