"""Estimates learn from usage and never leave sensible bounds."""

from hypothesis import given
from hypothesis import strategies as st
from tandem_gateway.scheduling import Estimator


def test_the_ratio_converges_to_what_usage_says() -> None:
    estimator = Estimator()
    for _ in range(200):
        estimator.learn(prompt_bytes=2000, prompt_tokens=1000, output_tokens=500)
    assert abs(estimator.bytes_per_token - 2.0) < 0.01
    assert abs(estimator.output_tokens - 500) < 1
    assert abs(estimator.prompt_tokens(4000) - 2001) < 10


def test_max_tokens_caps_the_expected_output() -> None:
    estimator = Estimator()
    assert estimator.expected_output(5) == 5
    assert estimator.expected_output(10**9) == estimator.expected_output(None)


def test_hits_that_nobody_here_expected_tell_of_other_gateways() -> None:
    estimator = Estimator()
    for _ in range(300):
        estimator.learn_cached(prompt_tokens=10_000, expected=2000, cached=2000)
        estimator.learn_cached(prompt_tokens=300, expected=0, cached=300)  # too short to be known better
    assert estimator.unseen_hits == 0.0
    for _ in range(300):
        estimator.learn_cached(prompt_tokens=10_000, expected=2000, cached=6000)
    assert abs(estimator.unseen_hits - 0.5) < 0.01
    for _ in range(600):
        estimator.learn_cached(prompt_tokens=10_000, expected=9000, cached=0)
    assert 0.0 <= estimator.unseen_hits < 0.01


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(-(2**63), 2**64)), max_size=30))
def test_no_usage_can_make_estimates_useless(observations: list[tuple[int, int, int]]) -> None:
    estimator = Estimator()
    for prompt_bytes, prompt_tokens, output in observations:
        estimator.learn(prompt_bytes=prompt_bytes, prompt_tokens=prompt_tokens, output_tokens=output)
    assert 0.25 <= estimator.bytes_per_token <= 64
    assert estimator.expected_output(None) >= 1
    assert estimator.prompt_tokens(0) >= 1
