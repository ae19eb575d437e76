"""When the time that a request's grammar takes ends the request."""

from __future__ import annotations

from tandem_worker.server.structured.grammar import CREDIT_SECONDS, STEP_SECONDS, TOKEN_SECONDS, MaskBudget


def test_what_an_ordinary_grammar_takes_never_ends() -> None:
    budget = MaskBudget()
    for token in range(100_000):
        assert budget.spend(token, 0.9 * TOKEN_SECONDS) is None


def test_the_first_masks_may_take_longer() -> None:
    budget = MaskBudget()
    for token in range(10):
        assert budget.spend(token, TOKEN_SECONDS + 0.9 * CREDIT_SECONDS / 10) is None


def test_more_than_the_average_ends_when_the_credit_is_spent() -> None:
    budget = MaskBudget()
    sentences = [budget.spend(token, 2 * TOKEN_SECONDS) for token in range(100)]
    first = next(token for token, sentence in enumerate(sentences) if sentence is not None)
    assert abs(first - (CREDIT_SECONDS / TOKEN_SECONDS - 1)) <= 1
    assert "50 ms per token" in (sentences[first] or "")


def test_one_token_that_takes_too_long_ends_at_once() -> None:
    sentence = MaskBudget().spend(1000, 1.1 * STEP_SECONDS)
    assert sentence == "one token took 1100 ms, and at most 1000 ms are allowed"


def test_choices_share_one_budget() -> None:
    """Sixteen choices do not get sixteen times as much."""
    budget = MaskBudget()
    tokens = 0
    while all(budget.spend(tokens, TOKEN_SECONDS / 2) is None for _ in range(16)):
        tokens += 1
    assert tokens <= CREDIT_SECONDS / (7 * TOKEN_SECONDS) + 1
