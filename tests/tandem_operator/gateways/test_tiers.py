"""Disks for key-value blocks: the volume, what workers are told, and what is told of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from operator_objects import blueprint
from pydantic import ValidationError
from tandem_api import names
from tandem_api.fleet import FleetReport, WorkerReport
from tandem_api.names import Role
from tandem_api.telemetry import TierTelemetry, WorkerTelemetry
from tandem_operator.gateways.fleet import _newest_samples, _tiers
from tandem_operator.gateways.tiers import forget_gone, has_tiers, tiers_condition
from tandem_operator.workloads import Blueprint
from tandem_operator.workloads.configs import build_config_map, worker_config
from tandem_operator.workloads.workers import build_stateful_set

DISK = {"size": "10Gi", "writeThrough": True, "maxDailyWrites": "1Ti"}


def with_disk(disk: dict[str, Any] | None = None, **spec: Any) -> Blueprint:
    return blueprint(kv={"disk": DISK if disk is None else disk}, **spec)


def test_every_worker_has_a_volume_of_its_own() -> None:
    plan = with_disk(prefill={})
    for role in plan.worker_roles:
        config = worker_config(plan, role)
        disk = config.kv.disk
        assert disk is not None
        assert (disk.path, disk.size_bytes, disk.write_through, disk.max_daily_writes) == (
            names.KV_DISK_PATH, 10 << 30, True, 1 << 40,
        )  # fmt: skip
        pod = build_stateful_set(plan, role, build_config_map(plan, role, config))["spec"]["template"]["spec"]
        assert {"name": "kv", "emptyDir": {"sizeLimit": "10Gi"}} in pod["volumes"]
        assert {"name": "kv", "mountPath": names.KV_DISK_PATH} in pod["containers"][0]["volumeMounts"]


def test_without_a_disk_nothing_is_as_it_was_not() -> None:
    assert worker_config(blueprint(), Role.UNIFIED).kv.disk is None


def test_peers_are_for_workers_of_one_rank_and_restart_nobody_where_they_are_off() -> None:
    plan = blueprint(kv={"peers": "Auto"}, prefill={}, decode={"parallelism": {"tensor": 2}})
    assert worker_config(plan, Role.PREFILL).kv.peers
    assert not worker_config(plan, Role.DECODE).kv.peers
    assert "peers" not in worker_config(blueprint(), Role.UNIFIED).set_json()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"kv": {"disk": {"size": "1Gi"}, "memory": "1Gi"}}, "larger than kv.memory"),
        ({"kv": {"disk": {"size": "1Gi"}}, "decode": {"parallelism": {"tensor": 2}}}, "workers of one rank"),
        ({"kv": {"disk": {"size": "1Gi"}}, "engine": {"kind": "VLLM"}}, "kv.disk is of Tandem's own engine"),
        ({"kv": {"disk": {}}}, "size"),
        ({"kv": {"disk": {"size": "1Gi", "storageClassName": "fast"}}}, "storageClassName"),
    ],
)
def test_what_makes_no_sense_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        blueprint(**spec)


def tell(reason: str | None, message: str = "") -> TierTelemetry:
    return TierTelemetry(tier="disk", reason=reason, message=message)


@pytest.mark.parametrize(
    ("tiers", "status", "reason", "words"),
    [
        ({}, "Unknown", "DisksNotSeen", "no worker has told"),
        ({"a": tell(None), "b": tell("Starting")}, "Unknown", "DisksNotSeen", "still looking"),
        ({"a": tell(None), "b": tell(None)}, "True", "DisksInUse", "2 workers"),
        (
            {"b": tell("VolumeFull", "no space left"), "a": tell(None), "c": tell("Starting")},
            "False",
            "VolumeFull",
            "1 of 3 workers have switched off .* b: no space left",
        ),
        (
            {f"w{number}": tell("VolumeGone", "gone") for number in range(9)},
            "False",
            "VolumeGone",
            "w0: gone; w1: gone; w2: gone and 6 more",
        ),
    ],
)
def test_the_condition_says_what_workers_say(
    tiers: dict[str, TierTelemetry], status: str, reason: str, words: str
) -> None:
    (condition,) = tiers_condition(with_disk(), tiers, {})
    assert (condition.type, condition.status, condition.reason) == ("KVTiersReady", status, reason)
    assert re.search(words, condition.message)


def test_nothing_is_said_where_no_disk_is_asked_for_or_nobody_serves() -> None:
    told = {"a": tell("VolumeFull")}
    assert tiers_condition(blueprint(), told, told) == []
    assert tiers_condition(with_disk(suspend=True), {}, {}) == []
    assert not has_tiers(with_disk(suspend=True))
    assert has_tiers(with_disk())
    group = blueprint(kv={"peers": "Auto"}, decode={"parallelism": {"tensor": 2}})
    assert tiers_condition(group, {}, {}) == [], "workers of several ranks ask nobody"


def tell_peers(reason: str | None, message: str = "") -> TierTelemetry:
    return TierTelemetry(tier="peer", reason=reason, message=message)


@pytest.mark.parametrize(
    ("peers", "status", "reason", "words"),
    [
        ({}, "Unknown", "PeersNotSeen", "no worker has told"),
        ({"a": tell_peers(None), "b": tell_peers(None)}, "True", "PeersInUse", "2 workers give each other blocks$"),
        (
            {"a": tell_peers(None), "b": tell_peers(None, "10.0.0.7:7000: refused")},
            "True",
            "PeersInUse",
            "blocks; b gets nothing of 10.0.0.7:7000: refused$",
        ),
        (
            {"a": tell_peers(None), "b": tell_peers("PeersFailing", "10.0.0.7:7000: refused")},
            "False",
            "PeersFailing",
            "^1 of 2 workers get nothing of the workers .* b: 10.0.0.7:7000: refused$",
        ),
        (
            {f"w{number}": tell_peers(None, "10.0.0.7:7000: refused") for number in range(9)},
            "True",
            "PeersInUse",
            "; w2 gets nothing of 10.0.0.7:7000: refused and 6 more$",
        ),
    ],
)
def test_the_condition_says_who_gets_nothing_of_others(
    peers: dict[str, TierTelemetry], status: str, reason: str, words: str
) -> None:
    (condition,) = tiers_condition(blueprint(kv={"peers": "Auto"}), {}, peers)
    assert (condition.type, condition.status, condition.reason) == ("KVTiersReady", status, reason)
    assert re.search(words, condition.message)


@pytest.mark.parametrize(
    ("disk", "peer", "status", "reason", "words"),
    [
        (None, None, "True", "DisksInUse", "the disks of 1 workers are in use; 1 workers give each other blocks"),
        ("VolumeFull", None, "False", "VolumeFull", "^1 of 1 workers have switched off the disk"),
        (None, "PeersFailing", "False", "PeersFailing", "^1 of 1 workers get nothing"),
        ("VolumeFull", "PeersFailing", "False", "VolumeFull", "no space left; 1 of 1 workers get nothing"),
        ("Starting", None, "Unknown", "DisksNotSeen", "still looking"),
        ("Starting", "PeersFailing", "False", "PeersFailing", "^1 of 1 workers get nothing"),
    ],
)
def test_of_disks_and_peers_the_worse_is_told(
    disk: str | None, peer: str | None, status: str, reason: str, words: str
) -> None:
    plan = blueprint(kv={"disk": DISK, "peers": "Auto"})
    disks, peers = {"w": tell(disk, "no space left" if disk else "")}, {"w": tell_peers(peer, "w1: x" if peer else "")}
    (condition,) = tiers_condition(plan, disks, peers)
    assert (condition.status, condition.reason) == (status, reason)
    assert re.search(words, condition.message)


@pytest.mark.parametrize(
    ("failing", "is_kept"),
    [
        (["10.0.0.7:7000"], True),
        (["[fd00::7]:7000", "10.0.0.7:7000"], True),
        (["[fd00::7]:7000"], True),
        (["10.0.0.9:7000"], False),  # it has gone, and is never asked again
        (["10.0.0.70:7000", "[fd00::77]:7000"], False),
        ([], True),  # a worker of an earlier release names none
    ],
)
@pytest.mark.parametrize("reason", [None, "PeersFailing"])
def test_of_workers_that_have_gone_nothing_is_told(reason: str | None, failing: list[str], is_kept: bool) -> None:
    told = TierTelemetry(tier="peer", reason=reason, message="nobody gives", failing=failing, tokens_per_second=5.0)
    (found,) = forget_gone({"a": told}, {"10.0.0.7", "fd00::7"}).values()
    assert found == (told if is_kept else TierTelemetry(tier="peer", tokens_per_second=5.0))


def test_beside_one_that_is_there_those_that_have_gone_are_not_named() -> None:
    """The worker's words are of the first three, all of whom may have gone with a rollout."""
    gone, here = [f"10.0.0.{number}:7000" for number in (1, 2, 3)], "10.0.0.7:7000"
    message = "; ".join(f"{each}: refused" for each in gone) + " and 1 more"
    told = TierTelemetry(tier="peer", reason="PeersFailing", message=message, failing=[*gone, here])
    (found,) = forget_gone({"a": told}, {"10.0.0.7"}).values()
    assert (found.reason, found.message, found.failing) == ("PeersFailing", here, [here])


