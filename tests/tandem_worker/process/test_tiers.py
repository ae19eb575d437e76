"""A worker's disk tier from its configuration: whose blocks it takes, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from tandem_api.keys import open_ring
from tandem_api.launch import GroupConfig, KVConfig, KVDiskConfig, KVStoreConfig, Parallelism, WorkerConfig
from tandem_worker.engine.schedule.idle import WatchedCache
from tandem_worker.host.devices import check_host_memory
from tandem_worker.host.environment import observe_pod
from tandem_worker.host.errors import StartupError
from tandem_worker.host.runtime import Runtime
from tandem_worker.host.vitals import Vitals
from tandem_worker.process.build import list_start_steps
from tandem_worker.process.graph import run_steps
from tandem_worker.process.progress import StartProgress
from tandem_worker.process.tiers import Tiers, open_tiers
from tandem_worker.tiers.disk import DiskTier

from tests.mooncake.library import plan_environment
from tests.mooncake.processes import run_store
from tests.tandem_worker.engine.history_model import HistoryModel, greedy_answer
from tests.tandem_worker.engine.rig import BLOCK_SIZE, Rig, build_config
from tests.tandem_worker.tiers.rig import wait_until

PROMPT = tuple(range(41))


def configure(folder: Path, revision: str = "r") -> WorkerConfig:
    config = build_config(64, 64)
    disk = KVDiskConfig(path=str(folder), size_bytes=64 << 20)
    return config.model_copy(
        update={"revision": revision, "kv": KVConfig(memory_bytes=1 << 20, block_size=BLOCK_SIZE, disk=disk)}
    )


def open_worker(folder: Path, *, digest: str = "d", revision: str = "r") -> tuple[Rig, DiskTier]:
    model = HistoryModel()
    rig = Rig(model, 64, model_digest=digest)  # type: ignore[arg-type]
    rig.engine._scheduler.hooks.prefill_rate = lambda: 1.0
    runtime = Runtime(host="127.0.0.1", peers=open_ring, api=open_ring, vitals=Vitals())
    tiers = open_tiers(rig.engine, configure(folder, revision), observe_pod({"POD_NAME": "w-0"}), digest, runtime)
    assert tiers is not None
    assert tiers.disk is not None
    tier = tiers.disk
    wait_until(lambda: tier.health.on)
    return rig, tier


def ask(rig: Rig, request_id: str) -> int:
    """Tokens that were not computed."""
    assert rig.run(request_id, PROMPT) == greedy_answer(PROMPT, 8)
    return rig.out.last(request_id).num_cached_tokens


@pytest.mark.parametrize(
    ("digest", "revision", "found"), [("d", "r", 40), ("d", "canary", 0), ("other weights", "r", 0)]
)
def test_the_next_worker_of_the_same_build_finds_the_blocks(
    tmp_path: Path, digest: str, revision: str, found: int
) -> None:
    rig, tier = open_worker(tmp_path)
    assert ask(rig, "a") == 0
    assert tier.flush(5.0)
    tier.close()
    rig.close()
    rig, tier = open_worker(tmp_path, digest=digest, revision=revision)
    assert ask(rig, "b") == found
    tier.close()
    rig.close()


def test_without_a_disk_there_is_no_tier() -> None:
    model = HistoryModel()
    rig = Rig(model, 64)  # type: ignore[arg-type]
    runtime = Runtime(host="127.0.0.1", peers=open_ring, api=open_ring, vitals=Vitals())
    assert open_tiers(rig.engine, build_config(64, 64), observe_pod({"POD_NAME": "w-0"}), "d", runtime) is None
    assert rig.engine._scheduler.hooks.loads is None
    rig.close()


@pytest.mark.parametrize("write_through", [False, True])
def test_the_disk_is_fed_from_host_memory_unless_it_is_written_through(tmp_path: Path, write_through: bool) -> None:
    rig = Rig(HistoryModel(), 30, host_blocks=100, model_digest="d")  # type: ignore[arg-type]
    rig.engine._scheduler.hooks.prefill_rate = lambda: 1.0
    config = configure(tmp_path)
    assert config.kv.disk is not None
    disk = config.kv.disk.model_copy(update={"write_through": write_through})
    config = config.model_copy(update={"kv": config.kv.model_copy(update={"disk": disk})})
    runtime = Runtime(host="127.0.0.1", peers=open_ring, api=open_ring, vitals=Vitals())
    tiers = open_tiers(rig.engine, config, observe_pod({"POD_NAME": "w-0"}), "d", runtime)
    assert tiers is not None
    wait_until(lambda: all(tier.health.on for tier in tiers.sinks))
    scheduler = rig.engine._scheduler
    assert scheduler.host is not None
    assert isinstance(scheduler.blocks.cache, WatchedCache) is write_through
    assert isinstance(scheduler.host.blocks.cache, WatchedCache) is not write_through
    ask(rig, "a")
    assert [tier.tier for tier in tiers.stats()] == ["host", "disk"]
    if write_through:
        wait_until(lambda: tiers.stats()[1].tokens_written == 48)
    tiers.flush(5.0)
    assert tiers.stats()[1].tokens_written == 48
    tiers.close()
    rig.close()
    again, tier = open_worker(tmp_path)
    assert ask(again, "b") == 40
    tier.close()
    again.close()


def test_ranks_have_host_memory_and_nothing_below() -> None:
    rig = Rig(HistoryModel(), 30, host_blocks=100)  # type: ignore[arg-type]
    runtime = Runtime(host="127.0.0.1", peers=open_ring, api=open_ring, vitals=Vitals())
    config = build_config(30, 64, 100)
    group = GroupConfig(parallelism=Parallelism(tensor=2))
    config = config.model_copy(update={"group": group, "kv": config.kv.model_copy(update={"peers": True})})
    tiers = open_tiers(rig.engine, config, observe_pod({"POD_NAME": "w-0"}), "d", runtime)
    assert tiers is not None
    assert [tier.tier for tier in tiers.stats()] == ["host"]
    assert rig.engine._scheduler.hooks.loads is None
    tiers.flush(1.0)
    tiers.close()
    rig.close()


def test_a_cpu_has_no_host_memory_below_its_own() -> None:
    check_host_memory(0, "cpu")
    check_host_memory(1 << 30, "cuda")
    with pytest.raises(StartupError, match="computes on a CPU, whose blocks are in host memory already") as told:
        check_host_memory(1 << 30, "cpu")
    assert told.value.reason == "HostMemoryOnCPU"
    config = build_config(30, 64, 100).model_copy(update={"device": "CPU"})
    runtime, progress = Runtime(host="127.0.0.1", peers=open_ring, api=open_ring, vitals=Vitals()), StartProgress()
    steps = list_start_steps(config, observe_pod({"POD_NAME": "w-0"}), runtime, progress)
    with pytest.raises(StartupError, match=r"leave it out, and give spec\.kv\.memory"):
        run_steps([step for step in steps if step.name in {"libraries", "device"}], progress)


@pytest.mark.usefixtures("loopback_alone")
def test_a_disk_and_a_store_both_get_what_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many blocks that become idle together the disk takes more at a time than the store has room for."""
    prompt = tuple(number * number % 61 for number in range(401))
    for name, value in plan_environment().items():
        monkeypatch.setenv(name, value)
    runtime = Runtime(host="127.0.0.1", peers=open_ring, api=open_ring, vitals=Vitals())
    with run_store(tmp_path) as (_, holder):

        def open_both(folder: str) -> tuple[Rig, Tiers]:
            model = HistoryModel()
            rig = Rig(model, 1024)  # type: ignore[arg-type]
            rig.engine._scheduler.hooks.prefill_rate = lambda: 1.0
            config = configure(tmp_path / folder, "r")
            kv = config.kv.model_copy(update={"store": KVStoreConfig(port=holder.port)})
            config = config.model_copy(update={"kv": kv})
            tiers = open_tiers(rig.engine, config, observe_pod({"POD_NAME": "w-0"}), "d", runtime)
            assert tiers is not None
            wait_until(lambda: all(tier.health.on for tier in tiers.sinks), 20.0)
            return rig, tiers

        def close(rig: Rig, tiers: Tiers) -> None:
            cache = rig.engine._scheduler.blocks.cache
            assert isinstance(cache, WatchedCache)
            wait_until(lambda: not cache.is_due and not any(cache._pinned))
            tiers.close()
            rig.close()

        first, tiers = open_both("disk")
        first.run("a", prompt)
        wait_until(lambda: min(each.tokens_written for each in tiers.stats()) >= BLOCK_SIZE * 100)
        close(first, tiers)
        for folder, where in (("disk", 0), ("another", 1)):
            again, tiers = open_both(folder)
            assert again.run("b", prompt) == greedy_answer(prompt, 8)
            assert again.out.last("b").num_cached_tokens == 400
            assert tiers.stats()[where].tokens_read == 400
            close(again, tiers)
