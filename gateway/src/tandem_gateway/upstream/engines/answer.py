"""Answers of other engines, as the client gets them: the served model's name, and a usage that tells the truth.

Who asked for no usage sees none, though the gateway has. What was cached is what the worker that computed the prompt
says: a decode worker takes every block that it was sent for cached. Pure: bytes in, bytes out.
"""

from __future__ import annotations

import re
from typing import Any, cast

import orjson

from tandem_gateway.http.sse import find_cached
from tandem_gateway.upstream.engines.contract import Fields

HAS_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_EVENT = re.compile(rb".+?(?:\r?\n\r?\n|\Z)", re.DOTALL)
_ERROR = re.compile(rb'data: ?\{\s*"error"')


class Answer:
    """What one answer becomes. `events` gets whole events, `body` an answer in one piece."""

    def __init__(self, *, reads_usage: bool, shows_usage: bool, worker_model: str, client_model: str) -> None:
        """`reads_usage`: its usage is that of chats and completions. `shows_usage`: the client asked for it."""
        self.cached: int | None = None
        """Prompt tokens that the worker which computed the prompt had; None: the answer's own figure stands."""
        self.usage: Fields | None = None
        """The last one of a stream."""
        self._reads_usage = reads_usage
        self._shows_usage = shows_usage
        self._rename = None
        if worker_model != client_model:
            self._rename = b'"model":' + orjson.dumps(worker_model), b'"model":' + orjson.dumps(client_model)
        self._client_model = client_model
        self._failed = False

    def events(self, data: bytes) -> bytes:
        """What the client gets of these events: possibly none. Nothing follows an event that tells of a failure."""
        if self._failed:
            return b""
        if self._rename is not None:
            data = data.replace(*self._rename)  # inside a string every quote has a backslash before it
        if b'"error"' in data and (found := _ERROR.search(data)):
            self._failed = True
            end = _EVENT.match(data, found.start())
            data = data[: end.end()] if end is not None else data
        if not self._reads_usage or not HAS_USAGE.search(data):
            return data
        return b"".join(map(self._take, _EVENT.findall(data)))

    def _take(self, event: bytes) -> bytes:
        if not HAS_USAGE.search(event) or not event.startswith(b"data:"):
            return event
        try:
            parsed: Any = orjson.loads(event[5:])
        except ValueError:
            return event
        if not isinstance(parsed, dict) or not isinstance(cast(Fields, parsed).get("usage"), dict):
            return event
        fields = cast(Fields, parsed)
        self.usage = self._correct(fields)
        if not self._shows_usage:
            if not fields.get("choices"):
                return b""
            fields["usage"] = None
        try:
            return b"data: " + orjson.dumps(fields) + b"\n\n"
        except orjson.JSONEncodeError:  # nested beyond what can be written
            return event

    def body(self, data: bytes) -> bytes:
        """An answer in one piece. What is no JSON object, or one too deep to be written again, stays as it is."""
        if self._rename is None and self.cached is None:
            return data
        try:
            parsed: Any = orjson.loads(data)
        except ValueError:
            return data
        if not isinstance(parsed, dict):
            return data
        fields = cast(Fields, parsed)
        if self._rename is not None and "model" in fields:
            fields["model"] = self._client_model
        fields.pop("kv_transfer_params", None)  # names workers
        if self._reads_usage and isinstance(fields.get("usage"), dict):
            self._correct(fields)
        try:
            return orjson.dumps(fields)
        except orjson.JSONEncodeError:  # nested beyond what can be written
            return data

    def _correct(self, fields: Fields) -> Fields:
        usage = cast(Fields, fields["usage"])
        if self.cached is not None:
            details: Any = usage.get("prompt_tokens_details")
            known = cast(Fields, details) if isinstance(details, dict) else {}
            usage["prompt_tokens_details"] = known | {"cached_tokens": self.cached}
        return usage


def count_cached(usage: Fields | None) -> int:
    """Cached prompt tokens by a usage. Engines leave the figure out where it is none."""
    return max(0, find_cached(usage or {}) or 0)
