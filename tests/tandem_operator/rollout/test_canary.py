"""What a canary does next, by what is there, what gateways say and what time it is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.crd.rollout import Canary
from tandem_api.crd.status import CanaryFigures, CanaryStatus, RolloutStatus
from tandem_api.launch import CanaryTraffic
from tandem_api.names import Role
from tandem_operator.objects.problem import Problem
from tandem_operator.rollout.canary import RolloutRequest, advance, canary_traffic, limits, rollout_problem, wants_slot
from tandem_operator.rollout.figures import Judgement, Verdict
from tandem_operator.rollout.trial import RoleFleet, TrialFleet, replicas_for

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CANARY = Canary.model_validate(
    {"steps": [{"weight": 10, "duration": "1m"}, {"weight": 50, "duration": "5m"}], "maxErrorRate": 5}
)
GOOD, BAD = (
    Verdict(judgement=Judgement.GOOD),
    Verdict(judgement=Judgement.BAD, reason="ErrorRateExceeded", text="9 of 9"),
)
UNKNOWN = Verdict(judgement=Judgement.UNKNOWN, reason="NoFigures", text="no gateway has reported")


def text(seconds: float = 0) -> str:
    return (NOW + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def state(phase: str = "Complete", **fields: Any) -> RolloutStatus:
    told = {"phase": phase, "revision": 1, "digest": "a", "stableRevision": 1, "completeRevision": 1, "since": text()}
    return RolloutStatus.model_validate(told | fields)


def trying(**fields: Any) -> RolloutStatus:
    trial = {"revision": 2, "step": 1, "weight": 10, "since": text(), "ready": True} | fields
    return state("Canary", revision=2, canary=trial)


def request(revision: int = 2, **fields: Any) -> RolloutRequest:
    return RolloutRequest(**({"revision": revision, "digest": "b", "canary": CANARY} | fields))


def role(wanted: int = 4, **fields: Any) -> RoleFleet:
    return RoleFleet(**({"wanted": wanted, "new": wanted, "new_ready": wanted, "new_up": wanted} | fields))


def tried(ready: int = 1, wanted: int = 4, **fields: Any) -> TrialFleet:
    """A fleet with new workers, and old ones beside them."""
    old = wanted - ready
    one = role(wanted, new=ready, new_ready=ready, new_up=ready, old=old, old_up=old, keeps_old=True)
    return TrialFleet(roles={Role.UNIFIED: RoleFleet(**{f: getattr(one, f) for f in one.__slots__} | fields)})


def even(**fields: Any) -> TrialFleet:
    return TrialFleet(roles={Role.UNIFIED: role(**fields)})


def after(
    before: RolloutStatus | None, asked: RolloutRequest, fleet: TrialFleet, verdict: Verdict = GOOD, *, at: float = 0
) -> RolloutStatus:
    return advance(before, asked, fleet, verdict=verdict, now=NOW + timedelta(seconds=at))


def test_a_change_begins_a_canary_where_all_workers_are_of_one_revision() -> None:
    found = after(state(), request(), even())
    assert (found.phase, found.revision, found.stable_revision) == ("Canary", 2, 1)
    assert found.canary is not None
    assert (found.canary.step, found.canary.weight, found.canary.ready) == (1, 0, False)


@pytest.mark.parametrize(
    ("asked", "fleet", "phase"),
    [
        (request(canary=None), even(), "Progressing"),
        (request(), even(old=1, old_up=1), "Preparing"),
        (request(), even(is_current=False), "Preparing"),
        (request(), even(new_ready=0, new_up=0), "Preparing"),
        (
            request(),
            even(new_up=0, trouble=Problem(reason="CrashLoopBackOff", message="x", stalled=True)),
            "Progressing",
        ),
        (request(), even(wanted=0), "Preparing"),
        (request(may_roll=False), even(), "Preparing"),
    ],
    ids=["no canary", "in the middle", "not seen", "starting", "broken", "suspended", "no turn"],
)
def test_what_a_change_begins_with(asked: RolloutRequest, fleet: TrialFleet, phase: str) -> None:
    found = after(state(), asked, fleet)
    assert found.phase == phase
    assert found.waiting == (not asked.may_roll)


def test_a_clock_that_was_ahead_holds_no_step() -> None:
    """Another operator wrote down when the step began, or somebody has set the clock."""
    before = trying(since=text(7200)).model_copy(update={"since": text(7200)})
    found = after(before, request(), tried(1))
    assert found.canary is not None
    assert (found.since, found.canary.since) == (text(), text())
    found = after(found, request(), tried(1), at=60)
    assert found.canary is not None
    assert found.canary.step == 2


@pytest.mark.parametrize("complete", [None, 1])
def test_nobody_waits_for_a_revision_that_cannot_come_up(complete: int | None) -> None:
    """A status that was lost, and the correction of a mistake with a canary: what still serves is of a revision that
    nobody knows, and the one before the correction is the mistake."""
    stuck = even(new=1, new_up=0, new_ready=0, old=1, old_up=1)
    trouble = even(
        new=1, new_up=0, new_ready=0, old=1, old_up=1,
        trouble=Problem(reason="ImagePullFailed", message="x", stalled=True),
    )  # fmt: skip
    before = state("Preparing", revision=2, stableRevision=1, completeRevision=complete)
    assert after(before, request(digest="a"), stuck).phase == "Preparing"
    found = after(before, request(digest="a"), trouble)
    assert (found.phase, found.stable_revision) == ("Progressing", 2)


def test_a_model_that_never_served_has_nothing_to_protect() -> None:
    assert after(state("Progressing", completeRevision=None), request(), even(new_up=0)).phase == "Progressing"


def test_a_change_in_the_middle_of_a_rollout_that_does_not_come_up_goes_back_to_what_served() -> None:
    rolling = state("Progressing", revision=2, stableRevision=2, completeRevision=1)
    stuck = even(new=1, new_up=0, new_ready=0, old=3, old_up=3)
    assert after(rolling, request(3), stuck).stable_revision == 1
    assert after(rolling, request(3), even(new=3, new_up=3, old=1, old_up=1)).stable_revision == 2


def test_the_time_of_a_step_counts_while_its_workers_are_ready() -> None:
    begun = after(trying(ready=False, weight=0), request(), tried(1), at=30)
    assert begun.canary is not None
    assert (begun.canary.ready, begun.canary.weight, begun.canary.since) == (True, 10, text(30))
    assert after(begun, request(), tried(1), at=80).canary == begun.canary
    lost = after(begun, request(), tried(0), at=80)
    assert lost.canary is not None
    assert (lost.canary.ready, lost.canary.weight, lost.canary.since) == (False, 0, text(80))
    over = after(begun, request(), tried(1), at=90)
    assert over.canary is not None
    assert (over.canary.step, over.canary.weight, over.canary.ready) == (2, 10, False)
    more = after(over, request(), tried(2), at=95)
    assert more.canary is not None
    assert (more.canary.weight, more.canary.ready) == (50, True)
    assert after(more, request(), tried(2), at=394).phase == "Canary"
    done = after(more, request(), tried(2), at=395)
    assert (done.phase, done.stable_revision, done.canary) == ("Progressing", 2, None)
    assert after(done, request(), even(), at=400).complete_revision == 2


@pytest.mark.parametrize("verdict", [UNKNOWN, BAD])
def test_without_good_figures_no_step_ends_well(verdict: Verdict) -> None:
    found = after(trying(), request(), tried(1), verdict, at=1000)
    assert found.canary is not None
    assert found.canary.step == 1
    assert found.phase == ("RolledBack" if verdict is BAD else "Canary")
    assert found.canary.message == ("9 of 9" if verdict is BAD else "no gateway has reported")
    assert found.stable_revision == 1


def test_a_canary_whose_workers_do_not_come_up_goes_back() -> None:
    starting = trying(ready=False, weight=0)
    assert after(starting, request(deadline_seconds=60), tried(0), at=59).phase == "Canary"
    late = after(starting, request(deadline_seconds=60), tried(0), at=60)
    assert late.canary is not None
    assert (late.phase, late.canary.reason) == ("RolledBack", "ProgressDeadlineExceeded")
    assert after(starting, request(deadline_seconds=60, paused=True), tried(0), at=600).phase == "Canary"
    looping = tried(0, trouble=Problem(reason="CrashLoopBackOff", message="Pod m-decode-3: x", stalled=True))
    assert after(starting, request(), looping).phase == "RolledBack"


def test_the_deadline_begins_anew_after_a_pause() -> None:
    paused = after(trying(ready=False, weight=0), request(deadline_seconds=60, paused=True), tried(0), at=500)
    on = after(paused, request(deadline_seconds=60), tried(0), at=510)
    assert on.canary is not None
    assert (on.phase, on.canary.since) == ("Canary", text(510))
    assert after(on, request(deadline_seconds=60), tried(0), at=570).phase == "RolledBack"
    waiting = trying(ready=False, weight=0).model_copy(update={"waiting": True})
    given = after(waiting, request(deadline_seconds=60), tried(0), at=500)
    assert (given.phase, given.waiting) == ("Canary", False)
    assert after(given, request(deadline_seconds=60), tried(0), at=559).phase == "Canary"


def test_what_failed_stays_failed_until_somebody_asks() -> None:
    failed = after(trying(), request(), tried(1), BAD)
    assert after(failed, request(), even(), at=10_000) == failed
    assert after(failed, request(retry="again"), even()).phase == "Canary"
    early = after(trying(), request(retry="too early"), tried(1), BAD)
    assert after(early, request(retry="too early"), even()) == early
    assert after(failed, request(3), even()).phase == "Canary"
    assert after(failed, request(1), even()).phase == "Progressing"
    promoted = after(failed, request(canary=None), even())
    assert (promoted.phase, promoted.stable_revision) == ("Progressing", 2)


def test_old_workers_that_were_all_gone_end_a_canary() -> None:
    assert after(trying(), request(), tried(1, keeps_old=False)).phase == "Preparing"
    assert after(trying(), request(), tried(0, wanted=0)).phase == "Preparing"


@given(wanted=st.integers(1, 20), surge=st.integers(0, 3), weight=st.integers(1, 99))
def test_replicas_of_a_step_leave_one_of_each_revision(wanted: int, surge: int, weight: int) -> None:
    count = replicas_for(RoleFleet(wanted=wanted, surge=surge), weight)
    assert count >= 1
    if wanted + surge > 1:
        assert wanted + surge - count >= 1
        assert count >= min(wanted * weight / 100, wanted + surge - 1)


def test_limits_are_those_of_the_step() -> None:
    fleet = TrialFleet(roles={Role.PREFILL: role(2), Role.DECODE: role(8), Role.UNIFIED: role(3, is_tried=False)})
    assert limits(trying(), CANARY, fleet) == {Role.PREFILL: 1, Role.DECODE: 1}
    assert limits(trying(step=2), CANARY, fleet) == {Role.PREFILL: 1, Role.DECODE: 4}
    assert limits(state(), CANARY, fleet) == {}


def test_traffic_names_the_workers_on_trial() -> None:
    fleet = tried(1, new_workers=("m-decode-3",), old_workers=("m-decode-0",))
    traffic = canary_traffic(trying(), fleet, None)
    assert traffic == CanaryTraffic(percent=10.0, workers=["m-decode-3"])
    unseen = tried(1, is_current=False)
    assert canary_traffic(trying(), unseen, traffic) == traffic
    failed = after(trying(), request(), fleet, BAD)
    assert canary_traffic(failed, unseen, traffic) == CanaryTraffic(percent=0.0, workers=["m-decode-3"])
    going = TrialFleet(roles={Role.UNIFIED: role(old_workers=("m-decode-3",))})
    assert canary_traffic(failed, going, traffic) == CanaryTraffic(percent=0.0, workers=["m-decode-3"])
    assert canary_traffic(failed, even(new_workers=("m-decode-3",)), traffic) is None
    assert canary_traffic(state("Progressing"), going, None) is None, "a rollout like any other takes nothing away"


def test_what_goes_back_asks_nobody_for_a_turn() -> None:
    failed = after(trying(), request(), tried(1), BAD)
    assert not wants_slot(failed, request(), tried(1))
    assert wants_slot(failed, request(retry="x"), tried(1))
    assert wants_slot(state(), request(), even())
    assert not wants_slot(state(), request(1), even())
    assert not wants_slot(trying(), request(paused=True), tried(1))


def test_conditions_say_what_it_waits_for() -> None:
    waiting = after(state(), request(may_roll=False), even())
    told = rollout_problem(waiting, CANARY, paused=False)
    assert told is not None
    assert (told.reason, told.stalled) == ("WaitingForTurn", False)
    running = after(trying(), request(), tried(1), UNKNOWN, at=100)
    told = rollout_problem(running, CANARY, paused=False)
    assert told is not None
    assert told.message == "revision 2, step 1 of 2, 10 % of requests: no gateway has reported"
    assert rollout_problem(state(), CANARY, paused=True) is None


STATES = st.builds(
    RolloutStatus,
    phase=st.sampled_from(["Complete", "Progressing", "Preparing", "Canary", "RolledBack"]),
    revision=st.integers(1, 3),
    digest=st.just("a"),
    stable_revision=st.integers(1, 3),
    complete_revision=st.none() | st.integers(1, 3),
    since=st.just(text()),
    waiting=st.booleans(),
    canary=st.none()
    | st.builds(
        CanaryStatus, revision=st.integers(1, 3), step=st.integers(1, 4), since=st.just(text()), ready=st.booleans(),
        figures=st.none() | st.just(CanaryFigures()),
    ),
    retry=st.none(),
)  # fmt: skip


@pytest.mark.parametrize("phase", ["Preparing", "Canary"])
def test_a_canary_of_a_status_that_cannot_be_is_rolled_out(phase: str) -> None:
    """Whoever edits a status must not stop the looks at a model."""
    edited = RolloutStatus(phase=phase, revision=1, digest="a", stable_revision=1, since="2026-01-01T00:00:00Z")  # type: ignore[arg-type]
    assert after(edited, request(1, canary=None), TrialFleet(), GOOD).phase == "Progressing"


FLEETS = st.builds(
    lambda **fields: TrialFleet(roles={Role.UNIFIED: RoleFleet(**fields)}),
    wanted=st.integers(0, 4), surge=st.integers(0, 1), new=st.integers(0, 4), new_ready=st.integers(0, 4),
    new_up=st.integers(0, 4), old=st.integers(0, 4), old_up=st.integers(0, 4), is_current=st.booleans(),
    keeps_old=st.booleans(),
)  # fmt: skip


@given(
    before=STATES, asked=st.integers(1, 3), canary=st.sampled_from([None, CANARY]), fleet=FLEETS,
    verdict=st.sampled_from([GOOD, BAD, UNKNOWN]), paused=st.booleans(), turn=st.booleans(), at=st.integers(0, 4000),
)  # fmt: skip
def test_nothing_is_promoted_but_by_its_last_step(
    before: RolloutStatus,
    asked: int,
    canary: Canary | None,
    fleet: TrialFleet,
    verdict: Verdict,
    paused: bool,
    turn: bool,
    at: int,
) -> None:
    told = request(asked, canary=canary, paused=paused, may_roll=turn)
    found = after(before, told, fleet, verdict, at=at)
    assert found == after(before, told, fleet, verdict, at=at), "the same state has the same answer"
    if before.phase != "Canary" or asked != before.revision or canary is None:
        return
    if found.phase == "Progressing":
        assert before.canary is not None
        assert before.canary.step >= len(CANARY.steps)
        assert verdict is GOOD
        assert not paused
        assert before.canary.ready
        assert fleet.is_ready_for(50)
