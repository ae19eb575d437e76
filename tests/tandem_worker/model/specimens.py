"""Small models of every family as a `config.json`, and transformers' answer to what such a file says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tandem_worker.model.families.registry import find_family
from tandem_worker.model.keys import ConfigKeys
from tandem_worker.model.load import load_model
from transformers import AutoConfig, AutoModelForCausalLM  # here, so that no test's clock runs meanwhile

from tests.tandem_worker.families import COMMON, FAMILIES

ABSENT: Final = object()
"""In place of a value: the file does not have the key."""
TOKENS = torch.randint(3, 90, (34,), generator=torch.Generator().manual_seed(5)).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Specimen:
    """A family of `tests.tandem_worker.families`, and the names of its architecture."""

    family: str
    architecture: str
    config_class: str

    @property
    def keys(self) -> ConfigKeys:
        return find_family(self.architecture).keys

    def small(self) -> dict[str, Any]:
        """The content of a small model's `config.json`, as transformers writes it."""
        model_type, own = FAMILIES[self.family]
        options = {**COMMON, **own}
        config = AutoConfig.for_model(model_type, **{key: value for key, value in options.items() if value is not None})
        return {**config.to_dict(), "architectures": [self.architecture]}


SPECIMENS: Final = {
    specimen.family: specimen
    for specimen in (
        Specimen(family="llama3", architecture="LlamaForCausalLM", config_class="LlamaConfig"),
        Specimen(family="qwen3", architecture="Qwen3ForCausalLM", config_class="Qwen3Config"),
        Specimen(family="qwen3-moe", architecture="Qwen3MoeForCausalLM", config_class="Qwen3MoeConfig"),
        Specimen(family="deepseek-v3", architecture="DeepseekV3ForCausalLM", config_class="DeepseekV3Config"),
        Specimen(family="llama4", architecture="Llama4ForCausalLM", config_class="Llama4TextConfig"),
        Specimen(family="gpt-oss", architecture="GptOssForCausalLM", config_class="GptOssConfig"),
    )
}


def with_changes(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**raw, **changes}
    return {key: value for key, value in merged.items() if value is not ABSENT}


def build_reference(folder: Path, raw: Mapping[str, Any]) -> Any:
    """Write `raw` and random weights of its shapes under `folder`; transformers' model of the same file."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(raw, default=str)
    (folder / "config.json").write_text(text)
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.2)
    model.eval().save_pretrained(folder)
    (folder / "config.json").write_text(text)
    return model


def ask_reference(model: Any) -> torch.Tensor:
    """Logits `[2, vocab_size]` after the first 20 and after all tokens."""
    with torch.inference_mode():
        logits = model(torch.tensor([TOKENS]), use_cache=False, return_dict=True).logits[0].float()
    return logits[[19, -1]]


def ask_worker(folder: Path, paged_sequences: Any) -> torch.Tensor:
    """As `ask_reference`, of the model that the worker loads. Raises StartupError."""
    run = paged_sequences(load_model(folder, device=torch.device("cpu"), dtype=torch.float32))
    run.add()
    return torch.cat([run.step({0: TOKENS[:20]}), run.step({0: TOKENS[20:]})])
