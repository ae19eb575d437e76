"""Sentences that name what may be many."""

from __future__ import annotations

import pytest
from tandem_api.wording import name_some


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b"], "a; b"),
        (["a", "b", "c"], "a; b and 1 more"),
        (["a", "b", "c", "d"], "a; b and 2 more"),
    ],
)
def test_the_first_are_named_and_the_others_counted(told: list[str], text: str) -> None:
    assert name_some(told, 2, "; ") == text
