from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field
from tandem_api.errors import SchemaError
from tandem_api.schema import Schema, custom_resource_definition, structural_schema
from tandem_api.validation import RULES_KEY, Matches, Satisfies


class Inner(BaseModel):
    count: Annotated[int, Field(ge=1)] = 3


class Outer(BaseModel):
    inner: Inner = Field(default_factory=Inner)
    maybe: Inner | None = None
    names: dict[str, Annotated[str, Field(max_length=5)]] = Field(default_factory=dict, max_length=4)
    choice: Literal["A", "B"] = "A"


def every_schema(schema: Schema) -> list[Schema]:
    nested = [*schema.get("properties", {}).values()]
    nested += [schema[key] for key in ("items", "additionalProperties") if isinstance(schema.get(key), dict)]
    return [schema, *(inner for child in nested for inner in every_schema(child))]


def root() -> Schema:
    return custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def test_references_are_inlined_and_none_is_optional() -> None:
    schema = structural_schema(Outer)
    inner = {"type": "object", "properties": {"count": {"type": "integer", "default": 3, "minimum": 1}}}
    assert schema["properties"]["inner"] == inner | {"default": {}}
    assert schema["properties"]["maybe"] == inner
    assert "required" not in schema


def test_bounds_of_maps_count_properties() -> None:
    names = structural_schema(Outer)["properties"]["names"]
    assert names == {"type": "object", "maxProperties": 4, "additionalProperties": {"type": "string", "maxLength": 5}}


def test_real_unions_are_refused() -> None:
    class Union(BaseModel):
        value: int | str

    with pytest.raises(SchemaError, match=r"Union\.value"):
        structural_schema(Union)


def test_unknown_keywords_are_refused() -> None:
    class Multiple(BaseModel):
        value: Annotated[int, Field(multiple_of=2)]

    with pytest.raises(SchemaError, match="multipleOf"):
        structural_schema(Multiple)


def test_rules_add_up() -> None:
    class Text(BaseModel):
        value: Annotated[str, Matches(r"it's\.", "must be it's."), Satisfies("size(self) > 1", "must be longer")]

    rules = structural_schema(Text)["properties"]["value"][RULES_KEY]
    assert rules == [
        {"rule": r"self.matches('^(it\'s\\.)$')", "message": "must be it's."},
        {"rule": "size(self) > 1", "message": "must be longer"},
    ]


def test_every_value_has_one_type_and_every_rule_a_sentence() -> None:
    for schema in every_schema(root()):
        assert "type" in schema or schema.get("x-kubernetes-int-or-string")
        assert not {"$ref", "anyOf", "title", "pattern"} & schema.keys()
        for rule in schema.get(RULES_KEY, []):
            assert rule["message"]


def test_a_model_without_prefill_stays_without() -> None:
    spec = root()["properties"]["spec"]["properties"]
    assert "default" not in spec["prefill"]
    assert spec["decode"]["default"] == {}


def test_every_field_of_the_spec_is_described() -> None:
    def undescribed(schema: Schema, path: str) -> list[str]:
        found: list[str] = []
        for name, field in schema.get("properties", {}).items():
            found += [] if "description" in field else [f"{path}.{name}"]
            found += undescribed(field, f"{path}.{name}")
        return found

    assert undescribed(root()["properties"]["spec"], "spec") == []


def test_strings_that_cel_reads_are_bounded() -> None:
    for schema in every_schema(root()["properties"]["spec"]):
        if schema.get("type") == "string" and "enum" not in schema:
            assert "maxLength" in schema


def test_roles_carry_the_rules_of_parallelism_and_the_defaults_that_these_read() -> None:
    """CEL sees defaulted objects, but for the default of the role itself: `parallelism` alone may be missing there."""
    for role in ("prefill", "decode"):
        schema = root()["properties"]["spec"]["properties"][role]
        assert [entry["fieldPath"] for entry in schema[RULES_KEY]] == [
            ".nodesPerReplica", ".parallelism", ".resources.limits", ".scaling"
        ]  # fmt: skip
        assert all(entry["rule"].startswith("!has(self.parallelism) || ") for entry in schema[RULES_KEY][:3])
        assert schema[RULES_KEY][3]["rule"].startswith("!has(self.scaling) || !has(self.scaling.mode) || ")
        assert schema["properties"]["nodesPerReplica"]["default"] == 1
        spread = schema["properties"]["parallelism"]
        assert spread["default"] == {}
        assert {axis["default"] for axis in spread["properties"].values()} == {1}


def test_the_gateway_carries_the_rules_of_its_replicas_and_its_store() -> None:
    gateway = root()["properties"]["spec"]["properties"]["gateway"]
    assert [entry["fieldPath"] for entry in gateway[RULES_KEY]] == [
        ".replicas", ".scaling.mode", ".responseStore.maxBytes"
    ]  # fmt: skip


def test_an_object_without_a_status_has_not_been_observed() -> None:
    """Readers by kstatus would take it for one that is done; the API server fills this in."""
    status = root()["properties"]["status"]
    assert status["default"] == {"observedGeneration": -1}
    assert not any("default" in schema for schema in every_schema(status)[1:])
