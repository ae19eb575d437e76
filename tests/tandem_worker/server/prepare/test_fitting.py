"""The bound on a text's tokens is never above what the tokenizer makes of it; where it might be, there is none."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.server.prepare.fitting import NFC_SHRINKS, LengthBound, observe_bound
from tandem_worker.server.text.detokenizer import byte_level_alphabet
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

Change = Callable[[Tokenizer], object]
MERGES = [("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("h", "e"), ("Ì", "ģ"), ("e", "ÌĢ")]


def byte_level(*, without: str = "", unk: str | None = None) -> Tokenizer:
    pieces = [piece for piece in byte_level_alphabet() if piece not in without]
    merges = [pair for pair in MERGES if all(part in pieces or len(part) > 1 for part in pair)]
    known = dict.fromkeys(pieces)
    usable: list[tuple[str, str]] = []
    for left, right in merges:
        if left in known and right in known:
            usable.append((left, right))
            known[left + right] = None
    vocabulary = {piece: index for index, piece in enumerate([*known, *([unk] if unk else [])])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=usable, unk_token=unk, fuse_unk=unk is not None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentence_pieces() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefgh", "▁▁", "▁▁▁▁"]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)}, merges=[("▁", "▁"), ("▁▁", "▁▁")],
            byte_fallback=True, fuse_unk=True, unk_token="<unk>",
        )
    )  # fmt: skip
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def changed(make: Callable[..., Tokenizer], change: Change, **options: Any) -> Tokenizer:
    backend = make(**options)
    change(backend)
    return backend


def set_normalizer(normalizer: Any) -> Change:
    return lambda backend: setattr(backend, "normalizer", normalizer)


def set_pre_tokenizer(*steps: Any) -> Change:
    return lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Sequence(list(steps)))


def add(**options: Any) -> Change:
    return lambda backend: backend.add_tokens([AddedToken("<mark of a turn>", **options)])


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
BOUNDED = {
    "byte level": byte_level(),
    "bytes that the vocabulary lacks": byte_level(without="aĠ"),
    "bytes that are unknown together": byte_level(without="a", unk="<unk>"),
    "composed": changed(byte_level, set_normalizer(normalizers.NFC())),
    "split": changed(byte_level, set_pre_tokenizer(pre_tokenizers.Split(Regex(r"\d|\s+"), "isolated"), BYTE_LEVEL)),
    "digits": changed(byte_level, set_pre_tokenizer(pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL)),
    "added": changed(byte_level, add(special=True)),
    "added to normalized text": changed(
        lambda: changed(byte_level, set_normalizer(normalizers.NFC())), add(normalized=True)
    ),
    "sentence pieces": sentence_pieces(),
    "sentence pieces, added": changed(sentence_pieces, add(special=True)),
}
PIECES = st.sampled_from(
    ["<mark of a turn>", "    ", "he", "e\u0300", "\u0399\u0308\u0301", "\u212a", "▁", "\x04", "aaaa"]
)


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=settings().max_examples * 3 // 2, deadline=None)
@given(text=st.lists(st.one_of(PIECES, st.text(max_size=20)), max_size=20).map("".join))
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    backend = BOUNDED[name]
    bound = observe_bound(backend)
    assert bound is not None
    assert bound.fewest_tokens(text) <= len(backend.encode(text, add_special_tokens=False).ids)


def test_the_bound_is_as_good_as_the_longest_token() -> None:
    assert observe_bound(byte_level()) == LengthBound(4.0)
    assert observe_bound(changed(byte_level, add())) == LengthBound(float(len("<mark of a turn>")))
    assert LengthBound(4.0).fewest_tokens("é" * 10) == 5
    assert LengthBound(4.0, b"ab").fewest_tokens("abcd" * 3) == 2


UNBOUNDED = {
    "stripped": changed(byte_level, set_normalizer(normalizers.Strip())),
    "compatibility forms": changed(byte_level, set_normalizer(normalizers.NFKC())),
    "replaced by nothing": changed(byte_level, set_normalizer(normalizers.Replace("x", ""))),
    "replaced by pattern": changed(byte_level, set_normalizer(normalizers.Replace(Regex(" +"), " "))),
    "composed, without some bytes": changed(byte_level, set_normalizer(normalizers.NFC()), without="a"),
    "split and removed": changed(byte_level, set_pre_tokenizer(pre_tokenizers.Split(" ", "removed"), BYTE_LEVEL)),
    "white space": changed(byte_level, set_pre_tokenizer(pre_tokenizers.WhitespaceSplit(), BYTE_LEVEL)),
    "swallows on the left": changed(byte_level, add(lstrip=True)),
    "swallows on the right": changed(byte_level, add(rstrip=True)),
    "truncated": changed(byte_level, lambda backend: backend.enable_truncation(8)),
    "words": Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
    "characters without bytes": Tokenizer(models.BPE(vocab={"a": 0}, merges=[])),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_without_certainty_there_is_no_bound(name: str) -> None:
    assert observe_bound(UNBOUNDED[name]) is None


def test_composition_shrinks_by_no_more() -> None:
    """Every character's share in what the composition of it and others can replace, over all of Unicode."""
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    changing = [char for char in characters if unicodedata.decomposition(char) or 0xAC00 <= ord(char) < 0xD7A4]
    decomposed = {char: unicodedata.normalize("NFD", char) for char in changing}
    weights: dict[str, int] = {}
    for char, parts in decomposed.items():
        if len(parts) == 1:
            weights[parts] = max(weights.get(parts, len(parts.encode())), len(char.encode()))

    def weight(parts: str) -> int:
        return sum(weights.get(part, len(part.encode())) for part in parts)

    assert all(len(char.encode()) <= weight(parts) for char, parts in decomposed.items())
    factors = [
        weight(parts) / len(char.encode())
        for char, parts in [*decomposed.items(), *((part, part) for part in weights)]
        if unicodedata.normalize("NFC", parts) == char
    ]
    assert max(factors) == NFC_SHRINKS
