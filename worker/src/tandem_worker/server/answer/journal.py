"""The journal of a stream: written here, kept by the gateway, read where the stream goes on. See `tandem_api.journal`.

    {"id": …, "created": …, "fingerprint": …, "seed": …, "digest": …}    the head: a header of the response
    : b POSITION CACHED            the answers to this prompt began; so many of its tokens had been cached
    : t CHOICE IDS [WAITING]       the choice has these tokens more; logprobs that are withheld now
    : f CHOICE TOKENS REASONING [PREDICTED]    it has ended, and had so many, of which so many were predicted
    : u PROMPT CACHED TOKENS       the answer has ended, with this usage
    :                              nothing

A line commits all events since the line before it, so that what a client has seen is always what the lines say: what a
choice has sent is a function of its tokens (`text.choice`), except for withheld logprobs, which therefore travel along.

Events of encoders that have a state are another matter: they are numbered, and later ones repeat earlier ones. Whoever
goes on writes all of them once more from lines that say how the tokens were cut into updates, and a checksum of all
events so far proves that they are those which the client has seen:

    : b POSITION CACHED CHECK
    : e CHOICE IDS CHECK [WAITING LOGPROBS]    as t; logprobs that its events have, and later ones repeat

CHECK is `-` where they have logprobs that are not repeated: such events are no part of it. There is no line where the
answer ends: its last events are committed together.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.types import Message, Receive, Scope
from tandem_api import names
from tandem_api.journal import MARK, MAX_JOURNAL_BYTES

from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.schedule.params import GenerationRequest, TokenLogprob
from tandem_worker.server.dialects.contract import Encoder
from tandem_worker.server.text.choice import Choice
from tandem_worker.server.text.output import Update
from tandem_worker.server.wire.http import ClientGoneError, content_length, header
from tandem_worker.server.wire.intake import BODY_SECONDS
from tandem_worker.server.wire.pacing import Steps, pace

Withheld = tuple[int, TokenLogprob]
_MAX_BYTES = MAX_JOURNAL_BYTES + 64 * 1024
_MAX_TOKEN = 2**31 - 1
_SLICE_BYTES = 8 * 1024
"""Bytes of reading at a time: a few milliseconds, whether it is tokens, a line for each, or logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamHead:
    """What a stream was given at its beginning, and tells in every event or needs for every token."""

    id: str
    created: int
    fingerprint: str
    seed: int
    digest: str
    """Digest of the prompts' tokens and of how much may follow: another worker must come to the same."""

    def to_json(self) -> str:
        """A JSON object of the fields."""
        return orjson.dumps(self).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldLine:
    """What one line says of an update whose events are to be written once more."""

    end: int
    """So many tokens the choice has with it."""
    check: int | None
    waiting: tuple[Withheld, ...]
    logprobs: tuple[TokenLogprob, ...]


@dataclass(slots=True)
class ChoiceRecord:
    """What is known of a choice that began elsewhere."""

    token_ids: list[int] = field(default_factory=list[int])
    waiting: tuple[Withheld, ...] = ()
    told: list[ToldLine] = field(default_factory=list[ToldLine])
    """What its client was told, where the encoder has a state."""
    ended: tuple[int, int, int] | None = None
    """Tokens, and those of them that were reasoning, or predicted by the client."""


@dataclass(slots=True, kw_only=True)
class Resume:
    """A journal that was read."""

    head: StreamHead
    cached: dict[int, int] = field(default_factory=dict[int, int])
    """Cached tokens of the prompts whose answers have begun, by position."""
    check: int | None = None
    """Checksum of the events with which the answer began, where the encoder has a state."""
    choices: dict[int, ChoiceRecord] = field(default_factory=dict[int, ChoiceRecord])

    def get(self, index: int) -> ChoiceRecord:
        """What choice `index` had said; an empty record when it had said nothing."""
        return self.choices.get(index) or ChoiceRecord()

    def find_resumed(self, position: int, n: int) -> tuple[tuple[int, ...] | None, ...] | None:
        """The tokens of the choices of a prompt, as `GenerationRequest.resumed` has them; None: nothing was said."""
        records = [self.get(index) for index in range(position * n, (position + 1) * n)]
        if not any(record.token_ids or record.ended for record in records):
            return None
        return tuple(None if record.ended else tuple(record.token_ids) for record in records)


