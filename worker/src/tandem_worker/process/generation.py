"""What a model's files say about generating: the tokens that end an answer, and its makers' sampling settings."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem_api.launch import GenerationSettings

from tandem_worker.server.dialects.openai.options import API_DEFAULTS, LIMITS, SamplingDefaults

logger = logging.getLogger(__name__)

SETTINGS, CONFIG = "generation_config.json", "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How answers of a model begin and end where a request does not say."""

    end_tokens: frozenset[int]
    sampling: SamplingDefaults = API_DEFAULTS


def observe_generation(path: Path, tokenizer: Any, use: GenerationSettings = "Model") -> Generation:
    """What the folder `path` and the tokenizer say.

    End tokens are the tokenizer's and those of `generation_config.json`; where that names none, those of `config.json`.
    They count whatever `use` says: an answer that does not end is nobody's wish. `use` "Off" leaves sampling settings
    out. What cannot be used is left out with a warning.
    """
    from tandem_worker.server.prepare.served_model import end_tokens

    settings = _read(path / SETTINGS)
    listed, source = settings.get("eos_token_id"), SETTINGS
    if listed is None:
        config, source = _read(path / CONFIG), CONFIG
        text = config.get("text_config")
        listed = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, Mapping) else None)
    found = set(end_tokens(tokenizer)) | _token_ids(listed, source)
    sampling = _take_sampling(settings) if use == "Model" else API_DEFAULTS
    if sampling != API_DEFAULTS:
        logger.info(
            "requests are answered with the model's sampling settings where they do not say",
            extra={"settings": _differing(sampling)},
        )
    return Generation(end_tokens=frozenset(found), sampling=sampling)


def _differing(sampling: SamplingDefaults) -> dict[str, float]:
    own = dataclasses.asdict(API_DEFAULTS)
    return {name: value for name, value in dataclasses.asdict(sampling).items() if value != own[name]}


def _read(path: Path) -> Mapping[str, Any]:
    """The object in a file; nothing where there is no file, or none that can be read."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read, so what it says about generating is not used: %s", path.name, error)
        return {}
    if isinstance(content, dict):
        return content
    logger.warning("%s is no JSON object, so what it says about generating is not used", path.name)
    return {}


def _token_ids(listed: object, source: str) -> set[int]:
    found: set[int] = set()
    for token in listed if isinstance(listed, list) else [] if listed is None else [listed]:
        if type(token) is int and token >= 0:
            found.add(token)
        else:
            logger.warning("eos_token_id of %s has %.80r, which is no token id, so it ends no answer", source, token)
    return found


def _take_sampling(settings: Mapping[str, Any]) -> SamplingDefaults:
    taken: dict[str, Any] = {}
    for name, (lowest, highest) in LIMITS.items():
        value = settings.get(name)
        if value is None:
            continue
        if _is_number(value) and lowest <= value <= highest:
            taken[name] = float(value)
        else:
            _warn(name, value, f"a number from {lowest:g} to {highest:g}")
    top_k = settings.get("top_k")
    if top_k is not None:
        if _is_number(top_k) and top_k == int(top_k) and -1 <= top_k < 2**30:
            taken["top_k"] = max(0, int(top_k))
        else:
            _warn("top_k", top_k, "a whole number, -1 or 0 for all tokens")
    return SamplingDefaults(**taken)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _warn(name: str, value: object, wanted: str) -> None:
    logger.warning("%s of %s is %.80r and not %s, so it is not used", name, SETTINGS, value, wanted)
