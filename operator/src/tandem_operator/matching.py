"""Does a live object already say everything that a desired one says?

The API server adds defaults and other managers add fields: both are left alone. Anything the desired object states must
be there, so that a change by hand of a field that the operator owns is noticed. A false alarm costs one server-side
apply that changes nothing; a miss would leave drift, so doubtful cases count as different.
"""

from __future__ import annotations

from typing import Any, cast

from tandem_api.quantities import parse_quantity

_QUANTITY_MAPS = frozenset({"requests", "limits"})


def satisfies(live: Any, desired: Any, *, field: str = "") -> bool:
    """True when `live` holds all of `desired`."""
    if isinstance(desired, dict):
        return _map_satisfies(live, cast(dict[str, Any], desired), field=field)
    if isinstance(desired, list):
        wanted = cast(list[Any], desired)
        if not wanted and live is None:
            return True
        if not isinstance(live, list) or len(cast(list[Any], live)) != len(wanted):
            return False
        return all(satisfies(have, want) for have, want in zip(cast(list[Any], live), wanted, strict=True))
    return type(live) is type(desired) and live == desired


def _map_satisfies(live: Any, desired: dict[str, Any], *, field: str) -> bool:
    if not desired and live is None:
        return True
    if not isinstance(live, dict):
        return False
    have = cast(dict[str, Any], live)
    if field in _QUANTITY_MAPS:
        return have.keys() >= desired.keys() and all(_same_quantity(have[key], desired[key]) for key in desired)
    return all(satisfies(have.get(key), value, field=key) for key, value in desired.items())


def _same_quantity(live: Any, desired: Any) -> bool:
    """The API server rewrites quantities: `1000m` comes back as `1`."""
    try:
        return parse_quantity(str(live)) == parse_quantity(str(desired))
    except ValueError:
        return str(live) == str(desired)
