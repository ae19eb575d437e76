"""By what blocks move: what workers are told, who may reach whom for it, and what is told of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from operator_objects import blueprint
from pydantic import ValidationError
from tandem_api.fleet import FleetReport, WorkerReport
from tandem_api.names import Role
from tandem_api.telemetry import KVTransportTelemetry, WorkerTelemetry
from tandem_operator.gateways.fleet import _newest_samples, _transports
from tandem_operator.gateways.transports import summarize, transport_condition
from tandem_operator.workloads import Blueprint
from tandem_operator.workloads.configs import worker_config
from tandem_operator.workloads.transports import may_use_mooncake

RDMA = {"resources": {"limits": {"rdma/hca_shared_devices_a": "1"}}}
CLAIM = {"resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "one-roce-port"}]}


def with_transport(transport: str | None = None, **kv: Any) -> Blueprint:
    return blueprint(prefill={}, kv=kv | ({} if transport is None else {"transport": transport}))


@pytest.mark.parametrize(
    ("plan", "told", "opens"),
    [
        (with_transport(), "TCP", False),
        (with_transport("TCP"), "TCP", False),
        (with_transport("Mooncake"), "Mooncake", True),
        (blueprint(prefill=RDMA, decode=RDMA), "Auto", True),
        (blueprint(prefill=CLAIM, decode=RDMA), "Auto", True),
        (blueprint(prefill=RDMA, decode={}), "TCP", False),
        (blueprint(prefill=RDMA, decode=RDMA, kv={"transport": "TCP"}), "TCP", False),
        (blueprint(decode=RDMA), "TCP", False),
        (blueprint(prefill=RDMA, decode=RDMA, engine={"kind": "VLLM"}), "TCP", False),
        (blueprint(kv={"transport": "Mooncake"}), "Mooncake", False),
        (blueprint(prefill={}, engine={"kind": "VLLM", "args": []}), "TCP", False),
    ],
)
def test_workers_are_told_of_mooncake_where_it_is_asked_for_or_could_be_faster(
    plan: Blueprint, told: str, opens: bool
) -> None:
    for role in plan.worker_roles:
        config = worker_config(plan, role).kv
        assert config.wanted_transport == told
        assert config.transport == ("Mooncake" if told == "Mooncake" else "TCP"), "an earlier release knows no Auto"
    assert may_use_mooncake(plan) is opens


def test_the_fallback_is_told() -> None:
    config = worker_config(with_transport("Mooncake", allowFallback=True), Role.DECODE)
    assert config.kv.allow_fallback


@pytest.mark.parametrize("kv", [{"allowFallback": True}, {"allowFallback": True, "transport": "TCP"}])
def test_a_fallback_from_nothing_is_refused(kv: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"allowFallback is for kv.transport Mooncake"):
        blueprint(prefill={}, kv=kv)


def tell(transport: str | None, rate: float | None = None, fallback: str = "") -> KVTransportTelemetry:
    protocol = None if transport == "TCP" else "rdma"
    return KVTransportTelemetry(
        wanted="Mooncake", transport=transport, protocol=protocol, bytes_per_second=rate, fallback=fallback
    )


@pytest.mark.parametrize(
    ("plan", "told", "status", "reason", "words"),
    [
        (with_transport("Mooncake"), {}, "Unknown", "TransportNotSeen", "no block has moved yet"),
        (with_transport("Mooncake"), {"a": tell(None)}, "Unknown", "TransportNotSeen", "no block has moved yet"),
        (
            with_transport("Mooncake"),
            {"a": tell("Mooncake", 9e9), "b": tell("Mooncake", 8.1e9)},
            "True",
            "BlocksMove",
            "Mooncake over rdma at 2 workers, about 8.2 GB/s",
        ),
        (with_transport(), {"a": tell("TCP", 5e8)}, "True", "BlocksMove", "by TCP at 1 workers, about 512 MB/s"),
        (with_transport(), {"a": tell("TCP")}, "True", "BlocksMove", "by TCP at 1 workers$"),
        (
            with_transport(),
            {"a": tell("TCP", 5e8), "b": tell("Mooncake", 2e9)},
            "True",
            "BlocksMove",
            "Mooncake over rdma at 1 workers, about 2 GB/s; TCP at 1 workers",
        ),
        (
            with_transport("Mooncake"),
            {"a": tell("Mooncake", 1e9), "b": tell(None, fallback="it is not installed")},
            "False",
            "TransportFallback",
            "1 of 2 workers cannot use the Mooncake .*decode workers compute the prompts.*b: it is not installed",
        ),
        (
            with_transport("Mooncake", allowFallback=True),
            {f"w{number}": tell("TCP", 1e9, "no device") for number in range(9)},
            "True",
            "TransportFallback",
            "9 of 9 .*TCP stands in, as spec.kv.allowFallback says: w0: no device; .*w2: no device and 6 more",
        ),
    ],
)
def test_the_condition_says_what_workers_say(
    plan: Blueprint, told: dict[str, KVTransportTelemetry], status: str, reason: str, words: str
) -> None:
    (condition,) = transport_condition(plan, told)
    assert (condition.type, condition.status, condition.reason) == ("KVTransferReady", status, reason)
    assert re.search(words, condition.message), condition.message


def test_nothing_is_said_where_no_blocks_move_or_nobody_serves() -> None:
    told = {"a": tell("TCP", 1e9)}
    assert transport_condition(blueprint(), told) == []
    assert transport_condition(blueprint(prefill={}, suspend=True), told) == []
    assert transport_condition(with_transport(), {}) == []
    assert transport_condition(with_transport(), {"a": tell(None)}) == []


def test_a_rate_that_changes_a_little_writes_no_status() -> None:
    (one,), (other,) = (transport_condition(with_transport(), {"a": tell("TCP", rate)}) for rate in (1.000e9, 1.1e9))
    assert one == other
    assert summarize({"a": tell("TCP", 1.000e9)}) == summarize({"a": tell("TCP", 1.1e9)})
    assert summarize({"a": tell("TCP", 1e9)}) != summarize({"a": tell("TCP", 4e9)})
    assert summarize({"a": tell("TCP", 1e9)}) != summarize({"a": tell("TCP", 1e9, "no device")})


def test_one_workers_rate_among_many_causes_no_look() -> None:
    """Of a large fleet there is always one whose rate has just passed a step."""
    told = {f"w{number}": tell("TCP", 1e9) for number in range(9)}
    assert summarize(told) == summarize(told | {"w3": tell("TCP", 4e9)})
    assert summarize(told) != summarize(told | {"w3": tell("Mooncake", 1e9)})


@pytest.mark.parametrize("transport", ["TCP", "Auto"])
def test_workers_from_before_lack_nothing_that_is_asked_for_now(transport: str) -> None:
    told = {"old": tell(None, fallback="no device"), "new": tell("TCP", 1e9)}
    (condition,) = transport_condition(with_transport(transport), told)
    assert (condition.status, condition.reason) == ("True", "BlocksMove")


def report(gateway: str, age: float, transport: KVTransportTelemetry | None) -> FleetReport:
    sample = WorkerTelemetry(
        model_name="m", role=Role.DECODE, revision="r", pod="w", draining=False, running_requests=0,
        queued_requests=0, running_tokens=0, queued_prefill_tokens=0, kv_blocks_used=0, kv_blocks_cached=0,
        kv_blocks_total=1, kv_eviction_horizon=0, kv_transport=transport,
    )  # fmt: skip
    worker = WorkerReport(
        name="w", address="10.0.0.1:8000", role=Role.DECODE, revision="r", state="Admitted", telemetry=sample,
        telemetry_age=age,
    )  # fmt: skip
    return FleetReport(gateway=gateway, started_at=0, at=0, workers=[worker])


def test_the_newest_of_several_samples_counts() -> None:
    old, new = tell("TCP", 1e9, "no device"), tell("Mooncake", 2e9)
    assert _transports(_newest_samples([(report("a", 9.0, old), 0.0), (report("b", 1.0, new), 0.0)])) == {"w": new}
    assert _transports(_newest_samples([(report("a", 1.0, None), 0.0)])) == {}
