"""A master that is killed has another one that stands by: both are known to an etcd, where holders look."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mooncake.processes import build_holder, build_master, find_etcd, run_etcd
from tests.tandem_worker.tiers.mooncake.rig import StoreRig
from tests.tandem_worker.tiers.mooncake.test_faults import check_found, refill, serve
from tests.tandem_worker.tiers.rig import wait_until


@pytest.mark.full
def test_the_next_master_is_found_by_etcd(tmp_path: Path) -> None:
    program = find_etcd()
    if program is None:
        pytest.skip("there is no etcd: `make cluster` builds one")
    with run_etcd(program, tmp_path) as etcd:
        leader = build_master(tmp_path, etcd=etcd)
        after = build_master(tmp_path, etcd=etcd, stands_by=True)
        holder = build_holder(tmp_path, f"etcd://{etcd}")
        try:
            rig = StoreRig(holder.address)
            refill(rig, 1)
            leader.kill()
            assert serve(rig, "during", 2) < 5.0
            wait_until(lambda: not rig.tier.health.on)
            wait_until(lambda: rig.tier.health.on)
            refill(rig, 3)
            check_found(holder.address, 3)
            rig.close()
        finally:
            for each in (holder, after, leader):
                each.kill()
