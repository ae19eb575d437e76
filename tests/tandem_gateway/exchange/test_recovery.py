"""What happens after a failed attempt: one table of all that can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_gateway.errors import GatewayFull, NoEndpoint, RequestError, UpstreamFailed, UpstreamTimeout
from tandem_gateway.exchange.recovery import (
    MAX_ATTEMPTS,
    MAX_DEATHS,
    MAX_RESETS,
    MAX_STALLS,
    POLICIES,
    Action,
    Blame,
    Ending,
    Journal,
    Patience,
    Progress,
    Step,
    decide,
    may_ask_another,
    may_displace,
    name_answer,
    name_failure,
)
from tandem_gateway.scheduling import Outcome, classify_status
from tandem_gateway.scheduling.health import RULES
from tandem_gateway.upstream.base import Failure

FIRST: dict[str, Any] = {}
"""The first of two attempts or more; nothing of its answer is here."""
LAST = {"attempts": MAX_ATTEMPTS}
DEADLY = {"resets": MAX_RESETS - 1}
"""One worker may have died of it already."""
STREAM = {"attempts": 1, "begun": True, "untouched": False, "journal": Journal(stalls=1, deaths=1)}
STUCK = STREAM | {"journal": Journal(stalls=MAX_STALLS + 1)}
FREE = {"another": True}
WHOLE = {"streams": False}
WAITED = {"waited": True}

TABLE = [
    # how it ended, how far it had come, what is done, blame, whether it counts as failed, the error
    (Ending.REFUSED, FIRST, Step.RETRY, Blame.WORKER, True, None),
    (Ending.REFUSED, LAST, Step.RETRY, Blame.WORKER, True, None),
    (Ending.REFUSED, WAITED, Step.RETRY, Blame.WORKER, True, None),
    (Ending.REFUSED, LAST | WAITED, Step.FAIL, Blame.WORKER, True, NoEndpoint),
    (Ending.REFUSED, LAST | WAITED | DEADLY, Step.FAIL, Blame.WORKER, True, UpstreamFailed),
    (Ending.REFUSED, STREAM, Step.MOVE, Blame.WORKER, True, None),
    (Ending.UNAUTHORIZED, LAST, Step.RETRY, Blame.WORKER, True, None),
    (Ending.UNAUTHORIZED, LAST | WAITED, Step.FAIL, Blame.WORKER, True, NoEndpoint),
    (Ending.UNAUTHORIZED, STREAM, Step.MOVE, Blame.WORKER, True, None),
    (Ending.DRAINING, FIRST, Step.RETRY, Blame.WORKER, None, None),
    (Ending.DRAINING, LAST, Step.FAIL, Blame.WORKER, None, NoEndpoint),
    (Ending.DRAINING, STREAM, Step.MOVE, Blame.WORKER, None, None),
    (Ending.HANDED_ON, FIRST, Step.RETRY, Blame.WORKER, None, None),
    (Ending.HANDED_ON, STREAM, Step.MOVE, Blame.WORKER, None, None),
    (Ending.RESET, FIRST, Step.RETRY, Blame.SUSPECT, True, None),
    (Ending.RESET, DEADLY, Step.FAIL, Blame.SUSPECT, True, UpstreamFailed),
    (Ending.RESET, LAST, Step.FAIL, Blame.SUSPECT, True, UpstreamFailed),
    (Ending.RESET, LAST | WAITED, Step.FAIL, Blame.SUSPECT, True, UpstreamFailed),
    (Ending.RESET, WHOLE, Step.RETRY, Blame.SUSPECT, True, None),
    (Ending.RESET, STREAM, Step.MOVE, Blame.WORKER, True, None),
    (Ending.RESET, STREAM | DEADLY | LAST, Step.MOVE, Blame.WORKER, True, None),
    (Ending.RESET, STUCK, Step.FAIL, Blame.WORKER, True, UpstreamFailed),
    (Ending.HELD_BACK, STREAM, Step.MOVE, Blame.NOBODY, None, None),
    (Ending.HELD_BACK, STUCK, Step.FAIL, Blame.NOBODY, None, UpstreamFailed),
    (Ending.STALE, FIRST, Step.RETRY, Blame.NOBODY, None, None),
    (Ending.STALE, DEADLY, Step.FAIL, Blame.NOBODY, None, UpstreamFailed),
    (Ending.STALE, STREAM, Step.MOVE, Blame.NOBODY, None, None),
    (Ending.UNHELPED, FIRST, Step.RETRY, Blame.NOBODY, None, None),
    (Ending.UNHELPED, DEADLY, Step.FAIL, Blame.NOBODY, None, UpstreamFailed),
    (Ending.SILENT, FIRST, Step.FAIL, Blame.SILENCE, True, UpstreamTimeout),
    (Ending.SILENT, FREE, Step.RETRY, Blame.SILENCE, True, None),
    (Ending.SILENT, FREE | DEADLY, Step.FAIL, Blame.SILENCE, True, UpstreamFailed),
    (Ending.SILENT, WHOLE, Step.FAIL, Blame.SILENCE, True, UpstreamTimeout),
    (Ending.SILENT, STREAM, Step.MOVE, Blame.SILENCE, True, None),
    (Ending.SILENT, STREAM | WHOLE, Step.FAIL, Blame.SILENCE, True, UpstreamTimeout),
    (Ending.SILENT, STUCK, Step.FAIL, Blame.SILENCE, True, UpstreamTimeout),
    (Ending.BUSY, {"status": 429}, Step.PASS_ON, Blame.NOBODY, None, None),
    (Ending.BUSY, FREE | {"status": 429}, Step.RETRY, Blame.WORKER, False, None),
    (Ending.BUSY, FREE | {"status": 503}, Step.RETRY, Blame.WORKER, True, None),
    (Ending.BUSY, STREAM | {"status": 503}, Step.MOVE, Blame.WORKER, True, None),
    (Ending.FULL, {"status": 429}, Step.PASS_ON, Blame.NOBODY, None, None),
    (Ending.FULL, {"status": 429, "outnumbered": True}, Step.DISPLACE, Blame.NOBODY, False, None),
    (Ending.FULL, {"status": 503, "outnumbered": True}, Step.DISPLACE, Blame.NOBODY, False, None),
    (Ending.FULL, FREE | {"status": 429}, Step.RETRY, Blame.WORKER, False, None),
    (Ending.FULL, STREAM | {"status": 429, "outnumbered": True}, Step.MOVE, Blame.WORKER, False, None),
    (Ending.ERROR, {"status": 500}, Step.PASS_ON, Blame.NOBODY, None, None),
    (Ending.ERROR, FREE | {"status": 500}, Step.RETRY, Blame.SUSPECT, True, None),
    (Ending.ERROR, FREE | {"status": 429}, Step.RETRY, Blame.SUSPECT, False, None),
    (Ending.ERROR, STREAM | {"status": 500}, Step.MOVE, Blame.WORKER, True, None),
    (Ending.DECLINED, STREAM | {"status": 400}, Step.FAIL, Blame.NOBODY, False, UpstreamFailed),
    (Ending.ENDLESS, FIRST, Step.FAIL, Blame.NOBODY, True, UpstreamFailed),
    (Ending.ENDLESS, STREAM, Step.FAIL, Blame.NOBODY, True, UpstreamFailed),
    (Ending.LOCAL, FIRST, Step.WAIT, Blame.NOBODY, None, None),
    (Ending.LOCAL, LAST | WAITED | DEADLY, Step.WAIT, Blame.NOBODY, None, None),
    (Ending.LOCAL, {"starved": True}, Step.FAIL, Blame.NOBODY, None, GatewayFull),
    (Ending.LOCAL, STREAM, Step.WAIT, Blame.NOBODY, None, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ending", "progress", "step", "blame", "failed", "error"),
    TABLE,
    ids=[f"{row[0].value}-{row[2].name.lower()}-{index}" for index, row in enumerate(TABLE)],
)
def test_what_is_done(
    ending: Ending,
    progress: dict[str, Any],
    step: Step,
    blame: Blame,
    failed: bool | None,
    error: type[RequestError] | None,
) -> None:
    action = decide(ending, Progress(**progress))
    assert (action.step, action.blame, action.failed, type(action.error)) == (step, blame, failed, error or type(None))


def test_every_ending_is_in_both_tables() -> None:
    assert set(POLICIES) == set(Ending) == {row[0] for row in TABLE}
    reported = {policy.outcome for policy in POLICIES.values() if policy.blame is not Blame.NOBODY}
    assert reported <= set(RULES), "what a worker is blamed for has a rule of its health"


JOURNALS = st.none() | st.builds(
    Journal, kept=st.booleans(), stalls=st.integers(0, 9), deaths=st.integers(0, 19), late=st.booleans()
)
PROGRESS = st.builds(
    Progress,
    attempts=st.integers(1, 9),
    resets=st.integers(0, 4),
    untouched=st.booleans(),
    begun=st.booleans(),
    streams=st.booleans(),
    journal=JOURNALS,
    status=st.none() | st.sampled_from((200, 400, 429, 500, 503)),
    another=st.booleans(),
    outnumbered=st.booleans(),
    waited=st.booleans(),
    starved=st.booleans(),
    detail=st.just("it is gone"),
)


@given(ending=st.sampled_from(Ending), progress=PROGRESS)
def test_a_client_is_never_left_without_an_end(ending: Ending, progress: Progress) -> None:
    action = decide(ending, progress)
    assert (action.step is Step.FAIL) == (action.error is not None)
    if progress.begun:  # what the client has seen of a stream cannot be taken back
        assert action.step in (Step.MOVE, Step.FAIL, Step.WAIT)
    else:
        assert action.step is not Step.MOVE
        assert action.unmoved is None or ending is Ending.DECLINED
    if action.step in (Step.PASS_ON, Step.DISPLACE, Step.WAIT):
        assert action.blame is Blame.NOBODY, "the answer tells, once its client gets it"
    if action.blame in (Blame.WORKER, Blame.SUSPECT):
        assert action.outcome is not None


@given(ending=st.sampled_from(Ending), progress=PROGRESS)
def test_a_request_that_kills_does_not_meet_every_worker(ending: Ending, progress: Progress) -> None:
    action = decide(ending, progress)
    if action.step is Step.RETRY and action.kills:
        assert progress.resets + 1 < MAX_RESETS
    if action.step is Step.MOVE:
        assert progress.journal is not None
        assert progress.journal.stalls <= MAX_STALLS
        assert progress.journal.deaths <= MAX_DEATHS


@given(ending=st.sampled_from(Ending), progress=PROGRESS)
def test_what_is_not_asked_for_changes_nothing(ending: Ending, progress: Progress) -> None:
    """To look for another worker costs a choice, and a part of the budget: it is done only where it counts."""
    asked = may_ask_another(ending, progress)
    alone = decide(ending, replace(progress, another=False))
    if asked:
        assert _told(decide(ending, replace(progress, another=True))) != _told(alone)
    if not may_displace(ending, replace(progress, another=False)):
        swapped = replace(progress, another=False, outnumbered=not progress.outnumbered)
        assert _told(decide(ending, swapped)) == _told(alone)


def _told(action: Action) -> tuple[object, ...]:
    """Errors are compared by what they say."""
    return action.step, action.blame, action.failed, str(action.error), action.unmoved


@pytest.mark.parametrize(
    ("journal", "word"),
    [
        (None, "unkept"),
        (Journal(kept=False), "memory"),
        (Journal(stalls=MAX_STALLS + 1), "deaths"),
        (Journal(stalls=1, deaths=MAX_DEATHS + 1), "deaths"),
        (Journal(late=True), "time"),
        (Journal(stalls=MAX_STALLS, deaths=MAX_DEATHS), None),
    ],
)
def test_why_a_stream_cannot_move(journal: Journal | None, word: str | None) -> None:
    action = decide(Ending.RESET, Progress(begun=True, untouched=False, journal=journal, detail="it is gone"))
    assert action.unmoved == word
    assert action.error is None or str(action.error) == "the answer broke off: it is gone"


@pytest.mark.parametrize("ending", [ending for ending, policy in POLICIES.items() if policy.outcome is not None])
def test_what_it_means_for_the_time_that_a_request_waits(ending: Ending) -> None:
    patience = decide(ending, Progress(another=True)).patience
    if ending in (Ending.REFUSED, Ending.UNAUTHORIZED):
        assert patience is Patience.RUNS
    else:
        assert patience is (Patience.LASTS if ending in (Ending.DRAINING, Ending.HANDED_ON) else Patience.ANEW)


@pytest.mark.parametrize(
    ("status", "begins"),
    [(None, "the worker did not begin its answer"), (200, "it is silent")],
    ids=["nothing", "head"],
)
def test_a_timeout_says_what_was_waited_for(status: int | None, begins: str) -> None:
    action = decide(Ending.SILENT, Progress(status=status, detail="it is silent"))
    assert str(action.error).startswith(begins)


@pytest.mark.parametrize("failure", Failure)
def test_how_a_connection_ended(failure: Failure) -> None:
    ending = name_failure(failure, held_back=False)
    held = name_failure(failure, held_back=True)
    assert held is (Ending.HELD_BACK if ending is Ending.RESET else ending)
    assert (ending is Ending.RESET) == (failure in (Failure.RESET, Failure.PROTOCOL))


@pytest.mark.parametrize(
    ("status", "retry", "ending"),
    [
        (400, None, Ending.DECLINED),
        (401, None, Ending.UNAUTHORIZED),
        (429, None, Ending.BUSY),
        (429, b"full", Ending.FULL),
        (503, b"elsewhere", Ending.DRAINING),
        (429, b"request", Ending.ERROR),
        (500, b"full", Ending.ERROR),
    ],
)
def test_how_an_answer_stands(status: int, retry: bytes | None, ending: Ending) -> None:
    assert name_answer(classify_status(status, retry), full=retry == b"full") is ending


def test_outcomes_that_an_answer_has_are_known() -> None:
    answers = {
        classify_status(status, retry) for status in range(200, 600) for retry in (None, b"", b"request", b"full")
    }
    assert {Outcome.ANSWERED, Outcome.BUSY, Outcome.DRAINING, Outcome.ERROR, Outcome.UNAUTHORIZED} == answers
    for outcome in answers:
        name_answer(outcome, full=True)
