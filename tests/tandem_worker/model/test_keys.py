"""What families say about keys of `config.json`, held against transformers' configuration classes.

A release of transformers that adds a key, or changes a default, fails here until somebody decides what it means.
`test_keys_sweep.py` asks transformers' models.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
import transformers
from tandem_worker.host.errors import StartupError
from tandem_worker.model.assembly.build import Build
from tandem_worker.model.backends.torch.layers import TORCH
from tandem_worker.model.checkpoint.loader import Part, WeightLoader
from tandem_worker.model.checkpoint.safetensors import SafetensorsSource
from tandem_worker.model.config import ModelConfig, parse_config
from tandem_worker.model.families.registry import find_family, supported_architectures
from tandem_worker.model.keys import COMMON_FIXED, COMMON_IGNORES, DECODER_READS, REQUIRED, ConfigKeys
from tandem_worker.model.rope import SCALING_KEYS
from tandem_worker.parallel.context import SINGLE

from tests.tandem_worker.model.specimens import SPECIMENS, Specimen

WRAPPERS = {"Llama4ForConditionalGeneration": "Llama4Config", "KimiK25ForConditionalGeneration": "Kimi_K25Config"}
MEANT_AT_PARSING = {"num_key_value_heads", "head_dim", *DECODER_READS}
"""Keys that the figures of `ModelConfig` are made of."""


def class_defaults(name: str) -> dict[str, Any]:
    """Key to default of a configuration class of transformers."""
    config_class = getattr(transformers, name)
    return {field.name: field.default for field in dataclasses.fields(config_class)}


def class_keys(name: str) -> set[str]:
    """All that a configuration class takes and writes."""
    config_class = getattr(transformers, name)
    mapped = config_class.attribute_map
    return {*class_defaults(name), *config_class().to_dict(), *mapped.values(), *mapped}


def parse(specimen: Specimen, **changes: Any) -> ModelConfig:
    return parse_config({**specimen.small(), **changes}, specimen.keys, architecture=specimen.architecture)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["float8_e4m3fn", "fp16", "torch.bfloat16", "auto", 16, ["bfloat16"]])
def test_an_element_type_that_is_not_known_is_refused_by_name(key: str, value: Any) -> None:
    changes = {"dtype": None, "torch_dtype": None, key: value}
    with pytest.raises(StartupError, match="bfloat16, float16, float32") as refused:
        parse(SPECIMENS["llama3"], **changes)
    assert repr(value) in str(refused.value)
    assert refused.value.reason == "UnsupportedConfig"


@pytest.mark.parametrize(("said", "meant"), [
    ({"dtype": "bfloat16"}, torch.bfloat16), ({"dtype": None, "torch_dtype": "float16"}, torch.float16),
    ({"dtype": None}, torch.float32), ({"dtype": "float64"}, torch.float32),
])  # fmt: skip
def test_the_element_type_is_the_configurations(said: dict[str, Any], meant: torch.dtype) -> None:
    assert parse(SPECIMENS["llama3"], **said).dtype == meant


def test_a_language_model_has_the_element_type_of_what_is_around_it() -> None:
    name = "Llama4ForConditionalGeneration"
    text = {key: value for key, value in SPECIMENS["llama4"].small().items() if key not in {"dtype", "torch_dtype"}}
    for inner, outer, meant in ((None, "bfloat16", torch.bfloat16), ("float16", "bfloat16", torch.float16)):
        raw = {"model_type": "llama4", "torch_dtype": outer, "text_config": text | ({"dtype": inner} if inner else {})}
        assert parse_config(raw, find_family(name).keys, architecture=name).dtype == meant


def classes() -> list[Any]:
    found = [pytest.param(one.keys, one.config_class, id=one.family) for one in SPECIMENS.values()]
    for architecture, config_class in WRAPPERS.items():
        wrapper = find_family(architecture).keys.wrapper
        assert wrapper is not None
        found.append(pytest.param(wrapper, config_class, id=config_class))
    return found


def test_every_family_has_a_specimen() -> None:
    covered = {specimen.architecture for specimen in SPECIMENS.values()} | set(WRAPPERS)
    assert {architecture for architecture in supported_architectures() if not architecture.endswith("Model")} == covered


@pytest.mark.parametrize(("keys", "config_class"), classes())
def test_every_key_of_the_class_is_declared(keys: ConfigKeys, config_class: str) -> None:
    assert {key for key in class_keys(config_class) if keys.kind(key) == "unknown"} == set()


@pytest.mark.parametrize(("keys", "config_class"), classes())
def test_a_key_is_declared_once(keys: ConfigKeys, config_class: str) -> None:
    parts = [set(keys.reads), {*keys.fixed, *keys.derived}, set(keys.ignores), set(keys.aliases)]
    assert sum(map(len, parts)) == len(set.union(*parts))
    assert not set(keys.ignores) & set(COMMON_IGNORES)
    assert not set(COMMON_FIXED) & set(COMMON_IGNORES)


@pytest.mark.parametrize(("keys", "config_class"), classes())
def test_defaults_are_those_of_the_class(keys: ConfigKeys, config_class: str) -> None:
    defaults = class_defaults(config_class)
    mapped = {theirs: ours for ours, theirs in getattr(transformers, config_class).attribute_map.items()}
    for key, default in keys.reads.items():
        if default is not REQUIRED and key not in ("rope_theta", "rope_scaling"):
            assert default == defaults.get(key, defaults.get(mapped.get(key, ""))), key
    for key, allowed in keys.fixed.items():
        assert key not in defaults or allowed[0] == defaults[key], key


@pytest.mark.parametrize("specimen", SPECIMENS.values(), ids=SPECIMENS)
def test_absent_rotary_settings_are_those_of_the_class(specimen: Specimen) -> None:
    raw = specimen.small()
    for key in ("rope_parameters", "rope_theta", "rope_scaling"):
        raw.pop(key, None)
    for nulls in ({}, {"rope_parameters": None, "rope_scaling": None}):
        rope = parse_config({**raw, **nulls}, specimen.keys, architecture=specimen.architecture).rope
        theirs = dict(getattr(transformers, specimen.config_class)(**nulls).rope_parameters)
        assert rope.theta == theirs.pop("rope_theta")
        assert rope.kind == theirs.pop("rope_type")
        assert rope.scaling == theirs


@pytest.mark.parametrize("specimen", SPECIMENS.values(), ids=SPECIMENS)
def test_both_spellings_of_rotary_settings(specimen: Specimen) -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0}
    if "yarn" not in specimen.keys.rope_kinds:
        pytest.skip("no such scaling in this family")
    new = parse(specimen, rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **scaling}).rope
    old = parse(specimen, rope_parameters=None, rope_theta=5e5, rope_scaling={"type": "yarn", **scaling}).rope
    assert new == old
    assert (new.theta, new.kind) == (5e5, "yarn")


@pytest.mark.parametrize("kind", SCALING_KEYS)
@pytest.mark.parametrize("key", ["mrope_section", "factor", "short_factor", "partial_rotary_factor", "low_freq_factor"])
def test_rotary_keys_that_the_kind_does_not_read(kind: str, key: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, **dict.fromkeys(SCALING_KEYS[kind], 2.0)}
    parse(SPECIMENS["qwen3"], rope_parameters=rope | {"finetuned": True, "partial_rotary_factor": 1.0, "unknown": None})
    if key not in SCALING_KEYS[kind]:
        with pytest.raises(StartupError, match=rf"rope_parameters\.{key} is 0\.5"):
            parse(SPECIMENS["qwen3"], rope_parameters=rope | {key: 0.5})


def change(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return "other" if isinstance(value, str) else 3


def keys_of_kind(kind: str) -> list[Any]:
    return [
        pytest.param(specimen, key, id=f"{specimen.family}-{key}")
        for specimen in SPECIMENS.values()
        for key in sorted(class_keys(specimen.config_class))
        if specimen.keys.kind(key) == kind
    ]


@pytest.mark.parametrize(("specimen", "key"), keys_of_kind("ignored"))
def test_ignored_keys_change_nothing(specimen: Specimen, key: str) -> None:
    if key in ("architectures", "model_type"):  # they choose the family; within it nothing reads them
        return
    assert parse(specimen, **{key: change(specimen.small().get(key))}) == parse(specimen)


@pytest.mark.parametrize(("specimen", "key"), keys_of_kind("fixed"))
def test_fixed_keys_are_refused_by_name(specimen: Specimen, key: str) -> None:
    with pytest.raises(StartupError, match=rf"\b{key} is ") as refusal:
        parse(specimen, **{key: change(specimen.small().get(key))})
    assert refusal.value.reason == "UnsupportedConfig"
    assert "Choose another checkpoint" in str(refusal.value)


@pytest.mark.parametrize("specimen", SPECIMENS.values(), ids=SPECIMENS)
def test_unknown_keys_are_refused_unless_null(specimen: Specimen) -> None:
    parse(specimen, key_of_tomorrow=None)
    for value in (False, 0, "", [], {}, 1.5):
        with pytest.raises(StartupError, match=r"key_of_tomorrow is .*\(not a key that is known\)"):
            parse(specimen, key_of_tomorrow=value)
    with pytest.raises(StartupError, match=r"first_one is 1 .*second_one is 2"):
        parse(specimen, first_one=1, second_one=2)


@pytest.mark.parametrize("specimen", SPECIMENS.values(), ids=SPECIMENS)
def test_another_model_type_is_refused(specimen: Specimen) -> None:
    with pytest.raises(StartupError, match=r"model_type is 'mistral'"):
        parse(specimen, model_type="mistral")


class Noting(dict[str, Any]):
    """Settings that note which of them are asked for."""

    def __init__(self, settings: Any, seen: set[str]) -> None:
        super().__init__(settings)
        self.seen = seen

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)


class WillingLoader(WeightLoader):
    """Finds every tensor in the shape that is asked for, without content."""

    def read(self, part: Part) -> torch.Tensor:
        return torch.empty(part.local_shape, device="meta")


@pytest.mark.parametrize("specimen", SPECIMENS.values(), ids=SPECIMENS)
def test_what_is_declared_is_read(specimen: Specimen) -> None:
    """A declaration that no code follows would pass a key over all the same."""
    family, seen = find_family(specimen.architecture), set[str]()
    for changes in ({}, {"use_sliding_window": True, "layer_types": None}, {"no_rope_layers": None, "moe_layers": [0]}):
        config = parse(specimen, **{key: value for key, value in changes.items() if key in specimen.keys.reads})
        source = SafetensorsSource([])
        loader = WillingLoader(source, dtype=torch.float32, device=torch.device("meta"), keeps_packed=False)
        noting = dataclasses.replace(config, raw=Noting(config.raw, seen))
        family.load(noting, Build(loader=loader, backend=TORCH, context=SINGLE))
        family.ignorable(noting)
    assert set(specimen.keys.reads) - MEANT_AT_PARSING - seen == set()


def test_a_family_cannot_read_what_it_does_not_declare() -> None:
    with pytest.raises(AssertionError, match="without declaring"):
        parse(SPECIMENS["llama3"]).get("sliding_window")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5; it must be whole"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be a boolean"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"rope_parameters": None, "rope_scaling": 4.0}, "rope_scaling is 4.0; it must be an object"),
        ({"rope_parameters": {"rope_theta": "high"}}, "rope_theta is 'high'"),
        ({"rope_parameters": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "'linear' and 'yarn'"),
    ],
)
def test_values_that_cannot_be_computed_with(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(StartupError, match=says) as refusal:
        parse(SPECIMENS["llama3"], **changes)
    assert refusal.value.reason == "ConfigInvalid"


@pytest.mark.parametrize("specimen", SPECIMENS.values(), ids=SPECIMENS)
@pytest.mark.parametrize("value", [None, "1", [1], {}, True, -1.5])
def test_no_value_of_any_key_breaks_the_reading(specimen: Specimen, value: Any) -> None:
    """It is taken or refused, and a required key that is missing is refused as well."""
    small = specimen.small()
    for key in {*small, *specimen.keys.reads, *specimen.keys.derived, *specimen.keys.fixed}:
        for raw in ({**small, key: value}, {name: one for name, one in small.items() if name != key}):
            with contextlib.suppress(StartupError):
                parse_config(raw, specimen.keys, architecture=specimen.architecture)


def test_two_names_of_one_key_must_agree() -> None:
    specimen = SPECIMENS["qwen3-moe"]
    assert parse(specimen, num_experts=6, num_local_experts=6).need("num_experts", int) == 6
    with pytest.raises(StartupError, match="num_local_experts and num_experts mean the same, but differ"):
        parse(specimen, num_experts=6, num_local_experts=8)


@pytest.mark.parametrize("architecture", WRAPPERS)
def test_keys_around_the_language_model(architecture: str) -> None:
    specimen = SPECIMENS["llama4" if "Llama4" in architecture else "deepseek-v3"]
    keys = find_family(architecture).keys
    raw = {"architectures": [architecture], "text_config": specimen.small(), "vision_config": {"hidden_size": 8}}
    assert parse_config(raw, keys, architecture=architecture).num_layers == parse(specimen).num_layers
    with pytest.raises(StartupError, match=r"^config\.json asks .*key_of_tomorrow is 1"):
        parse_config({**raw, "key_of_tomorrow": 1}, keys, architecture=architecture)
    text = {**specimen.small(), "key_of_tomorrow": 1}
    with pytest.raises(StartupError, match=r"^config\.json, text_config asks .*key_of_tomorrow is 1"):
        parse_config({**raw, "text_config": text}, keys, architecture=architecture)
    with pytest.raises(StartupError, match="has no text_config"):
        parse_config({"architectures": [architecture]}, keys, architecture=architecture)


def test_a_language_model_is_not_unwrapped() -> None:
    with pytest.raises(StartupError, match="text_config is"):
        parse(SPECIMENS["llama3"], text_config={"hidden_size": 8})
