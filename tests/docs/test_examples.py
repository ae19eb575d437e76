"""Every model that an example names is one that workers serve, split in a way that it can be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tandem_worker.host.errors import StartupError
from tandem_worker.model.config import ModelConfig, parse_config, read_architecture
from tandem_worker.model.families.registry import find_family

from tests.docs.published import PLACEHOLDERS, PUBLISHED
from tests.docs.test_claims import PAGES, ROOT

Json = dict[str, Any]


def list_models() -> Iterator[tuple[str, Json]]:
    """Every InferenceModel of an example or of a page, with the place where it stands."""
    for file in sorted((ROOT / "examples").rglob("*.yaml")):
        yield from ((file.name, each) for each in yaml.safe_load_all(file.read_text()) if _is_model(each))
    for page in PAGES:
        yield from ((page.name, each) for each in _list_blocks(page))


def _list_blocks(page: Path) -> Iterator[Json]:
    for block in page.read_text().split("```yaml\n")[1:]:
        text = block.partition("```")[0]
        if text.startswith("apiVersion: tandem.dev/"):
            yield from filter(_is_model, yaml.safe_load_all(text))


def _is_model(document: object) -> bool:
    return isinstance(document, dict) and document.get("kind") == "InferenceModel" and "spec" in document


def resolve(uri: str) -> ModelConfig | None:
    """What the worker would read; None for a placeholder. Raises StartupError where the worker refuses the model."""
    scheme, _, rest = uri.partition("://")
    repository = "/".join(rest.split("/")[:2])
    if scheme != "hf" or repository in PLACEHOLDERS:
        return None
    assert repository in PUBLISHED, f"{repository} is in no line of tests/docs/published.py"
    raw = PUBLISHED[repository]
    architecture = read_architecture(raw)
    return parse_config(raw, find_family(architecture).keys, architecture=architecture)


@pytest.mark.parametrize(
    ("place", "model"),
    [pytest.param(*found, id=f"{found[0]}:{found[1]['metadata']['name']}") for found in list_models()],
)
def test_a_model_that_is_named_is_served(place: str, model: Json) -> None:
    spec = model["spec"]
    config = resolve(spec["model"]["uri"])
    if config is None:
        return
    asked = spec.get("engine", {}).get("maxModelLen", 0)
    assert asked <= config.max_position_embeddings, (place, asked)
    for role in ("prefill", "decode"):
        shape = spec.get(role, {}).get("parallelism", {})
        assert config.num_heads % shape.get("tensor", 1) == 0, (place, role)
        assert config.num_layers >= shape.get("pipeline", 1), (place, role)


def test_there_is_something_to_look_at() -> None:
    places = [place for place, _ in list_models()]
    assert len(places) >= 24
    assert {"README.md", "shared-gpus.yaml"} <= set(places)


def test_a_model_of_no_family_would_be_noticed() -> None:
    with pytest.raises(StartupError, match="Qwen2ForCausalLM are not supported"):
        resolve("hf://Qwen/Qwen2.5-7B-Instruct")


def test_no_line_is_there_for_nobody() -> None:
    named = {"/".join(model["spec"]["model"]["uri"].partition("://")[2].split("/")[:2]) for _, model in list_models()}
    assert (set(PUBLISHED) | set(PLACEHOLDERS)) - named == {"Qwen/Qwen2.5-7B-Instruct"}
