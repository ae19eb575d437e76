"""Carries out what `recovery` decides after an attempt that has failed: finds out how far the request has come, asks,
and keeps the books about the worker before it does what is to be done.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

from tandem_api.names import Role

from tandem_gateway.errors import WorkerFull
from tandem_gateway.exchange import state
from tandem_gateway.exchange.delivery import drop_call, fail, release
from tandem_gateway.exchange.dispatching import answer_seconds, dispatch, leave_queue, stay_in_queue
from tandem_gateway.exchange.recovery import (
    POLICIES,
    Action,
    AttemptProgress,
    Blame,
    Ending,
    Patience,
    RecoveryStep,
    decide,
    may_ask_another,
    may_displace,
)
from tandem_gateway.exchange.state import SENT, WAITING, ExchangeState
from tandem_gateway.upstream.base import Failure

log = logging.getLogger(__name__)


def end_attempt(x: ExchangeState, ending: Ending, detail: str, status: int | None = None) -> bool:
    """Do what is to be done after an attempt that ended so, with this `status` where it is an answer. False: the
    client gets that answer."""
    progress, rival = find_progress(x, ending, detail, status), None
    if may_ask_another(ending, progress):
        progress = replace(progress, another=is_another_free(x))
    if may_displace(ending, progress):
        rival = find_rival(x)
        progress = replace(progress, outnumbered=rival is not None)
    action = decide(ending, progress)
    step = action.step
    if step is RecoveryStep.PASS_ON:
        return False
    drop_call(x)
    if action.failed is not None:
        assert x.choice is not None
        x.choice.decode.count_end(failed=action.failed)
    if x.trace is not None:
        others = x.begun and progress.untouched  # what is known was answered by the worker before
        answered = None if others else x.answered_status
        x.trace.attempt_ended(x, action.reason, answered if status is None else status)
    blame(x, action)
    if action.unmoved is not None:
        x.context.metrics.failed_resumes[action.unmoved] += 1
    if step is RecoveryStep.FAIL:
        assert action.error is not None
        fail(x, action.error)
        return True
    release(x)
    if step is RecoveryStep.RETRY:
        retry(x, action)
    elif step is RecoveryStep.MOVE:
        move(x, action, detail)
    elif rival is not None:
        displace(x, rival)
    else:
        wait_for_connection(x)
    return True


def find_progress(x: ExchangeState, ending: Ending, detail: str, status: int | None) -> AttemptProgress:
    """How far this request has come, of what can be told without looking for another worker."""
    now, policy, continuation = x.loop.time(), POLICIES[ending], x.continuation
    if ending is Ending.LOCAL:
        x.connect_by = x.connect_by or now + state.GRACE_SECONDS
    journal = None
    if continuation is not None and x.begun and policy.outcome is not None:
        journal = continuation.note_failure(policy.outcome.value, now, fatal=policy.fatal)
    call = x.call
    return AttemptProgress(
        attempts=x.attempts,
        resets=x.resets + (call is not None and call.resent),
        untouched=x.phase == SENT,
        begun=x.begun,
        streams=x.inquiry.stream,
        journal=journal,
        status=x.answered_status if status is None else status,
        waited=now >= (x.give_up_at or now + x.context.queue.settings.ttl_seconds),
        starved=0 < x.connect_by <= now,
        detail=detail,
    )


def is_another_free(x: ExchangeState) -> bool:
    """Another worker is free for this request now, and the budget of retries allows it; spends of that."""
    return x.can_go_elsewhere() and x.context.scheduler.may_retry()


def blame(x: ExchangeState, action: Action) -> None:
    """Report the worker, or keep in mind what it is suspected of."""
    assert x.choice is not None
    decode, scheduler, outcome, now = x.choice.decode, x.context.scheduler, action.outcome, x.loop.time()
    if action.blame is Blame.SILENCE:
        timeouts = x.context.timeouts
        allowed = answer_seconds(x) if x.head is None else timeouts.idle_seconds
        scheduler.report_timeout(decode, allowed, now)
    elif outcome is not None and action.blame is Blame.SUSPECT:
        x.suspects += ((decode, outcome),)
    elif outcome is not None and action.blame is Blame.WORKER:
        scheduler.report(decode, outcome, now)


def retry(x: ExchangeState, action: Action) -> None:
    """Hand the request to another worker."""
    assert x.choice is not None
    x.head = x.stream = None
    x.held.clear()
    x.held_size = 0
    x.excluded |= {x.choice.decode.worker.name}
    x.resets += action.kills
    if action.patience is Patience.RUNS:
        x.give_up_at = x.give_up_at or x.loop.time() + x.context.queue.settings.ttl_seconds
    elif action.patience is Patience.ANEW:
        x.give_up_at = 0.0
    x.context.metrics.retries[action.reason] += 1
    dispatch(x)


def move(x: ExchangeState, action: Action, detail: str) -> None:
    """Let another worker go on with a stream that has begun."""
    continuation = x.continuation
    assert continuation is not None
    assert x.choice is not None
    decode = x.choice.decode
    log.info("a stream moves", extra={"request_id": x.request_id.decode(), "reason": action.reason,
                                      "detail": detail, "worker": decode.worker.name})  # fmt: skip
    continuation.stream.restart()
    x.excluded |= {decode.worker.name}
    unsent, x.unsent = x.unsent, b""
    if unsent:
        x.connection.transport.write(unsent)
    x.deadline = continuation.deadline
    if x.slow:
        x.phase = WAITING  # for its client: nothing would hold the next worker back
    else:
        dispatch(x)


def wait_for_connection(x: ExchangeState) -> None:
    """The gateway itself lacks what a connection needs. Others may soon give some back."""
    x.context.metrics.retries[Failure.LOCAL.value] += 1
    x.attempts -= 1
    x.deadline = x.connect_by + state.GRACE_SECONDS
    x.phase = WAITING


def displace(x: ExchangeState, rival: ExchangeState) -> None:
    """Let `rival` go instead of this one, which takes its place at the worker."""
    assert x.choice is not None
    endpoint, now = x.choice.decode, x.loop.time()
    x.displaced = True
    others = (other.worker for other in x.context.scheduler.endpoints.values() if other is not endpoint)
    x.excluded = frozenset(worker.name for worker in others if worker.role is not Role.PREFILL)
    x.phase, x.deadline = WAITING, now + state.GRACE_SECONDS
    rival.turn_away(
        WorkerFull(
            "as many requests wait at the worker as it takes, and most of them are of this client's address; try"
            " again later",
            x.context.queue.find_backlog(),
        )
    )


def find_rival(x: ExchangeState) -> ExchangeState | None:
    """The newest request at this worker of whoever has most there, where that is somebody else with more than one
    more, and this one has made nobody go yet."""
    choice = x.choice
    assert choice is not None
    if x.displaced:
        return None
    newest: dict[str, ExchangeState] = {}
    counts: Counter[str] = Counter()
    for reservation in choice.decode.owing:
        holder = reservation.holder
        if isinstance(holder, ExchangeState) and holder.choice is not None and holder.choice.decode is choice.decode:
            counts[holder.source] += 1
            newest[holder.source] = holder
    source, most = counts.most_common(1)[0] if counts else ("", 0)
    return None if source == x.source or most <= counts[x.source] else newest[source]


def time_out(x: ExchangeState) -> None:
    """Its deadline is over: that of its worker, or that of its wait for one."""
    if x.phase == WAITING:
        if x.begun:
            x.context.metrics.failed_resumes["time"] += 1
        if x.ticket is not None and stay_in_queue(x):
            return
        leave_queue(x, "expired")
        fail(x, x.context.queue.refuse())
        return
    end_attempt(x, Ending.SILENT, "the worker was silent for too long")
