"""Does a live object already say everything that a desired one says?

The API server adds defaults and other managers add fields: both are left alone. Anything the desired object states must
be there, so that a change by hand of a field that the operator owns is noticed. A miss would leave drift, so doubtful
cases count as different; but what the API server writes otherwise than it was told, in a pod template above all, must
count as the same: a template that never matches looks like a new one for ever, and holds its rollout.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal
from typing import Any, cast

from tandem_api.quantities import parse_quantity

_QUANTITY_MAPS = frozenset({"requests", "limits", "overhead"})
_QUANTITIES = frozenset({"sizeLimit", "divisor"})
_MOST, _FINEST = Decimal(2**63 - 1), Decimal("0.001")
"""What the API server cuts quantities to, and the precision that it rounds them up to."""
_LEFT_OUT = frozenset({"hostIPC", "hostNetwork", "hostPID", "readOnly", "stdin", "stdinOnce", "tty"})
"""Switches of pods that the API server leaves out where they are off."""
_HAS_DEFAULT = frozenset(
    {
        "dnsPolicy", "imagePullPolicy", "path", "protocol", "restartPolicy", "schedulerName", "scheme",
        "terminationMessagePath", "terminationMessagePolicy",
    }
)  # fmt: skip
"""Texts of pods that the API server fills in where they are empty."""
_ZERO_MEANS = {
    "hostPort": None, "initialDelaySeconds": None, "timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1,
    "failureThreshold": 3,
}  # fmt: skip
"""Numbers of pods that the API server leaves out, or replaces, where they are 0."""


def satisfies(live: Any, desired: Any, *, field: str = "") -> bool:
    """True when `live` holds all of `desired`."""
    if live is desired:
        return True
    if isinstance(desired, dict):
        return _map_satisfies(live, cast(dict[str, Any], desired), field=field)
    if isinstance(desired, list):
        wanted = cast(list[Any], desired)
        if not wanted and live is None:
            return True
        if not isinstance(live, list) or len(cast(list[Any], live)) != len(wanted):
            return False
        return all(satisfies(have, want) for have, want in zip(cast(list[Any], live), wanted, strict=True))
    if type(live) is type(desired) and live == desired:
        return True
    return _is_rewritten(live, desired, field=field)


def _is_rewritten(live: Any, desired: Any, *, field: str) -> bool:
    """Whether `live` is what the API server makes of `desired`. Most empty texts it leaves out."""
    if desired == "" or (desired is False and field in _LEFT_OUT):
        return live is None or field in _HAS_DEFAULT
    if type(desired) is int and desired == 0 and field in _ZERO_MEANS:
        return live == _ZERO_MEANS[field]
    return field in _QUANTITIES and live is not None and _same_quantity(live, desired)


def _map_satisfies(live: Any, desired: dict[str, Any], *, field: str) -> bool:
    if not desired and live is None:
        return True
    if not isinstance(live, dict):
        return False
    have = cast(dict[str, Any], live)
    if field in _QUANTITY_MAPS:
        return have.keys() >= desired.keys() and all(_same_quantity(have[key], desired[key]) for key in desired)
    for key, want in desired.items():
        kept = have.get(key)
        if type(want) is str and kept == want:  # most of an object are texts, and every look compares all of them
            continue
        if not satisfies(kept, want, field=key):
            return False
    return True


def _same_quantity(live: Any, desired: Any) -> bool:
    """The API server rewrites quantities: `1000m` comes back as `1`, `1024Mi` as `1Gi`."""
    try:
        return _kept(str(live)) == _kept(str(desired))
    except ValueError:
        return str(live) == str(desired)


def _kept(quantity: str) -> Decimal:
    return min(parse_quantity(quantity), _MOST).quantize(_FINEST, rounding=ROUND_CEILING)
