"""Several batches side by side: to the engine, its one step runner.

A group's data and expert coordinates each compute a batch of their own. Every such lane has a runner with its own
scheduler and block space; steps are joint, because expert ranks exchange tokens in every layer: a lane without work
takes part with padding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tandem_worker.engine.contract import LayerListener, PrefillClient, RemotePrefill, RemotePrefillResult
from tandem_worker.engine.execute.executor import ModelExecutor
from tandem_worker.engine.runner import StepRunner
from tandem_worker.engine.schedule.lane_choice import choose_lane
from tandem_worker.engine.schedule.meter import WorkMeter
from tandem_worker.engine.schedule.params import TokenDelta
from tandem_worker.engine.schedule.request import Request


class LaneRunner:
    """Satisfies what `EngineCore` asks of a `StepRunner`. What concerns one request is for the lane that knows it."""

    def __init__(self, lanes: Sequence[StepRunner], executor: ModelExecutor) -> None:
        self.lanes = tuple(lanes)
        self.work = WorkMeter()
        self._executor = executor

    @property
    def prefill_client(self) -> PrefillClient | None:
        """The same for all lanes."""
        return self.lanes[0].prefill_client

    @prefill_client.setter
    def prefill_client(self, client: PrefillClient | None) -> None:
        for lane in self.lanes:
            lane.prefill_client = client

    def knows(self, request_id: str) -> bool:
        """Whether a lane has an open choice of the request."""
        return any(lane.knows(request_id) for lane in self.lanes)

    @property
    def has_deltas(self) -> bool:
        """Whether a lane has something to deliver."""
        return any(lane.has_deltas for lane in self.lanes)

    def take_deltas(self) -> list[TokenDelta]:
        """What all lanes have to deliver now, in the order of the lanes."""
        return [delta for lane in self.lanes for delta in lane.take_deltas()]

    def submit(self, request: Request) -> None:
        """Give a client's request to the lane that `choose_lane` picks."""
        self._choose(request).submit(request)

    def submit_peer(self, request: Request, order: RemotePrefill, listener: LayerListener) -> None:
        """Give a peer's prompt to the lane that `choose_lane` picks."""
        self._choose(request).submit_peer(request, order, listener)

    def _choose(self, request: Request) -> StepRunner:
        return self.lanes[choose_lane([lane.scheduler for lane in self.lanes], request)]

    def abort(self, request_id: str) -> None:
        """As `StepRunner.abort`. Told to every lane; those that do not know the request ignore it."""
        for lane in self.lanes:
            lane.abort(request_id)

    def abort_choice(self, request_id: str, choice: int) -> None:
        """As `StepRunner.abort_choice`, told to every lane."""
        for lane in self.lanes:
            lane.abort_choice(request_id, choice)

    def release(self, request_id: str) -> None:
        """As `StepRunner.release`, told to every lane."""
        for lane in self.lanes:
            lane.release(request_id)

    def remote_overdue(self, request_id: str, generation: int) -> None:
        """As `StepRunner.remote_overdue`, told to every lane."""
        for lane in self.lanes:
            lane.remote_overdue(request_id, generation)

    def remote_done(self, result: RemotePrefillResult) -> None:
        """As `StepRunner.remote_done`, told to every lane."""
        for lane in self.lanes:
            lane.remote_done(result)

    def remote_failed(self, request_id: str, generation: int, reason: str) -> None:
        """As `StepRunner.remote_failed`, told to every lane."""
        for lane in self.lanes:
            lane.remote_failed(request_id, generation, reason)

    def end_all(self) -> None:
        """The worker stops: everything in all lanes ends."""
        for lane in self.lanes:
            lane.end_all()

    def disown_all(self, message: str) -> None:
        """The step loop is dead: every lane says so to everyone who waits."""
        for lane in self.lanes:
            lane.disown_all(message)

    def step(self) -> bool:
        """A joint step of all lanes. False: nothing can be done until a command comes."""
        steps = [lane.begin_step() for lane in self.lanes]
        if all(step is None for step in steps):
            return False
        outputs = self._executor.run_lanes([None if step is None else step.plan for step in steps])
        for lane, step, output in zip(self.lanes, steps, outputs, strict=True):
            if step is not None:
                step.output = output
                lane.finish_step(step)
        done = [step for step in steps if step is not None]
        self.work.record(
            began=min(step.began for step in done),
            ended=time.perf_counter(),
            num_prefill_tokens=sum(step.plan.num_prefill_tokens for step in done),
            num_decodes=sum(len(step.plan.decodes) for step in done),
        )
        return True
