"""A worker's disk tier from its configuration: whose blocks it takes, and what it leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from tandem_api.keys import open_ring
from tandem_api.launch import KVConfig, KVDiskConfig, WorkerConfig
from tandem_worker.host.runtime import Runtime
from tandem_worker.host.vitals import Vitals
from tandem_worker.process.tiers import open_tier
from tandem_worker.tiers.disk import DiskTier

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
    tier = open_tier(rig.engine, configure(folder, revision), digest, runtime)
    assert tier is not None
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
    assert open_tier(rig.engine, build_config(64, 64), "d", runtime) is None
    assert rig.engine._scheduler.hooks.loads is None
    rig.close()
