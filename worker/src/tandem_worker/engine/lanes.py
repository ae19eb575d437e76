"""Several batches side by side: to the engine, its one step runner.

A group's data and expert coordinates each compute a batch of their own. Every such lane has a runner with its own
scheduler and block space; steps are joint, because expert ranks exchange tokens in every layer: a lane without work
takes part with padding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tandem_worker.engine.execute.executor import ModelExecutor
from tandem_worker.engine.runner import StepRunner
from tandem_worker.engine.schedule.lane_choice import choose_lane
from tandem_worker.engine.schedule.meter import WorkMeter
from tandem_worker.engine.schedule.request import Request


class LaneRunner:
    """A `Runner` of several lanes."""

    def __init__(self, lanes: Sequence[StepRunner], executor: ModelExecutor) -> None:
        self.lanes = tuple(lanes)
        self.work = WorkMeter()
        self._executor = executor

    def choose(self, request: Request) -> StepRunner:
        """The lane that `choose_lane` picks."""
        return self.lanes[choose_lane([lane.scheduler for lane in self.lanes], request)]

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
            num_decodes=sum(step.plan.num_decode_tokens for step in done),
        )
        return True
