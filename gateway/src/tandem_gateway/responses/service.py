"""What the gateway does with a store of responses: continue conversations, and answer questions about what is kept."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from urllib.parse import parse_qsl, unquote

import orjson
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from tandem_api.launch import StoreLimits
from tandem_api.telemetry import Metric

from tandem_gateway.errors import BadRequest, GatewayFull, NotRouted, RequestError, UnknownResponse
from tandem_gateway.families import by_label
from tandem_gateway.http.budget import FREE_BYTES, Budget
from tandem_gateway.http.request import Request
from tandem_gateway.paths import RESPONSES
from tandem_gateway.requests.prompt import Said, write_said
from tandem_gateway.responses.conversation import (
    MAX_PAGE_ITEMS,
    PAGE_ITEMS,
    Question,
    list_items,
    read_question,
    show_page,
    write_request,
)
from tandem_gateway.responses.recording import Recording
from tandem_gateway.responses.store import ResponseStore, StoredResponse, Turn

log = logging.getLogger(__name__)
ONE, ITEMS, CANCEL = f"{RESPONSES}/{{id}}", f"{RESPONSES}/{{id}}/input_items", f"{RESPONSES}/{{id}}/cancel"
BYTES_PER_COST = 4096
"""Bytes of a stored response that are read and written in as long as a small answer takes."""
_OFF = (
    "responses are not stored here: send the whole conversation in 'input'. Who runs the model turns a store on with "
    "'spec.gateway.responseStore' of the InferenceModel (--response-store of a gateway without Kubernetes)"
)
_SHORT_NUMBER = re.compile(r"[0-9]{1,9}")
_HARMLESS = {"include": ("reasoning.encrypted_content",), "stream": ("false",)}
_REPLAY = {
    "stream": "a stored response is sent whole: leave 'stream' out or false",
    "starting_after": "a stored response is sent whole: leave 'starting_after' out",
    "include_obfuscation": "a stored response is sent whole: leave 'include_obfuscation' out",
    "include": "only 'reasoning.encrypted_content', which changes nothing, can be included: logprobs are not stored",
}


def name_path(path: str) -> str:
    """A path below /v1/responses/ without the id in it, for records; others as they are."""
    if not path.startswith(f"{RESPONSES}/"):
        return path
    rest = path[len(RESPONSES) + 1 :].partition("/")[2]
    return {"": ONE, "input_items": ITEMS, "cancel": CANCEL}.get(rest, path)


def refuse_off() -> NotRouted:
    """For paths of stored responses where none are stored."""
    return NotRouted(_OFF, code="responses_not_stored")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request for a response, as it came."""

    question: Question
    tenant: bytes
    parent: Turn | None
    """The last turn of what it continues."""

    @property
    def size(self) -> int:
        """Bytes that it asks for beyond its own."""
        return 0 if self.parent is None else self.parent.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """The same request with all that it continues."""

    body: bytes
    said: Said
    given: Said
    """What it adds itself."""
    keeps: bool
    """Its answer is to be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer to a question about what is kept."""

    size: int
    """Bytes that are read for it, about."""
    build: Callable[[], object]
    """Raises RequestError."""


