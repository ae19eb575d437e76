"""How much of a prediction an answer has said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.engine.guess.lookup import index_prediction
from tandem_worker.engine.guess.ngrams import CompleteIndex
from tandem_worker.server.text.prediction import Prediction


def count(predicted: list[int], answer: list[int]) -> int:
    tally = Prediction(predicted).begin()
    for token in answer:
        tally.feed(token)
    return tally.accepted


def test_what_was_predicted_counts_from_the_beginning_and_from_where_the_two_meet_again() -> None:
    predicted = list(range(100, 120))
    assert count(predicted, predicted) == 20
    assert count(predicted, [1, 2, 3]) == 0
    assert count(predicted, predicted[:5]) == 5
    assert count(predicted, [*predicted[:5], 7, *predicted[6:]]) == 19, "one token was another"
    assert count(predicted, [*predicted[:5], 7, 8, 9, *predicted[6:]]) == 5 + 14 - 2, "two tokens find the place again"
    assert count([], [1, 2]) == 0


@given(
    predicted=st.lists(st.integers(0, 5), max_size=40),
    answer=st.lists(st.integers(0, 5), max_size=60),
    cut=st.integers(0, 60),
)
def test_it_is_never_more_than_there_is_and_only_grows(predicted: list[int], answer: list[int], cut: int) -> None:
    first, whole = count(predicted, answer[:cut]), count(predicted, answer)
    assert 0 <= first <= whole <= min(len(predicted), len(answer))


def test_a_prediction_is_indexed_once_and_not_before_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait in the queue take no more memory for it than their tokens do."""
    indices: list[CompleteIndex] = []

    def index(tokens: list[int]) -> CompleteIndex:
        indices.append(index_prediction(tokens))
        return indices[-1]

    monkeypatch.setattr("tandem_worker.server.text.prediction.index_prediction", index)
    prediction = Prediction([1, 2, 3])
    tallies = [prediction.begin() for _ in range(3)]
    assert indices == []
    for tally in tallies:
        tally.feed(1)
        assert (tally.accepted, tally.num_tokens) == (1, 3)
    assert len(indices) == 1
