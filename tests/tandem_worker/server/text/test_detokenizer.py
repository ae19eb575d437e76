"""Incremental text equals the tokenizer's own decoding, and never shows half a character."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.server.text.detokenizer import StreamDetokenizer, TokenTable


def stream(table: TokenTable, ids: list[int], **options: Any) -> list[str]:
    detokenizer = table.new(**options)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 272), max_size=60))
def test_byte_level_equals_decode_for_any_tokens(tokenizer: Any, ids: list[int]) -> None:
    table = TokenTable(tokenizer)
    assert "".join(stream(table, ids)) == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    whole = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(stream(table, ids, visible=table.special_ids)) == whole


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40).filter(lambda text: "<|" not in text))  # special tokens, which are no text
def test_no_piece_has_half_a_character(tokenizer: Any, text: str) -> None:
    pieces = stream(TokenTable(tokenizer), tokenizer.encode(text))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces).replace("\ufffd" * text.count("\ufffd"), "") or "\ufffd" in text


WORDS = st.lists(st.sampled_from([*"abcxyz., ", "the ", " the", "in", "é", "🌍", "ж", "\n", "  "]), max_size=20).map(
    "".join
)


@settings(max_examples=200, deadline=None)
@given(text=WORDS)
def test_byte_fallback_equals_decode(fallback_tokenizer: Any, text: str) -> None:
    ids = fallback_tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(TokenTable(fallback_tokenizer), ids)
    assert "".join(pieces) == fallback_tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    assert "\ufffd" not in "".join(pieces)


def test_a_continuation_keeps_its_space(fallback_tokenizer: Any) -> None:
    ids = fallback_tokenizer.encode("the", add_special_tokens=False)
    table = TokenTable(fallback_tokenizer)
    assert "".join(stream(table, ids)) == "the"
    assert "".join(stream(table, ids, continues=True)) == " the"


def test_an_incomplete_character_waits_and_shows_at_the_end(tokenizer: Any) -> None:
    table = TokenTable(tokenizer)
    ids = tokenizer.encode("🌍")
    assert stream(table, ids) == ["", "", "", "🌍", ""]
    assert stream(table, ids[:3]) == ["", "", "", "\ufffd"]
    # Broken by another character: what is there is shown at once, as decoding does.
    assert "".join(stream(table, [*ids[:2], *tokenizer.encode("a")])) == "\ufffda"


def test_special_tokens_are_hidden_unless_wanted(tokenizer: Any) -> None:
    table = TokenTable(tokenizer)
    end = tokenizer.backend_tokenizer.token_to_id("<|im_end|>")
    call = tokenizer.backend_tokenizer.token_to_id("<tool_call>")
    assert "".join(stream(table, [end, call])) == "<tool_call>"
    assert "".join(stream(table, [end, call], visible=frozenset({end}))) == "<|im_end|><tool_call>"


def test_ids_without_a_token_are_empty(tokenizer: Any) -> None:
    assert stream(TokenTable(tokenizer), [100_000]) == ["", ""]


def test_other_tokenizers_go_through_the_library(tokenizer: Any) -> None:
    detokenizer = StreamDetokenizer(tokenizer.backend_tokenizer, frozenset())
    ids = tokenizer.encode("Paris 🌍 the")
    assert "".join(detokenizer.feed(token) for token in ids) == "Paris 🌍 the"


@pytest.mark.parametrize("text", ["Paris in the 🌍"])
def test_token_bytes_add_up(tokenizer: Any, text: str) -> None:
    table = TokenTable(tokenizer)
    assert b"".join(table.token_bytes(token) for token in tokenizer.encode(text)) == text.encode()
