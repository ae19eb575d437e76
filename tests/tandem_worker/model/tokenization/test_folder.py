"""Tokenizers from the files of a checkpoint: the same as transformers', with it and without."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.host.errors import StartupError
from tandem_worker.model.tokenization import folder
from tandem_worker.model.tokenization.conversion import adopt
from tandem_worker.model.tokenization.folder import read_folder
from tandem_worker.model.tokenization.tokenizer import Tokenizer
from tandem_worker.model.tokenizer import load_tokenizer
from tokenizers import AddedToken, normalizers, pre_tokenizers

from tests.tandem_worker.model.tokenization import specimens
from tests.tandem_worker.model.tokenization.specimens import assert_same

NAMED = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
PIECES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
WORDS = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
MADE: dict[str, tuple[Callable[[], Any], dict[str, str]]] = {
    "byte level": (specimens.byte_level, NAMED),
    "byte level, begun": (specimens.byte_level_with_start, NAMED),
    "qwen": (specimens.qwen, NAMED),
    "unigram": (specimens.unigram, PIECES),
    "word pieces": (specimens.word_pieces, WORDS),
    "byte fallback": (specimens.byte_fallback, PIECES),
}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write(path: Path, backend: Any, config: dict[str, Any], *, model_type: str | None = "llama") -> Path:
    """A checkpoint's folder, without weights."""
    path.mkdir(exist_ok=True, parents=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if model_type is not None:
        (path / "config.json").write_text(json.dumps({"model_type": model_type, "transformers_version": "5.1.0"}))
    return path


def oracle(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), local_files_only=True)


@pytest.mark.parametrize("kind", MADE)
def test_files_that_suffice(kind: str, tmp_path: Path) -> None:
    make, named = MADE[kind]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "model_max_length": 4096}
    path = write(tmp_path / "made", make(), config | named)
    found = read_folder(path)
    assert found is not None
    assert_same(found, oracle(path))


@pytest.mark.parametrize("kind", MADE)
def test_what_transformers_saves(kind: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    make, named = MADE[kind]
    theirs = PreTrainedTokenizerFast(tokenizer_object=make(), chat_template=TEMPLATE, **named)
    theirs.add_special_tokens({"additional_special_tokens": ["<more>"]})
    theirs.save_pretrained(tmp_path)
    found = read_folder(tmp_path)
    assert found is not None
    assert_same(found, oracle(tmp_path))


SUFFICE: dict[str, dict[str, Any]] = {
    "a start that the file does not say": {"add_bos_token": True, "add_eos_token": True},
    "other special tokens": {"additional_special_tokens": ["<|im_start|>"]},
    "other special tokens, later spelling": {"extra_special_tokens": ["<|im_start|>", "<think>"]},
    "named by the model": {"extra_special_tokens": {"image_token": "<|im_start|>"}},
    "named at the top": {"image_token": "<|im_start|>"},
    "special tokens are text": {"split_special_tokens": True},
    "written at length": {
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False, "rstrip": False,
                      "normalized": False, "single_word": False, "special": True},
    },
    "none": {"unk_token": None},
    "no limit": {"model_max_length": None},
    "another limit": {"max_len": 77},
    "several templates": {
        "chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
    },
    "no template": {"chat_template": None},
    "spaces": {"clean_up_tokenization_spaces": True},
    "llama by name": {"tokenizer_class": "LlamaTokenizerFast"},
}  # fmt: skip


@pytest.mark.parametrize("case", SUFFICE)
def test_what_a_configuration_may_say(case: str, tmp_path: Path) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | NAMED | SUFFICE[case]
    path = write(tmp_path / "made", specimens.byte_level_with_start(), config)
    found = read_folder(path)
    assert found is not None
    assert_same(found, oracle(path))


