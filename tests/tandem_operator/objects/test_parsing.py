from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_objects import raw_model
from tandem_api.crd.status import (
    CanaryStatus,
    Condition,
    InferenceModelStatus,
    RoleScalingStatus,
    RolloutStatus,
    ScalingStatus,
)
from tandem_operator.objects.errors import InvalidSpecError
from tandem_operator.objects.parsing import MOST_LEVELS, parse_status, read_model, read_past


def test_a_good_object() -> None:
    reading = read_model(raw_model())
    assert (reading.model.served_name, reading.unknown) == ("m", ())


STEPS = [{"weight": 5, "duration": "1m", "future": 1}, {"weight": 9, "duration": "1m", "later": {"a": 1}}]


@pytest.mark.parametrize(
    ("spec", "unknown"),
    [
        ({"future": {"nested": 1}}, ["spec.future"]),
        ({"engine": {"lookahead": 4, "image": "w:1"}}, ["spec.engine.lookahead"]),
        ({"prefill": {"scaling": {"pace": "fast"}}, "slow": 1}, ["spec.prefill.scaling.pace", "spec.slow"]),
        ({"decode": {"tolerations": [{"key": "a"}, {"key": "b", "until": 3}]}}, ["spec.decode.tolerations[1].until"]),
        (
            {"rollout": {"canary": {"steps": STEPS}}},
            ["spec.rollout.canary.steps[0].future", "spec.rollout.canary.steps[1].later"],
        ),
    ],
)
def test_fields_of_another_release_are_read_past_and_named(spec: dict[str, Any], unknown: list[str]) -> None:
    raw = raw_model(**spec)
    reading = read_model(raw)
    assert list(reading.unknown) == unknown
    assert raw == raw_model(**spec), "what was read stays as it is"
    if "engine" in spec:
        assert reading.model.spec.engine.image == "w:1", "the rest holds"
    if "rollout" in spec:
        assert reading.model.spec.rollout.canary is not None
        assert [step.weight for step in reading.model.spec.rollout.canary.steps] == [5, 9]


def test_what_is_free_by_design_is_not_looked_into() -> None:
    free = {"spec": {"containers": [{"name": "worker", "newField": 1}]}, "metadata": {"labels": {"a": "b"}}}
    decode = {"podTemplate": free, "affinity": {"nodeAffinity": {"new": {"er": 1}}}}
    reading = read_model(raw_model(decode=decode))
    assert reading.unknown == ()
    assert reading.model.spec.decode.pod_template is not None
    assert reading.model.spec.decode.pod_template.spec == free["spec"]
    assert read_model(raw_model(decode={"podTemplate": {"status": {}}})).unknown == ("spec.decode.podTemplate.status",)


def nest(levels: int) -> Any:
    nested: Any = 1
    for level in range(levels):
        nested = [nested] if level % 2 else {"a": nested}
    return nested


@pytest.mark.parametrize("levels", [200, 9_000])
def test_what_is_nested_beyond_reason_is_refused_in_words(levels: int) -> None:
    """Without a call for each level."""
    raw = raw_model(decode={"podTemplate": {"spec": {"a": nest(levels)}}})
    with pytest.raises(InvalidSpecError, match="spec is nested more than 100 levels deep"):
        read_model(raw)
    assert read_past(raw) is None


def test_the_deepest_of_pod_templates_is_read() -> None:
    read_model(raw_model(decode={"podTemplate": {"spec": {"a": nest(MOST_LEVELS - 20)}}}))


def test_every_value_that_cannot_be_read_is_named_and_fields_beside_it() -> None:
    with pytest.raises(InvalidSpecError) as caught:
        read_model(raw_model(future=1, model={"uri": "nowhere"}, engine={"device": "TPU"}))
    text = str(caught.value)
    assert "spec.model.uri: must be hf://" in text
    assert "spec.engine.device: Input should be 'Auto', 'CUDA' or 'CPU'" in text
    assert text.endswith("; spec.future: not known")


def test_rules_over_several_fields_are_judged_without_what_is_unknown() -> None:
    with pytest.raises(InvalidSpecError, match="maxSurge and maxUnavailable are both 0"):
        read_model(raw_model(future=1, rollout={"maxSurge": 0, "maxUnavailable": 0}))


