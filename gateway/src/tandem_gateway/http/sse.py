"""Server-sent events on their way through: counted and cut at event borders, never parsed one by one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import orjson

from tandem_gateway.paths import MESSAGES

MAX_EVENT_BYTES = 4 * 1024 * 1024
DONE = b"[DONE]"
_LAST_EVENT = re.compile(rb"event: (?:response\.(?:completed|incomplete|failed)|message_stop)\n")
"""With which streams of the Responses API and the Messages API end."""
_FAILURE = re.compile(rb'data: ?\{"error"|event: (?:response\.failed|error)\n')


class EventTooLarge(Exception):
    """A single event exceeds MAX_EVENT_BYTES: this is not a token stream."""


TAIL_BYTES = 8 * 1024
"""Kept of the last two reads, for what an answer says in its end."""
_USAGE = re.compile(rb'"usage": ?(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')


class EventStream:
    """Splits what arrives into whole events. O(1) per chunk in the common case of whole events in one read.

    Invariant: everything returned by `feed` ends at an event border, so an error event can follow at any time.
    """

    __slots__ = ("_ends", "_fails", "_held", "_last", "_previous", "events")

    def __init__(self) -> None:
        self.events: int = 0
        self._held = bytearray()
        # Two reads are enough to find the end of the stream and the usage before it.
        self._previous: bytes = b""
        self._last: bytes = b""
        self._ends = self._fails = False
        """An event that ends the answer, or says that it failed, began before what is kept of the last read."""

    def feed(self, data: bytes) -> bytes:
        """Bytes to pass on now, possibly none.

        Raises:
            EventTooLarge: no event border within MAX_EVENT_BYTES.
        """
        if self._held or not data.endswith(b"\n\n"):
            data = self._cut(data)
            if not data:
                return data
        self.events += data.count(b"\n\n")
        self._previous = self._last
        self._last = data if len(data) <= TAIL_BYTES else self._cut_tail(data)
        return data

    def _cut_tail(self, data: bytes) -> bytes:
        """What is kept of a large read."""
        self._ends = _LAST_EVENT.search(data) is not None
        self._fails = _FAILURE.search(data) is not None
        return data[-TAIL_BYTES:]

    @property
    def held_bytes(self) -> int:
        """Not passed on yet, or kept."""
        return len(self._held) + len(self._previous) + len(self._last)

    def _cut(self, data: bytes) -> bytes:
        held = self._held
        known = max(0, len(held) - 3)  # no border ends before: an event of megabytes comes in hundreds of reads
        held += data
        lf, crlf = held.rfind(b"\n\n", known), held.rfind(b"\r\n\r\n", known)
        border = max(lf + 2 if lf >= 0 else 0, crlf + 4 if crlf >= 0 else 0)
        if len(held) - border > MAX_EVENT_BYTES:
            raise EventTooLarge
        whole = bytes(held[:border])
        del held[:border]
        self.events += whole.count(b"\r\n\r\n")
        return whole

    @property
    def tail(self) -> bytes:
        return self._previous + self._last

    @property
    def done(self) -> bool:
        """The stream said that it is complete."""
        return self._last.rstrip().endswith(DONE) or _LAST_EVENT.search(self._last) is not None or self._ends

    @property
    def failed(self) -> bool:
        """The worker itself ended the stream with an error event."""
        last = self._last
        if b"error" not in last and b".failed" not in last:  # nearly always, and looked for much faster
            return self._fails
        return self._fails or _FAILURE.search(last) is not None


def tells_failure(events: bytes) -> bool:
    """Whether a worker ended these events with an error."""
    return _FAILURE.search(events) is not None


def find_usage(tail: bytes) -> dict[str, Any] | None:
    """The `usage` object of the last event that has one."""
    if b'"usage"' not in tail:
        return None
    for event in reversed(tail.replace(b"\r\n", b"\n").split(b"\n\n")):
        if b'"usage"' not in event:
            continue
        try:
            parsed: Any = orjson.loads(event[event.index(b"{") :])
        except ValueError:
            parsed = _read_cut(event)
        if not isinstance(parsed, dict):
            continue
        whole: Any = cast(dict[str, Any], parsed).get("response", parsed)
        usage: Any = cast(dict[str, Any], whole).get("usage") if isinstance(whole, dict) else None
        if isinstance(usage, dict):
            return _rename(cast(dict[str, Any], usage))
    return None


def _read_cut(event: bytes) -> dict[str, Any] | None:
    """The usage in an event of which the beginning is missing."""
    found = _USAGE.findall(event)
    try:
        return {"usage": orjson.loads(found[-1])} if found else None
    except ValueError:
        return None


def find_cached(usage: Mapping[str, object]) -> int | None:
    """Prompt tokens that a usage calls cached; None where it says nothing of them, or no number."""
    details: Any = usage.get("prompt_tokens_details")
    cached: Any = cast(dict[str, Any], details).get("cached_tokens") if isinstance(details, dict) else None
    return cached if type(cached) is int else None


def _rename(usage: dict[str, Any]) -> dict[str, Any]:
    """Under the names of chats, where it has others."""
    if "input_tokens" not in usage:
        return usage
    prompt, details = usage["input_tokens"], usage.get("input_tokens_details")
    cached = usage.get("cache_read_input_tokens")
    if isinstance(cached, int) and isinstance(prompt, int):  # of the Messages API, which counts them apart
        prompt, details = prompt + cached, {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": usage.get("output_tokens"),
        "prompt_tokens_details": details,
    }


def build_failure(path: str, body: dict[str, Any]) -> bytes:
    """The last event of a stream that broke off, as clients of the API at `path` read it. `body` is OpenAI's."""
    if path == MESSAGES:
        # Its clients pass over events without a name, and would take the answer for complete.
        return b"event: error\ndata: " + orjson.dumps({"type": "error", **body}) + b"\n\n"
    return b"data: " + orjson.dumps(body) + b"\n\n"
