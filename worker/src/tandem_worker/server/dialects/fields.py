"""Reads a JSON object field by field: strict types, ranges, and nothing left over.

The body of a request is untrusted. A `Fields` hands out each field once, checked; `finish()` refuses what nobody
asked for. Every refusal is a RequestError (400) whose `param` is the path of the field, as OpenAI writes it. JSON
`null` means "not given", as in OpenAI's API. There are no conversions: "1" is not 1 and 1.0 is not an integer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Never

import orjson

from tandem_worker.engine.errors import RequestError

_MISSING = object()


def refuse(path: str, message: str, code: str | None = None) -> Never:
    """Raise the RequestError of one field."""
    raise RequestError(message, param=path, code=code)


def _json_type(value: object) -> str:
    names: dict[type, str] = {
        bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "an array", dict: "an object",
    }  # fmt: skip
    return names.get(type(value), "null")


def wrong_type(path: str, expected: str, value: object) -> Never:
    """Refuse a value for its JSON type; `expected` is a noun with its article."""
    refuse(path, f"Invalid type for '{path}': expected {expected}, but got {_json_type(value)}.", "invalid_type")


def write_json(path: str, value: object) -> bytes:
    """A value of the request as JSON again. Raises RequestError."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:  # what was read but cannot be written is nested beyond 250 levels
        refuse(path, f"'{path}' is nested too deeply.", "invalid_value")


