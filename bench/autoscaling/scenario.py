"""The traces of the benchmark on the fleets that suit them, and its targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tandem_operator.autoscale.plan.contract import Target
from tandem_sim.profiles import H200, QWEN3_8B, QWEN3_32B_FP8, WorkerProfile, build_profile
from tandem_sim.synthetic import make_conversations, make_requests
from tandem_sim.traces import Arrival, read
from tandem_sim.workload import Workload, build_workload

TTFT = Target(percentile=0.98, seconds=2.0, seconds_per_token=1e-4)
TPOT = Target(percentile=0.98, seconds=0.03)


def build_scenario(name: str, recording: Sequence[Arrival], profile: WorkerProfile) -> Workload:
    return build_workload(name, recording, profile, ttft=TTFT, tpot=TPOT)


@cache
def load_scenarios(conversation: Path | None, azure: Path | None) -> Mapping[str, Workload]:
    """Both traces, or requests made up in their place."""
    chats = read(conversation) if conversation else make_conversations(sessions=2500, seconds=1800)
    singles = read(azure) if azure else make_requests()
    return {
        "conversation": build_scenario("conversation", chats, build_profile(QWEN3_8B, H200)),
        "azure": build_scenario("azure", singles, build_profile(QWEN3_32B_FP8, H200)),
    }
