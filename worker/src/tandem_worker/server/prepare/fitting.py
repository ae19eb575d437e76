"""How few tokens a text can have, told from its length alone: most texts that cannot fit need not be tokenized.

No token stands for more bytes than the longest one, so a text of `b` bytes has at least `b / longest` tokens. That is
true only of a tokenizer that leaves nothing out and folds nothing together, which `observe_bound` checks part by part:

- the normalizer shrinks a text by a known factor at most, or not at all;
- the pre-tokenizer drops nothing (`Removed` delimiters, white space);
- no added token swallows the white space around it;
- the model is byte-pair encoding over bytes. Bytes that its vocabulary lacks are dropped, and therefore not counted.

For any other tokenizer there is no bound, and texts are tokenized to be counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem_worker.server.text.detokenizer import byte_level_alphabet

NFC_SHRINKS = 3.5
"""The most bytes that become one byte of their canonical composition: iota with three marks becomes U+0390."""
_KEEPING = frozenset({"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"})
"""Behaviours of a pre-tokenizer that leave delimiters in the text."""
_UTF8 = frozenset(range(0x100)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
"""Bytes that valid text can have."""


@dataclass(frozen=True, slots=True)
class LengthBound:
    longest: float
    """The most bytes of text that a token can stand for."""
    dropped: bytes = b""
    """Bytes that may stand for no token at all."""

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` has or exceeds."""
        # Lone surrogates are refused by the tokenizer, in its own words.
        raw = text.encode(errors="surrogatepass")
        num_bytes = len(raw.translate(None, self.dropped)) if self.dropped else len(raw)
        return int(-(-num_bytes // self.longest))


def observe_bound(backend: Any) -> LengthBound | None:
    """None where no bound is certain. `backend` is a `tokenizers.Tokenizer`. Takes a second for a large vocabulary."""
    state: dict[str, Any] = json.loads(backend.to_str())
    steps = [*_parts(state["normalizer"], "normalizers"), *_parts(state["pre_tokenizer"], "pretokenizers")]
    added: list[dict[str, Any]] = state["added_tokens"]
    shrinks = _shrinking(_parts(state["normalizer"], "normalizers"))
    keeps_all = (
        all(map(_keeps, _parts(state["pre_tokenizer"], "pretokenizers")))
        and not any(token["lstrip"] or token["rstrip"] for token in added)
        and state["truncation"] is None
    )
    pieces = _observe_pieces(state["model"], byte_level=any(step["type"] == "ByteLevel" for step in steps))
    if shrinks is None or not keeps_all or pieces is None:
        return None
    longest, dropped = pieces
    if dropped and shrinks != 1.0:
        return None  # what a normalizer makes of a text may have bytes that the text did not have
    # Added tokens are found in the text as it was, or as it is normalized; either way they cover their own length.
    return LengthBound(shrinks * max([longest, *(len(token["content"].encode()) for token in added)]), dropped)


def _parts(step: Mapping[str, Any] | None, key: str) -> Sequence[Mapping[str, Any]]:
    """The steps of a sequence, or the one step there is."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [part for inner in step[key] for part in _parts(inner, key)]


def _shrinking(normalizers: Sequence[Mapping[str, Any]]) -> float | None:
    """The factor by which they shorten a text at most, in bytes; None when that is not known."""
    factor = 1.0
    for part in normalizers:
        match part["type"]:
            case "NFC":
                factor *= NFC_SHRINKS
            case "Prepend" | "ByteLevel":
                pass
            case "Replace":
                pattern = part["pattern"].get("String")
                if not pattern or len(part["content"].encode()) < len(pattern.encode()):
                    return None
            case _:
                return None
    return factor


def _keeps(pre_tokenizer: Mapping[str, Any]) -> bool:
    match pre_tokenizer["type"]:
        case "ByteLevel" | "Metaspace" | "Digits":
            return True
        case "Split" | "Punctuation":
            return pre_tokenizer["behavior"] in _KEEPING
        case _:
            return False


def _observe_pieces(model: Mapping[str, Any], *, byte_level: bool) -> tuple[int, bytes] | None:
    """Bytes of the longest piece, and the bytes without a piece. None unless all pieces are made of bytes."""
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    vocabulary: Mapping[str, int] = model["vocab"]
    if byte_level:
        # A character of a piece is a byte of the text.
        missing = {byte for char, byte in byte_level_alphabet().items() if char not in vocabulary}
        return max(map(len, vocabulary)), bytes(sorted(missing & _UTF8))
    if model["byte_fallback"]:
        missing = {byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary}
        return None if missing else (max(len(piece.encode()) for piece in vocabulary), b"")
    return None