class Journal:
    """Writes the lines of one stream."""

    def __init__(self, head: StreamHead, encoder: Encoder) -> None:
        """`encoder` writes the events."""
        self.head = head
        self._encoder = encoder
        self._check = 0
        self._untold: dict[int, list[int]] = {}
        """Tokens since the last line of a choice, which changed nothing that a client sees."""

    def check(self, events: bytes) -> int:
        """The checksum of all events so far, with these."""
        self._check = zlib.crc32(events, self._check)
        return self._check

    def begin(self, position: int, num_cached_tokens: int, events: bytes) -> bytes:
        """The line after `events`, with which the answers to the prompt at `position` begin. So many of its tokens had
        been cached."""
        if self._encoder.has_state:
            return b": b %d %d %d\n" % (position, num_cached_tokens, self.check(events))
        return b": b %d %d\n" % (position, num_cached_tokens)

    def update(self, choice: Choice, update: Update, events: bytes) -> bytes:
        """The line after the events of `update`; nothing where there are none, and the choice goes on."""
        ids = update.token_ids
        if not events:
            self._untold.setdefault(choice.index, []).extend(ids)
            return b""
        if self._encoder.has_state:
            return b"" if update.finish is not None else self._tell_events(choice, ids, events)
        if update.finish is not None:
            told = (choice.index, choice.completion_tokens, choice.reasoning_tokens)
            if choice.num_predicted:
                return b": f %d %d %d %d\n" % (*told, choice.accepted_prediction_tokens)
            return b": f %d %d %d\n" % told
        if self._untold:
            ids = [*self._untold.pop(choice.index, ()), *ids]
        if len(ids) == 1 and not choice.waiting:
            return b": t %d %d\n" % (choice.index, ids[0])
        line = b": t %d %b" % (choice.index, ",".join(map(str, ids)).encode())
        if choice.waiting:
            line += b" " + _write_withheld(choice)
        return line + b"\n"

    def _tell_events(self, choice: Choice, ids: Sequence[int], events: bytes) -> bytes:
        ids, repeated = [*self._untold.pop(choice.index, ()), *ids], self._encoder.repeated_logprobs
        check = b"-" if repeated is None else b"%d" % self.check(events)
        line = b": e %d %b %b" % (choice.index, ",".join(map(str, ids)).encode(), check)
        if choice.waiting or repeated:
            line += b" %b %b" % (_write_withheld(choice), orjson.dumps([*map(_write_logprob, repeated or ())]))
        return line + b"\n"


def _write_withheld(choice: Choice) -> bytes:
    return orjson.dumps([[offset, *_write_logprob(entry)] for offset, entry in choice.waiting])


def _write_logprob(entry: TokenLogprob) -> list[Any]:
    """JSON has no infinity: it is null."""
    return [entry.token_id, entry.logprob, entry.top]


def _read_withheld(entry: Any) -> Withheld:
    offset, *logprob = entry
    return int(offset), _read_logprob(logprob)


def _read_logprob(entry: Any) -> TokenLogprob:
    token_id, logprob, top = entry
    pairs = tuple((_read_token(token), _read_float(value)) for token, value in top)
    return TokenLogprob(token_id=_read_token(token_id), logprob=_read_float(logprob), top=pairs)


def _read_token(value: Any) -> int:
    """Those beyond the vocabulary have no text; tokenizers cannot be asked about others."""
    if type(value) is not int or not 0 <= value <= _MAX_TOKEN:
        raise ValueError(f"{value!r:.40} is no token")
    return value


def _read_float(value: float | None) -> float:
    return float("-inf") if value is None else float(value)


def digest_requests(requests: Sequence[GenerationRequest]) -> str:
    """Differs where the tokens of the prompts do, or what may follow them."""
    digest = hashlib.blake2b(digest_size=12)
    for request in requests:
        tokens = array("q", request.prompt_token_ids)
        digest.update(b"%d %d %d\n" % (len(tokens), request.sampling.max_tokens, request.n))
        digest.update(tokens.tobytes())
    return digest.hexdigest()