def test_what_else_is_said_beside_a_value_that_cannot_be_read() -> None:
    steps = [{"weight": 5, "duration": "1m"}, {"weight": "?", "duration": "1m"}, {"weight": "!", "duration": "1m"}]
    raw = raw_model(
        engine={"device": "TPU", "image": "w:1", "future": 1}, decode={"replicas": 3}, prefill={"replicas": 2},
        rollout={"canary": {"steps": steps}, "maxUnavailable": 1},
    )  # fmt: skip
    found = read_past(raw)
    assert found is not None
    assert (found.spec.engine.image, found.spec.engine.device) == ("w:1", "Auto")
    assert (found.spec.decode.replicas, found.spec.rollout.max_unavailable) == (3, "1")


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"uri": "s3://bucket"}},
        {"decode": {"replicas": 2000}},
        {"prefill": {"scaling": {"mode": "Later"}}},
        {"decode": {"nodesPerReplica": 2, "parallelism": {"tensor": 3}}},
        {"gateway": {"replicas": "many"}},
        {"suspend": "perhaps"},
    ],
)
def test_without_what_a_promise_is_counted_by_too_little_is_left(spec: dict[str, Any]) -> None:
    assert read_past(raw_model(**spec)) is None


def test_parts_of_a_status_that_cannot_be_read_are_written_anew_and_the_others_stay() -> None:
    raw = raw_model() | {"status": {"conditions": "none", "url": "http://m"}}
    assert (parse_status(raw).conditions, parse_status(raw).url) == ([], "http://m")
    assert read_model(raw).model.status.observed_generation == -1
    kept = RolloutStatus(revision=3, digest="d", stable_revision=3)
    status = InferenceModelStatus(rollout=kept).model_dump(by_alias=True) | {"prefill": {"ready": "some"}, "new": 1}
    assert parse_status({"status": status}).rollout == kept
    assert parse_status({"status": "none"}) == parse_status({}) == InferenceModelStatus()


def test_of_what_a_later_release_wrote_only_the_values_that_cannot_be_read_are_left_out() -> None:
    """Without the rollout, a revision that failed its canary would pass for the one that serves."""
    trial = CanaryStatus(revision=4, step=2, weight=25, reason="ErrorRate", message="9 % of requests failed")
    kept = RolloutStatus(phase="RolledBack", revision=4, digest="d", stable_revision=3, canary=trial, retry="r")
    told = [
        Condition(
            type="Ready", status="True", reason="Serving", message="m", last_transition_time="2026-01-01T00:00:00Z"
        ),
        Condition(type="ModelReady", status="True", reason="Loaded", message="m"),
    ]
    scaling = ScalingStatus(decode=RoleScalingStatus(mode="SLO", desired=7), message="m")
    status: dict[str, Any] = InferenceModelStatus(rollout=kept, conditions=told, scaling=scaling).model_dump(
        by_alias=True, exclude_none=True
    )
    status["rollout"]["canary"] |= {"weight": 12.5, "analysis": "a"}
    status["conditions"] = [
        {"type": "Later", "status": "Perhaps", "reason": "R", "message": "m"},
        *status["conditions"],
    ]
    status["scaling"] |= {"prefill": {"mode": "Predictive", "desired": 3}}
    found = parse_status({"status": status})
    assert found.rollout == kept.model_copy(update={"canary": trial.model_copy(update={"weight": 0})})
    assert (found.conditions, found.scaling) == (told, scaling)
    status["rollout"]["phase"] = "Analysing"
    again = parse_status({"status": status}).rollout
    assert again is not None
    assert (again.phase, again.revision, again.stable_revision, again.retry) == ("Preparing", 4, 3, "r")
    status["rollout"]["stableRevision"] = "three"
    assert parse_status({"status": status}).rollout is None, "nobody knows what serves"
    assert parse_status({"status": status}).conditions == told


@given(
    place=st.lists(
        st.sampled_from(["rollout", "conditions", "scaling", "canary", "phase", "decode", "0", "mode"]), max_size=4
    ),
    value=st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2) | st.just({"a": []}),
)
def test_any_status_is_read(place: list[str], value: Any) -> None:
    for step in reversed(place):
        value = {step: value}
    parse_status({"status": value})
