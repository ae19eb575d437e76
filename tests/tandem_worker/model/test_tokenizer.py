"""Loading tokenizers from folders and GGUF files."""

from __future__ import annotations

import subprocess
import sys
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


def test_tokenizers_are_loaded_without_torch(gguf: Path, tmp_path: Path) -> None:
    """Nothing but a worker's own process does so: the tests' oracle needs transformers with torch."""
    ours = load_tokenizer(gguf)
    ours.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    program = f"""
import sys
from pathlib import Path
from tandem_worker.model.tokenizer import leave_torch_out, load_tokenizer
leave_torch_out()
print(load_tokenizer(Path({str(tmp_path)!r})).encode("Hello world"))
assert "torch" not in sys.modules
import torch
print(load_tokenizer(Path({str(gguf)!r})).encode("Hello world"))
assert torch.ones(1).item() == 1.0 and not {{"sympy", "torch._dynamo"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{ours.encode('Hello world')}\n" * 2