class Responses:
    """Belongs to one event loop."""

    def __init__(self, limits: StoreLimits, budget: Budget, *, clock: Callable[[], float]) -> None:
        self._budget = budget
        self._clock = clock
        self._secret = os.urandom(32)
        self.store = ResponseStore(limits, budget)
        self._tell_limit(limits)

    def follow(self, limits: StoreLimits | None) -> None:
        """From now on it is so. None: nothing is kept any more, and what was is gone."""
        if limits is not None:
            self.store.resize(limits, self._clock())
            self._tell_limit(limits)
        else:
            self.store.resize(StoreLimits(max_bytes=0, ttl_seconds=0), self._clock())

    def _tell_limit(self, limits: StoreLimits) -> None:
        if self.store.max_bytes < limits.max_bytes:
            log.warning(
                "fewer bytes of responses are kept than configured: half of what the gateway may hold",
                extra={"bytes": self.store.max_bytes, "configured": limits.max_bytes},
            )

    def _name_tenant(self, request: Request) -> bytes:
        """Tell whose responses a request sees: those of the same Authorization header, which is not kept."""
        return blake2b(request.headers.get(b"authorization", b""), digest_size=16, key=self._secret).digest()

    # requests for a response

    def read(self, request: Request, *, look: bool = False) -> Asked:
        """What a request asks of the store. With `look` nothing is changed by it, not even what was used last.

        Raises:
            BadRequest: what it says of the store cannot be.
            UnknownResponse: what it continues is not here.
        """
        question, tenant = read_question(request.body), self._name_tenant(request)
        if question.previous is None:
            return Asked(question=question, tenant=tenant, parent=None)
        find = self.store.peek(tenant, question.previous) if look else self._find(tenant, question.previous)
        if find is None:
            raise UnknownResponse(question.previous, param="previous_response_id")
        return Asked(question=question, tenant=tenant, parent=find.turn)

    def expand(self, asked: Asked, *, body: bytes, max_bytes: int) -> Expanded | None:
        """The request with the whole conversation in the place of its `body`. None: it is as it should be.

        Raises:
            BadRequest: the conversation has become too long, or cannot be kept as was asked for.
            GatewayFull: there is no room for the whole conversation.
        """
        question, parent = asked.question, asked.parent
        if question.store is False and parent is None:
            return None
        given = write_said(question.fields)
        size = len(given.items)
        keeps = question.store is not False and self.store.may_keep(size)
        if question.store and not keeps:
            raise BadRequest(
                f"'input' has {size} bytes, more than is stored of one response "
                f"({self.store.max_entry_bytes} with all that belongs to it): leave 'store' out or false",
                status=413,
                param="store",
                code="too_large_to_store",
            )
        if parent is not None:  # once more below: this one is before the work
            self._check_room(parent.total)
        whole, said = write_request(question, given, parent, max_bytes=max_bytes)
        self._check_room(len(whole) + size - len(body))
        return Expanded(body=whole, said=said, given=given, keeps=keeps)

    def keep_hold(self, asked: Asked) -> Callable[[], None]:
        """What a request continues stays, until what is returned is called."""
        parent = asked.parent
        if parent is None:
            return lambda: None
        parent.hold()
        return partial(self.store.release, parent)

    def record(self, asked: Asked, expanded: Expanded) -> Recording:
        """What follows the answer to a request."""
        return Recording(
            self.store,
            tenant=asked.tenant,
            name=f"resp_{secrets.token_hex(24)}" if expanded.keeps else None,
            given=expanded.given,
            parent=asked.parent,
            previous=asked.question.previous,
            clock=self._clock,
        )

    def _find(self, tenant: bytes, name: str) -> StoredResponse | None:
        return self.store.find(tenant, name, self._clock())

    # questions about what is kept

    def answer(self, request: Request) -> Reply:
        """To one of the paths below /v1/responses/.

        Raises:
            RequestError: there is nothing of the kind, or it cannot be done.
        """
        name, _, rest = request.path[len(RESPONSES) + 1 :].partition("/")
        name, tenant = unquote(name), self._name_tenant(request)
        allowed = {"": ("GET", "HEAD", "DELETE"), "input_items": ("GET", "HEAD"), "cancel": ("POST",)}.get(rest)
        if allowed is None:
            raise NotRouted(f"unknown path {request.path[:200]!r}", code="unknown_url")
        if request.method.decode("latin-1") not in allowed:
            raise NotRouted.wrong_method(request.method, name_path(request.path), ", ".join(allowed))
        if request.method == b"DELETE":
            if not self.store.delete(tenant, name, self._clock()):
                raise UnknownResponse(name)
            return Reply(size=0, build=lambda: {"id": name, "object": "response", "deleted": True})
        found = self._find(tenant, name)
        if found is None:
            raise UnknownResponse(name)
        if rest == "cancel":
            raise BadRequest(
                "Cannot cancel a synchronous response, and none run in the background: end the request's connection",
                code="not_in_background",
            )
        size = found.turn.total if rest else found.size
        self._check_room(size)
        request.cost += size // BYTES_PER_COST
        return Reply(size=size, build=partial(_list_input if rest else _show, found, request.query))

    def _check_room(self, size: int) -> None:
        """A few bytes ask for many: raises GatewayFull where there is no room for them."""
        if size > FREE_BYTES and self._budget.used + size > self._budget.limit:
            raise GatewayFull("the gateway holds as many bytes as it may; try again shortly")

    # records

    def families(self) -> list[Family]:
        store = self.store
        return [
            GaugeMetricFamily(Metric.GATEWAY_STORED_RESPONSES, "Responses that are kept.", value=len(store)),
            GaugeMetricFamily(Metric.GATEWAY_STORED_BYTES, "Held for responses that are kept.", value=store.used_bytes),
            GaugeMetricFamily(
                Metric.GATEWAY_STORED_LIMIT_BYTES, "That may be held for responses.", value=store.max_bytes
            ),
            by_label(
                Metric.GATEWAY_STORED_EVENTS_TOTAL,
                "What became of responses that were to be kept, looked for or forgotten.",
                store.events,
                label="event",
            ),
        ]


def _read_query(query: str) -> list[tuple[str, str]]:
    return [(name.removesuffix("[]"), value) for name, value in parse_qsl(query, keep_blank_values=True)]


def _refuse(name: str) -> RequestError:
    sentence = _REPLAY.get(name, f"{name[:100]!r} is no parameter here")
    return BadRequest(sentence, param=name, code="unsupported_parameter")


def _show(found: StoredResponse, query: str) -> object:
    for name, value in _read_query(query):
        if value.lower() not in _HARMLESS.get(name, ()):
            raise _refuse(name)
    return orjson.Fragment(found.render())


def _list_input(found: StoredResponse, query: str) -> object:
    after, limit, newest_first = None, PAGE_ITEMS, True
    for name, value in _read_query(query):
        if name == "limit":
            limit = int(value) if _SHORT_NUMBER.fullmatch(value) else 0
            if not 1 <= limit <= MAX_PAGE_ITEMS:
                raise BadRequest(f"'limit' must be from 1 to {MAX_PAGE_ITEMS}", param="limit", code="invalid_value")
        elif name == "order":
            if value not in ("asc", "desc"):
                raise BadRequest("'order' must be asc or desc", param="order", code="invalid_value")
            newest_first = value == "desc"
        elif name == "after":
            after = value
        elif value not in _HARMLESS.get(name, ()):
            raise _refuse(name)
    return show_page(list_items(found.turn, newest_first=newest_first), after=after, limit=limit)
