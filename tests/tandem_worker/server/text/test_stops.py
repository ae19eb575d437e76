"""Stop strings: the same result however the text is cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.server.text.stops import StopMatcher, held_back


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


def test_held_back() -> None:
    assert held_back("abcST", ["STOP", "Txx"]) == 2
    assert held_back("STOP", ["STOP"]) == 0
    assert held_back("", ["STOP"]) == 0
