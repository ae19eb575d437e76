"""Writes what is derived from the types: `python -m tandem_api.generate [--check]`.

The results are committed; a test compares them with what the types say now. PyYAML is a tool of the repository and not
a dependency of the package, so it is imported here alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from tandem_api.changes import change_of
from tandem_api.crd.fields import MODEL_NAME_MAX
from tandem_api.crd.spec import InferenceModelSpec
from tandem_api.names import GROUP
from tandem_api.schema import Schema, custom_resource_definition
from tandem_api.validation import RULES_KEY
from tandem_api.version import VERSION

ROOT = Path(__file__).resolve().parents[3]
HEADER = "# Generated from api/src/tandem_api/crd by `make generate`. Do not edit.\n"
DEFAULTS = "# Generated from values.yaml by `make generate`, for templates to read. Do not edit.\n"
COMPLETE = '{{- include "tandem.complete" . }}'
"""How every template of the chart begins: what an earlier release's values lack is added to them."""
RELEASE = f"{GROUP}/version"
"""Annotation of the CRD."""


class _Dumper(yaml.SafeDumper):
    """Writes repeated parts out: a CRD with YAML anchors is hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def generated_files() -> dict[str, str]:
    """Path in the repository → text of every generated file."""
    definition = custom_resource_definition()
    text = _yaml(_annotated(definition, {RELEASE: VERSION}))
    kept = _annotated(definition, {"helm.sh/resource-policy": "keep", RELEASE: VERSION})
    chart = f"{COMPLETE}\n{{{{- if .Values.crds.install }}}}\n{_yaml(kept)}{{{{- end }}}}\n"
    values = yaml.safe_load((ROOT / "charts/tandem/values.yaml").read_text())
    return {
        "crds/tandem.dev_inferencemodels.yaml": HEADER + text,
        "charts/tandem/templates/crd-inferencemodels.yaml": HEADER + chart,
        "charts/tandem/defaults.yaml": DEFAULTS + _yaml(values),
        "docs/inferencemodel.md": _reference(definition),
    }


def _annotated(definition: Schema, annotations: dict[str, str]) -> Schema:
    return definition | {"metadata": definition["metadata"] | {"annotations": annotations}}


def _yaml(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


def _reference(definition: Schema) -> str:
    root = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    lines = [
        "<!-- Generated from api/src/tandem_api/crd by `make generate`. Do not edit. -->",
        "# InferenceModel",
        "",
        "`tandem.dev/v1alpha1`, namespaced, short name `im`. `kubectl explain inferencemodels.tandem.dev.spec` prints",
        f"the same. The object's name has at most {MODEL_NAME_MAX} characters and becomes the name of a Service.",
        "",
        "## spec",
        "",
        _meaning(root["spec"]),
        "",
        "*A change* says what comes of another value while pods run: they are replaced, or they follow it, or it is a",
        "matter of the operator's alone. [What rolls, and what does not](operations.md#rollouts) has more.",
        "",
        *_table(root["spec"], of=InferenceModelSpec),
        "",
        "## status",
        "",
        *_table(root["status"]),
        "",
        "What the conditions mean and what to do about them: [operations.md](operations.md).",
    ]
    return "\n".join(lines) + "\n"


def _table(schema: Schema, *, of: type[BaseModel] | None = None) -> list[str]:
    heads = ["Field", "Type", "Default", *([] if of is None else ["A change"]), "Meaning"]
    return [_row(heads), "|" + "---|" * len(heads), *_rows(schema, path=(), of=of)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _rows(schema: Schema, *, path: tuple[str, ...], of: type[BaseModel] | None) -> list[str]:
    """`of` is the type whose fields declare what a change of them comes to; None where they do not."""
    rows: list[str] = []
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        here = (*path, name)
        default = "required" if name in required else _default(field.get("default", ""))
        cells = [f"`{'.'.join(here)}`", _type(field), default]
        if of is not None:
            change = change_of(of, [each.removesuffix("[]") for each in here])
            cells.append("" if "properties" in field else str(change))
        rows.append(_row([*cells, _meaning(field)]))
        rows += _rows(field, path=here, of=of) + _rows(field.get("items", {}), path=(*path, f"{name}[]"), of=of)
    return rows


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, (str, int)):
        return f"`{value}`" if value != "" else ""
    return "" if value == {} else str(value)


def _type(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(f"`{choice}`" for choice in field["enum"])
    if "additionalProperties" in field:
        return f"map of {_type(field['additionalProperties'])}"
    if "items" in field:
        return f"list of {_type(field['items'])}"
    if field.get("x-kubernetes-int-or-string"):
        return "quantity" if "quantity" in str(field.get(RULES_KEY)) else "integer or percentage"
    bounds = [
        f"≥ {field['minimum']}" if "minimum" in field else "",
        f"≤ {field['maximum']}" if "maximum" in field else "",
    ]
    return " ".join([field["type"], *filter(None, bounds)])


def _meaning(field: Schema) -> str:
    rules = [str(entry.get("fieldPath", "")).lstrip(".") for entry in field.get(RULES_KEY, [])]
    sentences = [
        f"{f'`{path}` ' if path else ''}{entry['message']}"
        for path, entry in zip(rules, field.get(RULES_KEY, []), strict=True)
    ]
    text = str(field.get("description", ""))
    if sentences:
        text += " Checked: " + "; ".join(sentences) + "."
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is out of date")
    check = parser.parse_args(arguments).check
    stale: list[str] = []
    for name, text in generated_files().items():
        path = ROOT / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    for name in stale:
        sys.stdout.write(f"{'out of date' if check else 'wrote'}: {name}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
