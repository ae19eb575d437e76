"""Holder and master run with what the operator gives them in pods, in one network and without images."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from operator_objects import blueprint
from tandem_api import names
from tandem_api.names import Role
from tandem_operator.objects.manifests import Manifest
from tandem_operator.workloads.store import build_holder, build_store, master_address

from tests.mooncake.library import plan_environment
from tests.tandem_worker.tiers.mooncake.rig import StoreRig
from tests.tandem_worker.tiers.mooncake.test_faults import refill, serve
from tests.tandem_worker.tiers.rig import wait_until


@contextlib.contextmanager
def run(container: Manifest, places: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A container's process; `places`: what stands here for what a pod has."""

    def here(text: str) -> str:
        for pods, ours in places.items():
            text = text.replace(pods, ours)
        return text

    assert container["command"][3] == "python3"
    command = [sys.executable, *container["command"][4:], *map(here, container["args"])]
    settings = {each["name"]: here(each["value"]) for each in container.get("env", []) if "value" in each}
    with subprocess.Popen(command, env=plan_environment() | settings, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()
        assert process.wait(60) == 0


@pytest.mark.usefixtures("module_on_loopback_alone")
def test_what_the_operator_asks_for_runs(tmp_path: Path) -> None:
    plan = blueprint(kv={"store": {"memory": "64Mi", "disk": "128Mi"}})
    (master,) = build_store(plan)[1]["spec"]["template"]["spec"]["containers"]
    (holder,) = build_holder(plan, Role.UNIFIED)
    disk, notes = tmp_path / "disk", tmp_path / "notes"
    disk.mkdir()
    places = {"$(POD_IP)": "127.0.0.1", names.STORE_DISK_PATH: str(disk), names.STORE_NOTES_PATH: str(notes)}
    # Both are in one network here: the holder's health is asked at another port than the master's.
    places |= {str(master_address(plan)): f"127.0.0.1:{names.STORE_MASTER_PORT}"}
    apart = {str(names.STORE_HEALTH_PORT): "50054", names.STORE_NOTES_PATH: str(tmp_path / "master")}
    with run(master, places | apart), run(holder, places):
        rig = StoreRig(f"127.0.0.1:{names.STORE_CLIENT_PORT}", notes=notes)
        refill(rig, 1)
        other = StoreRig(f"127.0.0.1:{names.STORE_CLIENT_PORT}")
        serve(other, "a", 1)
        assert other.cached("a") == 40
        wait_until((notes / "alive").exists)
        (file,) = disk.glob("*.data")
        assert file.stat().st_size <= 120 << 20
        assert file.stat().st_blocks * 512 >= file.stat().st_size
        other.close()
        rig.close()
