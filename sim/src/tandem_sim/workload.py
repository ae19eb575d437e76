"""A trace on the worker that serves it: what its prompts and answers are like, and what one replica can do of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tandem_api.names import Role
from tandem_operator.autoscale.plan.contract import RoleSpec, ScalingSpec, Target, Tuning
from tandem_operator.autoscale.plan.shared import SharedDemand, SharedReplica, size_shared
from tandem_operator.autoscale.plan.sizing import (
    Answers,
    DecodeRoom,
    Prompts,
    StepModel,
    count_resident,
    find_room,
    size_decode,
    size_prefill,
)

from tandem_sim.cache import PrefixCache
from tandem_sim.profiles import WorkerProfile
from tandem_sim.traces import Arrival

P, D = Role.PREFILL, Role.DECODE
MOST = 256
"""Replicas of a role that the planner may order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One trace with its worker and its targets."""

    name: str
    recording: Sequence[Arrival]
    profile: WorkerProfile
    prompts: Prompts
    answers: Answers
    ttft: Target
    tpot: Target

    def spec(
        self, tuning: Tuning | None = None, *, shared: bool = False, queue_seconds: float = float("inf")
    ) -> ScalingSpec:
        """`shared`: of replicas that do both."""
        bounds = RoleSpec(max=MOST, gpus=self.profile.gpus)
        return ScalingSpec(
            roles={D: bounds} if shared else {P: bounds, D: bounds},
            ttft=self.ttft, tpot=self.tpot, tuning=tuning or Tuning(), queue_seconds=queue_seconds,
        )  # fmt: skip

    @property
    def speed(self) -> float:
        """Uncached tokens per second of a prefill replica on this trace's prompts."""
        cached = self.prompts.tokens - self.prompts.uncached
        pairs = self.prompts.uncached * cached + self.prompts.squares / 2
        seconds = (
            self.profile.prefill_seconds
            + self.prompts.uncached * self.profile.prefill_token_seconds
            + pairs * self.profile.prefill_pair_seconds
        )
        return self.prompts.uncached / seconds

    def needed(self, tokens: float, requests: float) -> dict[Role, int]:
        """Replicas for so many uncached prompt tokens and requests per second, from the true profile."""
        return {
            P: max(1, size_prefill(tokens, self.prompts, self.speed, self.ttft)),
            D: max(1, size_decode(count_resident(requests, self.answers, self.room, 1.0), self.room)),
        }

    def needed_shared(self, tokens: float, requests: float, chunk: int) -> dict[Role, int]:
        """The same of replicas that do both, in steps of `chunk` tokens."""
        profile = self.profile
        per_token = profile.step_context_seconds + profile.step_sequence_seconds / self.answers.context
        context = min(self.room.context, requests * self.answers.output * self.tpot.seconds * self.answers.context)
        middle = self.prompts.tokens - self.prompts.uncached / 2
        mixed = profile.mixed_step(context / self.answers.context, context, chunk, middle)
        replica = SharedReplica(
            steps=StepModel(base=profile.step_seconds, slope=per_token),
            extra=max(0.0, mixed - profile.step_seconds - per_token * context),
            velocity=chunk / mixed,
            kv_tokens=profile.kv_tokens,
        )
        demand = SharedDemand(
            tokens=tokens, requests=requests, prompts=self.prompts, answers=self.answers, deviations=1.0
        )  # fmt: skip
        return {D: size_shared(demand, replica, self.ttft, self.tpot)[0]}

    @property
    def room(self) -> DecodeRoom:
        """What a decode replica takes in within the target for a token."""
        per_token = self.profile.step_context_seconds + self.profile.step_sequence_seconds / self.answers.context
        steps = StepModel(base=self.profile.step_seconds, slope=per_token)
        return find_room(steps, self.profile.kv_tokens, self.tpot)


def build_workload(
    name: str, recording: Sequence[Arrival], profile: WorkerProfile, *, ttft: Target, tpot: Target
) -> Workload:
    """With what its prompts and answers are like. Hits are those of one cache of a replica's size."""
    prefixes = PrefixCache(2 * profile.kv_tokens)
    uncached: list[int] = []
    for arrival in recording:
        uncached.append(arrival.prompt - prefixes.match(arrival.blocks, arrival.prompt))
        prefixes.keep(arrival.blocks, arrival.at)
    prompt = np.array([arrival.prompt for arrival in recording])
    output = np.array([arrival.output for arrival in recording])
    left = np.array(uncached)
    contexts = prompt + output / 2
    return Workload(
        name=name,
        recording=recording,
        profile=profile,
        prompts=Prompts(
            tokens=float(prompt.mean()), uncached=float(left.mean()), squares=float((left.astype(float) ** 2).mean())
        ),
        answers=Answers(
            context=float((contexts * output).sum() / output.sum()),
            output=float(output.mean()),
            variation=float(contexts.var() / contexts.mean() ** 2),
        ),
        ttft=ttft,
        tpot=tpot,
    )


class Intensity:
    """What truly arrives at a time: the mean over a minute around it."""

    def __init__(
        self, workload: Workload, arrivals: Sequence[Arrival], *, window: float = 60.0, chunk: int = 0
    ) -> None:
        """`chunk`: tokens of a step, of replicas that do both; 0: prefill and decode are apart."""
        self._chunk = chunk
        self._workload = workload
        self._at = np.array([arrival.at for arrival in arrivals])
        self._tokens = np.concatenate([[0.0], np.cumsum([arrival.prompt for arrival in arrivals])])
        self._window = window

    def needed(self, now: float) -> dict[Role, int]:
        """Replicas; none where nothing comes any more."""
        begin, end = max(0.0, now - self._window / 2), now + self._window / 2
        low, high = np.searchsorted(self._at, [begin, end])
        share = self._workload.prompts.uncached / self._workload.prompts.tokens
        passed = min(end, float(self._at[-1])) - begin
        if passed <= 0:
            return {}
        tokens = float(self._tokens[high] - self._tokens[low]) * share / passed
        requests = float(high - low) / passed
        if self._chunk:
            return self._workload.needed_shared(tokens, requests, self._chunk)
        return self._workload.needed(tokens, requests)
