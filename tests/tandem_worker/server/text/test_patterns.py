"""Regexes that end an answer: what Python's `re` finds, however the text is cut, and at a cost that has a bound."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tandem_worker.server.text.patterns import MAX_STEPS, PatternError, Patterns, compile_patterns
from tandem_worker.server.text.stops import MAX_WITHHELD, StopMatcher

from tests.effort import count_instructions

_ATOMS = ["a", "b", ".", "[ab]", "[^a]", r"\d", r"\w", r"\s", r"\W", "c", "ab", "(?i:B)", "é", r"\n", "x-y", "[a-c1]"]


def _patterns() -> st.SearchStrategy[str]:
    """Without anchors: where those hold, `re` is asked in another way below."""
    return st.recursive(
        st.sampled_from(_ATOMS),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,3}?", "*?", "+?"])).map(
                lambda two: f"(?:{two[0]}){two[1]}"
            ),
        ),
        max_leaves=6,
    )


def run(patterns: Patterns, pieces: list[str], *, keep: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher((), patterns, keep=keep)
    text = "".join(matcher.feed(piece) for piece in pieces)
    return text + matcher.flush(), matcher.matched


def reference(pattern: str, text: str) -> tuple[int, int] | None:
    """The first end at which `re` finds a match that ends there, with the first beginning of such a match."""
    compiled = re.compile(pattern)
    for end in range(1, len(text) + 1):
        for start in range(end):
            if compiled.fullmatch(text, start, end):
                return start, end
    return None


@settings(max_examples=600, deadline=None)
@given(pattern=_patterns(), pieces=st.lists(st.text("abcBé1 \n-xy", max_size=6), max_size=6))
@example(pattern="(?:a*)*b", pieces=["aac", "aaab"])
@example(pattern="(?:a|ab)(?:c|bcd)", pieces=["xab", "cd"])
def test_finds_what_re_finds(pattern: str, pieces: list[str]) -> None:
    if re.compile(pattern).fullmatch(""):
        with pytest.raises(PatternError, match="empty text"):
            Patterns([pattern])
        return
    text = "".join(pieces)
    found = reference(pattern, text)
    expected = (text, None) if found is None else (text[: found[0]], pattern)
    patterns = Patterns([pattern])
    assert run(patterns, pieces) == expected
    assert run(patterns, [text]) == expected
    assert run(patterns, list(text)) == expected
    kept = text if found is None else text[: found[1]]
    assert run(patterns, pieces, keep=True) == run(patterns, list(text), keep=True) == (kept, expected[1])


@settings(max_examples=300, deadline=None)
@given(
    pattern=_patterns().filter(lambda each: not re.compile(each).fullmatch("")), text=st.text("abc1 \n", max_size=20)
)
def test_what_is_out_is_never_part_of_a_match(pattern: str, text: str) -> None:
    patterns = Patterns([pattern])
    final, _ = run(patterns, [text])
    matcher = StopMatcher((), patterns)
    sent = ""
    for character in text:
        sent += matcher.feed(character)
        assert final.startswith(sent)


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_beside_stop_strings_the_first_that_is_complete_wins(stops: list[str], pieces: list[str]) -> None:
    """A regex that has no signs is a stop string."""
    text = "".join(pieces)
    patterns = Patterns(["ca", "bb+a"])

    def mixed(cut: list[str]) -> tuple[str, str | None]:
        matcher = StopMatcher(stops, patterns)
        said = "".join(matcher.feed(piece) for piece in cut)
        return said + matcher.flush(), matcher.matched

    ends = [
        (end, start, what)
        for end in range(1, len(text) + 1)
        for what in (*stops, "ca", "bb+a")
        for start in range(end)
        if (text[start:end] == what or (what == "bb+a" and re.fullmatch("bb+a", text[start:end])))
    ]
    first = min(ends, default=None)
    expected = (text, None) if first is None else (text[: first[1]], first[2])
    assert mixed(pieces) == mixed([text]) == mixed(list(text)) == expected


SAID: list[tuple[str, str, str, bool]] = [
    # pattern, text, what is left of it, whether it stops
    (r"^b", "ab\nb", "ab\nb", False), (r"(?m)^b", "ab\nb", "ab\n", True), (r"\Aa", "ba", "ba", False),
    (r"\bend\b", "the bend and the end.", "the bend and the ", True),
    (r"\bend\b", "weekend endure", "weekend endure", False),
    (r"end\b", "to the end", "to the ", True),  # the text ends there too
    (r"a\B", "a b ab", "a b ", True), (r"end$", "an end and more", "an ", True),
    (r"(?m)x$\ny", "ax\nb x\ny", "ax\nb ", True),
    (r"\n\n+", "a\nb\n\nc", "a\nb", True), (r"[.!?]\s", "v1.0 is out. It", "v1.0 is out", True),
    (r"(?i)stop!", "please sTOp!", "please ", True), (r"(?i)straße", "STRAẞE", "", True),
    (r"(?a)\d", "٣ 3", "٣ ", True), (r"\d", "٣ 3", "", True), (r"\s", "a\x1fb", "a", True),
    (r"(?a)\s", "a\x1fb", "a\x1fb", False),
    (r"(?a:\w)(?u:\w)", "éa aé", "éa ", True), (r"(?i)[^b]", "Bb", "Bb", False), (r"(?s)a.b", "a\nb", "", True),
    (r"a.b", "a\nb", "a\nb", False), (r"(?x) a  b # c", "xab", "x", True), (r"[[a]", "x[", "x", True),
    ("🙂+", "so 🙂🙂", "so ", True), (r"\N{SNOWMAN}", "a☃", "a", True), (r"\ud83d", "🙂", "🙂", False),
    (r"a{3}", "aab aaa", "aab ", True), (r"(?:(?:){9999}){9999}b", "ab", "a", True), (r"[^\s\S]|z", "az", "a", True),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "text", "left", "stops"), SAID)
def test_signs(pattern: str, text: str, left: str, stops: bool) -> None:
    patterns = Patterns([pattern])
    expected = (left, pattern if stops else None)
    assert run(patterns, [text]) == run(patterns, list(text)) == expected


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"(a)\1", "backreferences"), (r"(?=a)b", "look-ahead"), (r"(?<!a)b", "look-behind"), (r"(?>a|b)c", "atomic"),
        (r"a++b", "possessive"), (r"(a)?(?(1)b|c)", "conditions"), ("(", "no regex"), ("[a", "no regex"),
        ("a{99999999999}", "no regex"), ("a*", "empty text"), ("^", "empty text"), (r"\b", "empty text"),
        ("a|", "empty text"), ("a{65535}", "too large"), ("(?:a{60000}){60000}", "too large"),
        ("|" * 1023 + "a", "too large"),
        ("(" * 400 + "a" + ")" * 400, "levels of groups"), ("(?:" * 60 + "a" + ")+" * 60, "levels of groups"),
        ("(?L)a", "no regex"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_for_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(PatternError, match=why) as caught:
        compile_patterns(("fine", pattern))
    assert caught.value.number == 1


def test_text_that_was_skipped_is_no_beginning() -> None:
    matcher = StopMatcher((), Patterns(["^a", "bc"]))
    matcher.skip("b")
    assert (matcher.feed("ac"), matcher.stopped) == ("ac", False)
    assert (matcher.feed("bc"), matcher.stopped) == ("", True)


def test_of_a_long_match_no_more_is_withheld_than_a_stop_string_may_have() -> None:
    text = "a" + "x" * (2 * MAX_WITHHELD) + "z" + "more"
    for pieces in ([text], list(text), [text[:100], text[100:]]):
        said, matched = run(Patterns(["a[^z]*z"]), pieces)
        assert (said, matched) == (text[: 2 * MAX_WITHHELD + 1 - MAX_WITHHELD], "a[^z]*z"), len(pieces)
    matcher = StopMatcher((), Patterns(["a[^z]*z"]))
    sent = 0
    for position, character in enumerate(text[: 2 * MAX_WITHHELD], 1):
        sent += len(matcher.feed(character))
        assert position - sent == min(position, MAX_WITHHELD)


MOST_INSTRUCTIONS = 25_000
"""For a character: a fifth of a millisecond on an idle core. It was twenty times as much."""

HOSTILE = [
    r"(a+)+b", r"(a|a)*b", r"(a|aa)+$b", r"(?:a?){100}a{50}b", r"(?:.*.*.*)*=x", r"[\s\S]{0,126}z", r"(\w+\s?)*\b!",
    r"(?i)(?:[^k]?[^K]?){60}k", r"(?:(?:a|b)*c?){20}!", r"(?:a|b)*a[\s\S]{250}z",
]  # fmt: skip


@pytest.mark.parametrize("pattern", HOSTILE)
def test_no_pattern_takes_long(pattern: str) -> None:
    """With Python's own search the first takes years for sixty characters."""
    assert len(Patterns([pattern])._do) <= MAX_STEPS
    matcher = StopMatcher((), Patterns([pattern]))
    text = "ab" * 500 + "a" * 2000

    def feed(begin: int, end: int) -> None:
        for start in range(begin, end, 4):
            matcher.feed(text[start : start + 4])

    feed(0, 2800)
    assert count_instructions(lambda: feed(2800, 3000)) < 200 * MOST_INSTRUCTIONS


