"""The part of CEL that the CRD's rules are written in, for objects that no API server has judged by them.

The grammar is that of https://github.com/google/cel-spec, the functions are Kubernetes' own
(https://kubernetes.io/docs/reference/using-api/cel/): logic, comparison, arithmetic of whole numbers, `has`, `in`,
`all`, `map`, `size`, `string`, `double`, `matches`, `startsWith`, `endsWith`, `isSorted`, `duration`, `isQuantity`, and
of quantities `compareTo`, `add`, `isInteger`, `asInteger` and `asApproximateFloat`. What else CEL has is refused when a
rule is read.

`self` is a pydantic model, whose fields go by their aliases, or what JSON parses to. A field that is None is absent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cache, lru_cache
from typing import Any, cast

from pydantic import BaseModel

from tandem_api.errors import CELError
from tandem_api.quantities import parse_duration, parse_quantity

Scope = Mapping[str, Any]
Evaluate = Callable[[Scope], Any]
"""An expression that has been read: from the values of its variables to its own."""

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?)|(?P<name>[A-Za-z_]\w*)|(?P<text>'(?:[^'\\]|\\.)*')"
    r"|(?P<sign>\|\||&&|[=!<>]=|[-+*/%!<>?:.,()\[\]]))",
    re.ASCII,
)
_WORDS = {"true": True, "false": False, "null": None}


@lru_cache(maxsize=1024)
def read_expression(text: str) -> Evaluate:
    """The expression that `text` is.

    Raises:
        CELError: it is none, or uses what is not known here.
    """
    return _Reader(text).read()


def holds(expression: str, value: Any) -> bool:
    """Whether a rule holds of `value`, its `self`.

    Raises:
        CELError: the rule cannot be read, or reads what is not there.
    """
    try:
        return read_expression(expression)({"self": value}) is True
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CELError(f"{expression!r:.200} cannot be judged: {error}") from error


_RANKS = (("||",), ("&&",), ("==", "!=", "<=", ">=", "<", ">", "in"), ("+", "-"), ("*", "/", "%"))
"""Operators, those that bind least first."""


class _Tokens:
    """What is yet to be read of an expression."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._rest: list[tuple[str, str]] = []
        place = 0
        while place < len(text.rstrip()):
            match = _TOKEN.match(text, place)
            if match is None:
                raise CELError(f"{text!r} is no expression at {text[place : place + 20]!r}")
            self._rest.append((str(match.lastgroup), match[str(match.lastgroup)]))
            place = match.end()
        self._rest.append(("end", ""))

    def error(self) -> CELError:
        rest = " ".join(text for _, text in self._rest[:8])
        return CELError(f"{self._text!r} is not understood at {rest!r}")

    def take(self, *signs: str) -> str | None:
        """The next token where it is one of these."""
        kind, text = self._rest[0]
        return self.take_kind(kind) if text in signs and kind in ("sign", "name") else None

    def take_kind(self, kind: str) -> str | None:
        """The next token where it is of this kind."""
        found, text = self._rest[0]
        if found != kind:
            return None
        del self._rest[0]
        return text

    def expect(self, sign: str) -> None:
        if self.take(sign) is None:
            raise self.error()

    def expect_name(self) -> str:
        if (name := self.take_kind("name")) is None:
            raise self.error()
        return name


class _Reader:
    """A parser by recursive descent."""

    def __init__(self, text: str) -> None:
        self._text, self._tokens = text, _Tokens(text)

    def read(self) -> Evaluate:
        found = self._ternary()
        if self._tokens.take_kind("end") is None:
            raise self._tokens.error()
        return found

    def _ternary(self) -> Evaluate:
        test = self._binary(0)
        if self._tokens.take("?") is None:
            return test
        yes = self._binary(0)
        self._tokens.expect(":")
        no = self._ternary()
        return lambda scope: yes(scope) if test(scope) is True else no(scope)

    def _binary(self, rank: int) -> Evaluate:
        """Operands of a rank's operators, and what binds more within them."""
        if rank == len(_RANKS):
            return self._unary()
        found = self._binary(rank + 1)
        if rank < 2:
            parts, sign = [found], _RANKS[rank][0]
            while self._tokens.take(sign):
                parts.append(self._binary(rank + 1))
            return found if len(parts) == 1 else _any(parts) if sign == "||" else _all(parts)
        while (sign := self._tokens.take(*_RANKS[rank])) is not None:
            found = _applied(_OPERATORS[sign], found, self._binary(rank + 1))
        return found

    def _unary(self) -> Evaluate:
        if self._tokens.take("!"):
            operand = self._unary()
            return lambda scope: operand(scope) is not True
        return self._postfix(self._primary())

    def _primary(self) -> Evaluate:
        if self._tokens.take("("):
            inner = self._ternary()
            self._tokens.expect(")")
            return inner
        if (text := self._tokens.take_kind("text")) is not None:
            return _constant(re.sub(r"\\(.)", r"\1", text[1:-1]))
        if (number := self._tokens.take_kind("number")) is not None:
            return _constant(float(number) if "." in number else int(number))
        name = self._tokens.expect_name()
        if name in _WORDS:
            return _constant(_WORDS[name])
        if self._tokens.take("("):
            return self._has() if name == "has" else self._function(name)
        return lambda scope: scope[name]

    def _postfix(self, value: Evaluate) -> Evaluate:
        while sign := self._tokens.take(".", "["):
            if sign == "[":
                value = _applied(_item, value, self._ternary())
                self._tokens.expect("]")
                continue
            name = self._tokens.expect_name()
            value = self._method(value, name) if self._tokens.take("(") else _member(value, name)
        return value

    def _has(self) -> Evaluate:
        """`has(a.b.c)`: the last name may be absent, what stands before it may not."""
        value, name = self._primary(), None
        while self._tokens.take("."):
            value, name = (value if name is None else _member(value, name)), self._tokens.expect_name()
        self._tokens.expect(")")
        if name is None:
            raise self._tokens.error()
        return lambda scope: _look_up(value(scope), name) is not None

    def _arguments(self) -> list[Evaluate]:
        found: list[Evaluate] = []
        while self._tokens.take(")") is None:
            if found:
                self._tokens.expect(",")
            found.append(self._ternary())
        return found

    def _function(self, name: str) -> Evaluate:
        known, arguments = _FUNCTIONS.get(name), self._arguments()
        if known is None or len(arguments) != 1:
            raise CELError(f"{self._text!r}: {name} with {len(arguments)} arguments is not known here")
        return lambda scope: known(arguments[0](scope))

    def _method(self, value: Evaluate, name: str) -> Evaluate:
        if name in ("all", "map"):
            variable = self._tokens.expect_name()
            self._tokens.expect(",")
            body = self._ternary()
            self._tokens.expect(")")
            return _macro(name, value, variable, body)
        arguments = self._arguments()
        known = _METHODS.get((name, len(arguments)))
        if known is None:
            raise CELError(f"{self._text!r}: {name} with {len(arguments)} arguments is not known here")
        return lambda scope: known(value(scope), *(argument(scope) for argument in arguments))


