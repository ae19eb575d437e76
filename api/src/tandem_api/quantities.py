"""Kubernetes quantities and durations as people write them in manifests."""

from __future__ import annotations

import re
from decimal import Decimal

QUANTITY_PATTERN = r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?"
DURATION_PATTERN = r"[0-9]+h([0-9]+m)?([0-9]+s)?|[0-9]+m([0-9]+s)?|[0-9]+s"

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:[eE]([+-]?[0-9]{1,2})|(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei))?")
_FACTORS = {"m": Decimal("0.001"), None: Decimal(1)} | {
    suffix: Decimal(base**power)
    for base, suffixes in ((1000, ["k", "M", "G", "T", "P", "E"]), (1024, ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]))
    for power, suffix in enumerate(suffixes, start=1)
}
_DURATION = re.compile(r"(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?")


def parse_quantity(text: str) -> Decimal:
    """The value of a Kubernetes quantity such as `500m`, `2`, `16Gi`, or `1e3`, which the schema of models does not
    admit and Kubernetes' own objects may have.

    Raises:
        ValueError: `text` is not a quantity.
    """
    if not (match := _QUANTITY.fullmatch(text)):
        raise ValueError(
            f"{text!r} is not a quantity; write a number with an optional suffix, for example 500m or 16Gi"
        )
    return Decimal(match[1]).scaleb(int(match[2] or 0)) * _FACTORS[match[3]]


def parse_duration(text: str) -> float:
    """Seconds of a duration such as `30s`, `5m`, `1h30m`.

    Raises:
        ValueError: `text` is not a duration or is empty.
    """
    match = _DURATION.fullmatch(text)
    if not match or not any(match.groups()):
        raise ValueError(f"{text!r} is not a duration; write hours, minutes and seconds, for example 30s or 1h30m")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(hours * 3600 + minutes * 60 + seconds)
