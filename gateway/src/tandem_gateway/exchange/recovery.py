"""What happens after an attempt at a worker that did not give the client its answer: one decision, over one table.

`decide` is pure: how the attempt ended and how far the request has come go in, what is to be done comes out. The
exchange finds out the first and carries out the last. The table (`POLICIES`) says what each ending tells about the
worker and what it means for the request; the rest of this module is what all endings have in common: a request that
kills workers must not meet all of them, waiting is cheaper than failing, and an answer is better than none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from tandem_gateway.errors import GatewayFull, NoEndpoint, RequestError, UpstreamFailed, UpstreamTimeout
from tandem_gateway.scheduling import Outcome
from tandem_gateway.upstream.base import Failure

MAX_ATTEMPTS = 3
MAX_RESETS = 2
"""So many of the times that it is sent may end in a reset: a request that kills its worker must not meet all of
them."""
MAX_STALLS = 3
"""Moves of a stream after failures without any event between them, for the same reason."""
MAX_DEATHS = 8
"""Workers that fail under one stream, in all."""


class Ending(Enum):
    """How an attempt ended, or stands, where it is not the answer that the client gets as it is."""

    REFUSED = "refused"
    """The worker did not accept the connection."""
    UNAUTHORIZED = "unauthorized"
    """It does not take this gateway's key."""
    DRAINING = "draining"
    """It is about to stop, and has turned the request away."""
    HANDED_ON = "handed_on"
    """It is about to stop, and says that its stream is to go on elsewhere."""
    RESET = "reset"
    """The connection broke, carried something that is not HTTP, or ended within the answer."""
    HELD_BACK = "held_back"
    """The same, while nobody took from it because the client is slow, or soon after."""
    STALE = "stale"
    """An idle connection ended under it: by itself, or because the worker died of the request."""
    UNHELPED = "unhelped"
    """A worker that this one cannot do without has failed."""
    SILENT = "silent"
    """It has shown nothing of its answer for as long as it may."""
    BUSY = "busy"
    """It takes no more for now: 429, or 503."""
    FULL = "full"
    """The same, because as many requests wait there as may."""
    ERROR = "error"
    """Any other 5xx."""
    DECLINED = "declined"
    """It was to go on with a stream and will not: it says that this is the request's own fault."""
    ENDLESS = "endless"
    """An event of its stream has no end."""
    LOCAL = "local"
    """This gateway lacks what a connection needs: nothing was sent."""


class Blame(Enum):
    """What the worker is reported for."""

    NOBODY = auto()
    WORKER = auto()
    """The outcome."""
    SUSPECT = auto()
    """The outcome, once another worker has answered the same request: until then it may be the request's fault."""
    SILENCE = auto()
    """A timeout: its weight hangs on what others have heard of the worker meanwhile."""


class TrafficTally(Enum):
    """What the attempt counts as among those that the worker has ended."""

    NOTHING = auto()
    """It did nothing, and rightly so."""
    SERVED = auto()
    FAILED = auto()
    BY_STATUS = auto()
    """Failed where the status is 500 or more."""


class Patience(Enum):
    """What the attempt means for how long the request waits for a worker, once nobody is there."""

    LASTS = auto()
    """Nothing."""
    RUNS = auto()
    """Costs nothing but time: tried again for as long as a request may wait, which begins with the first such ending. A
    pod that restarts in place is back soon, keys arrive, or another worker takes over."""
    ANEW = auto()
    """This worker had begun with it: should nobody be there, the wait begins anew."""


class RecoveryStep(Enum):
    """What is done with the request."""

    PASS_ON = auto()
    """The client gets what the worker answered."""
    RETRY = auto()
    """Nothing has reached the client: the whole request goes to another worker, or waits for one."""
    MOVE = auto()
    """Another worker goes on with the stream."""
    DISPLACE = auto()
    """The newest waiting request of who has most at this worker goes, and this one gets its place."""
    WAIT = auto()
    """Until this gateway has what a connection needs."""
    FAIL = auto()
    """The client gets `Action.error`."""


@dataclass(frozen=True, slots=True)
class EndingPolicy:
    """What an ending says about the worker, and what it means for the request."""

    outcome: Outcome | None
    """What it says about the worker. Its value is the reason in metrics, spans and logs; None: the ending's own."""
    blame: Blame
    tally: TrafficTally
    patience: Patience = Patience.ANEW
    kills: bool = False
    """The worker may have died of the request."""
    fatal: bool = False
    """May be a stream's own fault."""
    stands: bool = False
    """Another worker is asked only while one is free and the budget of retries allows: else it stays with this end."""