def _constant(value: Any) -> Evaluate:
    return lambda _: value


def _any(parts: list[Evaluate]) -> Evaluate:
    def judge(scope: Scope) -> bool:
        for part in parts:  # noqa: SIM110  (a generator takes twice as long, and a spec has a hundred of these)
            if part(scope) is True:
                return True
        return False

    return judge


def _all(parts: list[Evaluate]) -> Evaluate:
    def judge(scope: Scope) -> bool:
        for part in parts:  # noqa: SIM110  (as above)
            if part(scope) is not True:
                return False
        return True

    return judge


def _applied(operator: Callable[[Any, Any], Any], left: Evaluate, right: Evaluate) -> Evaluate:
    return lambda scope: operator(left(scope), right(scope))


def _member(value: Evaluate, name: str) -> Evaluate:
    def read(scope: Scope) -> Any:
        found = _look_up(value(scope), name)
        if found is None:
            raise CELError(f"there is no {name}")
        return found

    return read


def _macro(name: str, value: Evaluate, variable: str, body: Evaluate) -> Evaluate:
    if name == "all":
        return lambda scope: all(body({**scope, variable: each}) is True for each in value(scope))
    return lambda scope: [body({**scope, variable: each}) for each in value(scope)]


@cache
def _fields(model: type[BaseModel]) -> dict[str, str]:
    return {field.alias or name: name for name, field in model.model_fields.items()}


def _look_up(value: Any, name: str) -> Any:
    """The field of an object, None where it is absent.

    Raises:
        CELError: `value` has no such field, or no fields.
    """
    if isinstance(value, BaseModel):
        attribute = _fields(type(value)).get(name)
        if attribute is None:
            raise CELError(f"{type(value).__name__} has no field {name}")
        return getattr(value, attribute)
    if isinstance(value, Mapping):
        return cast(Mapping[str, Any], value).get(name)
    raise CELError(f"{value!r:.80} has no fields, so no {name}")


def _item(value: Any, key: Any) -> Any:
    return value[key]


def _divide(left: Any, right: Any) -> Any:
    return left // right if type(left) is int and type(right) is int else left / right


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "in": lambda a, b: a in b,
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": _divide,
    "%": lambda a, b: a % b,
}


def _is_quantity(text: str) -> bool:
    try:
        parse_quantity(text)
    except ValueError:
        return False
    return True


def _text(value: Any) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "size": len,
    "string": _text,
    "double": float,
    "duration": parse_duration,
    "quantity": parse_quantity,
    "isQuantity": _is_quantity,
}


def _compare(left: Decimal, right: Decimal) -> int:
    return (left > right) - (left < right)


def _add(left: Decimal, right: Decimal) -> Decimal:
    return left + right


def _is_integer(value: Decimal) -> bool:
    return value == int(value)


def _is_sorted(values: list[Any]) -> bool:
    return values == sorted(values)


def _matches(text: str, pattern: str) -> bool:
    return re.search(pattern, text, re.ASCII) is not None


_METHODS: dict[tuple[str, int], Callable[..., Any]] = {
    ("compareTo", 1): _compare,
    ("add", 1): _add,
    ("isInteger", 0): _is_integer,
    ("asInteger", 0): int,
    ("asApproximateFloat", 0): float,
    ("matches", 1): _matches,
    ("startsWith", 1): str.startswith,
    ("endsWith", 1): str.endswith,
    ("isSorted", 0): _is_sorted,
}