def read_json(value: object, path: str, code: str) -> Any:
    """What a JSON text says; anything but a text as it is. Raises RequestError with `code` for a text that is none."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        refuse(path, f"'{path}' is not valid JSON: {error}.", code)


class Fields:
    """The fields of one JSON object; `path` is empty for the body itself."""

    __slots__ = ("_rest", "ignored", "path")

    def __init__(self, value: object, path: str = "", *, lenient: bool = False) -> None:
        """`lenient`: what is not supported may be left out of account where a reader says so, and is noted."""
        if not isinstance(value, dict):
            if path:
                wrong_type(path, "an object", value)
            raise RequestError(f"The request body must be a JSON object, but it is {_json_type(value)}.")
        self._rest: dict[str, Any] = dict(value)
        self.path = path
        self.ignored: list[str] | None = [] if lenient else None
        """Fields that were left out of account; None where none may be."""

    def name(self, key: str) -> str:
        """Path of a field of this object, as errors name it."""
        return f"{self.path}.{key}" if self.path else key

    def take(self, key: str) -> Any:
        """The raw value, or None when it is absent or null."""
        return self._rest.pop(key, None)

    def given(self, key: str) -> bool:
        """Whether the field is there and not null. Does not take it."""
        return self._rest.get(key) is not None

    def left(self) -> list[str]:
        """Names that nobody has taken yet."""
        return list(self._rest)

    def finish(self) -> None:
        """Refuse the first field that nobody took. One that is null says nothing."""
        for key, value in self._rest.items():
            if value is None:
                continue
            refuse(self.name(key), f"Unrecognized request argument supplied: {self.name(key)}.", "unknown_parameter")

    def required(self, key: str) -> Any:
        """The raw value; refuses an absent one and null."""
        value = self._rest.pop(key, _MISSING)
        if value is _MISSING:
            refuse(self.name(key), f"Missing required parameter: '{self.name(key)}'.", "missing_required_parameter")
        if value is None:
            refuse(self.name(key), f"'{self.name(key)}' must not be null.", "invalid_type")
        return value

    def string(self, key: str, *, max_length: int | None = None, allow_empty: bool = True) -> str | None:
        """None when absent. `max_length` counts characters."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, str):
            wrong_type(self.name(key), "a string", value)
        if max_length is not None and len(value) > max_length:
            refuse(
                self.name(key),
                f"Invalid '{self.name(key)}': at most {max_length} characters, but it has {len(value)}.",
                "string_above_max_length",
            )
        return value if allow_empty else check_text(value, self.name(key))

    def required_string(self, key: str, *, allow_empty: bool = True) -> str:
        """Take the string under `key`. Raises RequestError when it is missing, of another type, or empty where that is
        not allowed."""
        value = self.required(key)
        if not isinstance(value, str):
            wrong_type(self.name(key), "a string", value)
        return value if allow_empty else check_text(value, self.name(key))

    def boolean(self, key: str, default: bool = False) -> bool:
        """Take the boolean under `key`; `default` when it is missing or null. Raises RequestError for another type."""
        value = self.take(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            wrong_type(self.name(key), "a boolean", value)
        return value

    def integer(self, key: str, *, minimum: int | None = None, maximum: int | None = None) -> int | None:
        """None when absent; bounds included. 1.0 is no integer."""
        value = self.take(key)
        if value is None:
            return None
        return check_integer(value, self.name(key), minimum, maximum)

    def number(self, key: str, *, minimum: float | None = None, maximum: float | None = None) -> float | None:
        """None when absent; bounds included. An integer is a number too."""
        value = self.take(key)
        if value is None:
            return None
        return check_number(value, self.name(key), minimum, maximum)

    def choice(self, key: str, allowed: Collection[str]) -> str | None:
        """One of `allowed`; None when absent."""
        value = self.string(key)
        if value is not None and value not in allowed:
            listed = ", ".join(f"'{item}'" for item in sorted(allowed))
            refuse(
                self.name(key), f"Invalid value '{value}' for '{self.name(key)}'. Supported: {listed}.", "invalid_value"
            )
        return value

    def required_choice(self, key: str, allowed: Collection[str]) -> str:
        """One of `allowed`. Raises RequestError for another value, and where there is none."""
        if not self.given(key):
            self.required(key)
        value = self.choice(key, allowed)
        assert value is not None
        return value

    def array(self, key: str) -> list[Any] | None:
        """The items, unchecked; None when absent."""
        value = self.take(key)
        if value is not None and not isinstance(value, list):
            wrong_type(self.name(key), "an array", value)
        return value

    def object(self, key: str) -> Fields | None:
        """The fields of an object inside this one, to be finished by itself; None when absent."""
        value = self.take(key)
        return None if value is None else Fields(value, self.name(key))

    def raw_object(self, key: str) -> dict[str, Any] | None:
        """An object whose fields are not ours to check; None when absent."""
        value = self.take(key)
        if value is not None and not isinstance(value, dict):
            wrong_type(self.name(key), "an object", value)
        return value

    def unsupported(self, key: str, sentence: str, *, harmless: Sequence[object] = (), ignorable: bool = False) -> None:
        """A valid option that this server does not have: refused unless its value changes nothing.

        `ignorable`: a lenient client does without it.
        """
        value = self.take(key)
        # `0 == False` in Python; the types must agree too.
        if value is None or any(type(value) is type(item) and value == item for item in harmless):
            return
        if ignorable and self.ignored is not None:
            self.ignored.append(key)
            return
        refuse(self.name(key), sentence, "unsupported_parameter")


def check_text(value: object, path: str, max_length: int | None = None, *, blank: str = "") -> str:
    """`value` if it is a string of at most `max_length` characters, not all of them out of `blank`."""
    if not isinstance(value, str):
        wrong_type(path, "a string", value)
    if not value.strip(blank):
        refuse(path, f"'{path}' must not be empty.", "empty_string")
    return check_length(value, path, max_length)


def check_length(text: str, path: str, max_length: int | None) -> str:
    """`text` if it has at most `max_length` characters; None: any number."""
    if max_length is not None and len(text) > max_length:
        refuse(path, f"'{path}' is longer than {max_length} characters.", "string_above_max_length")
    return text


def check_array(value: object, path: str, most: int, items: str = "items", expected: str = "") -> list[Any]:
    """An array that is not empty and has at most `most` items. Raises RequestError, in words for `items`."""
    if not isinstance(value, list):
        wrong_type(path, expected or f"an array of {items}", value)
    if not value:
        refuse(path, f"'{path}' must not be empty.", "empty_array")
    if len(value) > most:
        refuse(path, f"At most {most} {items} are supported, but there are {len(value)}.", "array_above_max_length")
    return value


def check_integer(value: object, path: str, minimum: int | None = None, maximum: int | None = None) -> int:
    """`value` if it is an integer in the range, bounds included; neither a boolean nor 1.0 is one."""
    if isinstance(value, float) and value.is_integer() and not -(2.0**63) < value < 2.0**64:
        # The JSON parser makes floats of integers that no 64 bits hold.
        side, limit = ("below_min", "least") if value < 0 else ("above_max", "most")
        bound = (minimum if value < 0 else maximum) or (-(2**63) if value < 0 else 2**63 - 1)
        refuse(path, f"Invalid '{path}': must be at {limit} {bound}.", f"integer_{side}_value")
    if isinstance(value, bool) or not isinstance(value, int):
        wrong_type(path, "an integer", value)
    check_range(value, path, minimum, maximum, "integer")
    return value


def check_number(value: object, path: str, minimum: float | None = None, maximum: float | None = None) -> float:
    """`value` as a float if it is a number in the range, bounds included; a boolean is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        wrong_type(path, "a number", value)
    check_range(value, path, minimum, maximum, "decimal")
    return float(value)


def check_range(value: float, path: str, minimum: float | None, maximum: float | None, kind: str) -> None:
    """Refuse a value outside the range, bounds included; `kind` is the beginning of the error's code."""
    if minimum is not None and value < minimum:
        refuse(
            path,
            f"Invalid '{path}': must be at least {minimum}, but it is {value}.",
            f"{kind}_below_min_value",
        )
    if maximum is not None and value > maximum:
        refuse(
            path,
            f"Invalid '{path}': must be at most {maximum}, but it is {value}.",
            f"{kind}_above_max_value",
        )
