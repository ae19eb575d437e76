"""The base class of what Tandem's own processes send each other. What a peer or storage sends is parsed leniently: an
unknown field comes from a newer version and is ignored. What a person writes is another matter: `crd.authored`.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class Wire(BaseModel):
    """Sent between Tandem's own processes: camelCase, immutable, unknown fields ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True, use_attribute_docstrings=True
    )

    def to_json(self) -> str:
        """Serialized form; equal objects give equal text."""
        return self.model_dump_json(by_alias=True, exclude_none=True)

    def set_json(self, *, without: frozenset[str] = frozenset()) -> str:
        """What differs from the defaults, but for the fields `without`. A release that adds a field with a default says
        the same of what does not use it, so a digest of this text names a configuration over releases."""
        return self.model_dump_json(by_alias=True, exclude_none=True, exclude_defaults=True, exclude=set(without))