def test_one_that_tries_its_disk_again_has_not_switched_it_off() -> None:
    """It is told until what had failed has gone through."""
    (condition,) = tiers_condition(with_disk(), {"a": tell("VolumeSlow", "slow")}, {})
    assert "switched off the disk of spec.kv.disk, or try it again" in condition.message


def report(gateway: str, age: float, *tiers: TierTelemetry) -> FleetReport:
    sample = WorkerTelemetry(
        model_name="m", role=Role.UNIFIED, revision="r", pod="w", draining=False, running_requests=0,
        queued_requests=0, running_tokens=0, queued_prefill_tokens=0, kv_blocks_used=0, kv_blocks_cached=0,
        kv_blocks_total=1, kv_eviction_horizon=0, kv_tiers=list(tiers),
    )  # fmt: skip
    worker = WorkerReport(
        name="w", address="10.0.0.1:8000", role=Role.UNIFIED, revision="r", state="Admitted", telemetry=sample,
        telemetry_age=age,
    )  # fmt: skip
    return FleetReport(gateway=gateway, started_at=0, at=0, workers=[worker])


def read_tiers(reports: Sequence[FleetReport], kind: str = "disk", since: float = 0.0) -> dict[str, TierTelemetry]:
    """`since`: seconds since the first was read."""
    return _tiers(_newest_samples([(report, 0.0 if number else since) for number, report in enumerate(reports)]), kind)


