"""From an InferenceModel as the API server sends it to typed data."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from tandem_api.inferencemodel import InferenceModel, InferenceModelStatus

from tandem_operator.errors import InvalidSpecError
from tandem_operator.manifests import Manifest


def parse_model(raw: Manifest) -> InferenceModel:
    """The typed object.

    Raises:
        InvalidSpecError: the installed schema admits what this release cannot read; the sentence names every field.
    """
    try:
        return InferenceModel.model_validate(raw | {"status": parse_status(raw)})
    except ValidationError as error:
        problems = [f"{_path(item['loc'])}: {item['msg'].removeprefix('Value error, ')}" for item in error.errors()]
        raise InvalidSpecError("; ".join(problems)) from error


def parse_status(raw: Manifest) -> InferenceModelStatus:
    """The status that was written last; an empty one where it cannot be read, because it is written anew anyway."""
    try:
        return InferenceModelStatus.model_validate(raw.get("status") or {})
    except ValidationError:
        return InferenceModelStatus()


def _path(location: tuple[Any, ...]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).removeprefix(".")
