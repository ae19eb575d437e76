"""A tokenizer out of the files of a checkpoint, where these say all there is to say.

`tokenizer.json` is the library's object; `tokenizer_config.json` names special tokens and a class of transformers'.
Some classes take the file as it is. Others build an object of their own from its vocabulary: where the file already
says what they would build, it is taken too. For all else there is `conversion`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tandem_worker.model.tokenization.tokenizer import NAMED, UNLIMITED, Tokenizer, TokenizerSettings

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
NAMES = (
    TOKENIZER, CONFIG, TEMPLATE, TEMPLATES, "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
)  # fmt: skip
"""Files that say something about a tokenizer."""
AS_THEY_ARE = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that take the library's object as its file has it."""
MODEL_TYPES = (
    None, "llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4", "llama4_text", "mistral", "mixtral",
)  # fmt: skip
"""Those of `config.json`; transformers corrects the class for some others."""
IGNORED = frozenset({
    "tokenizer_class", "add_bos_token", "add_eos_token", "add_prefix_space", "backend", "clean_up_tokenization_spaces",
    "errors", "is_local", "legacy", "local_files_only", "max_length", "model_input_names", "padding_side",
    "pad_to_multiple_of", "pad_token_type_id", "processor_class", "response_template", "sp_model_kwargs",
    "spaces_between_special_tokens", "stride", "tokenizer_file", "truncation_side", "truncation_strategy",
    "use_default_system_prompt", "name_or_path", "special_tokens_map_file", "chat_control_tokens", "device_map",
})  # fmt: skip
"""Keys of `tokenizer_config.json` that change nothing here: of training and batches, and what files already say."""
READ = frozenset({
    "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens",
    "chat_template", "model_max_length", "max_len", "split_special_tokens",
})  # fmt: skip
_BYTE_LEVEL_BPE = {
    "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
}  # fmt: skip
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_STEPS: list[dict[str, Any]] = [
    {"type": "Split", "pattern": {"Regex": _QWEN_SPLIT}, "behavior": "Isolated", "invert": False},
    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
]
_QWEN_END = "<|endoftext|>"
_QWEN_DEFAULTS = {"unk_token": _QWEN_END, "eos_token": _QWEN_END, "pad_token": _QWEN_END}
"""What the class takes where the files name none."""


def read_folder(folder: Path) -> Tokenizer | None:
    """The tokenizer of the checkpoint in `folder`; None where its files do not suffice.

    Raises ValueError for files that cannot be read as what they are, OSError.
    """
    if not (folder / TOKENIZER).is_file() or not (folder / CONFIG).is_file():
        return None
    config = _read_json(folder / CONFIG)
    kind = _choose_class(folder, config)
    named, extra = _read_special_tokens(config)
    if kind is None or named is None or extra is None or not _is_whole(folder, config):
        return None
    try:
        backend = Backend.from_file(str(folder / TOKENIZER))
    except Exception as error:  # the library raises nothing more special
        raise ValueError(f"{TOKENIZER} cannot be read: {error}") from error
    padding: Mapping[str, Any] | None = backend.padding
    if padding is not None and "pad_token" not in config:
        named["pad_token"] = padding["pad_token"]
    if kind == "Qwen2Tokenizer":
        named = _QWEN_DEFAULTS | named
    found = {name: token for name, token in named.items() if token is not None}
    if not _holds(backend, found, extra, config, kind):
        return None
    length = config.get("model_max_length", config.get("max_len"))
    settings = TokenizerSettings(
        special_tokens={name: found[name] for name in (*NAMED, *sorted(found.keys() - set(NAMED))) if name in found},
        extra_special_tokens=tuple(extra),
        chat_template=_read_templates(folder, config),
        model_max_length=UNLIMITED if length is None else int(length),
        split_special_tokens=bool(config.get("split_special_tokens")),
        class_name=kind,
    )
    return Tokenizer(backend, settings)


