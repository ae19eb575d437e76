"""Linting the manifests: schemas are strict and whole, and every permit says why and is needed."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from e2e.manifests.permits import PERMITS, Finding, Permit, judge
from e2e.manifests.schemas import file_name, of_crd, select

SWAGGER: dict[str, Any] = {
    "definitions": {
        "Pod": {
            "x-kubernetes-group-version-kind": [{"group": "", "kind": "Pod", "version": "v1"}],
            "type": "object",
            "properties": {
                "kind": {"type": "string"},
                "port": {"type": "string", "format": "int-or-string"},
                "parts": {"type": "array", "items": {"$ref": "#/definitions/Part"}},
            },
        },
        "Part": {
            "type": "object",
            "properties": {"memory": {"$ref": "#/definitions/io.k8s.apimachinery.pkg.api.resource.Quantity"}},
        },
        "io.k8s.apimachinery.pkg.api.resource.Quantity": {"type": "string"},
        "Other": {"type": "object"},
    }
}


def is_valid(document: dict[str, Any]) -> bool:
    schema = select(SWAGGER, [("v1", "Pod")])["v1", "Pod"]
    return jsonschema.Draft7Validator(schema).is_valid(document)


@pytest.mark.parametrize(
    "document", [{}, {"port": "http"}, {"port": 80}, {"parts": [{"memory": 1}, {"memory": "1Gi"}]}]
)
def test_what_kubernetes_takes_is_valid(document: dict[str, Any]) -> None:
    assert is_valid({"kind": "Pod", **document})


@pytest.mark.parametrize("document", [{"prot": 80}, {"port": True}, {"parts": {}}, {"parts": [{"memroy": 1}]}])
def test_unknown_fields_and_other_types_are_not(document: dict[str, Any]) -> None:
    assert not is_valid({"kind": "Pod", **document})


def test_a_schema_holds_what_it_refers_to_and_no_more() -> None:
    (schema,) = select(SWAGGER, [("v1", "Pod"), ("example.com/v1", "Unknown")]).values()
    assert "Part" in schema["definitions"]
    assert "Other" not in schema["definitions"]


def test_the_schema_of_a_crd_keeps_what_may_hold_anything() -> None:
    root = {"type": "object", "properties": {"a": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}}
    version = {"name": "v1alpha1", "schema": {"openAPIV3Schema": root}}
    crd = {"spec": {"group": "tandem.dev", "names": {"kind": "Model"}, "versions": [version]}}
    validator = jsonschema.Draft7Validator(of_crd(crd)["tandem.dev/v1alpha1", "Model"])
    assert validator.is_valid({"a": {"b": 1}})
    assert not validator.is_valid({"b": 1})


def test_files_are_called_as_the_template_asks() -> None:
    assert file_name("v1", "Service") == "service-v1.json"
    assert file_name("rbac.authorization.k8s.io/v1", "RoleBinding") == "rolebinding-rbac-v1.json"


def finding(**changes: str) -> Finding:
    return Finding(**({"rule": "r", "file": "f", "kind": "Deployment", "name": "n", "text": "CPU limit"} | changes))


def test_a_permit_covers_what_it_names_and_must_be_needed() -> None:
    permit = Permit(rules=("r",), kind="Deployment", text="CPU", reason="because")
    assert judge([finding()], [permit]) == []
    others = [finding(rule="s"), finding(kind="StatefulSet"), finding(text="memory limit")]
    assert judge([finding(), *others], [permit]) == [str(each) for each in others]
    assert judge([], [permit]) == ["the permit for r applies to nothing: remove it"]


def test_every_permit_has_a_reason() -> None:
    assert all(permit.reason.endswith(".") for permit in PERMITS)
