"""Where a model's tokenizer is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from tandem_worker.host.errors import StartupError
from tandem_worker.model.tokenizer import load_tokenizer

from e2e.model import find_model


def test_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(find_model())
    found = load_tokenizer(tmp_path)
    assert (found.bos_token, found.eos_token, len(found)) == ("<|im_start|>", "<|im_end|>", 49152)
    assert found.encode("Hello world") == [19556, 905]


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(StartupError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.reason == "TokenizerInvalid"


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content in (b"", b"none", b"GGUF" + bytes(20)):
        path.write_bytes(content)
        with pytest.raises(StartupError) as caught:
            load_tokenizer(path)
        assert caught.value.reason == "TokenizerInvalid"
