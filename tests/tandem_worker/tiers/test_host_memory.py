"""Host memory between a device's and the disk: what the device gives up goes to the host, the host's coldest to the
disk, peers are lent both, and no answer changes. The model notices every wrong block."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tandem_worker.engine.contract import EngineStats, HostStats
from tandem_worker.engine.schedule import idle
from tandem_worker.process.tiers import describe_host, describe_tier

from tests.tandem_worker.engine.history_model import greedy_answer
from tests.tandem_worker.tiers.peer_rig import PeerRig
from tests.tandem_worker.tiers.rig import DiskRig, wait_until


def make_prompt(seed: int, length: int = 41) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(64) for _ in range(length))


def host_stats(rig: Any) -> HostStats:
    host = rig.engine.stats().host
    assert host is not None
    return host


def test_what_the_device_gives_up_comes_back_from_the_host_before_the_disk_is_asked(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, num_blocks=30, host_blocks=200)
    prompts = [make_prompt(seed) for seed in range(8)]
    for number, prompt in enumerate(prompts):
        rig.run(f"a{number}", prompt)
    assert rig.written == 0, "a quarter of the host is not used yet"
    for number, prompt in enumerate(prompts):
        assert rig.run(f"b{number}", prompt) == greedy_answer(prompt, 8)
        assert rig.cached(f"b{number}") == 40
    assert host_stats(rig).blocks_in_total > 40
    assert rig.tier.stats().tokens_read == 0
    rig.close()


def test_the_disk_takes_what_the_host_is_about_to_give_up(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, num_blocks=30, host_blocks=60)
    prompts = [make_prompt(seed) for seed in range(14)]
    for number, prompt in enumerate(prompts):
        rig.run(f"a{number}", prompt)
        wait_until(lambda: not rig.is_due)
    assert 0 < rig.written < 12 * 14, "what the device and the host have is not all written"
    for number, prompt in reversed(list(enumerate(prompts))):
        assert rig.run(f"b{number}", prompt) == greedy_answer(prompt, 8)
        assert rig.cached(f"b{number}") == 40, "from memory, from the host, from the disk, or some of each"
        wait_until(lambda: not rig.is_due)
    assert host_stats(rig).blocks_in_total > 0
    assert rig.tier.stats().tokens_read > 0
    assert host_stats(rig).evictions_total > 0
    rig.close()


def test_at_the_end_everything_passes_through_the_host_to_the_disk(tmp_path: Path) -> None:
    prompts = [make_prompt(seed) for seed in range(6)]
    rig = DiskRig(tmp_path, num_blocks=40, host_blocks=100)
    for number, prompt in enumerate(prompts):
        rig.run(f"a{number}", prompt)
    assert rig.tier.flush(5.0)
    assert rig.written == 12 * 6
    rig.close()
    again = DiskRig(tmp_path, num_blocks=40, host_blocks=100)
    for number, prompt in enumerate(prompts):
        assert again.run(f"b{number}", prompt) == greedy_answer(prompt, 8)
        assert again.cached(f"b{number}") == 40
    assert again.tier.stats().tokens_read == 40 * 6
    again.close()


def test_the_disk_is_fed_from_the_smallest_host_memory_too(tmp_path: Path) -> None:
    """64 MiB are a dozen blocks of a large model."""
    rig = DiskRig(tmp_path, num_blocks=40, host_blocks=12)
    for number in range(6):
        rig.run(f"a{number}", make_prompt(number))
        wait_until(lambda: not rig.is_due)
    assert rig.written > 0
    assert rig.tier.flush(5.0)
    for number in range(3, 6):
        assert rig.run(f"b{number}", make_prompt(number)) == greedy_answer(make_prompt(number), 8)
    rig.close()
    again = DiskRig(tmp_path, num_blocks=40, host_blocks=12)
    for number in range(3, 6):
        assert again.run(f"c{number}", make_prompt(number)) == greedy_answer(make_prompt(number), 8)
        assert again.cached(f"c{number}") == 40
    again.close()


@pytest.mark.parametrize("host_blocks", [0, 100])
def test_at_the_end_what_the_disk_has_hides_nothing_that_it_lacks(
    tmp_path: Path, host_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came from the disk was used last: there is more below it in the device's memory, and further than is looked
    at in one go."""
    monkeypatch.setattr(idle, "_MOST_EXAMINED", 4)
    known, others = make_prompt(0), [make_prompt(seed) for seed in range(1, 4)]
    first = DiskRig(tmp_path, num_blocks=60, host_blocks=host_blocks)
    first.run("a", known)
    assert first.tier.flush(5.0)
    first.close()
    rig = DiskRig(tmp_path, num_blocks=60, host_blocks=host_blocks)
    for number, prompt in enumerate(others):
        rig.run(f"b{number}", prompt)
    rig.run("c", known)
    assert rig.tier.stats().tokens_read == 40
    assert rig.tier.flush(5.0)
    assert rig.written == 12 * 3
    rig.close()