def read_journal(data: bytes) -> Steps[Resume]:
    """Raises RequestError."""
    try:
        head, *lines = data.split(b"\n")
        resume = Resume(head=_read_head(head))
        size = 0
        for line in lines:
            if size >= _SLICE_BYTES:
                yield
                size = 0
            _read_line(resume, line)
            size += len(line)
    except (ValueError, TypeError, KeyError) as error:
        raise RequestError(f"The journal cannot be read: {error}.", code="invalid_journal") from error
    return resume


def _read_head(data: bytes) -> StreamHead:
    head = StreamHead(**orjson.loads(data))
    texts, numbers = (head.id, head.fingerprint, head.digest), (head.created, head.seed)
    if not all(type(text) is str for text in texts) or not all(type(number) is int for number in numbers):
        raise ValueError("a field of its head has the wrong type")
    return head


def _read_line(resume: Resume, line: bytes) -> None:
    if not line.startswith(MARK):
        if line:
            raise ValueError("a line does not begin with a mark")
        return
    match line[len(MARK) :].split(b" "):
        case [b""] | [b"u", _, _, _]:
            pass
        case [b"b", position, cached, *check]:
            resume.cached[int(position)] = int(cached)
            resume.check = int(check[0]) if check else None
        case [b"e", index, ids, check, *logprobs]:
            record = _read_ids(resume, index, ids)
            withheld, told = map(orjson.loads, logprobs) if logprobs else ((), ())
            record.told.append(
                ToldLine(
                    end=len(record.token_ids),
                    check=None if check == b"-" else int(check),
                    waiting=tuple(map(_read_withheld, withheld)),
                    logprobs=tuple(map(_read_logprob, told)),
                )
            )
        case [b"t", index, ids, *rest]:
            record = _read_ids(resume, index, ids)
            record.waiting = tuple(map(_read_withheld, orjson.loads(rest[0]))) if rest else ()
        case [b"f", index, tokens, reasoning, *predicted] if len(predicted) <= 1:
            ended = int(tokens), int(reasoning), int(predicted[0]) if predicted else 0
            resume.choices.setdefault(int(index), ChoiceRecord()).ended = ended
        case _:
            raise ValueError(f"a line of it is unknown: {line[:40]!r}")


def _read_ids(resume: Resume, index: bytes, ids: bytes) -> ChoiceRecord:
    record = resume.choices.setdefault(int(index), ChoiceRecord())
    if ids:
        record.token_ids += map(int, ids.split(b","))
    return record


def wants_journal(scope: Scope) -> bool:
    """Whether the request has the header by which the gateway asks for a journal."""
    return header(scope, names.HEADER_RESUME) is not None


async def take_journal(scope: Scope, receive: Receive) -> tuple[Resume | None, Scope, Receive]:
    """What a request says about the stream that it continues, and the request without that.

    Raises RequestError, ClientGoneError.
    """
    value = header(scope, names.HEADER_RESUME) or "0"
    if not value.isdigit() or not value.isascii() or len(value) > 10 or int(value) > _MAX_BYTES:
        raise RequestError(
            f"The header {names.HEADER_RESUME} must be the number of bytes before the body, at most {_MAX_BYTES}.",
            param=names.HEADER_RESUME,
        )
    size = int(value)
    if not size:
        return None, scope, receive
    data = bytearray()
    more = True
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while more and len(data) < size:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                data += message.get("body", b"")
                more = message.get("more_body", False)
    except TimeoutError as error:
        message = f"The journal was not complete after {BODY_SECONDS:g} s."
        raise RequestError(message, code="body_timeout", status=408) from error
    resume = await pace(read_journal(bytes(data[:size])))
    return resume, _without_length(scope, size), _replay(bytes(data[size:]), more, receive)


def _without_length(scope: Scope, size: int) -> Scope:
    """The header with the length of the body alone. Raises RequestError."""
    length = content_length(scope)
    if length is None:
        return scope
    own = b"%d" % max(0, length - size)
    fields = [(name, own if name == b"content-length" else value) for name, value in scope["headers"]]
    return {**scope, "headers": fields}


def _replay(first: bytes, more: bool, receive: Receive) -> Receive:
    """As `receive`, with what has been read of the body already."""
    pending: list[Message] = [{"type": "http.request", "body": first, "more_body": more}]

    async def read() -> Message:
        return pending.pop() if pending else await receive()

    return read
