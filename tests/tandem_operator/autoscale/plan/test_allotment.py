"""A namespace's GPUs over its models: what always holds, and how models come to have what they are given."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_operator.autoscale.plan.allotment import Claim, allot, share_out

from tests.effort import count_instructions


def make_claim(name: str, priority: int = 0, *, least: int = 1, held: int = 1, wanted: int = 1, step: int = 1) -> Claim:
    return Claim(name=name, priority=priority, least=least, held=held, present=held, wanted=wanted, step=step)


@st.composite
def claim_lists(draw: st.DrawFn) -> list[Claim]:
    claims: list[Claim] = []
    for number in range(draw(st.integers(1, 6))):
        step = draw(st.sampled_from([1, 2, 4, 8]))
        least = step * draw(st.integers(1, 3))
        claims.append(
            Claim(
                name=f"m{number}", priority=draw(st.integers(-2, 2)), least=least,
                held=least + step * draw(st.integers(0, 6)), present=step * draw(st.integers(0, 12)),
                wanted=least + step * draw(st.integers(0, 10)), step=step,
            )
        )  # fmt: skip
    return claims


@settings(max_examples=4 * settings().max_examples, deadline=None)
@given(claim_lists(), st.integers(0, 120))
def test_never_over_the_budget_and_never_below_the_minimums(claims: list[Claim], budget: int) -> None:
    found = allot(claims, budget)
    least = sum(claim.least for claim in claims)
    assert sum(one.target for one in found.values()) <= max(budget, least)
    for claim in claims:
        one = found[claim.name]
        assert claim.least <= one.target <= claim.wanted
        assert claim.least <= one.granted <= one.target
    if least >= budget:
        assert all(found[claim.name].target == claim.least for claim in claims)


@settings(max_examples=4 * settings().max_examples, deadline=None)
@given(claim_lists(), st.integers(0, 120))
def test_nobody_grows_into_what_another_one_holds(claims: list[Claim], budget: int) -> None:
    claims = [replace(claim, held=max(claim.held, claim.least)) for claim in claims]
    found = allot(claims, budget)
    before = sum(max(claim.held, claim.present) for claim in claims)
    after = sum(max(claim.held, claim.present, found[claim.name].granted) for claim in claims)
    assert after <= max(budget, before)


@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(claim_lists(), st.integers(0, 120), st.data())
def test_a_higher_priority_never_gets_less(claims: list[Claim], budget: int, data: st.DataObject) -> None:
    fresh = [replace(claim, held=claim.least) for claim in claims]
    chosen = data.draw(st.sampled_from(fresh))
    raised = [replace(claim, priority=claim.priority + 3) if claim is chosen else claim for claim in fresh]
    assert share_out(raised, budget)[chosen.name] >= share_out(fresh, budget)[chosen.name]


@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(claim_lists(), st.integers(0, 120))
def test_the_lower_have_only_their_minimums_while_the_higher_want_more(claims: list[Claim], budget: int) -> None:
    targets = share_out(claims, budget)
    for higher in claims:
        if targets[higher.name] + higher.step > higher.wanted:
            continue
        for lower in claims:
            if lower.priority < higher.priority:
                assert targets[lower.name] - lower.least < higher.step, "what is too small for a replica of the higher"


@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(claim_lists(), st.integers(0, 120), st.randoms())
def test_the_order_of_the_claims_says_nothing(claims: list[Claim], budget: int, chance: random.Random) -> None:
    mixed = list(claims)
    chance.shuffle(mixed)
    assert allot(mixed, budget) == allot(claims, budget)


@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(claim_lists(), st.integers(0, 120))
def test_what_was_given_is_given_again(claims: list[Claim], budget: int) -> None:
    targets = share_out(claims, budget)
    assert share_out([replace(claim, held=targets[claim.name]) for claim in claims], budget) == targets


def follow(claims: Sequence[Claim], budget: int, *, rounds: int = 20) -> tuple[list[Claim], int]:
    """Claims after as many looks, each taking a look to drain, and the most that their pods took at any time."""
    most = sum(claim.present for claim in claims)
    for _ in range(rounds):
        found = allot(claims, budget)
        claims = [
            replace(claim, held=found[claim.name].granted, present=max(claim.held, found[claim.name].granted))
            for claim in claims
        ]
        most = max(most, sum(claim.present for claim in claims))
    return list(claims), most


@settings(max_examples=2 * settings().max_examples, deadline=None)
@given(claim_lists(), st.integers(40, 160))
def test_all_come_to_their_targets_and_pods_never_take_more_than_the_budget(claims: list[Claim], budget: int) -> None:
    start = [replace(claim, held=claim.least, present=claim.least) for claim in claims]
    if sum(claim.least for claim in start) > budget:
        return
    after, most = follow(start, budget)
    assert most <= budget
    assert {claim.name: claim.held for claim in after} == share_out(after, budget)


def test_a_lower_priority_drains_before_a_higher_one_grows() -> None:
    low, high = make_claim("low", 0, held=8, wanted=8), make_claim("high", 10, held=4, wanted=10)
    found = allot([low, high], 12)
    assert (found["low"].target, found["low"].granted) == (2, 2)
    assert (found["high"].target, found["high"].granted) == (10, 4), "the others are still there"
    draining = replace(low, held=2)
    assert allot([draining, high], 12)["high"].granted == 4
    assert allot([replace(draining, present=2), high], 12)["high"].granted == 10


def test_equals_share_by_need_and_do_not_take_turns() -> None:
    small, large = make_claim("small", wanted=6), make_claim("large", wanted=18)
    assert share_out([small, large], 12) == {"small": 3, "large": 9}
    held = [replace(small, held=3), replace(large, held=9)]
    for wanted in (17, 18, 19, 20):  # demand goes up and down by a replica or two
        assert share_out([held[0], replace(held[1], wanted=wanted)], 12) == {"small": 3, "large": 9}
    assert share_out([held[0], replace(held[1], wanted=60)], 12)["large"] > 9


def test_sharing_out_thousands_of_replicas_takes_milliseconds() -> None:
    """Every model asks every few seconds, on the operator's event loop."""
    claims = [make_claim(f"m{n}", least=1, held=50, wanted=100) for n in range(200)]
    assert sum(one.target for one in allot(claims, 15_000).values()) == 15_000
    assert count_instructions(lambda: allot(claims, 15_000)) < 2_000_000
