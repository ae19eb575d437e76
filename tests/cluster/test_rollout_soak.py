"""The soak of rollouts, without a cluster: what it counts is what was there, and what it adds up is what it counted."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from tandem_api.crd.spec import InferenceModelSpec
from tandem_api.names import LABEL_NODES_PER_REPLICA, LABEL_REVISION, LABEL_ROLE

from e2e.rollouts.cases import SHAPES, ChangeKind, RolloutCase, manifest, missing_cases, plan_cases, widths
from e2e.rollouts.evidence import Evidence
from e2e.rollouts.images import other_name
from e2e.rollouts.streams import MARGIN, is_clear
from e2e.rollouts.tables import Expected, Row, judge, make_row, read_rows, summary, table, write_rows
from e2e.suite.load import LoadOutcome

EXPECTED = Expected("blue", "length", 32)
RIGHT = LoadOutcome("blue", "length", 32, None, 2.0, 1.0, 100.0, False, "m-decode-0", "m-prefill-0")


def pod(name: str, build: str, *, ready: bool = True, nodes: int = 1, uid: str = "", going: bool = False) -> Any:
    labels = {LABEL_ROLE: name.split("-")[1], LABEL_REVISION: build, LABEL_NODES_PER_REPLICA: str(nodes)}
    state = "True" if ready else "False"
    metadata = {"name": name, "uid": uid or f"{name}/{build}", "labels": labels}
    return {
        "metadata": metadata | ({"deletionTimestamp": "now"} if going else {}),
        "status": {"conditions": [{"type": kind, "status": state} for kind in ("Ready", "ContainersReady")]},
    }


def pair(wanted: dict[str, int], *pods: Any) -> Evidence:
    evidence = Evidence(wanted)
    for entry in pods:
        evidence.see("ADDED", entry, 0.0)
    return evidence


@pytest.mark.parametrize(
    ("pods", "capacity"),
    [
        ([pod("m-prefill-0", "a"), pod("m-decode-0", "a")], Fraction(1)),
        ([pod("m-prefill-0", "a"), pod("m-decode-0", "b")], Fraction(0)),
        ([pod("m-prefill-0", "a"), pod("m-prefill-1", "b"), pod("m-decode-0", "a"), pod("m-decode-1", "b")], 1),
        ([pod("m-prefill-0", "a"), pod("m-decode-0", "a", ready=False)], Fraction(0)),
        ([pod("m-prefill-0", "a"), pod("m-decode-0", "a", going=True)], Fraction(0)),
        ([pod("m-prefill-0", "a"), pod("m-decode-0", "a", nodes=2)], Fraction(1)),
    ],
)
def test_capacity_is_that_of_complete_pairs_of_one_build(pods: list[Any], capacity: Fraction) -> None:
    evidence = pair({"prefill": 1, "decode": 1}, *pods)
    if capacity == 1 and any(entry["metadata"]["labels"][LABEL_NODES_PER_REPLICA] == "2" for entry in pods):
        assert evidence.level == 0, "half of a group serves nobody"
        evidence.see("ADDED", pod("m-decode-1", "a", nodes=2), 0.0)
    assert evidence.level == capacity


def test_shares_of_two_builds_add_up() -> None:
    wanted = {"prefill": 2, "decode": 4}
    old = [pod("m-prefill-0", "a"), *(pod(f"m-decode-{n}", "a") for n in range(3))]
    evidence = pair(wanted, *old, pod("m-prefill-1", "b"), pod("m-decode-3", "b"))
    assert evidence.level == Fraction(1, 2) + Fraction(1, 4)


def test_a_short_dip_is_seen_and_its_length_is_told() -> None:
    evidence = pair({"prefill": 1, "decode": 1}, pod("m-prefill-0", "a"), pod("m-decode-0", "a"))
    evidence.see("MODIFIED", pod("m-decode-0", "a", ready=False), 10.0)
    evidence.see("MODIFIED", pod("m-decode-0", "a"), 10.25)
    assert (evidence.lowest(5.0, 20.0), evidence.lowest(11.0, 20.0)) == (0, 1)
    assert evidence.seconds_below(Fraction(1), 5.0, 20.0) == 0.25
    assert evidence.seconds_below(Fraction(1), 10.2, 20.0) == pytest.approx(0.05)
    assert evidence.seconds_below(Fraction(1), 11.0, 20.0) == 0.0


def test_transfers_between_builds_are_told_by_who_had_a_name_when() -> None:
    evidence = pair({"prefill": 1, "decode": 1}, pod("m-prefill-0", "a"), pod("m-decode-0", "a"))
    assert evidence.meeting(RIGHT) == "same"
    assert evidence.meeting(replace(RIGHT, prefill_worker="m-decode-0")) == "none", "it computed the prompt itself"
    assert evidence.meeting(replace(RIGHT, decode_worker=None, prefill_worker=None)) == "none"
    assert evidence.meeting(replace(RIGHT, prefill_worker="m-prefill-7")) == "unsure", "nobody had this name"

    evidence.see("DELETED", pod("m-prefill-0", "a"), 50.0)
    evidence.see("ADDED", pod("m-prefill-0", "b", ready=False), 50.5)
    evidence.see("MODIFIED", pod("m-prefill-0", "b"), 90.0)
    assert evidence.meeting(replace(RIGHT, started=48.0)) == "same", (
        "the next one had the name, and could not serve yet"
    )
    assert evidence.meeting(RIGHT) == "between"
    assert evidence.meeting(replace(RIGHT, started=45.0, seconds=60.0, first_token_seconds=59.0)) == "unsure"


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "right"),
        ({"text": "green"}, "wrong"),
        ({"finish_reason": "stop"}, "wrong"),
        ({"completion_tokens": 31}, "wrong"),
        ({"completion_tokens": None}, "broken"),
        ({"error": "reset", "finish_reason": None}, "broken"),
        ({"error": "503", "finish_reason": None, "first_token_seconds": None}, "failed"),
        ({"error": "no end", "hung": True, "finish_reason": None, "first_token_seconds": None}, "failed"),
    ],
)
def test_what_became_of_a_stream(change: dict[str, Any], verdict: str) -> None:
    assert judge(replace(RIGHT, **change), EXPECTED) == verdict


def row(**more: Any) -> Row:
    evidence = pair({"prefill": 1, "decode": 1}, pod("m-prefill-0", "a"), pod("m-decode-0", "a"))
    made = make_row(
        RolloutCase(1, "1+1", ChangeKind.IMAGE), [(RIGHT, EXPECTED)], evidence, (5.0, 95.0),
        refused=0, error=None, commit="abc", at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    return replace(made, **more)


def test_a_rollout_is_good_when_nothing_at_all_is_wrong() -> None:
    assert row().is_good
    assert (row().streams, row().transfers, row().lowest, row().promise, row().seconds) == (1, 1, "1", "1", 90.0)
    bad = [
        {"failed": 1}, {"broken": 1}, {"wrong": 1}, {"between": 1}, {"unsure": 1}, {"refused": 1},
        {"lowest": "1/2"}, {"error": "it does not end"}, {"streams": 0},
    ]  # fmt: skip
    for change in bad:
        assert not row(**change).is_good, change
    assert row(lowest="1/2", promise="1/2").is_good


def test_the_table_has_a_line_for_each_kind_and_shape_and_adds_up() -> None:
    rows = [row(), row(streams=5, failed=2), row(kind="canary", shape="2+4", lowest="3/4", promise="1/2")]
    lines = table(rows).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [len(line) for line in cells] == [len(cells[0])] * 5
    assert cells[2][:6] == ["image", "1+1", "2", "1", "6", "2"]
    assert cells[3][:5] == ["canary that fails", "2+4", "1", "1", "1"]
    assert cells[4][:6] == ["all", "", "3", "2", "7", "2"]
    said = summary(rows, 3)
    assert (said["rollouts"], said["as_asked"], said["streams"], said["failed"]) == (3, 2, 7, 2)
    assert said["bad"] == ["image of 1+1: see the table"]
    assert table([]).count("\n") == 2


def test_what_is_recorded_is_read_again_and_runs_do_what_is_missing() -> None:
    rows = [row(), row(kind="canary")]
    assert read_rows(json.loads(json.dumps(write_rows(rows)))) == rows
    with pytest.raises(TypeError, match="colour"):
        read_rows([{"colour": 1}])
    cases = plan_cases(50, list(SHAPES), list(ChangeKind))
    assert [(case.shape, case.kind) for case in cases[7:9]] == [("1+1", ChangeKind.CANARY), ("2+4", ChangeKind.IMAGE)]
    assert len({(case.shape, case.kind) for case in cases}) == len(SHAPES) * len(ChangeKind)
    left = missing_cases(cases, [(r.shape, r.kind) for r in [*rows, rows[0]]])
    assert len(left) == 47
    assert [case.number for case in left[:2]] == [2, 3]


@pytest.mark.parametrize(("shape", "promise"), [("1+1", "1"), ("2+4", "1/2"), ("group", "1")])
def test_models_are_valid_and_promise_what_the_defaults_are(shape: str, promise: str) -> None:
    made = SHAPES[shape]
    assert str(made.promise) == promise
    model = manifest(made, "m", "w:1")
    InferenceModelSpec.model_validate(model["spec"])
    role, usual, longer = widths(made)
    assert model["spec"][role].get("parallelism", {}).get("pipeline", 1) == usual
    model["spec"][role]["parallelism"] = {"pipeline": longer}
    InferenceModelSpec.model_validate(model["spec"])


def test_an_image_has_another_name() -> None:
    digest = "sha256:" + "0" * 64
    assert other_name("r:5000/w:1", [["x:1"], [f"r:5000/w@{digest}", "r:5000/w:1"]]) == f"r:5000/w@{digest}"
    assert other_name("w:1", [["docker.io/library/w:1"]]) == "docker.io/library/w:1"
    assert other_name("w:1", [["docker.io/library/import-9@sha256:1", "docker.io/library/w:1"]]) == (
        "docker.io/library/w:1"
    )
    with pytest.raises(LookupError, match="w:2"):
        other_name("w:2", [["docker.io/library/w:1"]])


def answer(finish: str, *gaps: float) -> Any:
    tokens = [
        SimpleNamespace(top_logprobs=[SimpleNamespace(logprob=-gap), SimpleNamespace(logprob=0.0)]) for gap in gaps
    ]
    return SimpleNamespace(finish_reason=finish, logprobs=SimpleNamespace(content=tokens))


def test_prompts_whose_answer_hangs_by_a_hair_are_left_out() -> None:
    assert is_clear(answer("length", 1.0, 2 * MARGIN))
    assert not is_clear(answer("length", 1.0, MARGIN / 2))
    assert not is_clear(answer("stop", 1.0)), "the choice to stop is not among the tokens"
    assert not is_clear(answer("length"))
