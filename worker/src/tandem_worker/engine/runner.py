"""What happens on the engine thread: requests come, steps run, tokens go. No thread is known here.

Every handler and `finish_step` leave `outputs.deltas` for the caller to deliver. A request is in `requests` from
submission until its last choice ends; a peer's prompt is in `peers` until it is released.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tandem_worker.engine.block_reports import LayerReport, PeerPrompts
from tandem_worker.engine.contract import RemotePrefillResult
from tandem_worker.engine.execute.executor import ModelExecutor, is_fatal
from tandem_worker.engine.execute.step import PendingStep, StepAbandonedError
from tandem_worker.engine.guess.speculator import Speculator
from tandem_worker.engine.output_processor import OutputProcessor
from tandem_worker.engine.remote_prefills import RemotePrefills
from tandem_worker.engine.sample.state import SamplingState
from tandem_worker.engine.schedule.host_cache import NO_MOVES, is_fetching_sooner
from tandem_worker.engine.schedule.meter import SpeedMeter, Totals, WorkMeter
from tandem_worker.engine.schedule.params import FinishReason
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.engine.schedule.request import Request, Sequence, SequenceState
from tandem_worker.engine.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from tandem_worker.engine.drafting import Drafting

logger = logging.getLogger(__name__)

_ALONE = 3.0
"""A prompt with the engine to itself may take this much longer steps: larger chunks read less of their context anew."""


class Runner(Protocol):
    """What `EngineCore` asks of what steps: one lane, or several side by side. The rest it asks of the lanes."""

    @property
    def lanes(self) -> tuple[StepRunner, ...]:
        """Those that step together. What concerns one request is told to all; who does not know it ignores it."""
        ...

    @property
    def work(self) -> WorkMeter:
        """Measures what `step` has done."""
        ...

    def choose(self, request: Request) -> StepRunner:
        """The lane that takes a new request."""
        ...

    def step(self) -> bool:
        """Compute. False: nothing can be done until a command comes."""
        ...


class StepRunner:
    def __init__(
        self,
        scheduler: Scheduler,
        executor: ModelExecutor,
        *,
        eos_token_ids: frozenset[int],
        target_step_seconds: float | None,
        is_abandoned: Callable[[StepPlan], bool] = lambda plan: False,
        runs_ahead: bool = False,
        hand_over: Callable[[], None] = lambda: None,
        speculator: Speculator | None = None,
        drafting: Drafting | None = None,
        lane: int = 0,
    ) -> None:
        """`runs_ahead`: steps are launched before the tokens of the one before are known, where that is possible.
        `speculator` puts guesses into steps; None: every step is one token of each choice.
        `drafting`: where the model has a draft head, whether it guesses here or not; its steps do not run ahead.
        `lane`: which of several batches that run side by side this one plans.

        `hand_over` delivers `outputs.deltas`. Called where they would wait until another step is computed.
        """
        self.scheduler = scheduler
        self.executor = executor
        self.lanes: tuple[StepRunner, ...] = (self,)
        """This one alone; see `LaneRunner`."""
        self.requests: dict[str, Request] = {}
        self.meter = SpeedMeter()
        self.work = WorkMeter()
        """Measures what `step` has done."""
        self.totals = Totals()
        self.peers = PeerPrompts(scheduler, num_layers=executor.num_layers)
        self.remote = RemotePrefills(scheduler, executor, requests=self.requests, totals=self.totals)
        self.outputs = OutputProcessor(
            scheduler,
            executor,
            requests=self.requests,
            totals=self.totals,
            remote=self.remote,
            peers=self.peers,
            speculator=speculator,
            drafting=drafting,
        )
        self.latest = StepPlan()
        """What was planned last."""
        self._eos_token_ids = eos_token_ids
        self._target_step_seconds = target_step_seconds
        self._is_abandoned = is_abandoned
        self._runs_ahead = runs_ahead
        self._hand_over = hand_over
        self._lane = lane
        self._copying = False
        """Copies to host memory or back may be under way that others than steps do not wait for."""
        self._under_way: PendingStep | None = None
        """Launched, and finished after the next one is launched."""
        self._last_finish = 0.0
        self.holds_back = False
        """The device waits for the next step: what is to be delivered waits until it is launched."""
        scheduler.hooks.make_moves = self._make_moves
        scheduler.hooks.fetch_tokens = self._count_fetch_tokens
        if scheduler.host is not None:
            scheduler.host.prefers_fetch = self._prefers_fetch
        scheduler.hooks.has_begun = self.remote.has_begun
        scheduler.hooks.prefill_rate = lambda: self.meter.prefill_tokens_per_second
        scheduler.hooks.tokens_within = self.meter.plan_chunk_tokens
        self.speculator = speculator
        self._drafting = drafting
        if drafting is not None:
            scheduler.queues.on_release = drafting.settle
        if speculator is not None:
            scheduler.hooks.guess = self._guess if drafting is None else self._guess_with_head

    # -- commands ------------------------------------------------------------------------------------------------

    def choose(self, request: Request) -> StepRunner:
        """This one."""
        return self

    def submit(self, request: Request) -> None:
        """A client's request. Without a prefill client its endpoints are forgotten: it is prefilled here."""
        if self.remote.client is None:
            request.endpoints = ()
        self.requests[request.id] = request
        self.scheduler.add(request)
        grammars = request.grammars or (None,) * request.n
        for choice, grammar in zip(request.choices, grammars, strict=True):
            choice.sampler_state = SamplingState(request.sampling, self._eos_token_ids, grammar)
            choice.lockstep = choice.sampler_state.needs_host

    def remote_done(self, result: RemotePrefillResult) -> None:
        """As `RemotePrefills.done`: the first token is chosen here."""
        received = self.remote.done(result)
        if received is not None:
            sequence, logits = received
            self.outputs.accept_logits([sequence], logits)

    def end_all(self) -> None:
        """The worker stops: everything inside ends here."""
        if self._under_way is not None:
            self.finish_step(self._under_way)
            self._under_way = None
        for request in list(self.requests.values()):
            self.outputs.end_request(request, FinishReason.ABORT)
        self.peers.fail_all("the worker stops")

    def disown_all(self, message: str) -> None:
        """The step loop is dead and its state cannot be trusted: only say so to everyone who waits."""
        self.outputs.disown_all(message)
        self.peers.fail_all(message)

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Launch a step, and finish the one before it or itself. False: nothing can be done until a command comes."""
        awaited = self._await_tokens()
        step = self.begin_step()
        if step is not None:
            self.launch_step(step)
        if step is not None and self.outputs.deltas and (step.chosen is None or self.holds_back):
            self._hand_over()  # while it is computed
        self.holds_back = False
        before, self._under_way = self._under_way, None
        if before is not None:
            self._end_step(before)
        if step is not None and step.chosen is None:
            if self.outputs.deltas:
                self._hand_over()
            self._end_step(step)
            self.holds_back = self._runs_ahead
        else:
            self._under_way = step
        return awaited or step is not None or before is not None

    def _await_tokens(self) -> bool:
        """Finish the step under way where guesses behind its tokens promise more than running ahead of it does;
        whether that was done."""
        before = self._under_way
        if before is None or self.speculator is None or not self.speculator.is_worth_waiting(before.plan):
            return False
        self._under_way = None
        self._end_step(before)
        return True

    def _guess(self, plan: StepPlan, budget: int) -> dict[Sequence, tuple[int, ...]]:
        """As `Hooks.guess`: what comes behind tokens that are still to be chosen is not guessed."""
        assert self.speculator is not None
        return {} if self._under_way is not None else self.speculator.plan(plan, budget)

    def _end_step(self, step: PendingStep) -> None:
        self.finish_step(step)
        self.work.record(
            began=step.began,
            ended=time.perf_counter(),
            num_prefill_tokens=0 if step.error is not None else step.plan.num_prefill_tokens,
            num_decodes=step.plan.num_decode_tokens,
        )

    def begin_step(self) -> PendingStep | None:
        """Plan a step and order remote prefills. None: nothing can be computed until a command comes.

        Between `begin_step` and `finish_step` something launches the plan: `launch_step`, or one call for the steps
        of several runners, which sets `output` or `error` of each.
        """
        began = time.perf_counter()
        plan = self._plan()
        while plan.empty:
            # A failed start is prefilled here, and a preemption has made room: both want another look.
            retry = plan.num_preempted > 0 or any(s.state is SequenceState.RUNNING for s in plan.orders)
            if not retry or self._under_way is not None:
                return None
            plan = self._plan()
        self.latest = plan
        reports = self.peers.report_and_plan(plan)
        return PendingStep(plan, self._watch_layers(plan, reports), began)

    def launch_step(self, step: PendingStep) -> None:
        """Run the forward pass, and choose the tokens if the host has no part in that.

        Raises only what nothing can be computed after.
        """
        try:
            step.output = self.executor.run(step.plan, step.on_layer)
            if self._runs_ahead and not step.plan.lockstep:
                step.chosen = self.executor.choose(step.output)
            elif self._runs_ahead and step.plan.guesses:
                step.checked = self.executor.check(step.output)
        except Exception as error:
            if is_fatal(error):
                raise
            step.error = error

    def finish_step(self, step: PendingStep) -> None:
        """Deliver a launched step's tokens, or end the requests that it could not compute."""
        plan, output = step.plan, step.output
        checked: list[int] | None = None
        if step.checked is not None and step.error is None:
            checked = step.checked.wait().tolist()
        elif step.chosen is None:
            # Its tokens, if it has any, would wait too. An abandoned step or a part of a prompt has none, and its
            # blocks may be let go of next: the device must not write to them when they are another's.
            self.executor.settle()
        if step.error is not None:
            self.scheduler.cancel(plan)
            if not isinstance(step.error, StepAbandonedError):
                logger.error("a step failed", exc_info=step.error)
                self._fail(plan, step.error)
            # Its frames hold the step, and whatever the model was computing with: no memory is to wait for a collector.
            step.error = step.error.with_traceback(None)
            return
        assert output is not None, "the step was not launched"
        if step.chosen is None:
            if self._drafting is not None:
                self._drafting.keep(plan, output.layout)
            self.scheduler.complete(plan)
            self.outputs.accept_step(output.layout, output.logits, checked)
            if self._drafting is not None:
                self._drafting.end_step()
        else:
            tokens = step.chosen.wait().tolist()
            self.scheduler.complete(plan)
            self.outputs.accept_chosen(output.layout.sequences, tokens)
        self.totals.steps += 1
        now = time.perf_counter()
        seconds = now - max(step.began, self._last_finish)
        self.meter.record(
            num_prefill_tokens=plan.num_prefill_tokens,
            num_decodes=len(plan.decodes),
            num_guesses=plan.num_guesses,
            num_saved=self.outputs.right.total(),
            seconds=seconds,
            plain_seconds=None if self.speculator is None else self.speculator.without_guesses(plan, seconds),
        )
        if self.speculator is not None:
            self.speculator.record(plan, self.outputs.right, seconds)
            self.outputs.right.clear()
        self._last_finish = now

    def _plan(self) -> StepPlan:
        target = self._target_step_seconds
        if target is not None and self.scheduler.queues.num_waiting + len(self.scheduler.queues.running) <= 1:
            target *= _ALONE
        plan = self.scheduler.schedule(self.meter.plan_step_tokens(target))
        for sequence in plan.withdrawn:
            self.remote.withdraw(sequence)
        if plan.empty or plan.orders:
            self._make_moves(bool(plan.orders))
        else:
            self._launch_moves(others_write=False)  # its layers wait for them
        for sequence in plan.orders:
            self.remote.start(sequence)
        return plan

    def _make_moves(self, others_write: bool) -> None:
        """As `Hooks.make_moves`. Whatever is launched next finds what was fetched, in every layer."""
        self._launch_moves(others_write=others_write)
        self.executor.await_fetches()  # also what a step waits for that failed, or was abandoned

    def _launch_moves(self, *, others_write: bool) -> None:
        moves = self.scheduler.take_moves()
        if moves is None:
            if not (others_write and self._copying):
                return
            moves = NO_MOVES  # a block may have been let go of while it was copied
        if others_write and self.outputs.deltas:
            self._hand_over()  # they would wait for what is waited for
        self.executor.move_blocks(moves, lane=self._lane, settle=others_write)
        self._copying = not others_write

    def _guess_with_head(self, plan: StepPlan, budget: int) -> dict[Sequence, tuple[int, ...]]:
        """The head writes to blocks while the step is planned, some of which others have given up for that."""
        assert self.speculator is not None
        self._make_moves(False)
        return self.speculator.plan(plan, budget)

    def _prefers_fetch(self) -> bool:
        return is_fetching_sooner(
            self.scheduler.blocks.block_size,
            seconds_per_block=self.executor.fetch_seconds,
            prefill_tokens_per_second=self.meter.prefill_tokens_per_second,
        )

    def _count_fetch_tokens(self, num_blocks: int) -> int:
        return int(num_blocks * self.executor.fetch_seconds * (self.meter.prefill_tokens_per_second or 0.0))

    def _watch_layers(self, plan: StepPlan, reports: list[LayerReport]) -> Callable[[int], None] | None:
        if not plan.chunks:
            return None  # a decode step is short and reports nothing

        def on_layer(layer: int) -> None:
            if self._is_abandoned(plan):
                raise StepAbandonedError
            for report in reports:
                report.send(layer)

        return on_layer

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        message = f"the engine could not compute this request: {type(error).__name__}: {error}"
        for request in {id(s.request): s.request for s in plan.sequences()}.values():
            if not request.serves_peer or not self.peers.fail(request, message):
                self.outputs.end_request(request, FinishReason.ERROR, message)
