"""What a model's files say about generating, and what is left out of it with a warning."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tandem_worker.process.generation import observe_generation
from tandem_worker.server.dialects.openai.options import API_DEFAULTS, SamplingDefaults

TOKENIZER = SimpleNamespace(get_added_vocab=lambda: {"<|im_end|>": 7}, eos_token_id=2)


def write(folder: Path, config: Any = None, settings: Any = None) -> Path:
    for name, content in (("config.json", config), ("generation_config.json", settings)):
        if content is not None:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("config", "settings", "expected"),
    [
        ({"eos_token_id": 5}, None, {2, 7, 5}),
        ({"eos_token_id": [5, 6]}, {"temperature": 1.0}, {2, 7, 5, 6}),
        ({"text_config": {"eos_token_id": 9}}, None, {2, 7, 9}),
        ({"eos_token_id": 5}, {"eos_token_id": [8, 11]}, {2, 7, 8, 11}),  # its makers' word about generating wins
        ({"eos_token_id": None}, {"eos_token_id": None}, {2, 7}),
        ({"eos_token_id": ["x", -1, True, 4]}, None, {2, 7, 4}),
        ("no JSON", "[1]", {2, 7}),
        (None, None, {2, 7}),
    ],
)
def test_end_tokens(config: Any, settings: Any, expected: set[int], tmp_path: Path) -> None:
    assert observe_generation(write(tmp_path, config, settings), TOKENIZER).end_tokens == expected


def test_a_models_sampling_settings_are_taken_or_not(tmp_path: Path) -> None:
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "max_new_tokens": 9}
    write(tmp_path, settings=settings)
    expected = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    assert observe_generation(tmp_path, TOKENIZER).sampling == expected
    assert observe_generation(tmp_path, TOKENIZER, "Off").sampling == API_DEFAULTS


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({"temperature": "hot", "top_p": 0.9}, "temperature of generation_config.json is 'hot'"),
        ({"temperature": 3, "top_p": 0.9}, "temperature .* is 3 and not a number from 0 to 2"),
        ({"repetition_penalty": True, "top_p": 0.9}, "repetition_penalty .* is True"),
        ({"top_k": 2.5, "top_p": 0.9}, "top_k .* is 2.5 and not a whole number"),
        ({"min_p": float("nan"), "top_p": 0.9}, "min_p .* is nan"),
    ],
)
def test_a_setting_that_cannot_be_used_is_left_out_with_a_warning(
    settings: dict[str, Any], left_out: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        sampling = observe_generation(write(tmp_path, settings=settings), TOKENIZER).sampling
    assert sampling == SamplingDefaults(top_p=0.9)
    assert any(re.search(left_out, record.getMessage()) for record in caplog.records)


def test_minus_one_and_zero_are_all_tokens(tmp_path: Path) -> None:
    for value in (-1, 0):
        assert observe_generation(write(tmp_path, settings={"top_k": value}), TOKENIZER).sampling.top_k == 0