def _choose_class(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The class that transformers would make of it, where it is known what that does."""
    path = folder / "config.json"
    model_type = _read_json(path).get("model_type") if path.is_file() else None
    stated = config.get("tokenizer_class")
    if model_type not in MODEL_TYPES:
        return None
    if stated in AS_THEY_ARE:
        return "TokenizersBackend"
    if stated in ("LlamaTokenizer", "LlamaTokenizerFast") and model_type not in ("mistral", "mixtral"):
        # Many name this class whose vocabulary is none of its kind; transformers takes these as they are.
        return "TokenizersBackend" if b'"ByteLevel"' in (folder / TOKENIZER).read_bytes() else None
    if stated in ("Qwen2Tokenizer", "Qwen2TokenizerFast") and model_type in (None, "qwen3", "qwen3_moe"):
        return "Qwen2Tokenizer"
    return None


def _is_whole(folder: Path, config: Mapping[str, Any]) -> bool:
    """Nothing in the configuration or beside it says more than is read here."""
    known = {key for key in config if key in IGNORED or key in READ or key.endswith("_token")}
    if known != config.keys():
        return False
    if "added_tokens_decoder" in config:
        return True
    others = folder / "special_tokens_map.json"
    if (folder / "added_tokens.json").exists():
        return False
    stated = _read_json(others) if others.is_file() else {}
    return all(_plain(value) == _plain(config.get(key)) for key, value in stated.items())


def _read_special_tokens(config: Mapping[str, Any]) -> tuple[dict[str, str | None] | None, list[str] | None]:
    """Special tokens by name, and others. None where one is written in a way that is not known."""
    named: dict[str, Any] = {key: value for key, value in config.items() if key.endswith("_token")}
    named = {key: value for key, value in named.items() if key not in IGNORED}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    for more in (config.get("model_specific_special_tokens") or {}, extra if isinstance(extra, dict) else {}):
        named |= more
    others = [_plain(token) for token in extra] if isinstance(extra, list) else []
    texts = {name: _plain(token) for name, token in named.items()}
    if not all(token is None or isinstance(token, str) for token in texts.values()):
        return None, None
    return texts, others if all(isinstance(token, str) for token in others) else None


def _plain(value: Any) -> Any:
    """A token's text, however the token is written; lists of them likewise."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value["content"] if isinstance(value, dict) and "content" in value else value


def _holds(backend: Backend, named: Mapping[str, str], extra: list[str], config: Mapping[str, Any], kind: str) -> bool:
    """Whether the library's object already is what the class would make of it: the same tokens, built the same way."""
    added = {token.content: token for token in _added(backend).values()}
    # What has a name is special, whatever the file says.
    if not added.keys() >= {*named.values(), *extra} or not all(added[token].special for token in named.values()):
        return False
    if kind != "Qwen2Tokenizer":
        return _agrees(config, backend)
    plain = {token for token, value in added.items() if value == AddedToken(token, special=True)}
    stated = config.get("added_tokens_decoder")
    every = stated is None or {int(token) for token in stated} == _added(backend).keys()
    return every and _agrees(config, backend) and plain >= {*named.values()} and _is_as_qwen_builds(backend)


def _agrees(config: Mapping[str, Any], backend: Backend) -> bool:
    """Whether tokens that the configuration adds are those that the library's object has."""
    stated, added = config.get("added_tokens_decoder") or {}, _added(backend)
    return all(
        isinstance(token, dict) and added.get(int(index)) == AddedToken(**token) for index, token in stated.items()
    )


def _added(backend: Backend) -> dict[int, AddedToken]:
    return backend.get_added_tokens_decoder()


def _is_as_qwen_builds(backend: Backend) -> bool:
    """Whether the library's object is what Qwen's class builds around a vocabulary."""
    model: Any = backend.model
    if type(model).__name__ != "BPE" or backend.normalizer is None or backend.decoder is None:
        return False
    steps = _state(backend.pre_tokenizer).get("pretokenizers", [])
    for step in steps:
        step.pop("trim_offsets", None)  # where tokens stand in the text is never asked
    return (
        {name: getattr(model, name) for name in _BYTE_LEVEL_BPE} == _BYTE_LEVEL_BPE
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
        and _state(backend.normalizer) == {"type": "NFC"}
        and _state(backend.decoder)["type"] == "ByteLevel"
        and steps == _QWEN_STEPS
    )


def _state(part: Any) -> dict[str, Any]:
    return {} if part is None else json.loads(part.__getstate__())


def _read_templates(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Files come before the configuration."""
    found: dict[str, str] = {}
    if (folder / TEMPLATE).is_file():
        found["default"] = (folder / TEMPLATE).read_text(encoding="utf-8")
    for path in sorted((folder / TEMPLATES).glob("*.jinja")):
        found[path.name.removesuffix(".jinja")] = path.read_text(encoding="utf-8")
    if found:
        return found["default"] if found.keys() == {"default"} else found
    stated = config.get("chat_template")
    if isinstance(stated, list):
        return {template["name"]: template["template"] for template in stated}
    return stated


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is no JSON object")  # noqa: TRY004 - of a file, not of an argument
    return value
