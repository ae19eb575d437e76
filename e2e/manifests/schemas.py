"""JSON schemas for kubeconform, out of what Kubernetes itself publishes about its API. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Json = dict[str, Any]
_PREFIX = "#/definitions/"
_QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"


def file_name(api_version: str, kind: str) -> str:
    """As kubeconform's template `{{.ResourceKind}}{{.KindSuffix}}.json` says it: `deployment-apps-v1.json`."""
    group, _, version = api_version.rpartition("/")
    parts = [kind, *([group.split(".")[0]] if group else []), version]
    return "-".join(parts).lower() + ".json"


def select(swagger: Json, wanted: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Json]:
    """A schema for each (apiVersion, kind) that Kubernetes has, whole in itself."""
    definitions: Mapping[str, Json] = swagger["definitions"]
    names = {
        (f"{each['group']}/{each['version']}".lstrip("/"), each["kind"]): name
        for name, definition in definitions.items()
        for each in definition.get("x-kubernetes-group-version-kind", ())
    }
    return {each: _whole(names[each], definitions) for each in wanted if each in names}


def of_crd(crd: Json) -> dict[tuple[str, str], Json]:
    """The same for the type that a CustomResourceDefinition describes."""
    spec = crd["spec"]
    return {
        (f"{spec['group']}/{version['name']}", spec["names"]["kind"]): _strict(version["schema"]["openAPIV3Schema"])
        for version in spec["versions"]
    }


def _whole(name: str, definitions: Mapping[str, Json]) -> Json:
    needed: dict[str, Json] = {}
    open_names = [name]
    while open_names:
        current = open_names.pop()
        if current not in needed:
            needed[current] = _definition(current, definitions[current])
            open_names += _references(needed[current])
    return {"$ref": _PREFIX + name, "definitions": needed}


def _definition(name: str, definition: Json) -> Json:
    if name == _QUANTITY:
        return {"type": ["string", "number"]}
    return _strict(definition)


def _strict(schema: Json) -> Json:
    """No other fields than those listed; strings or integers where either may stand."""
    if schema.get("format") == "int-or-string" or schema.get("x-kubernetes-int-or-string"):
        return {"type": ["string", "integer"]}
    changed = {key: value for key, value in schema.items() if not key.startswith("x-") and key != "format"}
    if "properties" in schema:
        changed["properties"] = {key: _strict(value) for key, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            changed.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            changed[key] = _strict(schema[key])
    return changed


def _references(value: object) -> Iterable[str]:
    if isinstance(value, dict):
        target = value.get("$ref")
        if isinstance(target, str):
            yield target.removeprefix(_PREFIX)
        for each in value.values():
            yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)
