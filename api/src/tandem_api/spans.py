"""Spans as the parts hand them on: which trace a request belongs to, and what one step of it was."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

_TRACE_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
"""Version, trace, parent, flags; versions to come may add more."""
_SAMPLED = 1

Value = str | bool | int | float | list[str]
Kind = Literal["server", "client", "internal"]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span and the trace that it belongs to, in lower-case hexadecimal digits (W3C Trace Context)."""

    trace_id: str
    """32 digits."""
    span_id: str
    """16 digits."""
    sampled: bool = True

    @property
    def header(self) -> str:
        """The value of `traceparent` that makes this span the parent of what comes of a request."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def child(self) -> TraceContext:
        """A new span of the same trace."""
        return TraceContext(self.trace_id, make_id(64), self.sampled)


def read_context(traceparent: bytes) -> TraceContext | None:
    """What a `traceparent` says; None where it is not one."""
    found = _TRACE_PARENT.fullmatch(traceparent)
    if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5]):
        return None
    if not found[2].strip(b"0") or not found[3].strip(b"0"):
        return None
    return TraceContext(found[2].decode(), found[3].decode(), bool(int(found[4], 16) & _SAMPLED))


def make_id(bits: int) -> str:
    """A random id that is not 0, as hexadecimal digits."""
    return f"{random.getrandbits(bits) or 1:0{bits // 4}x}"


@dataclass(slots=True, kw_only=True)
class Span:
    """One that has ended."""

    name: str
    context: TraceContext
    parent: TraceContext | None
    kind: Kind = "internal"
    began: float
    """Seconds by `time.monotonic`, as the next."""
    ended: float
    attributes: Mapping[str, Value | None] = field(default_factory=dict[str, Value | None])
    """Those that are None are left out."""
    links: tuple[TraceContext, ...] = ()
    error: str | None = None
    """Why it failed, for `error.type`; None: it did not."""
