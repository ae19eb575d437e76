"""Several batches side by side: to the engine, its one step runner.

A group's data and expert coordinates each compute a batch of their own. Every such lane has a runner with its own
scheduler and block space; steps are joint, because expert ranks exchange tokens in every layer: a lane without work
takes part with padding.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem_worker.engine.contract import LayerListener, PrefillClient, RemotePrefill, RemotePrefillResult
from tandem_worker.engine.execute.executor import ModelExecutor
from tandem_worker.engine.runner import StepRunner
from tandem_worker.engine.schedule.lane_choice import choose_lane
from tandem_worker.engine.schedule.params import TokenDelta
from tandem_worker.engine.schedule.request import Request


class LaneRunner:
    """Satisfies what `EngineCore` asks of a `StepRunner`. What concerns one request is for the lane that knows it."""

    def __init__(self, lanes: Sequence[StepRunner], executor: ModelExecutor) -> None:
        self.lanes = tuple(lanes)
        self._executor = executor

    @property
    def prefill_client(self) -> PrefillClient | None:
        return self.lanes[0].prefill_client

    @prefill_client.setter
    def prefill_client(self, client: PrefillClient | None) -> None:
        for lane in self.lanes:
            lane.prefill_client = client

    def knows(self, request_id: str) -> bool:
        return any(lane.knows(request_id) for lane in self.lanes)

    @property
    def has_deltas(self) -> bool:
        return any(lane.has_deltas for lane in self.lanes)

    def take_deltas(self) -> list[TokenDelta]:
        return [delta for lane in self.lanes for delta in lane.take_deltas()]

    def submit(self, request: Request) -> None:
        self._choose(request).submit(request)

    def submit_peer(self, request: Request, order: RemotePrefill, listener: LayerListener) -> None:
        self._choose(request).submit_peer(request, order, listener)

    def _choose(self, request: Request) -> StepRunner:
        return self.lanes[choose_lane([lane.scheduler for lane in self.lanes], request)]

    def abort(self, request_id: str) -> None:
        for lane in self.lanes:
            lane.abort(request_id)

    def abort_choice(self, request_id: str, choice: int) -> None:
        for lane in self.lanes:
            lane.abort_choice(request_id, choice)

    def release(self, request_id: str) -> None:
        for lane in self.lanes:
            lane.release(request_id)

    def remote_overdue(self, request_id: str, generation: int) -> None:
        for lane in self.lanes:
            lane.remote_overdue(request_id, generation)

    def remote_done(self, result: RemotePrefillResult) -> None:
        for lane in self.lanes:
            lane.remote_done(result)

    def remote_failed(self, request_id: str, generation: int, reason: str) -> None:
        for lane in self.lanes:
            lane.remote_failed(request_id, generation, reason)

    def end_all(self) -> None:
        for lane in self.lanes:
            lane.end_all()

    def disown_all(self, message: str) -> None:
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
        return True
