"""What a change of a field does to pods that run: declared beside the field, read here.

    step_timeout: Annotated[Duration | None, Change.FOLLOWED] = None

A field that declares nothing is as what holds it, so a section of the spec says it once and its exceptions say the
rest. The operator leaves what is followed out of revisions and of the names of launch configurations, and the reference
of the CRD has a column of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo


class Change(StrEnum):
    """What a change comes to."""

    WORKERS = "replaces workers"
    """A role's own field replaces the workers of that role alone."""
    GATEWAYS = "replaces gateways"
    BOTH = "replaces workers and gateways"
    FOLLOWED = "is followed"
    """Pods that run go by it."""
    OPERATOR = "is the operator's"
    """Pods know nothing of it: it is about how many there are, when they change, or what stands around them."""


def declared_change(field: FieldInfo) -> Change | None:
    """What a field declares itself."""
    return next((each for each in field.metadata if isinstance(each, Change)), None)


def change_of(model: type[BaseModel], path: Sequence[str]) -> Change | None:
    """What a change of the field at `path`, in the words of manifests, comes to: as it declares, or else as what holds
    it does. None where nobody says.

    Raises:
        KeyError: there is no such field.
    """
    found: Change | None = None
    for step, name in enumerate(path):
        field = next((each for key, each in model.model_fields.items() if name == (each.alias or key)), None)
        if field is None:
            raise KeyError(f"{'.'.join(path[: step + 1])} is no field")
        found = declared_change(field) or found
        inner = _model_in(field.annotation)
        if inner is None:  # a map, or a list: what is in there is as it is
            break
        model = inner
    return found


def followed_fields(model: type[BaseModel]) -> frozenset[str]:
    """Fields that declare that they are followed, by their names in Python."""
    return frozenset(name for name, each in model.model_fields.items() if declared_change(each) is Change.FOLLOWED)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, or a list in it, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _model_in(each)) is not None), None)