REQUESTS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 50), st.integers(1, 12), st.sampled_from([1, 1, 1, 2]), st.booleans()),
    min_size=2,
    max_size=14,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=REQUESTS,
    num_blocks=st.integers(34, 60),
    host_blocks=st.sampled_from([1, 7, 40]),
    write_through=st.booleans(),
    ahead=st.booleans(),
)
def test_tokens_are_those_without_any_cache(
    tmp_path_factory: pytest.TempPathFactory,
    requests: list[tuple[int, int, int, int, bool]],
    num_blocks: int,
    host_blocks: int,
    write_through: bool,
    ahead: bool,
) -> None:
    """Memories so small that blocks go down and come back all the time, prompts that share beginnings, aborts, and
    several at a time."""
    rig = DiskRig(
        tmp_path_factory.mktemp("disk"),
        num_blocks=num_blocks,
        host_blocks=host_blocks,
        write_through=write_through,
        runs_ahead=ahead,
        scheduler={"max_batch_tokens": 32, "max_running_requests": 6},
    )
    for turn in range(2):
        names: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for index, (seed, length, max_tokens, n, aborts) in enumerate(requests):
            name, prompt = f"{turn}-{index}", make_prompt(seed, length)
            rig.submit(name, prompt, max_tokens, n=n, ignore_eos=True)
            if aborts:
                rig.engine.abort(name)
            else:
                names[name] = prompt, max_tokens, n
        rig.wait()
        for name, (prompt, max_tokens, n) in names.items():
            for choice in range(n):
                assert rig.out.tokens(name, choice) == greedy_answer(prompt, max_tokens)
    host = rig.engine._scheduler.host
    assert host is not None
    wait_until(lambda: rig.engine._scheduler.blocks.num_held == 0)
    rig.close()
    host.blocks.check()
    assert host.blocks.num_held == 0


def test_peers_are_lent_what_the_host_has() -> None:
    prompts = [make_prompt(seed) for seed in range(5)]
    holder, asker = PeerRig("holder", num_blocks=30, host_blocks=200), PeerRig("asker")
    for number, prompt in enumerate(prompts):
        holder.run(f"a{number}", prompt)
    assert host_stats(holder).blocks_stored > 20
    for number, prompt in enumerate(prompts):
        asker.submit(f"b{number}", prompt, kv_source=holder.kv)
        asker.wait()
        assert asker.out.tokens(f"b{number}") == greedy_answer(prompt, 8)
        assert asker.cached(f"b{number}") >= (40 if number < 2 else 28), "of the device's blocks a quarter is lent"
    wait_until(lambda: holder.engine._scheduler.blocks.num_held == 0)
    host = holder.engine._scheduler.host
    assert host is not None
    wait_until(lambda: host.blocks.num_held == 0)
    assert host_stats(holder).blocks_in_total == 0, "giving brings nothing to the device"
    asker.close()
    holder.close()


def test_what_gateways_and_figures_are_told(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path, num_blocks=30, host_blocks=60)
    for number in range(14):
        rig.run(f"a{number}", make_prompt(number))
        wait_until(lambda: not rig.is_due)
    stats: EngineStats = rig.engine.stats()
    tier, host = describe_host(stats), host_stats(rig)
    assert (tier.tier, tier.reason, tier.capacity_tokens) == ("host", None, 240)
    assert tier.tokens_written == 4 * host.blocks_out_total > 240
    assert tier.bytes_written == 64 * host.blocks_out_total
    assert tier.evictions == host.evictions_total > 0
    assert 0 < tier.horizon < stats.kv_eviction_horizon, "the host gives up what was used before"
    told = describe_tier(tier)
    assert (told.tier, told.capacity_tokens, told.horizon) == ("host", 240, tier.horizon)
    rig.close()