_DISTINCT = "".join(rf"[\W\w{chr(0x4E00 + number)}]" for number in range(160))


@pytest.mark.parametrize(
    "pattern", [r"[\s\S]{250}z", r"(?i:[\W\w]{249})z", r"(?i)(?:[\w ]?){100}Q{3}", f"(?i){_DISTINCT}z"]
)
def test_no_pattern_takes_long_in_a_script_with_many_characters(pattern: str) -> None:
    """More than a class remembers, so that each is looked at anew."""
    matcher = StopMatcher((), Patterns([pattern]))
    text = "".join(chr(0x4E00 + 7 * number % 20_000) for number in range(2000))
    matcher.feed(text[:1800])
    assert count_instructions(lambda: matcher.feed(text[1800:])) < 200 * MOST_INSTRUCTIONS
    assert not matcher.stopped


@pytest.mark.parametrize(
    "pattern",
    ["[a-cb-fx-z]", "[z-zA-Ca-b]", "[^a-eg-k]", "(?i)[a-cK\u017f]", "(?i)[^b-dS]", "(?ia)[k-s]", "(?a)[\\w\u00e9]",
     "(?i)[\u00c0-\u00d6\u00f9]", "[\\d\\s-]", "[^\\W_]", "(?i)k", "(?i)[^k]", "[\U0001F600-\U0001F64F]"],
)  # fmt: skip
def test_classes_hold_what_those_of_re_hold(pattern: str) -> None:
    characters = [chr(code) for code in (*range(0x250), 0x2028, 0x212A, 0x660, 0x4E00, 0x1F5FF, 0x1F600, 0x1F650)]
    found = [each for each in characters if run(Patterns([pattern]), [each])[1] is not None]
    assert found == re.findall(pattern, "".join(characters))
