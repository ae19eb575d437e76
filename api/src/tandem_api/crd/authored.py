"""What a person writes is parsed strictly: an unknown field is an error."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.alias_generators import to_camel

from tandem_api.validation import find_broken


class Authored(BaseModel):
    """Written by a person: camelCase, immutable, unknown fields refused. Attribute docstrings become descriptions, and
    its rules (`validation.rule`) are judged here as by the API server."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="after")
    def _keeps_its_rules(self) -> Self:
        """The rules over several fields are written once, in CEL beside the type."""
        if (sentence := find_broken(self)) is not None:
            raise ValueError(sentence)
        return self