def test_of_several_gateways_the_newest_sample_counts() -> None:
    old, new = report("a", 9.0, tell(None)), report("b", 1.0, tell("VolumeSlow"))
    assert read_tiers([old, new])["w"].reason == read_tiers([new, old])["w"].reason == "VolumeSlow"
    assert read_tiers([report("a", 1.0)]) == {}
    peer = TierTelemetry(tier="peer")
    assert read_tiers([report("a", 1.0, peer)]) == {}
    assert read_tiers([report("a", 1.0, peer, tell("VolumeSlow"))])["w"].reason == "VolumeSlow"


def test_what_a_gateway_said_last_that_does_not_answer_grows_older() -> None:
    frozen, other = report("a", 0.2, tell(None)), report("b", 0.9, tell("VolumeSlow"))
    assert read_tiers([frozen, other])["w"].reason is None
    assert read_tiers([frozen, other], since=20.0)["w"].reason == "VolumeSlow"


def test_a_store_is_no_disk() -> None:
    store = TierTelemetry(tier="store", reason="StoreFull")
    told = [report("a", 1.0, store, TierTelemetry(tier="disk", reason="VolumeFull"))]
    assert read_tiers(told)["w"].reason == "VolumeFull"
    assert read_tiers(told, "store")["w"].reason == "StoreFull"
    assert read_tiers([report("a", 1.0, store)]) == {}
