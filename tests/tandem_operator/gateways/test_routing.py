"""What gateways follow: a table of one change after another, and what holds for any history of names."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_objects import RELEASE, raw_model
from tandem_api.crd.resource import InferenceModel
from tandem_api.launch import GatewayRouting, StoreLimits, TracingConfig, TTFTDeadline
from tandem_operator.gateways.routing import MAX_FORMER_NAMES, plan_routing, seconds_left
from tandem_operator.workloads import Blueprint
from tandem_operator.workloads.configs import gateway_config, start_hash, worker_config

START = datetime(2026, 1, 1, tzinfo=UTC)
SLO = {"ttft": {"seconds": 1}, "tpot": {"seconds": 0.05}}


def plan(name: str, before: GatewayRouting | None, *, at: float = 0, **spec: Any) -> GatewayRouting:
    raw = raw_model(**spec)
    raw["spec"]["model"] |= {"servedName": name}
    raw["status"] = {} if before is None else {"routing": before.model_dump(by_alias=True, exclude_none=True)}
    blueprint = Blueprint(model=InferenceModel.model_validate(raw), release=RELEASE)
    return plan_routing(blueprint, now=START + timedelta(seconds=at))


def test_a_name_from_before_is_served_for_a_while() -> None:
    first = plan("old", None)
    assert (first.served_names, first.former_until) == (["old"], None)
    renamed = plan("new", first, at=10)
    assert (renamed.served_names, renamed.former_until) == (["new", "old"], "2026-01-01T00:01:10Z")
    assert plan("new", renamed, at=69) == renamed, "an operator that starts anew goes on with it"
    assert plan("new", renamed, at=70).served_names == ["new"]
    assert plan("new", renamed, at=70).former_until is None
    assert seconds_left(renamed, now=START + timedelta(seconds=60)) == 10
    assert seconds_left(first, now=START) is None


def test_a_clock_that_was_ahead_serves_a_name_no_longer() -> None:
    ahead = plan("new", plan("old", None), at=86_400)
    seen = plan("new", ahead, at=10)
    assert (seen.served_names, seen.former_until) == (["new", "old"], "2026-01-01T00:01:10Z")
    assert plan("new", seen, at=70).served_names == ["new"]


@pytest.mark.parametrize(("drain", "until"), [("5s", "2026-01-01T00:01:00Z"), ("10m", "2026-01-01T00:10:00Z")])
def test_it_is_served_as_long_as_streams_may_run(drain: str, until: str) -> None:
    assert plan("new", plan("old", None), drain={"timeout": drain}).former_until == until


def test_a_change_in_the_middle_of_another_one_keeps_all_names_and_taking_it_back_keeps_the_newer() -> None:
    second = plan("b", plan("a", None), at=0)
    third = plan("c", second, at=30)
    assert (third.served_names, third.former_until) == (["c", "b", "a"], "2026-01-01T00:01:30Z")
    assert plan("b", third, at=40).served_names == ["b", "c", "a"]


def test_limits_of_time_are_those_of_the_spec() -> None:
    limits = {"firstToken": "7s", "idle": "8s", "answer": "9s"}
    queue = {"max": 7, "ttl": "1m30s"}
    routing = plan("m", None, gateway={"timeouts": limits, "queue": queue}, drain={"timeout": "90s"})
    timeouts = routing.timeouts
    assert (routing.queue.max_requests, routing.queue.ttl_seconds) == (7, 90)
    assert (timeouts.first_token_seconds, timeouts.idle_seconds, timeouts.answer_seconds) == (7, 8, 9)
    assert routing.drain_timeout_seconds == 90


def test_gateways_follow_cors_and_none_is_started_anew_for_it() -> None:
    cors = {"allowOrigins": ["https://app.example.com"], "allowHeaders": ["authorization"], "maxAge": "1h"}
    rules = plan("m", None, gateway={"cors": cors}).cors
    assert rules is not None
    assert rules.allow_origins == ["https://app.example.com"]
    assert (rules.allow_headers, rules.allow_credentials, rules.max_age_seconds) == (["authorization"], False, 3600)
    assert plan("m", None).cors is None
    names = set()
    for spec in ({}, {"gateway": {"cors": cors}}):
        config = gateway_config(Blueprint(model=InferenceModel.model_validate(raw_model(**spec)), release=RELEASE))
        names.add(start_hash(config))
        assert config.cors == (rules if spec else None), "a gateway that starts does not wait for the status"
    assert len(names) == 1


def test_gateways_follow_the_store_of_responses_and_none_is_started_anew_for_it() -> None:
    store = {"responseStore": {"maxBytes": "64Mi", "ttl": "30m"}}
    wanted = StoreLimits(max_bytes=64 << 20, ttl_seconds=1800)
    assert (plan("m", None, gateway=store).response_store, plan("m", None).response_store) == (wanted, None)
    names = set()
    for spec in ({}, {"gateway": store}):
        config = gateway_config(Blueprint(model=InferenceModel.model_validate(raw_model(**spec)), release=RELEASE))
        names.add(start_hash(config))
        assert config.response_store == (wanted if spec else None), "a gateway that starts does not wait for the status"
    assert len(names) == 1


@pytest.mark.parametrize(
    ("usual", "spec", "expected"),
    [
        (None, {}, None),
        (None, {"samplingPercent": 5}, None),
        (None, {"endpoint": "http://c:4318"}, ("http://c:4318", 100)),
        (("http://u", 7), {}, ("http://u", 7)),
        (("http://u", 7), {"endpoint": "http://c"}, ("http://c", 7)),
        (("http://u", 7), {"samplingPercent": 0}, ("http://u", 0)),
        (("http://u", 7), {"enabled": False, "endpoint": "http://c"}, None),
    ],
)
def test_everybody_follows_tracing_and_nobody_is_started_anew_for_it(
    usual: tuple[str, float] | None, spec: dict[str, Any], expected: tuple[str, float] | None
) -> None:
    given = None if usual is None else TracingConfig(endpoint=usual[0], sampling_percent=usual[1])
    release = dataclasses.replace(RELEASE, tracing=given)
    model = InferenceModel.model_validate(raw_model(observability={"tracing": spec}))
    blueprint = Blueprint(model=model, release=release)
    silent = Blueprint(model=InferenceModel.model_validate(raw_model()), release=RELEASE)
    wanted = None if expected is None else TracingConfig(endpoint=expected[0], sampling_percent=expected[1])
    assert plan_routing(blueprint, now=START).tracing == wanted
    assert gateway_config(blueprint).tracing == wanted
    assert start_hash(gateway_config(blueprint)) == start_hash(gateway_config(silent))
    for role in blueprint.worker_roles:
        assert worker_config(blueprint, role).tracing == wanted
        assert start_hash(worker_config(blueprint, role)) == start_hash(worker_config(silent, role))


@given(history=st.lists(st.tuples(st.sampled_from("abcdefg"), st.integers(0, 100)), min_size=1, max_size=12))
def test_the_present_name_is_first_and_nobody_is_cut_off_early(history: list[tuple[str, int]]) -> None:
    routing, now, left_at = None, 0, dict[str, tuple[int, int]]()
    for number, (name, pause) in enumerate(history):
        now += pause
        before, routing = routing, plan(name, routing, at=now)
        if before is not None and before.served_names[0] != name:
            left_at[before.served_names[0]] = now, number
        left_at.pop(name, None)
        assert routing.served_names[0] == name
        assert len(set(routing.served_names)) == len(routing.served_names) <= 1 + MAX_FORMER_NAMES
        recent = sorted((left, n) for n, left in left_at.items() if now - left[0] < 60)[-MAX_FORMER_NAMES:]
        assert {n for _, n in recent} <= set(routing.served_names)
        assert (routing.former_until is None) == (len(routing.served_names) == 1)


def test_requests_are_due_by_the_target_for_first_tokens_in_queue_and_worker() -> None:
    target = {"ttft": {"seconds": 0.5, "secondsPerThousandTokens": 0.2}, "tpot": {"seconds": 0.05}}
    due = TTFTDeadline(seconds=0.5, seconds_per_token=0.0002)
    assert plan("m", None, slo=target).queue.ttft_target == due
    assert plan("m", None).queue.ttft_target is None
    with_target, without = (
        Blueprint(model=InferenceModel.model_validate(raw_model(**spec)), release=RELEASE)
        for spec in ({"slo": target}, dict[str, Any]())
    )
    for role in with_target.worker_roles:
        told = worker_config(with_target, role)
        assert told.ttft_target == due
        assert start_hash(told) == start_hash(worker_config(without, role)), "a change restarts nobody"


@pytest.mark.parametrize(
    ("spec", "seconds"),
    [
        ({"slo": SLO, "prefill": {}}, 0.05),
        ({"slo": SLO, "prefill": {}, "gateway": {"convertDecodeWorkers": False}}, None),
        ({"slo": SLO}, None),  # decode workers compute prompts anyway
        ({"prefill": {}}, None),  # nobody says what streams may wait
    ],
)
def test_decode_workers_compute_prompts_within_the_target_of_a_token(spec: dict[str, Any], seconds: float) -> None:
    routing = plan("m", None, **({"prefill": None} | spec))
    assert routing.convert_step_seconds == seconds
    model = InferenceModel.model_validate(raw_model(**({"prefill": None} | spec)))
    config = gateway_config(Blueprint(model=model, release=RELEASE))
    assert config.convert_step_seconds == seconds
    assert start_hash(config) == start_hash(config.model_copy(update={"convert_step_seconds": 1.0})), "restarts nobody"
