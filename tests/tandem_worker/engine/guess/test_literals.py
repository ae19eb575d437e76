"""Answers are followed through the texts of their grammar, in the tokens of their tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tandem_worker.engine.guess.contract import Source
from tandem_worker.engine.guess.json_ahead import Grade
from tandem_worker.engine.guess.literals import LiteralFollower, LiteralText, Spelling, Word
from tandem_worker.engine.guess.shapes import Shapes

PIECES = [
    '":',
    ' "',
    '",',
    ' "name',
    "name",
    "size",
    "},",
    ' {"',
    '{"',
    "}]",
    ' {"name',
    "call",
    "</call>",
    "\n  ",
    '":"',
]


class Greedy:
    """A tokenizer that takes the longest piece each time: token 256 + i is `PIECES[i]`, the others are bytes."""

    def __init__(self, mark: str = "") -> None:
        """`mark` is put before each text."""
        self.mark = mark
        self.num_calls = 0

    def encode(self, text: str) -> list[int]:
        self.num_calls += 1
        data, tokens = (self.mark + text).encode(), []
        while data:
            fitting = [piece.encode() for piece in PIECES if data.startswith(piece.encode())]
            longest = max(fitting, key=len, default=b"")
            tokens.append(256 + PIECES.index(longest.decode()) if longest else data[0])
            data = data[len(longest) or 1 :]
        return tokens

    @staticmethod
    def token_bytes(token: int) -> bytes:
        return bytes((token,)) if token < 256 else PIECES[token - 256].encode() if token < 256 + len(PIECES) else b""


def follow(words: Sequence[Word], greedy: Greedy | None = None) -> LiteralFollower:
    greedy = greedy or Greedy()
    return LiteralFollower(LiteralText(words), Spelling(greedy.encode, greedy.token_bytes))


def feed(follower: LiteralFollower, tokens: Sequence[int]) -> list[int]:
    """Returns the tokens that were guessed right."""
    right: list[int] = []
    text: list[int] = []
    for token in tokens:
        if follower.peek() == token:
            right.append(token)
        text.append(token)
        follower.feed(text)
    return right


def say(tokens: Sequence[int]) -> bytes:
    return b"".join(map(Greedy.token_bytes, tokens))


ROW = {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "number"}},
       "required": ["name", "size"], "additionalProperties": False}  # fmt: skip
ROWS = {"type": "array", "items": ROW}


def test_a_list_is_guessed_but_for_what_it_says() -> None:
    follower = follow([Word(b"", (Shapes(ROWS),))])
    text = json.dumps([{"name": "Ann", "size": 1}, {"name": "Bob", "size": 2}])
    tokens = Greedy().encode(text)
    right = feed(follower, tokens)
    assert say(right) == b'[{"name": " "size": }, {"name": " "size": '
    assert follower.source is Source.SCHEMA


def test_tokens_are_those_of_the_tokenizer_behind_what_was_said() -> None:
    follower = follow([Word(b"", (Shapes(ROWS),))])
    assert follower.read(9) == Greedy().encode('[{"name": "')
    feed(follower, [ord("[")])
    assert say(follower.read(9)) == b'{"name": "'
    feed(follower, [ord("{")])
    assert say(follower.read(9)) == b'"name": "', 'though `{"` is one token: its first half was said'
    feed(follower, Greedy().encode('"name": "A'))
    assert follower.peek() is None, "what a string says is not known"
    feed(follower, [ord('"')])
    assert follower.read(9) == [ord(","), *Greedy().encode(' "size": ')], "the quotation mark has ended"


def test_a_tokenizer_that_changes_texts_is_not_guessed_with() -> None:
    assert follow([Word(b"abc")], Greedy(mark="_")).peek() is None
    assert follow([Word(b"\xff\xfe")]).peek() is None


def test_tokens_that_the_model_does_not_have_are_not_guessed() -> None:
    """A tokenizer may have more than the model has rows of embeddings, and a client may write any of them."""
    greedy = Greedy()
    spelling = Spelling(greedy.encode, greedy.token_bytes, 256 + PIECES.index("</call>"))
    assert spelling.write(ord("a"), b"call") == [256 + PIECES.index("call")]
    assert spelling.write(ord("a"), b"call</call>") == []


def test_what_lies_between_texts_is_waited_for() -> None:
    follower = follow([Word(b"Name: "), Word(b". Age: "), Word(b" years.")])
    assert say(follower.read(20)) == b"Name: "
    right = feed(follower, list(b"Name: Ann. Age: 12 years."))
    assert say(right) == b"Name:  Age: years."


def test_a_text_is_found_that_is_not_due() -> None:
    follower = follow([Word(b"first thing "), Word(b"second thing "), Word(b"third thing ")])
    assert say(feed(follower, list(b"third thing 1"))).endswith(b"d thing ")
    assert say(feed(follower, list(b" second thing "))).endswith(b"ond thing ")


def test_calls_are_followed_again_and_again() -> None:
    words = [Word(b"<call>", (Shapes(ROWS),)), Word(b"</call>")]
    call = b'<call>[{"name": "A", "size": 1}]</call>'
    follower = follow(words)
    feed(follower, Greedy().encode("I think I must call it. "))
    for _ in range(2):
        right = say(feed(follower, Greedy().encode(call.decode())))
        assert right.endswith(b'[{"name": " "size": </call>'), right


def test_an_answer_may_begin_with_anything() -> None:
    follower = follow([Word(b""), Word(b"<call>", (Shapes(ROWS),))])
    assert follower.peek() is None
    feed(follower, Greedy().encode("Well, <call>"))
    assert say(follower.read(20)) == b'[{"name": "'


def test_json_behind_thoughts_is_found_by_its_bracket() -> None:
    follower = follow([Word(b"", (Shapes(ROWS),))])
    feed(follower, Greedy().encode('<think>It has {braces} and [brackets]</think>[{"name'))
    assert say(follower.read(20)) == b'": "'


def test_json_that_an_answer_may_be_is_found_by_its_bracket() -> None:
    follower = follow([Word(b""), Word(b"", (Shapes(ROWS),))])
    assert follower.peek() is None
    feed(follower, Greedy().encode('Here: [{"name'))
    assert say(follower.read(20)) == b'": "'


def test_text_that_was_cut_goes_on() -> None:
    long = {"const": "x" * 200}
    follower = follow([Word(b"", (Shapes(long),))])
    tokens = list(json.dumps("x" * 200).encode())
    assert len(feed(follower, tokens)) == len(tokens)


def test_grades_are_those_of_the_least_sure_byte() -> None:
    follower = follow([Word(b"", (Shapes({"properties": {"name": {"enum": ["ab", "cd"]}}, "required": ["name"]}),))])
    tokens = follower.read(20)
    grades = {say([token]): Grade(follower.grade(place)) for place, token in enumerate(tokens)}
    assert grades[b'{"'] is Grade.OPENING
    assert grades[b"name"] is Grade.SURE
    assert grades[b"a"] is Grade.CHOICE
    assert follower.grade(99) is Grade.EDGE
    assert follower.length == Grade.OPENING


def test_texts_are_tokenized_once_for_all_answers() -> None:
    greedy = Greedy()
    literals, spelling = LiteralText([Word(b"", (Shapes(ROWS),))]), Spelling(greedy.encode, greedy.token_bytes)
    tokens = Greedy().encode(json.dumps([{"name": "Ann", "size": 1}] * 3))
    counts: list[int] = []
    for _ in range(3):
        feed(LiteralFollower(literals, spelling), tokens)
        counts.append(greedy.num_calls)
    assert counts[0] == counts[1] == counts[2] > 0


def test_the_memory_of_spelled_texts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_worker.engine.guess.literals._SPELLINGS", 10)
    greedy = Greedy()
    spelling = Spelling(greedy.encode, greedy.token_bytes)
    for number in range(35):
        spelling.write(65, b"%d" % number)
    assert len(spelling._known) <= 10


def test_what_one_answer_said_is_not_guessed_for_another() -> None:
    """Neither white space nor texts of values: schemas are shared by all who send the same one, answers are not."""
    literals = LiteralText([Word(b"", (Shapes({"type": "array", "items": {"enum": ["one", "two"]}}),)), Word(b"end.")])
    spelling = Spelling(Greedy().encode, Greedy.token_bytes)
    untaught = LiteralFollower(literals, spelling).read(50)
    other = LiteralFollower(literals, spelling)
    feed(other, list(b'[\n     "two",\n     "two"\n]end.'))
    again = LiteralFollower(literals, spelling)
    assert again.read(50) == untaught
    feed(again, list(b'["'))
    assert say(again.read(3)) == b"one"


def test_ids_that_are_no_text_are_passed_over() -> None:
    follower = follow([Word(b"", (Shapes(ROWS),))])
    feed(follower, [100_000])
    assert follower.read(9) == Greedy().encode('[{"name": "')


@pytest.mark.parametrize("words", [[], [Word(b"")], [Word(b""), Word(b"")], [Word(b"", (Shapes(True),))]])
def test_grammars_without_a_text(words: list[Word]) -> None:
    follower: Any = follow(words)
    feed(follower, Greedy().encode('{"a": 1} and so on'))
    assert follower.peek() is None
