"""Tokenizers from the metadata of GGUF files: the same as transformers'."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.host.errors import StartupError
from tandem_worker.model.tokenization import conversion
from tandem_worker.model.tokenization.conversion import adopt, pack
from tandem_worker.model.tokenization.gguf import SPLITS, build_tokenizer, read_metadata
from tandem_worker.model.tokenizer import load_tokenizer

from e2e.model import find_model
from tests.tandem_worker.model.tokenization import specimens
from tests.tandem_worker.model.tokenization.specimens import TEXTS, assert_same, write_gguf


def oracle(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)


def metadata(**changes: Any) -> dict[str, Any]:
    """A small vocabulary as llama.cpp writes it. `changes` by the names after `tokenizer.ggml.`; None: left out."""
    backend = specimens.byte_level()
    vocabulary = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(backend.to_str())["model"]["merges"]
    special = set(specimens.MARKS)
    kinds = [3 if token in special else 4 if token.endswith("think>") else 1 for token, _ in vocabulary]
    tokens = [token for token, _ in vocabulary]
    ggml = {
        "model": "gpt2", "pre": "smollm", "tokens": tokens, "merges": [" ".join(merge) for merge in merges],
        "token_type": kinds, "bos_token_id": tokens.index("<|im_start|>"), "eos_token_id": tokens.index("<|im_end|>"),
        "padding_token_id": tokens.index("<|im_end|>"), "unknown_token_id": tokens.index("<|endoftext|>"),
        "add_bos_token": False,
    } | changes  # fmt: skip
    fields = {f"tokenizer.ggml.{key}": value for key, value in ggml.items() if value is not None}
    return {"general.architecture": "llama", "tokenizer.chat_template": "{{ messages }}"} | fields


def test_the_demo_model() -> None:
    path = find_model()
    ours, theirs = load_tokenizer(path), oracle(path)
    assert_same(ours, theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


def test_the_demo_model_needs_no_conversion() -> None:
    assert build_tokenizer(read_metadata(find_model()).values) is not None


@pytest.mark.parametrize("pre", list(SPLITS))
def test_ways_to_split(pre: str | None, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata(pre=pre))
    ours = build_tokenizer(read_metadata(path).values)
    assert ours is not None
    assert_same(ours, oracle(path))


CASES: dict[str, dict[str, Any]] = {
    "begun": {"add_bos_token": True},
    "begun and ended": {"add_bos_token": True, "add_eos_token": True},
    "nothing said of frames": {"add_bos_token": None},
    "nothing said of frames but that texts end": {"add_bos_token": None, "add_eos_token": True},
    "no kinds": {"token_type": None},
    "no names": {f"{name}_token_id": None for name in ("bos", "eos", "unknown", "padding")},
    "an ordinary token has a name": {"bos_token_id": 7, "add_bos_token": True},
    "of another architecture": {"pre": "llama-bpe", "bos_token_id": None, "add_bos_token": True},
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_file_may_say(case: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata(**CASES[case]))
    ours = build_tokenizer(read_metadata(path).values)
    assert ours is not None
    assert_same(ours, oracle(path))


def test_tokens_that_are_not_spelled_in_bytes(tmp_path: Path) -> None:
    """Control tokens that are not are a mistake of the file's; others are respelled."""
    fields = metadata()
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    for token, kind in (("<｜end▁of▁sentence｜>", 3), ("two words", 4), ("日本", 1), ("<tool>", 4)):
        tokens.append(token)
        kinds.append(kind)
    path = write_gguf(tmp_path / "m.gguf", fields)
    ours = build_tokenizer(read_metadata(path).values)
    assert ours is not None
    assert_same(ours, oracle(path), [*TEXTS, "a<｜end▁of▁sentence｜>b two words <tool>x"])


OTHERS: dict[str, dict[str, Any]] = {
    "an unheard-of way to split": {"pre": "unheard-of"},
    "no merges": {"merges": None, "scores": [0] * 345},
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_transformers_has_to_convert(case: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata(**OTHERS[case]))
    assert build_tokenizer(read_metadata(path).values) is None
    assert_same(adopt(oracle(path)), oracle(path))


def test_sentencepiece_is_converted(tmp_path: Path) -> None:
    backend = specimens.byte_fallback()
    tokens = [token for token, _ in sorted(backend.get_vocab().items(), key=lambda item: item[1])]
    merges = [" ".join(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]
    fields = metadata(
        model="llama", pre=None, tokens=tokens, merges=merges, bos_token_id=1, eos_token_id=2, unknown_token_id=0,
        padding_token_id=None, token_type=[3, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
    )  # fmt: skip
    path = write_gguf(tmp_path / "m.gguf", fields)
    assert build_tokenizer(read_metadata(path).values) is None
    assert_same(load_tokenizer(path), oracle(path))


def test_transformers_decides_about_files_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has loaded it anyway; the test above starts the other one."""
    path = write_gguf(tmp_path / "m.gguf", metadata())
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 77}')
    asked: list[tuple[Path, Path | None]] = []

    def convert_here(folder: Path, gguf: Path | None) -> bytes:
        asked.append((folder, gguf))
        return pack(adopt(oracle(path)))

    monkeypatch.setattr(conversion, "_run", convert_here)
    ours = load_tokenizer(path)
    assert asked == [(tmp_path, path)]
    assert_same(ours, oracle(path))


@pytest.mark.parametrize(
    "changes",
    [{"bos_token_id": 345}, {"merges": ["a"]}, {"merges": ["a b c"]}, {"merges": ["zzz yyy"]}, {"model": "unheard-of"}],
)
def test_files_that_contradict_themselves(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(StartupError) as caught:
        load_tokenizer(write_gguf(tmp_path / "m.gguf", metadata(**changes)))
    assert caught.value.reason == "TokenizerInvalid"


@given(data=st.data())
def test_a_damaged_file_is_refused_or_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Wherever it is cut or altered, nothing but ValueError comes of it."""
    path = tmp_path_factory.mktemp("damaged") / "m.gguf"
    whole = bytearray(write_gguf(path, metadata()).read_bytes())
    position = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        del whole[position:]
    else:
        whole[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    with contextlib.suppress(ValueError):
        build_tokenizer(read_metadata(path).values)
