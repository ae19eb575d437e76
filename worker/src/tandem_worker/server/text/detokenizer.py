"""Token ids to text, one token at a time.

`TokenTable` knows the bytes of every token; an `IncrementalDetokenizer` joins the bytes of one choice and hands out
text as soon as its characters are complete. Cost per token is constant: nothing is decoded twice.

Two families of tokenizers are covered exactly: byte-level BPE (Llama 3, Qwen, DeepSeek, gpt-oss, SmolLM2) and
SentencePiece-style pieces with byte fallback (Llama 2, Mistral). Others go through the tokenizer's own decode stream.

The joined text equals `tokenizer.decode(ids)`. One exception, on purpose: where byte-fallback tokens are invalid
UTF-8, that decoder blanks the valid characters standing next to them too; here they are kept, because they may have
been sent already.
"""

from __future__ import annotations

import codecs
import json
from typing import Any, Protocol


class Detokenizer(Protocol):
    def feed(self, token_id: int) -> str:
        """Text that this token completes; may be empty."""
        ...

    def flush(self) -> str:
        """What remains at the end: an incomplete character becomes U+FFFD, as in `tokenizer.decode`."""
        ...


def byte_level_alphabet() -> dict[str, int]:
    """Characters that stand for bytes in byte-level BPE vocabularies.

    Printable latin-1 bytes stand for themselves; the others, in order, are moved to U+0100 and up
    (the published GPT-2 byte encoding).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    moved = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(moved)})
    return alphabet


class TokenTable:
    """Bytes of each token, computed on first use. Shared by all requests; any thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._cache: dict[int, bytes] = {}
        self.special_ids = frozenset[int](tokenizer.all_special_ids) | _special_added_ids(self._backend)
        kinds = _decoder_kinds(self._backend)
        self.byte_level = "ByteLevel" in kinds
        self.byte_fallback = "ByteFallback" in kinds
        self.strips_leading_space = "Strip" in kinds or "Metaspace" in kinds
        self.exact = self.byte_level or self.byte_fallback
        self._alphabet = byte_level_alphabet() if self.byte_level else {}

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token; empty for ids outside the vocabulary (padding rows of the output matrix)."""
        known = self._cache.get(token_id)
        if known is None:
            known = self._cache[token_id] = self._compute(token_id)
        return known

    def _compute(self, token_id: int) -> bytes:
        piece: str | None = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self.byte_level:
            try:
                return bytes([self._alphabet[char] for char in piece])
            except KeyError:  # an added token in plain text
                return piece.encode()
        if self.byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        if self.exact:
            return piece.replace("▁", " ").encode()
        return str(self._backend.decode([token_id], skip_special_tokens=False)).encode()

    def new(self, *, visible: frozenset[int] = frozenset(), continues: bool = False) -> Detokenizer:
        """A detokenizer for one choice.

        `visible` are special tokens whose text is wanted (marks of tool calls, for instance); other special tokens
        have none. `continues`: the text is appended to a prompt, so a leading space is kept where the tokenizer would
        drop it.
        """
        hidden = self.special_ids - visible
        if self.exact:
            return IncrementalDetokenizer(self, hidden, strip_first=self.strips_leading_space and not continues)
        return StreamDetokenizer(self._backend, hidden)


class IncrementalDetokenizer:
    __slots__ = ("_decode", "_hidden", "_strip_first", "_table")

    def __init__(self, table: TokenTable, hidden: frozenset[int], *, strip_first: bool) -> None:
        self._table = table
        self._hidden = hidden
        self._strip_first = strip_first
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        text = self._decode(self._table.token_bytes(token_id))
        if self._strip_first and text:
            self._strip_first = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        return self._decode(b"", True)


class StreamDetokenizer:
    """For decoders that are neither byte-level nor byte-fallback: the tokenizers library's own decode stream."""

    __slots__ = ("_backend", "_hidden", "_stream")

    def __init__(self, backend: Any, hidden: frozenset[int]) -> None:
        from tokenizers.decoders import DecodeStream

        self._backend = backend
        self._hidden = hidden
        self._stream = DecodeStream(skip_special_tokens=False)

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        return self._stream.step(self._backend, token_id) or ""

    def flush(self) -> str:
        return ""


def _special_added_ids(backend: Any) -> frozenset[int]:
    return frozenset(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)


def _decoder_kinds(backend: Any) -> frozenset[str]:
    """Type names in the tokenizer's decoder, those of a sequence included."""
    if backend.decoder is None:
        return frozenset()
    state = json.loads(backend.decoder.__getstate__())
    return frozenset(part["type"] for part in state.get("decoders", [state]))
