from __future__ import annotations

from pathlib import Path

import pytest
from tandem_worker.engine.execute import memory
from tandem_worker.engine.execute.memory import (
    observe_available_memory,
    plan_gpu_kv_memory,
    plan_max_model_len,
    plan_num_blocks,
)
from tandem_worker.host.errors import StartupError

from tests.tandem_worker.engine.history_model import HistoryModel
from tests.tandem_worker.engine.rig import BLOCK_SIZE, build_config


def test_blocks_fill_the_memory() -> None:
    assert plan_num_blocks(1000, 300) == 3
    with pytest.raises(StartupError, match="one block takes 300") as error:
        plan_num_blocks(500, 300)
    assert error.value.reason == "KVCacheTooSmall"


def test_the_block_space_takes_what_activations_leave() -> None:
    assert plan_gpu_kv_memory(1000, 200) == 760
    assert plan_gpu_kv_memory(1000, 2000) == 0
    assert plan_gpu_kv_memory(1000, None) == 850


@pytest.mark.parametrize(
    ("wanted", "supported", "expected"), [(None, 1000, 160), (None, 100, 100), (50, 100, 50), (160, 1000, 160)]
)
def test_the_longest_request_fits_model_and_block_space(wanted: int | None, supported: int, expected: int) -> None:
    assert plan_max_model_len(wanted, supported, num_blocks=11, block_size=16) == expected


@pytest.mark.parametrize(("wanted", "reason"), [(200, "KVCacheTooSmall"), (2000, "MaxModelLenTooLong")])
def test_a_length_that_cannot_be_kept_is_refused(wanted: int, reason: str) -> None:
    with pytest.raises(StartupError) as error:
        plan_max_model_len(wanted, 1000, num_blocks=11, block_size=16)
    assert error.value.reason == reason


def test_available_memory_is_what_machine_and_cgroup_leave(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert observe_available_memory(tmp_path / "none", meminfo) == 4_096_000
    (tmp_path / "memory.max").write_text("max\n")
    assert observe_available_memory(tmp_path, meminfo) == 4_096_000
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 200000\nactive_file 90000\n")
    assert observe_available_memory(tmp_path, meminfo) == 500_000
    assert observe_available_memory(tmp_path, meminfo, beside_gpu=True) == 590_000


def test_cached_weights_take_nothing_from_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read twice at every start, to be summed and to be copied to the device."""
    config, model = build_config(8, 64, host_blocks=7), HistoryModel()
    assert model.kv_cache_spec(BLOCK_SIZE).bytes_per_block == 64
    monkeypatch.setattr(memory, "observe_available_memory", lambda *, beside_gpu: 512 if beside_gpu else 511)
    assert memory.observe_num_host_blocks(model, config) == 8
