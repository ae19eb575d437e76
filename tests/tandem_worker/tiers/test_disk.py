"""What was computed once is found again on the disk, and tokens are those of an engine without any cache."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tandem_worker.engine.history_model import greedy_answer
from tests.tandem_worker.tiers.rig import KEY, DiskRig, wait_until


def make_prompt(seed: int, length: int = 41) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(64) for _ in range(length))


def test_a_prompt_is_found_after_a_restart(tmp_path: Path) -> None:
    prompt = make_prompt(1)
    first = DiskRig(tmp_path)
    answer = first.run("a", prompt)
    assert first.tier.flush(5.0)
    assert first.written == 12
    first.close()
    second = DiskRig(tmp_path)
    assert second.run("b", prompt) == answer == greedy_answer(prompt, 8)
    assert second.cached("b") == 40
    assert second.tier.stats().tokens_read == 40
    assert second.engine.stats().cached_tokens_total == 40
    second.close()


def test_a_follow_up_finds_the_answer_too(tmp_path: Path) -> None:
    prompt = make_prompt(2, 16)
    first = DiskRig(tmp_path)
    answer = first.run("a", prompt, max_tokens=9)
    first.tier.flush(5.0)
    first.close()
    second = DiskRig(tmp_path)
    follow_up = (*prompt, *answer, 7)
    assert second.run("b", follow_up) == greedy_answer(follow_up, 8)
    assert second.cached("b") == 24
    second.close()


def test_what_memory_gives_up_is_written_before(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, num_blocks=64)
    prompts = [make_prompt(seed) for seed in range(12)]
    for number, prompt in enumerate(prompts):
        rig.run(f"a{number}", prompt)
        wait_until(lambda: not rig.is_due)
    assert rig.written > 0
    wait_until(lambda: rig.engine._scheduler.blocks.num_held == 0)
    for number, prompt in enumerate(prompts):
        assert rig.run(f"b{number}", prompt) == greedy_answer(prompt, 8)
        assert rig.cached(f"b{number}") == 40
        wait_until(lambda: not rig.is_due)
    assert rig.tier.stats().tokens_read > 0
    rig.close()


def test_nothing_is_written_while_memory_suffices(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, num_blocks=64)
    rig.run("a", make_prompt(1))
    rig.close()
    assert rig.written == 0


def test_write_through_waits_for_nothing(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, write_through=True)
    rig.run("a", make_prompt(1))
    wait_until(lambda: rig.written == 12)
    rig.close()


@pytest.mark.parametrize(
    "other", [replace(KEY, revision="r2"), replace(KEY, layout="x"), replace(KEY, model_digest="y"),
              replace(KEY, shard="1"), replace(KEY, format=99)]
)  # fmt: skip
def test_another_key_finds_nothing_and_spoils_nothing(tmp_path: Path, other: object) -> None:
    prompt = make_prompt(1)
    first = DiskRig(tmp_path)
    first.run("a", prompt)
    first.tier.flush(5.0)
    first.close()
    second = DiskRig(tmp_path, key=other)  # type: ignore[arg-type]
    assert second.run("b", prompt) == greedy_answer(prompt, 8)
    assert second.cached("b") == 0
    second.close()


def test_tenants_find_only_their_own(tmp_path: Path) -> None:
    prompt = make_prompt(1)
    first = DiskRig(tmp_path)
    first.run("a", prompt, cache_salt="one")
    first.tier.flush(5.0)
    first.close()
    second = DiskRig(tmp_path)
    for request, salt, cached in (("b", "two", 0), ("c", "", 0), ("d", "one", 40)):
        assert second.run(request, prompt, cache_salt=salt) == greedy_answer(prompt, 8)
        assert second.cached(request) == cached
    second.close()


def test_a_second_worker_is_kept_out(tmp_path: Path) -> None:
    first = DiskRig(tmp_path)
    second = DiskRig(tmp_path, usable=False)
    wait_until(lambda: second.tier.stats().reason == "VolumeInUse")
    assert second.run("a", make_prompt(1)) == greedy_answer(make_prompt(1), 8)
    second.close()
    assert first.tier.health.on
    first.close()


def test_a_disk_that_is_full_gives_up_what_was_used_longest_ago(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, num_blocks=64, size=1 << 20, segment_bytes=16 * 8192, write_through=True)
    capacity = rig.tier.stats().capacity_tokens
    assert 0 < capacity < 1 << 20
    for number in range(60):
        rig.run(f"a{number}", make_prompt(number))
        wait_until(lambda: rig.written >= 12 * (number + 1))  # noqa: B023
    stats = rig.tier.stats()
    assert stats.stored_tokens <= capacity
    assert stats.evictions > 0
    assert stats.horizon > 0
    used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert used <= 1 << 20
    for number in (0, 59):
        assert rig.run(f"b{number}", make_prompt(number)) == greedy_answer(make_prompt(number), 8)
    assert (rig.cached("b0"), rig.cached("b59")) == (0, 40)
    rig.close()


def test_a_prompt_that_is_aborted_while_it_is_loaded_leaves_nothing(tmp_path: Path) -> None:
    first = DiskRig(tmp_path)
    prompts = [make_prompt(seed, 121) for seed in range(3)]
    for number, prompt in enumerate(prompts):
        first.run(f"a{number}", prompt, max_tokens=1)
        first.tier.flush(5.0)
    first.close()
    second = DiskRig(tmp_path)
    for turn in range(30):
        second.submit(f"b{turn}", prompts[turn % 3], max_tokens=1)
        second.engine.abort(f"b{turn}")
    second.wait()
    wait_until(lambda: second.engine._scheduler.blocks.num_held == 0)
    for number, prompt in enumerate(prompts):
        assert second.run(f"c{number}", prompt) == greedy_answer(prompt, 8)
    second.close()


def test_random_work_over_one_folder(tmp_path: Path) -> None:
    """Many requests in a small memory, with restarts: tokens as without any cache, and nothing is left held."""
    rng = random.Random(5)
    conversations = [list(make_prompt(seed, rng.randint(5, 60))) for seed in range(10)]
    for restart in range(4):
        rig = DiskRig(tmp_path, num_blocks=48, size=2 << 20, write_through=restart % 2 == 1)
        for turn in range(30):
            several = rng.sample(conversations, 3)
            for index, conversation in enumerate(several):
                if len(conversation) > 90:
                    del conversation[20:]
                rig.submit(f"{turn}-{index}", conversation, max_tokens=rng.randint(1, 12))
            rig.wait()
            for index, conversation in enumerate(several):
                tokens = rig.out.tokens(f"{turn}-{index}")
                assert tokens == greedy_answer(tuple(conversation), len(tokens))
                conversation.extend(tokens)
                conversation.append(rng.randrange(64))
        if restart % 2 == 0:
            rig.tier.flush(5.0)
        assert rig.tier.stats().integrity_failures == 0
        assert restart == 0 or rig.tier.stats().tokens_read > 0
        rig.close()