_WORKER, _FAILED, _NOBODY = Blame.WORKER, TrafficTally.FAILED, Blame.NOBODY
POLICIES = {
    Ending.REFUSED: EndingPolicy(Outcome.REFUSED, _WORKER, _FAILED, Patience.RUNS),
    Ending.UNAUTHORIZED: EndingPolicy(Outcome.UNAUTHORIZED, _WORKER, _FAILED, Patience.RUNS),
    Ending.DRAINING: EndingPolicy(Outcome.DRAINING, _WORKER, TrafficTally.NOTHING, Patience.LASTS),
    Ending.HANDED_ON: EndingPolicy(Outcome.DRAINING, _WORKER, TrafficTally.NOTHING, Patience.LASTS),
    Ending.RESET: EndingPolicy(Outcome.RESET, Blame.SUSPECT, _FAILED, kills=True, fatal=True),
    Ending.HELD_BACK: EndingPolicy(Outcome.RESET, _NOBODY, TrafficTally.NOTHING, kills=True, fatal=True),
    Ending.STALE: EndingPolicy(Outcome.RESET, _NOBODY, TrafficTally.NOTHING, kills=True, fatal=True),
    Ending.UNHELPED: EndingPolicy(Outcome.RESET, _NOBODY, TrafficTally.NOTHING, kills=True, fatal=True),
    Ending.SILENT: EndingPolicy(Outcome.TIMEOUT, Blame.SILENCE, _FAILED, kills=True, fatal=True, stands=True),
    Ending.BUSY: EndingPolicy(Outcome.BUSY, _WORKER, TrafficTally.BY_STATUS, stands=True),
    Ending.FULL: EndingPolicy(Outcome.BUSY, _WORKER, TrafficTally.BY_STATUS, stands=True),
    Ending.ERROR: EndingPolicy(Outcome.ERROR, Blame.SUSPECT, TrafficTally.BY_STATUS, fatal=True, stands=True),
    Ending.DECLINED: EndingPolicy(None, _NOBODY, TrafficTally.SERVED),
    Ending.ENDLESS: EndingPolicy(None, _NOBODY, _FAILED),
    Ending.LOCAL: EndingPolicy(None, _NOBODY, TrafficTally.NOTHING),
}
_OF_FAILURE = {
    Failure.CONNECT: Ending.REFUSED,
    Failure.LOCAL: Ending.LOCAL,
    Failure.RESET: Ending.RESET,
    Failure.STALE: Ending.STALE,
    Failure.PROTOCOL: Ending.RESET,
    Failure.HELPER: Ending.UNHELPED,
}
_OF_OUTCOME = {
    Outcome.ANSWERED: Ending.DECLINED,
    Outcome.UNAUTHORIZED: Ending.UNAUTHORIZED,
    Outcome.DRAINING: Ending.DRAINING,
    Outcome.BUSY: Ending.BUSY,
    Outcome.ERROR: Ending.ERROR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalState:
    """What is kept of a stream that has begun, and how it has fared, this attempt included."""

    kept: bool = True
    stalls: int = 0
    """Fatal endings since its last event."""
    deaths: int = 0
    """Fatal endings in all."""
    late: bool = False
    """The time for its move is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptProgress:
    """How far a request has come when an attempt ends."""

    attempts: int = 1
    """This one included."""
    resets: int = 0
    """Attempts before that its workers may have died of."""
    untouched: bool = True
    """Nothing of this attempt's answer is here but its header."""
    begun: bool = False
    """The client sees a stream."""
    streams: bool = True
    """It asked for one."""
    journal: JournalState | None = None
    """None: the stream cannot go on elsewhere, whatever happens."""
    status: int | None = None
    """What the worker has answered; None: nothing."""
    another: bool = False
    """Another worker is free for it, and the budget of retries allows one more. See `may_ask_another`."""
    outnumbered: bool = False
    """Somebody else has more requests waiting at this worker, by more than one. See `may_displace`."""
    waited: bool = False
    """It has waited for a worker for as long as it may."""
    starved: bool = False
    """This gateway has lacked what a connection needs for as long as a request waits for it."""
    detail: str = ""
    """What happened, for people."""


@dataclass(frozen=True, slots=True)
class Action:
    """What is to be done: first the books about the worker, then the step."""

    step: RecoveryStep
    reason: str
    """In one word, for metrics, spans and logs."""
    blame: Blame = Blame.NOBODY
    outcome: Outcome | None = None
    """What the worker is blamed for."""
    failed: bool | None = None
    """How the attempt counts at its worker: it failed, or did not; None: it does not count."""
    kills: bool = False
    patience: Patience = Patience.LASTS
    error: RequestError | None = None
    unmoved: str | None = None
    """Why a stream that has begun cannot go on, in one word."""


def name_failure(failure: Failure, *, held_back: bool) -> Ending:
    """How an attempt ended whose connection did. `held_back`: nobody took from it, because the client is slow."""
    ending = _OF_FAILURE[failure]
    return Ending.HELD_BACK if held_back and ending is Ending.RESET else ending


def name_answer(outcome: Outcome, *, full: bool) -> Ending:
    """How an attempt stands whose worker has answered, by what that says about the worker. `full`: it says so."""
    ending = _OF_OUTCOME[outcome]
    return Ending.FULL if full and ending is Ending.BUSY else ending


def may_ask_another(ending: Ending, progress: AttemptProgress) -> bool:
    """Whether `decide` goes by `AttemptProgress.another`. To find that out costs a choice, and spends of the budget."""
    if not POLICIES[ending].stands or progress.begun:
        return False
    if ending is Ending.SILENT and not progress.streams:
        return False  # the next one would take as long
    return progress.untouched and progress.attempts < MAX_ATTEMPTS


def may_displace(ending: Ending, progress: AttemptProgress) -> bool:
    """Whether `decide` goes by `AttemptProgress.outnumbered`."""
    return ending is Ending.FULL and progress.untouched and not progress.begun and not progress.another


def decide(ending: Ending, progress: AttemptProgress) -> Action:
    """What is done after an attempt has ended so."""
    policy = POLICIES[ending]
    if ending is Ending.LOCAL:
        return _starve(progress)
    if policy.stands and not progress.begun and not progress.another and ending is not Ending.SILENT:
        if may_displace(ending, progress) and progress.outnumbered:
            return Action(RecoveryStep.DISPLACE, Outcome.BUSY.value, failed=False)
        return Action(RecoveryStep.PASS_ON, Outcome.ANSWERED.value)
    step, error, unmoved = _find_step(ending, policy, progress)
    blame = policy.blame
    if blame is Blame.SUSPECT and progress.begun:
        blame = Blame.WORKER  # nobody else will answer the request from its beginning, and so tell whose fault it was
    return Action(
        step,
        ending.value if policy.outcome is None else policy.outcome.value,
        blame=blame,
        outcome=policy.outcome,
        failed=_count(policy.tally, progress.status),
        kills=policy.kills,
        patience=policy.patience,
        error=error,
        unmoved=unmoved,
    )


def _count(tally: TrafficTally, status: int | None) -> bool | None:
    if tally is TrafficTally.BY_STATUS:
        return status is not None and status >= 500
    return None if tally is TrafficTally.NOTHING else tally is TrafficTally.FAILED


def _starve(progress: AttemptProgress) -> Action:
    if not progress.starved:
        return Action(RecoveryStep.WAIT, Ending.LOCAL.value)
    error = GatewayFull(f"the gateway cannot connect to a worker: {progress.detail}; try again shortly")
    return Action(RecoveryStep.FAIL, Ending.LOCAL.value, error=error)


def _find_step(
    ending: Ending, policy: EndingPolicy, progress: AttemptProgress
) -> tuple[RecoveryStep, RequestError | None, str | None]:
    """What to do with the request, what its client is told, and why its stream cannot move."""
    detail = progress.detail
    if ending is Ending.ENDLESS:
        return RecoveryStep.FAIL, UpstreamFailed("the worker sent an event without end"), None
    if ending is Ending.DECLINED:
        text = f"the answer broke off, and no other worker could go on with it ({progress.status})"
        return RecoveryStep.FAIL, UpstreamFailed(text), "refused"
    if ending is Ending.SILENT and not (progress.streams if progress.begun else progress.another):
        begins = "the worker did not begin its answer in time"
        return RecoveryStep.FAIL, UpstreamTimeout(begins if progress.status is None else detail), None
    if progress.begun:
        problem = _find_problem(progress.journal)
        if problem is None:
            return RecoveryStep.MOVE, None, None
        error = UpstreamTimeout if ending is Ending.SILENT else UpstreamFailed
        return RecoveryStep.FAIL, error(f"the answer broke off: {detail}"), problem
    resets = progress.resets + policy.kills
    exhausted = progress.attempts >= MAX_ATTEMPTS or resets >= MAX_RESETS
    if policy.patience is Patience.RUNS:
        exhausted = exhausted and progress.waited
    if not exhausted:
        return RecoveryStep.RETRY, None, None
    if not resets:
        return RecoveryStep.FAIL, NoEndpoint(f"no worker is available: {detail}; try again shortly"), None
    text = f"no worker could answer after {progress.attempts} attempts; the last said: {detail}"
    return RecoveryStep.FAIL, UpstreamFailed(text), None


def _find_problem(journal: JournalState | None) -> str | None:
    """Why a stream cannot move, in one word; None: it can."""
    if journal is None:
        return "unkept"
    if not journal.kept:
        return "memory"
    if journal.stalls > MAX_STALLS or journal.deaths > MAX_DEATHS:
        return "deaths"
    return "time" if journal.late else None
