"""A trace on the fleet that suits it, and what one replica of that fleet can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from tandem_api.names import Role
from tandem_operator.scaling.contract import RoleSpec, ScalingSpec, Target, Tuning
from tandem_operator.scaling.sizing import (
    Answers,
    Prompts,
    StepModel,
    count_resident,
    find_room,
    size_decode,
    size_prefill,
)
from tandem_sim.baselines import Velocity
from tandem_sim.cache import PrefixCache
from tandem_sim.profiles import H200, QWEN3_8B, QWEN3_32B_FP8, WorkerProfile, build_profile
from tandem_sim.traces import Arrival, make_conversations, make_requests, read

P, D = Role.PREFILL, Role.DECODE
TTFT = Target(percentile=0.98, seconds=2.0, seconds_per_token=1e-4)
TPOT = Target(percentile=0.98, seconds=0.03)
MOST = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One trace with its workers."""

    name: str
    recording: Sequence[Arrival]
    profile: WorkerProfile
    prompts: Prompts
    answers: Answers

    def spec(self, tuning: Tuning | None = None) -> ScalingSpec:
        return ScalingSpec(
            roles={P: RoleSpec(max=MOST), D: RoleSpec(max=MOST)}, ttft=TTFT, tpot=TPOT, tuning=tuning or Tuning()
        )

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
        room = find_room(self._steps, self.profile.kv_tokens, TPOT)
        return {
            P: max(1, size_prefill(tokens, self.prompts, self.speed, TTFT)),
            D: max(1, size_decode(count_resident(requests, self.answers, room, 1.0), room)),
        }

    @property
    def velocity(self) -> Velocity:
        room = find_room(self._steps, self.profile.kv_tokens, TPOT)
        return Velocity(
            prefill=self.speed,
            decode=room.tokens_per_second(self.answers.context),
            sequences=room.context / self.answers.context,
            kv_share=room.context / self.profile.kv_tokens,
        )

    @property
    def _steps(self) -> StepModel:
        per_token = self.profile.step_context_seconds + self.profile.step_sequence_seconds / self.answers.context
        return StepModel(base=self.profile.step_seconds, slope=per_token)


def build_scenario(name: str, recording: Sequence[Arrival], profile: WorkerProfile) -> Scenario:
    """With what its prompts and answers are like. Hits are those of one cache of a replica's size."""
    prefixes = PrefixCache(2 * profile.kv_tokens)
    uncached: list[int] = []
    for arrival in recording:
        uncached.append(arrival.prompt - prefixes.match(arrival.blocks, arrival.prompt))
        prefixes.keep(arrival.blocks)
    prompt = np.array([arrival.prompt for arrival in recording])
    output = np.array([arrival.output for arrival in recording])
    left = np.array(uncached)
    contexts = prompt + output / 2
    return Scenario(
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
    )


@cache
def load_scenarios(conversation: Path | None, azure: Path | None) -> Mapping[str, Scenario]:
    """Both traces, or requests made up in their place."""
    chats = read(conversation) if conversation else make_conversations(sessions=2500, seconds=1800)
    singles = read(azure) if azure else make_requests()
    return {
        "conversation": build_scenario("conversation", chats, build_profile(QWEN3_8B, H200)),
        "azure": build_scenario("azure", singles, build_profile(QWEN3_32B_FP8, H200)),
    }


class Intensity:
    """What truly arrives at a time: the mean over a minute around it."""

    def __init__(self, scenario: Scenario, arrivals: Sequence[Arrival], *, window: float = 60.0) -> None:
        self._scenario = scenario
        self._at = np.array([arrival.at for arrival in arrivals])
        self._tokens = np.concatenate([[0.0], np.cumsum([arrival.prompt for arrival in arrivals])])
        self._window = window

    def needed(self, now: float) -> dict[Role, int]:
        begin, end = max(0.0, now - self._window / 2), now + self._window / 2
        low, high = np.searchsorted(self._at, [begin, end])
        share = self._scenario.prompts.uncached / self._scenario.prompts.tokens
        passed = min(end, float(self._at[-1])) - begin
        if passed <= 0:
            return {}
        tokens = float(self._tokens[high] - self._tokens[low]) * share / passed
        return self._scenario.needed(tokens, float(high - low) / passed)
