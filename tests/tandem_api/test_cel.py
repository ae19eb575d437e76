"""Rules in CEL as they are judged here. The oracle is the API server: `e2e/suite/test_examples.py` checks with a real
one what each file of `e2e/manifests/malformed` says that it answers."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ConfigDict, ValidationError
from tandem_api.cel import holds, read_expression
from tandem_api.crd.authored import Authored
from tandem_api.crd.spec import InferenceModelSpec
from tandem_api.errors import CELError
from tandem_api.schema import Schema, custom_resource_definition
from tandem_api.validation import RULES_KEY, rule

ROOT = Path(__file__).resolve().parents[2]
CRD: Schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC: Schema = CRD["properties"]["spec"]
MALFORMED = sorted((ROOT / "e2e/manifests/malformed").glob("*.yaml"))
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def evaluate(expression: str, **scope: Any) -> Any:
    return read_expression(expression)(scope)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3 == 7 && (1 + 2) * 3 == 9", True),
        ("7 / 2 == 3 && 7 % 2 == 1", True),
        ("true || false && false", True),
        ("!true || !false", True),
        ("1 < 2 == true", True),
        ("false ? 1 : true ? 2 : 3", 2),
        ("'a' in self.map && !('z' in self.map) && 2 in self.list", True),
        ("self.map['a']", "1Gi"),
        ("has(self.map) && !has(self.nothing) && !has(self.map.b)", True),
        ("self.list.map(x, x * 2)", [2, 4, 6]),
        ("self.list.all(x, x > 0) && !self.list.all(x, x > 1)", True),
        ("self.map.all(k, self.map[k] == '1Gi')", True),
        ("self.list.isSorted() && size(self.list) == 3", True),
        ("string(12) == '12' && string(true) == 'true'", True),
        (r"'it\'s'.startsWith('it') && 'a\\b'.endsWith('b')", True),
        ("'abc'.matches('b')", True),
        ("duration('1h30m') > duration('89m')", True),
        ("isQuantity('1Gi') && !isQuantity('1 Gi')", True),
        ("quantity('2Ki').asApproximateFloat() > quantity('1Ki').asApproximateFloat() * double(1)", True),
        ("quantity('1Gi').compareTo(quantity('1024Mi'))", 0),
        ("quantity('1Ki').asApproximateFloat() * double(3 / 2)", 1024.0),
        ("quantity('500m').add(quantity('500m')).isInteger() && quantity('2').asInteger() == 2", True),
    ],
)
def test_expressions(expression: str, value: Any) -> None:
    assert evaluate(expression, self={"map": {"a": "1Gi"}, "list": [1, 2, 3], "nothing": None}) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1 +", "(1", "self.", "self.exists(x, x)", "1 ~ 2", "a b", "has(self)", "now()", "'open", "self.split()"],
)
def test_what_is_not_known_is_refused(expression: str) -> None:
    with pytest.raises(CELError):
        holds(expression, {})


@pytest.mark.parametrize("expression", ["self.a == 1", "has(self.a.b)", "1 / 0 == 1", "size(1) == 1", "self.b.c == 1"])
def test_what_cannot_be_judged_is_no_verdict(expression: str) -> None:
    with pytest.raises(CELError):
        holds(expression, {"b": 3})


class Bounds(Authored):
    at_least: int | None = None
    at_most: int = 3


def test_fields_of_models_go_by_their_aliases() -> None:
    assert holds("!has(self.atLeast) && self.atMost == 3", Bounds())
    with pytest.raises(CELError, match="Bounds has no field at_most"):
        holds("self.at_most == 3", Bounds())


class Divided(Authored):
    model_config = ConfigDict(json_schema_extra={RULES_KEY: [rule("6 / self.by > 1", "must be below 6")]})

    by: int


def test_an_object_that_a_rule_cannot_be_judged_of_is_refused_in_words() -> None:
    """What comes from pydantic becomes a condition of the object; anything else would be a defect of the operator."""
    assert Divided(by=2).by == 2
    with pytest.raises(ValidationError, match="must be below 6"):
        Divided(by=6)
    with pytest.raises(ValidationError, match=r"6 / self\.by > 1' cannot be judged: .* by zero"):
        Divided(by=0)


@given(a=st.integers(-99, 99), b=st.integers(-99, 99), c=st.booleans(), d=st.booleans())
def test_operators_are_those_of_arithmetic_and_logic(a: int, b: int, c: bool, d: bool) -> None:
    scope = {"a": a, "b": b, "c": c, "d": d}
    assert evaluate("a + b * 2 - a", **scope) == a + b * 2 - a
    assert evaluate("a <= b || a > b && c", **scope) == (a <= b or (a > b and c))
    assert evaluate("!c || d", **scope) == (not c or d)
    assert evaluate("c != d ? a : b", **scope) == (a if c != d else b)


def with_defaults(schema: Schema, value: Any) -> Any:
    """As the API server fills them in before it judges."""
    if isinstance(value, dict):
        for name, field in schema.get("properties", {}).items():
            if name not in value and "default" in field:
                value[name] = copy.deepcopy(field["default"])
            if name in value:
                with_defaults(field, value[name])
    for each in value if isinstance(value, list) else ():
        with_defaults(schema.get("items", {}), each)
    return value


def broken(schema: Schema, value: Any) -> Iterator[str]:
    """The sentences of all rules of the CRD that an object breaks."""
    yield from (each["message"] for each in schema.get(RULES_KEY, ()) if not holds(each["rule"], value))
    if isinstance(value, dict):
        for name, each in value.items():
            field = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            yield from () if field is None else broken(field, each)
    for each in value if isinstance(value, list) else ():
        yield from broken(schema.get("items", {}), each)


def sentences(schema: Schema) -> Iterator[str]:
    """What the rules say."""
    yield from (each["message"] for each in schema.get(RULES_KEY, ()))
    for field in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        yield from () if field is None else sentences(field)


def test_what_the_api_server_refuses_by_a_rule_is_refused_by_the_same_rule() -> None:
    said, checked = set(sentences(CRD)), 0
    for path in MALFORMED:
        text = path.read_text()
        says = re.search(r"^# says: (.+)$", text, re.MULTILINE)
        assert says is not None
        if any(says[1] in message for message in said):
            found = list(broken(CRD, with_defaults(CRD, yaml.safe_load(text))))
            assert any(says[1] in message for message in found), f"{path.name}: {found}"
            checked += 1
    assert checked >= 60


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_keep_every_rule(path: Path) -> None:
    for model in yaml.safe_load_all(path.read_text()):
        if model["kind"] == "InferenceModel":
            assert list(broken(CRD, with_defaults(CRD, model))) == []


def test_what_was_stored_before_a_rule_is_read() -> None:
    spec = {"model": {"uri": "file:///m"}, "gateway": {"service": {"nodePort": 30000}}, "drain": {"timeout": "2h"}}
    assert any("is for a type of NodePort" in each for each in broken(SPEC, with_defaults(SPEC, copy.deepcopy(spec))))
    assert InferenceModelSpec.model_validate(spec).gateway.service.node_port == 30000
