"""What the API server refuses, and what it says about it. Each file states the field and a part of the sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from e2e.suite.fleet import Fleet

ROOT = Path(__file__).resolve().parents[2]
MALFORMED = sorted((ROOT / "e2e" / "manifests" / "malformed").glob("*.yaml"))


def create(fleet: Fleet, manifest: dict[str, Any]) -> None:
    path = fleet.path("inferencemodels")
    fleet.kubernetes.request("POST", f"{path}?dryRun=All&fieldValidation=Strict", manifest)


def test_malformed_manifests_are_refused_with_a_sentence(fleet: Fleet) -> None:
    assert len(MALFORMED) >= 30
    for path in MALFORMED:
        text = path.read_text()
        field, says = (re.search(rf"^# {key}: (.+)$", text, re.MULTILINE)[1] for key in ("field", "says"))  # type: ignore[index]
        with pytest.raises(client.ApiException) as refused:
            create(fleet, yaml.safe_load(text))
        message = refused.value.body.replace('\\"', '"')
        assert field in message, path.name
        assert says in message, path.name
