"""A request's body as JSON, and how many parts it may have: each costs many times its bytes to read. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from tandem_gateway.errors import BadRequest

MAX_NODES = 100_000
"""Objects, lists and strings of a body, names included. Each costs many times its bytes to read."""
MAX_VALUES = 1_000_000
"""Values of all kinds, numbers too: so many take some 30 ms to read, and a prompt given as tokens has fewer."""
_DICT: Any = dict
"""`dict` for a test that every request goes through: what is tested stays `Any`, and no call is spent on telling the
type checker so."""


def read_object(body: bytes) -> dict[str, Any]:
    """The fields of a request's body. Raises BadRequest: it is no JSON object, or has too many parts."""
    if len(body) > 2 * MAX_NODES:
        check_nodes(body)
    try:
        fields: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the request body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, _DICT):
        raise BadRequest("the request body must be a JSON object", code="invalid_json")
    return fields


def check_nodes(body: bytes) -> None:
    """Raises BadRequest: it has too many parts."""
    if body.count(b",") >= MAX_VALUES and _drop_strings(body).count(b",") >= MAX_VALUES:
        raise BadRequest(
            f"the request body consists of too many parts; at most {MAX_VALUES} values are read",
            status=413,
            code="too_many_parts",
        )
    if count_nodes(body) > MAX_NODES:
        raise BadRequest(
            f"the request body consists of too many parts; at most {MAX_NODES} objects, lists and strings are read",
            status=413,
            code="too_many_parts",
        )


def bound_nodes(text: bytes) -> int:
    """Objects, lists and strings in a JSON text, at most: as many as if every quote, brace and bracket began or ended
    one. O(bytes), without reading it."""
    return text.count(b'"') // 2 + text.count(b"{") + text.count(b"[")


def count_nodes(body: bytes) -> int:
    """Objects, lists and strings in a JSON text, or more than MAX_NODES where there are more. O(bytes), without
    reading it."""
    if bound_nodes(body) <= MAX_NODES:
        return 0
    plain = _drop_escapes(body)
    strings = plain.count(b'"') // 2
    if strings > MAX_NODES:
        return strings
    outside = b"".join(plain.split(b'"')[::2])
    return strings + outside.count(b"{") + outside.count(b"[")


def _drop_escapes(body: bytes) -> bytes:
    return body.replace(b"\\\\", b"").replace(b'\\"', b"")


def _drop_strings(body: bytes) -> bytes:
    """What is outside of strings; of a text with more strings than may be, all of it."""
    plain = _drop_escapes(body)
    return plain if plain.count(b'"') // 2 > MAX_NODES else b"".join(plain.split(b'"')[::2])
