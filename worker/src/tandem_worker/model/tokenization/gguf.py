"""A tokenizer out of a GGUF file: vocabularies of byte-level BPE whose way of splitting texts is known.

llama.cpp names that way in `tokenizer.ggml.pre`; the patterns are those that the models' own tokenizers have.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tandem_worker.model.tokenization.tokenizer import Tokenizer, TokenizerSettings

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CONTROL, _USER_DEFINED = 3, 4
_READ = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type")

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?%s*%s+%s|[^\r\n\p{L}\p{N}]?%s+%s*%s"
_GPT_4O = _WORDS % ((_UPPER, _LOWER, _ENDING) * 2) + r"|\p{N}{1,3}" + _REST
_TEKKEN = _WORDS % ((_UPPER, _LOWER, "") * 2) + r"|\p{N}" + _REST
SPLITS: dict[str | None, str | None] = {
    # None: as GPT-2 does it, which is the library's own way.
    None: None, "default": None, "gpt-2": None, "gpt2": None, "smollm": None,
    "llama3": _LLAMA3, "llama-v3": _LLAMA3, "llama-bpe": _LLAMA3, "falcon3": _LLAMA3, "pixtral": _LLAMA3,
    "dbrx": _LLAMA3, "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "megrez": _QWEN2,
    "gpt-4o": _GPT_4O, "llama4": _GPT_4O, "tekken": _TEKKEN,
}  # fmt: skip
"""What `tokenizer.ggml.pre` may say; another way of splitting texts is not known here."""
_NAMED_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_GPT2_END = "<|endoftext|>"
"""GPT-2's tokenizer has it, so every vocabulary that is read as one of its kind has it too."""


@dataclass(frozen=True, slots=True)
class GGUFMetadata:
    """Values by key. Of long arrays those of the tokenizer alone."""

    values: Mapping[str, Any]
    size: int
    """Bytes of the file up to the end of the metadata."""


def read_metadata(path: Path) -> GGUFMetadata:
    """Raises ValueError for what is no GGUF file of version 2 or 3, OSError."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            magic, version, _, count = struct.unpack_from("<4sIQQ", data)
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"{path.name} is no GGUF file of version 2 or 3")
            values: dict[str, Any] = {}
            position = 24
            for _ in range(count):
                key, position = _string(data, position)
                kind = struct.unpack_from("<I", data, position)[0]
                values[key], position = _value(data, position + 4, kind, key in _READ)
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ValueError(f"{path.name} is damaged: its metadata cannot be read ({error})") from error
        if position > len(data):
            raise ValueError(f"{path.name} is damaged: its metadata reaches beyond its end")
        return GGUFMetadata(values, position)


def _value(data: mmap.mmap, position: int, kind: int, wanted: bool) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(data, position)
    if kind != _ARRAY:
        return struct.unpack_from(f"<{_form(kind)}", data, position)[0], position + struct.calcsize(_form(kind))
    kind, count = struct.unpack_from("<IQ", data, position)
    position += 12
    if kind == _STRING:
        return _strings(data, position, count, wanted)
    end = position + count * struct.calcsize(_form(kind))
    return struct.unpack_from(f"<{count}{_form(kind)}", data, position) if wanted else None, end


def _form(kind: int) -> str:
    if kind not in _FORMATS:
        raise ValueError(f"a value of type {kind}, which GGUF does not have, or not within an array")
    return _FORMATS[kind]


def _string(data: mmap.mmap, position: int) -> tuple[str, int]:
    start = position + 8
    end = start + struct.unpack_from("<Q", data, position)[0]
    return data[start:end].decode(), end


def _strings(data: mmap.mmap, position: int, count: int, wanted: bool) -> tuple[list[str] | None, int]:
    """Vocabularies have a quarter of a million of them: this loop is what reading a file's metadata takes."""
    length = struct.Struct("<Q").unpack_from
    found: list[str] = []
    for _ in range(count):
        start = position + 8
        position = start + length(data, position)[0]
        if wanted:
            found.append(data[start:position].decode())
    return found if wanted else None, position


def build_tokenizer(values: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer that a GGUF file's metadata describe, or None for a kind that is not known here.

    Raises ValueError for a vocabulary that contradicts itself.
    """
    tokens, merges = values.get("tokenizer.ggml.tokens"), values.get("tokenizer.ggml.merges")
    pre = values.get("tokenizer.ggml.pre")
    if values.get("tokenizer.ggml.model") != "gpt2" or pre not in SPLITS or not tokens or merges is None:
        return None
    backend = _build_backend(tokens, merges, SPLITS[pre])
    backend.add_tokens([AddedToken(_GPT2_END, special=True)])
    kinds = values.get("tokenizer.ggml.token_type") or ()
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL and _is_spelled(token)]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    known = (token for token, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED)
    backend.add_tokens([
        AddedToken(token, normalized=False, special=False) for token in known if backend.token_to_id(token) is not None
    ])  # fmt: skip
    named = _read_named(values, tokens)
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [AddedToken(token, special=True) for token in dict.fromkeys(named.values()) if token not in added]
    backend.add_tokens(missing)
    backend.post_processor = _build_frame(backend, named, values)
    template = values.get("tokenizer.chat_template")
    return Tokenizer(backend, TokenizerSettings(special_tokens=named, chat_template=template))


def _build_backend(tokens: list[str], merges: list[str], split: str | None) -> Backend:
    other = re.compile(f"[^{re.escape(''.join(_alphabet()))}]")
    vocabulary = {_spell(token) if other.search(token) else token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for merge in merges for left, right in [_split_merge(merge)]]
    try:
        model = models.BPE(
            vocab=vocabulary, merges=pairs, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False
        )
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"the vocabulary contradicts itself: {error}") from error
    backend = Backend(model)
    backend.decoder = decoders.ByteLevel()
    if split is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        steps = [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return backend


def _split_merge(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator or " " in right:
        raise ValueError(f"{merge!r} is no merge of two tokens")
    return left, right


def _alphabet() -> Iterator[str]:
    """Characters that stand for the 256 bytes, in the bytes' order: GPT-2's spelling."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = 0x100
    for byte in range(256):
        if byte in printable:
            yield chr(byte)
        else:
            yield chr(moved)
            moved += 1


_SPELLING = tuple(_alphabet())
_LETTERS: Container[str] = frozenset(_SPELLING)


def _spell(token: str) -> str:
    return "".join(_SPELLING[byte] for byte in token.encode())


def _is_spelled(token: str) -> bool:
    """A control token that is not is a mistake of the file's: it would be one more than the model knows."""
    return all(letter in _LETTERS for letter in token)


def _read_named(values: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, key in _NAMED_KEYS.items():
        token = values.get(f"tokenizer.ggml.{key}_token_id")
        if token is None:
            continue
        if not 0 <= token < len(tokens):
            raise ValueError(f"its {name} is {token}, which the vocabulary of {len(tokens)} does not have")
        found[name] = tokens[token]
    return found


def _build_frame(backend: Backend, named: Mapping[str, str], values: Mapping[str, Any]) -> Any:
    """What is put around a text."""
    bos = named.get("bos_token") if values.get("tokenizer.ggml.add_bos_token") else None
    eos = named.get("eos_token") if values.get("tokenizer.ggml.add_eos_token") else None
    used = [token for token in (bos, eos) if token is not None]
    return processors.TemplateProcessing(
        single=[*([f"{bos}:0"] if bos else []), "$A:0", *([f"{eos}:0"] if eos else [])],
        pair=None,
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(used)],
    )
