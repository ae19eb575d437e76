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
    AttemptProgress,
    Blame,
    Ending,
    JournalState,
    Patience,
    RecoveryStep,
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
STREAM = {"attempts": 1, "begun": True, "untouched": False, "journal": JournalState(stalls=1, deaths=1)}
STUCK = STREAM | {"journal": JournalState(stalls=MAX_STALLS + 1)}
FREE = {"another": True}
WHOLE = {"streams": False}
WAITED = {"waited": True}

TABLE = [
    # how it ended, how far it had come, what is done, blame, whether it counts as failed, the error
    (Ending.REFUSED, FIRST, RecoveryStep.RETRY, Blame.WORKER, True, None),
    (Ending.REFUSED, LAST, RecoveryStep.RETRY, Blame.WORKER, True, None),
    (Ending.REFUSED, WAITED, RecoveryStep.RETRY, Blame.WORKER, True, None),
    (Ending.REFUSED, LAST | WAITED, RecoveryStep.FAIL, Blame.WORKER, True, NoEndpoint),
    (Ending.REFUSED, LAST | WAITED | DEADLY, RecoveryStep.FAIL, Blame.WORKER, True, UpstreamFailed),
    (Ending.REFUSED, STREAM, RecoveryStep.MOVE, Blame.WORKER, True, None),
    (Ending.UNAUTHORIZED, LAST, RecoveryStep.RETRY, Blame.WORKER, True, None),
    (Ending.UNAUTHORIZED, LAST | WAITED, RecoveryStep.FAIL, Blame.WORKER, True, NoEndpoint),
    (Ending.UNAUTHORIZED, STREAM, RecoveryStep.MOVE, Blame.WORKER, True, None),
    (Ending.DRAINING, FIRST, RecoveryStep.RETRY, Blame.WORKER, None, None),
    (Ending.DRAINING, LAST, RecoveryStep.FAIL, Blame.WORKER, None, NoEndpoint),
    (Ending.DRAINING, STREAM, RecoveryStep.MOVE, Blame.WORKER, None, None),
    (Ending.HANDED_ON, FIRST, RecoveryStep.RETRY, Blame.WORKER, None, None),
    (Ending.HANDED_ON, STREAM, RecoveryStep.MOVE, Blame.WORKER, None, None),
    (Ending.RESET, FIRST, RecoveryStep.RETRY, Blame.SUSPECT, True, None),
    (Ending.RESET, DEADLY, RecoveryStep.FAIL, Blame.SUSPECT, True, UpstreamFailed),
    (Ending.RESET, LAST, RecoveryStep.FAIL, Blame.SUSPECT, True, UpstreamFailed),
    (Ending.RESET, LAST | WAITED, RecoveryStep.FAIL, Blame.SUSPECT, True, UpstreamFailed),
    (Ending.RESET, WHOLE, RecoveryStep.RETRY, Blame.SUSPECT, True, None),
    (Ending.RESET, STREAM, RecoveryStep.MOVE, Blame.WORKER, True, None),
    (Ending.RESET, STREAM | DEADLY | LAST, RecoveryStep.MOVE, Blame.WORKER, True, None),
    (Ending.RESET, STUCK, RecoveryStep.FAIL, Blame.WORKER, True, UpstreamFailed),
    (Ending.HELD_BACK, STREAM, RecoveryStep.MOVE, Blame.NOBODY, None, None),
    (Ending.HELD_BACK, STUCK, RecoveryStep.FAIL, Blame.NOBODY, None, UpstreamFailed),
    (Ending.STALE, FIRST, RecoveryStep.RETRY, Blame.NOBODY, None, None),
    (Ending.STALE, DEADLY, RecoveryStep.FAIL, Blame.NOBODY, None, UpstreamFailed),
    (Ending.STALE, STREAM, RecoveryStep.MOVE, Blame.NOBODY, None, None),
    (Ending.UNHELPED, FIRST, RecoveryStep.RETRY, Blame.NOBODY, None, None),
    (Ending.UNHELPED, DEADLY, RecoveryStep.FAIL, Blame.NOBODY, None, UpstreamFailed),
    (Ending.SILENT, FIRST, RecoveryStep.FAIL, Blame.SILENCE, True, UpstreamTimeout),
    (Ending.SILENT, FREE, RecoveryStep.RETRY, Blame.SILENCE, True, None),
    (Ending.SILENT, FREE | DEADLY, RecoveryStep.FAIL, Blame.SILENCE, True, UpstreamFailed),
    (Ending.SILENT, WHOLE, RecoveryStep.FAIL, Blame.SILENCE, True, UpstreamTimeout),
    (Ending.SILENT, STREAM, RecoveryStep.MOVE, Blame.SILENCE, True, None),
    (Ending.SILENT, STREAM | WHOLE, RecoveryStep.FAIL, Blame.SILENCE, True, UpstreamTimeout),
    (Ending.SILENT, STUCK, RecoveryStep.FAIL, Blame.SILENCE, True, UpstreamTimeout),
    (Ending.BUSY, {"status": 429}, RecoveryStep.PASS_ON, Blame.NOBODY, None, None),
    (Ending.BUSY, FREE | {"status": 429}, RecoveryStep.RETRY, Blame.WORKER, False, None),
    (Ending.BUSY, FREE | {"status": 503}, RecoveryStep.RETRY, Blame.WORKER, True, None),
    (Ending.BUSY, STREAM | {"status": 503}, RecoveryStep.MOVE, Blame.WORKER, True, None),
    (Ending.FULL, {"status": 429}, RecoveryStep.PASS_ON, Blame.NOBODY, None, None),
    (Ending.FULL, {"status": 429, "outnumbered": True}, RecoveryStep.DISPLACE, Blame.NOBODY, False, None),
    (Ending.FULL, {"status": 503, "outnumbered": True}, RecoveryStep.DISPLACE, Blame.NOBODY, False, None),
    (Ending.FULL, FREE | {"status": 429}, RecoveryStep.RETRY, Blame.WORKER, False, None),
    (Ending.FULL, STREAM | {"status": 429, "outnumbered": True}, RecoveryStep.MOVE, Blame.WORKER, False, None),
    (Ending.ERROR, {"status": 500}, RecoveryStep.PASS_ON, Blame.NOBODY, None, None),
    (Ending.ERROR, FREE | {"status": 500}, RecoveryStep.RETRY, Blame.SUSPECT, True, None),
    (Ending.ERROR, FREE | {"status": 429}, RecoveryStep.RETRY, Blame.SUSPECT, False, None),
    (Ending.ERROR, STREAM | {"status": 500}, RecoveryStep.MOVE, Blame.WORKER, True, None),
    (Ending.DECLINED, STREAM | {"status": 400}, RecoveryStep.FAIL, Blame.NOBODY, False, UpstreamFailed),
    (Ending.ENDLESS, FIRST, RecoveryStep.FAIL, Blame.NOBODY, True, UpstreamFailed),
    (Ending.ENDLESS, STREAM, RecoveryStep.FAIL, Blame.NOBODY, True, UpstreamFailed),
    (Ending.LOCAL, FIRST, RecoveryStep.WAIT, Blame.NOBODY, None, None),
    (Ending.LOCAL, LAST | WAITED | DEADLY, RecoveryStep.WAIT, Blame.NOBODY, None, None),
    (Ending.LOCAL, {"starved": True}, RecoveryStep.FAIL, Blame.NOBODY, None, GatewayFull),
    (Ending.LOCAL, STREAM, RecoveryStep.WAIT, Blame.NOBODY, None, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ending", "progress", "step", "blame", "failed", "error"),
    TABLE,
    ids=[f"{row[0].value}-{row[2].name.lower()}-{index}" for index, row in enumerate(TABLE)],
)
def test_what_is_done(
    ending: Ending,
    progress: dict[str, Any],
    step: RecoveryStep,
    blame: Blame,
    failed: bool | None,
    error: type[RequestError] | None,
) -> None:
    action = decide(ending, AttemptProgress(**progress))
    assert (action.step, action.blame, action.failed, type(action.error)) == (step, blame, failed, error or type(None))


def test_every_ending_is_in_both_tables() -> None:
    assert set(POLICIES) == set(Ending) == {row[0] for row in TABLE}
    reported = {policy.outcome for policy in POLICIES.values() if policy.blame is not Blame.NOBODY}
    assert reported <= set(RULES), "what a worker is blamed for has a rule of its health"


JOURNALS = st.none() | st.builds(
    JournalState, kept=st.booleans(), stalls=st.integers(0, 9), deaths=st.integers(0, 19), late=st.booleans()
)
PROGRESS = st.builds(
    AttemptProgress,
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
def test_a_client_is_never_left_without_an_end(ending: Ending, progress: AttemptProgress) -> None:
    action = decide(ending, progress)
    assert (action.step is RecoveryStep.FAIL) == (action.error is not None)
    if progress.begun:  # what the client has seen of a stream cannot be taken back
        assert action.step in (RecoveryStep.MOVE, RecoveryStep.FAIL, RecoveryStep.WAIT)
    else:
        assert action.step is not RecoveryStep.MOVE
        assert action.unmoved is None or ending is Ending.DECLINED
    if action.step in (RecoveryStep.PASS_ON, RecoveryStep.DISPLACE, RecoveryStep.WAIT):
        assert action.blame is Blame.NOBODY, "the answer tells, once its client gets it"
    if action.blame in (Blame.WORKER, Blame.SUSPECT):
        assert action.outcome is not None


@given(ending=st.sampled_from(Ending), progress=PROGRESS)
def test_a_request_that_kills_does_not_meet_every_worker(ending: Ending, progress: AttemptProgress) -> None:
    action = decide(ending, progress)
    if action.step is RecoveryStep.RETRY and action.kills:
        assert progress.resets + 1 < MAX_RESETS
    if action.step is RecoveryStep.MOVE:
        assert progress.journal is not None
        assert progress.journal.stalls <= MAX_STALLS
        assert progress.journal.deaths <= MAX_DEATHS


@given(ending=st.sampled_from(Ending), progress=PROGRESS)
def test_what_is_not_asked_for_changes_nothing(ending: Ending, progress: AttemptProgress) -> None:
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
        (JournalState(kept=False), "memory"),
        (JournalState(stalls=MAX_STALLS + 1), "deaths"),
        (JournalState(stalls=1, deaths=MAX_DEATHS + 1), "deaths"),
        (JournalState(late=True), "time"),
        (JournalState(stalls=MAX_STALLS, deaths=MAX_DEATHS), None),
    ],
)
def test_why_a_stream_cannot_move(journal: JournalState | None, word: str | None) -> None:
    action = decide(Ending.RESET, AttemptProgress(begun=True, untouched=False, journal=journal, detail="it is gone"))
    assert action.unmoved == word
    assert action.error is None or str(action.error) == "the answer broke off: it is gone"


@pytest.mark.parametrize("ending", [ending for ending, policy in POLICIES.items() if policy.outcome is not None])
def test_what_it_means_for_the_time_that_a_request_waits(ending: Ending) -> None:
    patience = decide(ending, AttemptProgress(another=True)).patience
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
    action = decide(Ending.SILENT, AttemptProgress(status=status, detail="it is silent"))
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
