"""What transformers converts is kept, and what is kept is trusted no further than it can be read."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tandem_worker.host.errors import StartupError
from tandem_worker.model.tokenization import conversion
from tandem_worker.model.tokenization.conversion import pack, unpack
from tandem_worker.model.tokenization.tokenizer import Tokenizer, TokenizerSettings
from tandem_worker.model.tokenizer import load_tokenizer

from e2e.model import find_model
from tests.tandem_worker.model.tokenization import specimens
from tests.tandem_worker.model.tokenization.test_folder import PIECES, write

SETTINGS = TokenizerSettings(
    special_tokens={"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}, extra_special_tokens=("<|im_start|>",),
    chat_template={"default": "é\n", "tool_use": "b"}, model_max_length=77, split_special_tokens=True, class_name="C",
)  # fmt: skip


class Kept(dict[str, bytes]):
    """Prepared files in memory."""

    def read(self, name: str) -> bytes | None:
        return self.get(name)

    def write(self, name: str, payload: bytes) -> None:
        self[name] = payload


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One that has to be converted."""
    return write(tmp_path / "made", specimens.byte_fallback(), {"tokenizer_class": "LlamaTokenizer"} | PIECES)


def test_a_conversion_is_made_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pack(Tokenizer(specimens.byte_fallback(), SETTINGS))
    monkeypatch.setattr(conversion, "_run", lambda *_: whole)
    kept = Kept()
    first = load_tokenizer(checkpoint, kept)
    assert [name.partition("-")[0] for name in kept] == ["tokenizer"]

    def fail(*_: object) -> bytes:
        raise AssertionError("it is converted again")

    monkeypatch.setattr(conversion, "_run", fail)
    second = load_tokenizer(checkpoint, kept)
    assert second.settings == first.settings
    assert second.backend_tokenizer.to_str() == first.backend_tokenizer.to_str()
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(AssertionError, match="again"):  # other files have another name
        load_tokenizer(checkpoint, kept)


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]\n", b'{"extra_special_tokens": []}\n{', b"\xff\n\xff"])
def test_what_is_kept_and_cannot_be_read_is_made_anew(
    damage: bytes, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = pack(Tokenizer(specimens.byte_level(), SETTINGS))
    monkeypatch.setattr(conversion, "_run", lambda *_: whole)
    kept = Kept()
    load_tokenizer(checkpoint, kept)
    (name,) = kept
    kept[name] = damage
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(checkpoint, kept).settings == SETTINGS
    assert kept[name] == whole
    assert "made anew" in caplog.text


@pytest.mark.parametrize("copy", [lambda each: unpack(pack(each)), lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_are_whole(copy: Callable[[Tokenizer], Tokenizer]) -> None:
    made = Tokenizer(specimens.byte_level(), SETTINGS)
    copied = copy(made)
    assert copied.settings == SETTINGS
    assert copied.backend_tokenizer.to_str() == made.backend_tokenizer.to_str()
    assert copied.encode("<|im_end|>") == made.encode("<|im_end|>") != [made.eos_token_id]


def test_weights_are_no_part_of_the_name(checkpoint: Path) -> None:
    before = conversion._name(checkpoint, None, 0)
    (checkpoint / "model.safetensors").write_bytes(b"1")
    assert conversion._name(checkpoint, None, 0) == before
    (checkpoint / "merges.txt").write_bytes(b"1")
    assert conversion._name(checkpoint, None, 0) != before


def test_files_that_are_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(StartupError, match="The model's tokenizer cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.reason == "TokenizerInvalid"


def test_neither_torch_nor_transformers_is_loaded(checkpoint: Path) -> None:
    """Not where files suffice, and where they do not, not here."""
    program = f"""
import sys
from pathlib import Path
from tandem_worker.model.tokenizer import load_tokenizer
print(load_tokenizer(Path({str(find_model())!r})).encode("Hello world"))
print(load_tokenizer(Path({str(checkpoint)!r})).encode("H"))
assert not {{"torch", "transformers", "sympy", "numpy"}} & sys.modules.keys(), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"[19556, 905]\n{specimens.byte_fallback().encode('H').ids}\n"
