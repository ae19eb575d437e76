"""The page about models says what the code does."""

from __future__ import annotations

from pathlib import Path

from tandem_worker.model.families.registry import find_family, supported_architectures
from tandem_worker.model.reference import render

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def test_the_page_is_what_the_families_declare() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run `make generate`"


def test_the_page_names_every_key() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for architecture in supported_architectures():
        keys = find_family(architecture).keys
        for key in (*keys.reads, *keys.fixed, *keys.derived, *keys.ignores, *keys.aliases):
            assert f"`{key}`" in text, (architecture, key)
