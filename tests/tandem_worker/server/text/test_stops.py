"""Stop strings: the same result however the text is cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.server.text.stops import StopMatcher, held_back

from tests.effort import count_instructions


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.feed(piece) for piece in pieces)
    return text + matcher.flush(), matcher.stopped


def reference(stops: list[str], text: str) -> tuple[str, bool]:
    for end in range(len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(map(len, matching))], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_equals_a_character_by_character_search(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    expected = reference(stops, text)
    assert run(stops, pieces) == expected
    assert run(stops, [text]) == expected
    assert run(stops, list(text)) == expected


@settings(max_examples=200, deadline=None)
@given(stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), text=st.text("abc", max_size=12))
def test_what_is_out_is_never_part_of_a_stop_string(stops: list[str], text: str) -> None:
    final, _ = run(stops, [text])
    matcher = StopMatcher(stops)
    sent = ""
    for char in text:
        sent += matcher.feed(char)
        assert final.startswith(sent)


@settings(max_examples=200, deadline=None)
@given(stops=st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=3), text=st.text("abc", max_size=30))
def test_no_more_is_withheld_than_may_be_the_beginning_of_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    sent = "".join(matcher.feed(char) for char in text)
    if not matcher.stopped:
        assert len(text) - len(sent) == held_back(text, stops)


def test_long_stop_strings_that_nearly_come_cost_no_more_than_others() -> None:
    """With as many choices as a worker runs at a time, a millisecond for each token would hold up all streams."""
    matcher = StopMatcher(["ab" * 512, "ac" * 512, "ad" * 512, "a" * 1023 + "e"])
    for _ in range(3000):
        matcher.feed("a")
    spent = count_instructions(lambda: [matcher.feed("a") for _ in range(500)])
    assert spent < 500 * 800


def test_held_back() -> None:
    assert held_back("abcST", ["STOP", "Txx"]) == 2
    assert held_back("STOP", ["STOP"]) == 0
    assert held_back("", ["STOP"]) == 0