@pytest.mark.parametrize("model_type", folder.MODEL_TYPES)
@pytest.mark.parametrize("stated", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_types_of_models(model_type: str | None, stated: str, tmp_path: Path) -> None:
    config = {"tokenizer_class": stated} | NAMED
    path = write(tmp_path / "made", specimens.byte_level_with_start(), config, model_type=model_type)
    if stated.startswith("Llama") and model_type in ("mistral", "mixtral"):
        assert read_folder(path) is None
        return
    found = read_folder(path)
    assert found is not None
    assert_same(found, oracle(path))


def test_added_tokens_that_the_configuration_repeats(tmp_path: Path) -> None:
    backend = specimens.byte_level()
    stated = {
        str(index): token.__getstate__() for index, token in backend.get_added_tokens_decoder().items() if index % 2
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": stated} | NAMED
    path = write(tmp_path / "made", backend, config)
    found = read_folder(path)
    assert found is not None
    assert_same(found, oracle(path))


@pytest.mark.parametrize("defaults", [True, False])
def test_qwen(defaults: bool, tmp_path: Path) -> None:
    backend = specimens.qwen()
    stated = {str(index): token.__getstate__() for index, token in backend.get_added_tokens_decoder().items()}
    config: dict[str, Any] = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": stated}
    if not defaults:
        config |= {"unk_token": None, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        config |= {"additional_special_tokens": ["<|im_start|>"], "split_special_tokens": False, "errors": "replace"}
    path = write(tmp_path / "made", backend, config, model_type="qwen3")
    found = read_folder(path)
    assert found is not None
    assert_same(found, oracle(path))


@pytest.mark.parametrize("name", ["default alone", "named", "both"])
def test_templates_in_files_come_first(name: str, tmp_path: Path) -> None:
    config = {"tokenizer_class": "TokenizersBackend", "chat_template": "not this"} | NAMED
    path = write(tmp_path / "made", specimens.byte_level(), config)
    if name != "named":
        (path / "chat_template.jinja").write_text("the default, é")
    if name != "default alone":
        (path / "additional_chat_templates").mkdir()
        (path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    found = read_folder(path)
    assert found is not None
    assert found.chat_template == oracle(path).chat_template
    assert found.chat_template != "not this"


def test_special_tokens_in_a_file_of_their_own(tmp_path: Path) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | NAMED
    path = write(tmp_path / "made", specimens.byte_level(), config)
    (path / "special_tokens_map.json").write_text(json.dumps(NAMED | {"eos_token": {"content": "<|im_end|>"}}))
    found = read_folder(path)
    assert found is not None
    assert_same(found, oracle(path))
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_start|>"}))
    assert read_folder(path) is None


def _change(backend: Any, name: str, value: Any) -> Any:
    setattr(backend, name, value)
    return backend


OTHERS: dict[str, tuple[Callable[[], Any], dict[str, Any], str | None]] = {
    "a class with rules of its own": (specimens.byte_level, {"tokenizer_class": "GPT2Tokenizer"}, "llama"),
    "a class that builds another": (specimens.byte_level, {"tokenizer_class": "Qwen2Tokenizer"}, "qwen3"),
    "qwen without its normalizer": (
        lambda: _change(specimens.qwen(), "normalizer", normalizers.NFKC()), {"tokenizer_class": "Qwen2Tokenizer"},
        "qwen3",
    ),
    "qwen with another split": (
        lambda: _change(specimens.qwen(), "pre_tokenizer", pre_tokenizers.ByteLevel(False)),
        {"tokenizer_class": "Qwen2Tokenizer"}, "qwen3",
    ),
    "qwen with some of its tokens": (
        specimens.qwen,
        {"tokenizer_class": "Qwen2Tokenizer",
         "added_tokens_decoder": {"0": AddedToken("<|endoftext|>", special=True).__getstate__()}}, "qwen3",
    ),
    "a type that transformers corrects": (specimens.qwen, {}, "qwen2"),
    "no class": (specimens.byte_level, {"tokenizer_class": None}, "llama"),
    "a token that is none yet": (specimens.byte_level, {"pad_token": "<pad>"}, "llama"),
    "a token in other words": (
        specimens.byte_level,
        {"added_tokens_decoder": {"340": AddedToken("<|endoftext|>", special=True, lstrip=True).__getstate__()}},
        "llama",
    ),
    "an unheard-of key": (specimens.byte_level, {"unheard_of": 1}, "llama"),
    "a name for a token that is not special": (specimens.byte_level, {"image_token": "<think>"}, "llama"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_what_transformers_has_to_convert(case: str, tmp_path: Path) -> None:
    make, changes, model_type = OTHERS[case]
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | NAMED | changes
    path = write(tmp_path / "made", make(), config, model_type=model_type)
    assert read_folder(path) is None
    assert_same(adopt(oracle(path)), oracle(path))


def test_a_sentencepiece_class_is_converted(tmp_path: Path) -> None:
    path = write(tmp_path / "made", specimens.byte_fallback(), {"tokenizer_class": "LlamaTokenizer"} | PIECES)
    assert read_folder(path) is None
    assert_same(load_tokenizer(path), oracle(path))


def test_types_that_transformers_corrects_are_not_ours() -> None:
    """A release that corrects one more is noticed here."""
    from transformers.models.auto import tokenization_auto

    assert not set(folder.MODEL_TYPES) & tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    for model_type in ("qwen3", "qwen3_moe"):
        assert tokenization_auto.TOKENIZER_MAPPING_NAMES[model_type] == "Qwen2Tokenizer"


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer.json", "{"), ("tokenizer.json", '{"model": {"type": "BPE"}}'), ("tokenizer_config.json", "[]"),
     ("tokenizer_config.json", "{"), ("config.json", "nothing")],
)  # fmt: skip
def test_files_that_are_damaged(name: str, text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "made", specimens.byte_level(), {"tokenizer_class": "PreTrainedTokenizerFast"} | NAMED)
    (path / name).write_text(text)
    with pytest.raises(StartupError, match=name) as caught:
        load_tokenizer(path)
    assert caught.value.reason == "TokenizerInvalid"


@pytest.fixture(scope="module", params=["byte level, begun", "byte fallback", "unigram"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    make, named = MADE[request.param]
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | named
    path = write(tmp_path_factory.mktemp("made"), make(), config)
    found = read_folder(path)
    assert found is not None
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return found, oracle(path)


@given(text=st.text(st.sampled_from("Helo wrld<|endtx>/s_im 1é🎉\n▁")), ids=st.lists(st.integers(0, 600), max_size=12))
def test_any_text_and_any_ids(both: tuple[Tokenizer, Any], text: str, ids: list[int]) -> None:
    ours, theirs = both
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
