"""Tokenizers of every kind that checkpoints have, made here, and what it means for two to be the same."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)  # fmt: skip

TEXTS = [
    "Hello world", " 12 été 🎉\n\n<|im_start|>user", "a  b\t", "", "x", "  leading", "it's they'LL 1234567 ﬁ é",
    "日本語 <think>hm</think><|im_end|>", "<s>a</s> [CLS] b [SEP]", "tail \r\n\r\n ", "<|endoftext|><|endoftext|>",
]  # fmt: skip
CORPUS = [
    "Hello world, it's a fine day: 123 456 7890.", "the quick brown fox jumps over the lazy dog", "été où ça 日本語 🎉",
    "def f(x):\n    return x + 1\n", "they'll WE'VE hello hello hello world world",
]  # fmt: skip
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(*, split: str | None = None, normalizer: Any = None, **options: Any) -> Tokenizer:
    """As GPT-2, or with a `split` as later ones."""
    made = Tokenizer(models.BPE(**options))
    if split is None:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        made.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False),
        ])  # fmt: skip
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=340, show_progress=False, initial_alphabet=alphabet)
    )
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    made.add_tokens([AddedToken(mark, normalized=False) for mark in ("<think>", "</think>")])
    return made


def qwen() -> Tokenizer:
    """As Qwen's class builds it."""
    return byte_level(
        split=QWEN_SPLIT, normalizer=normalizers.NFC(), continuing_subword_prefix="", end_of_word_suffix=""
    )


def byte_level_with_start() -> Tokenizer:
    """Begins each text with a token, as Llama 3."""
    made = byte_level(split=r"\p{N}{1,3}|\s+|[^\s\p{N}]+")
    start = made.token_to_id("<|endoftext|>")
    made.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", start)]),
    ])  # fmt: skip
    return made


def unigram() -> Tokenizer:
    """SentencePiece's other model."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁Hello", -3.0), ("▁world", -3.5)]
    pieces += [(letter, -4.0 - index / 10) for index, letter in enumerate("abcdefghijklmnopqrstuvwxyzH<>/")]
    made = Tokenizer(models.Unigram(pieces, unk_id=0))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens([AddedToken(mark, special=True) for mark in ("<unk>", "<s>", "</s>")])
    made.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    return made


def word_pieces() -> Tokenizer:
    """BERT's."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "hello", "world", "##s", "a", "b", "it", "'", "##t", "the", "."]
    made = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens([AddedToken(word, special=True) for word in words[:4]])
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.enable_truncation(6)
    made.enable_padding(pad_id=0, pad_token="[PAD]", length=12)
    return made


def byte_fallback() -> Tokenizer:
    """SentencePiece's BPE, with bytes for what it lacks, as Llama 2."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Helowrd", "▁H", "el"]
    merges = [("▁", "H"), ("e", "l")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    made.add_special_tokens([AddedToken(mark, special=True) for mark in ("<unk>", "<s>", "</s>")])
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return made


def assert_same(ours: Any, theirs: Any, texts: list[str] = TEXTS) -> None:
    """`theirs` is transformers'. Equal wherever the worker looks."""
    # Encoding through transformers sets what checkpoints say of truncation and padding, which the worker never does.
    backend = Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = theirs.backend_tokenizer.encode_special_tokens
    for text in texts:
        for special in (True, False):
            ids = backend.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special) == ids, text
            assert theirs.encode(text, add_special_tokens=special, truncation=False, padding=False) == ids
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip_special_tokens=skip) == expected
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    added = theirs.backend_tokenizer.get_added_tokens_decoder()
    assert {index: str(token.__getstate__()) for index, token in added.items()} == {
        index: str(token.__getstate__()) for index, token in ours.backend_tokenizer.get_added_tokens_decoder().items()
    }
    assert ours.backend_tokenizer.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert sorted(ours.all_special_tokens) == sorted(theirs.all_special_tokens)
    assert sorted(ours.all_special_ids) == sorted(theirs.all_special_ids)
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "bos_token_id", "eos_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.model_max_length == theirs.model_max_length
    assert ours.chat_template == theirs.chat_template
    assert ours.settings.class_name == type(theirs).__name__


def write_gguf(path: Path, fields: dict[str, Any]) -> Path:
    """A file of metadata alone: strings, booleans, numbers, lists of strings and of numbers."""
    body = b"".join(_string(key) + _value(value) for key, value in fields.items())
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(fields)) + body)
    return path


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
        case list():
            return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
    raise TypeError(type(value))
