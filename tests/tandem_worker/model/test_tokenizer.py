"""Loading tokenizers from folders and GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tandem_worker.host.errors import StartupError
from tandem_worker.model.tokenizer import load_tokenizer

from e2e.model import find_model

TEXTS = ["Hello world", " 12 été 🎉\n\n<|im_start|>user", "a  b\t", ""]


@pytest.fixture(scope="module")
def gguf() -> Path:
    return find_model()


@pytest.mark.full
def test_gguf_equals_what_transformers_finds_by_itself(gguf: Path) -> None:
    from transformers import AutoTokenizer

    ours = load_tokenizer(gguf)
    theirs = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    assert ours.chat_template == theirs.chat_template
    assert ours.all_special_ids == theirs.all_special_ids
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


def test_saved_folder_equals_the_gguf_file(gguf: Path, tmp_path: Path) -> None:
    ours = load_tokenizer(gguf)
    ours.save_pretrained(tmp_path)
    saved = load_tokenizer(tmp_path)
    assert saved.chat_template == ours.chat_template
    assert [saved.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(StartupError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.reason == "TokenizerInvalid"
