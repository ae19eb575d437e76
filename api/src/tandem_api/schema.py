"""From pydantic models to the structural schema that a CustomResourceDefinition holds.

Structural means: no `$ref`, every value has one type, nothing but validation inside. `X | None` becomes an optional X,
because the API server prunes nulls of fields that are not nullable. Any other union is refused.
"""

from __future__ import annotations

from typing import Any, cast

from pydantic import BaseModel

from tandem_api.crd.resource import ROOT_RULES
from tandem_api.crd.spec import InferenceModelSpec
from tandem_api.crd.status import InferenceModelStatus
from tandem_api.errors import SchemaError
from tandem_api.names import GROUP, KIND, PLURAL, VERSION
from tandem_api.validation import RULES_KEY, published

Schema = dict[str, Any]

CRD_NAME = f"{PLURAL}.{GROUP}"
_KEPT = (
    "description", "type", "format", "enum", "default", "minimum", "maximum", "minLength", "maxLength", "minItems",
    "maxItems", "required",
)  # fmt: skip
_RENAMED_FOR_MAPS = {"maxLength": "maxProperties", "minLength": "minProperties"}
_DROPPED = ("title", "$defs", "additionalProperties", "properties", "items", "minProperties", "maxProperties")
_PRESERVE = "x-kubernetes-preserve-unknown-fields"


def structural_schema(model: type[BaseModel]) -> Schema:
    """The structural schema of a model's serialized form.

    Raises:
        SchemaError: the model uses something that a structural schema cannot say.
    """
    source = model.model_json_schema(by_alias=True)
    return _structural(source, definitions=source.get("$defs", {}), path=model.__name__)


def custom_resource_definition() -> Schema:
    """The whole CustomResourceDefinition of InferenceModel."""
    root: Schema = {
        "description": "InferenceModel is one large language model, served by a fleet of pods behind one endpoint.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural_schema(InferenceModelSpec) | {"description": "What should run."},
            "status": _without_defaults(structural_schema(InferenceModelStatus))
            # Readers by kstatus take an object without any status for one that is done.
            | {"description": "What runs, written by the operator.", "default": {"observedGeneration": -1}},
        },
        RULES_KEY: ROOT_RULES,
    }
    version: Schema = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": _printer_columns(),
        "schema": {"openAPIV3Schema": root},
    }
    names = {"kind": KIND, "listKind": f"{KIND}List", "plural": PLURAL, "singular": KIND.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": names | {"shortNames": ["im"], "categories": ["tandem"]},
            "versions": [version],
        },
    }


def _printer_columns() -> list[Schema]:
    def column(name: str, path: str, kind: str = "string", **more: Any) -> Schema:
        return {"name": name, "type": kind, "jsonPath": path} | more

    ready = '.status.conditions[?(@.type=="Ready")]'
    return [
        column("Ready", f"{ready}.status"),
        column("Reason", f"{ready}.reason"),
        column("Prefill", ".status.prefill.summary"),
        column("Decode", ".status.decode.summary"),
        column("Updated", ".status.updated"),
        column("Stalled", '.status.conditions[?(@.type=="Stalled")].reason'),
        column("URL", ".status.url"),
        column("Available", '.status.conditions[?(@.type=="Available")].status', priority=1),
        column("Model", ".spec.model.uri", priority=1),
        column("Revision", ".status.revision", priority=1),
        column("Scaling", '.status.conditions[?(@.type=="ScalingActive")].reason', priority=1),
        column("SLO", '.status.conditions[?(@.type=="SLOMet")].status', priority=1),
        column("Message", f"{ready}.message", priority=1),
        column("Age", ".metadata.creationTimestamp", "date"),
    ]


def _structural(source: Schema, *, definitions: Schema, path: str) -> Schema:
    source = _resolve(source, definitions=definitions, path=path)
    if "const" in source:  # a choice of one
        source = {key: value for key, value in source.items() if key != "const"} | {"enum": [source["const"]]}
    is_map = source.get("type") == "object" and "properties" not in source
    result: Schema = {}
    for key in _KEPT:
        if key in source and not (key == "default" and source[key] is None):
            result[_RENAMED_FOR_MAPS.get(key, key) if is_map else key] = source[key]
    result |= {key: value for key, value in source.items() if key.startswith("x-kubernetes-")}
    if RULES_KEY in result:
        result[RULES_KEY] = [published(entry) for entry in result[RULES_KEY]]
    if unknown := set(source) - set(_KEPT) - set(_DROPPED) - set(result):
        raise SchemaError(f"{path}: {', '.join(sorted(unknown))} has no structural form")
    if "description" in result:
        result["description"] = " ".join(str(result["description"]).split())
    if is_map and not source.get(_PRESERVE):
        values = cast(Schema, source.get("additionalProperties"))
        result["additionalProperties"] = _structural(values, definitions=definitions, path=f"{path}[*]")
        result |= {key: source[key] for key in ("minProperties", "maxProperties") if key in source}
    if "items" in source:
        result["items"] = _structural(source["items"], definitions=definitions, path=f"{path}[]")
    if "properties" in source:
        result["properties"] = {
            name: _property(value, definitions=definitions, path=f"{path}.{name}")
            for name, value in source["properties"].items()
        }
        required = set(source.get("required", []))
        result["properties"] = {
            name: {key: item for key, item in value.items() if key != "default"} if name in required else value
            for name, value in result["properties"].items()
        }
    return result


def _resolve(source: Schema, *, definitions: Schema, path: str) -> Schema:
    """`source` with its reference inlined and its `| None` removed; what stands beside them wins."""
    while "$ref" in source or "anyOf" in source:
        source = dict(source)
        if "$ref" in source:
            target = definitions[source.pop("$ref").rsplit("/", 1)[-1]]
        else:
            choices = [choice for choice in source.pop("anyOf") if choice != {"type": "null"}]
            if len(choices) != 1:
                raise SchemaError(f"{path}: a union of several types has no structural form")
            target = choices[0]
        source = {**target, **source}
    return source


def _property(source: Schema, *, definitions: Schema, path: str) -> Schema:
    """A field's schema. Leaving out an `X | None` field says something, so such a field gets no default."""
    schema = _structural(source, definitions=definitions, path=path)
    is_optional = "default" in source and source["default"] is None
    return schema if is_optional else _with_default(schema)


def _without_defaults(schema: Schema) -> Schema:
    """A status has no defaults: what the operator has not written is not known."""
    result = {key: value for key, value in schema.items() if key != "default"}
    if "properties" in schema:
        result["properties"] = {name: _without_defaults(value) for name, value in schema["properties"].items()}
    if "items" in schema:
        result["items"] = _without_defaults(schema["items"])
    return result


def _with_default(schema: Schema) -> Schema:
    """An object whose fields have defaults defaults to `{}`, so that they hold when it is left out."""
    properties: Schema = schema.get("properties", {})
    is_default = "default" not in schema and "required" not in schema
    if is_default and any("default" in value for value in properties.values()):
        return schema | {"default": {}}
    return schema
