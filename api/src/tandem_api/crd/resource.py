"""The object: metadata, spec and status."""

from __future__ import annotations

from pydantic import Field, model_validator

from tandem_api.base import Wire
from tandem_api.crd.fields import MODEL_NAME_MAX
from tandem_api.crd.spec import InferenceModelSpec
from tandem_api.crd.status import InferenceModelStatus
from tandem_api.validation import rule


class ObjectMeta(Wire):
    """What Tandem reads of an object's metadata."""

    name: str
    namespace: str
    uid: str = ""
    generation: int = 0
    deletion_timestamp: str | None = None
    annotations: dict[str, str] = Field(default_factory=dict[str, str])

    @model_validator(mode="after")
    def _fits(self) -> ObjectMeta:
        if len(self.name) > MODEL_NAME_MAX:
            raise ValueError(f"metadata.name has {len(self.name)} characters; use at most {MODEL_NAME_MAX}")
        return self


ROOT_RULES = [
    rule(
        f"size(self.metadata.name) <= {MODEL_NAME_MAX}",
        f"metadata.name must have at most {MODEL_NAME_MAX} characters, because pods append their role and number",
    ),
    rule(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name becomes the name of a Service: use lower-case letters, digits and '-', beginning with a letter",
    ),
]
"""Rules about the whole object: CEL sees only `metadata.name` and `metadata.generateName` of the metadata."""


class InferenceModel(Wire):
    metadata: ObjectMeta
    spec: InferenceModelSpec
    status: InferenceModelStatus = Field(default_factory=InferenceModelStatus)

    @property
    def served_name(self) -> str:
        return self.spec.model.served_name or self.metadata.name
