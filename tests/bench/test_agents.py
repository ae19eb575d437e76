"""Agents made up: turns follow answers, prompts grow, helpers are waited for."""

from collections import defaultdict
from itertools import pairwise
from math import inf

from tandem_sim.traces import BLOCK_TOKENS, Arrival

from bench.routing.agents import Agents


def play(agents: Agents, seconds: float) -> list[tuple[Arrival, float]]:
    """Every answer takes so long."""
    seen = []
    while agents.next_at < inf:
        arrival = agents.pop()
        seen.append((arrival, arrival.at + seconds))
        agents.end(arrival.session, arrival.at + seconds)
    return seen


def test_a_turn_comes_after_the_answer_before_it_and_continues_its_prompt() -> None:
    seen = play(Agents(20, requests=2000), 1.5)
    assert len(seen) == 2000
    turns = defaultdict(list)
    for arrival, end in seen:
        assert len(arrival.blocks) == arrival.prompt // BLOCK_TOKENS
        turns[arrival.session].append((arrival, end))
    for conversation in turns.values():
        for (before, end), (after, _) in pairwise(conversation):
            assert after.at >= end
            assert after.blocks[: len(before.blocks)] == before.blocks
            assert after.prompt > before.prompt
    assert [arrival.at for arrival, _ in seen] == sorted(arrival.at for arrival, _ in seen)


def test_many_begin_alike_and_continue_apart() -> None:
    firsts = {}
    for arrival, _ in play(Agents(50, requests=3000), 0.5):
        firsts.setdefault(arrival.session, arrival)
    begins = [arrival.blocks[:3] for arrival in firsts.values()]
    assert len(set(begins)) <= len(begins) / 4
    assert len({arrival.blocks for arrival in firsts.values()}) > len(begins) / 2


def test_a_slow_fleet_is_asked_less_by_the_same_agents() -> None:
    fast, slow = play(Agents(20, requests=1000), 0.1), play(Agents(20, requests=1000), 10.0)
    assert fast[-1][0].at < slow[-1][0].at / 2

    def sizes(seen: list[tuple[Arrival, float]]) -> list[int]:
        return [arrival.prompt for arrival, _ in seen]

    assert sizes(play(Agents(20, requests=1000), 0.1)) == sizes(fast)
