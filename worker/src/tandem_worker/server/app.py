"""The worker's HTTP API: routes, and the order of checks of a request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tandem_api import names
from tandem_api.launch import WorkerConfig
from tandem_api.logs import find_trace
from tandem_api.names import Role
from tandem_api.openai import error_body
from tandem_api.tracing import Tracer
from tandem_api.version import VERSION

from tandem_worker.engine.contract import Engine
from tandem_worker.engine.errors import RequestError
from tandem_worker.model.pooling import EmbeddingSpec
from tandem_worker.server.answer import Answerer, Plan
from tandem_worker.server.deltas import ClientGoneError, DeltaHub
from tandem_worker.server.embeddings import Embedder
from tandem_worker.server.http import ServiceError, describe_error, header, request_id, send_bytes, send_json
from tandem_worker.server.journal import StreamHead, take_journal, wants_journal
from tandem_worker.server.messages.encoder import MessagesEncoder, to_error
from tandem_worker.server.messages.request import RENAMED as RENAMED_MESSAGES
from tandem_worker.server.openai.defaults import API_DEFAULTS, SamplingDefaults
from tandem_worker.server.openai.renaming import renamed_errors
from tandem_worker.server.planning import plan_chat, plan_completion
from tandem_worker.server.preparation.preparing import PreparedChat
from tandem_worker.server.prompt_names import PromptNames
from tandem_worker.server.request_metrics import PreparationCounts
from tandem_worker.server.responses.encoder import ResponsesEncoder
from tandem_worker.server.responses.request import RENAMED as RENAMED_RESPONSES
from tandem_worker.server.resuming import open_journal, take_up
from tandem_worker.server.served_model import ServedModel
from tandem_worker.server.structured.compiler import GrammarCompiler
from tandem_worker.server.text.output import Usage
from tandem_worker.server.tracing import ServerTrace, begin_trace, current_trace

_log = logging.getLogger(__name__)
_ENDPOINT = re.compile(r"[A-Za-z0-9_.\-\[\]:]+:\d{1,5}")
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
MAX_PREFILL_ENDPOINTS = 8
MAX_KV_SOURCE = 300
_KV_SOURCE = re.compile(r"([A-Za-z0-9_.\-\[\]:]+:\d{1,5})(?:; ?tokens=(\d{1,9}))?")
MAX_STEP_SECONDS = 60.0

FAILURE_POLL_SECONDS = 0.5

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """One finished request, for metrics."""

    path: str
    status: int
    """HTTP status; 499 when the client went away."""
    seconds: float
    first_token_seconds: float | None
    usage: Usage | None


class RequestObserver(Protocol):
    def __call__(self, outcome: RequestOutcome) -> None: ...


def build_app(
    engine: Engine,
    tokenizer: Any,
    config: WorkerConfig,
    *,
    hub: DeltaHub,
    pod_name: str,
    ready: Callable[[], bool],
    draining: Callable[[], bool],
    max_model_len: int | None = None,
    vocab_size: int | None = None,
    eos_token_ids: Collection[int] = (),
    tool_format: str | None = None,
    embedding: EmbeddingSpec | None = None,
    observer: RequestObserver | None = None,
    preparation: PreparationCounts | None = None,
    grammars: GrammarCompiler | None = None,
    sampling: SamplingDefaults = API_DEFAULTS,
    tracer: Tracer | None = None,
    prompts: PromptNames | None = None,
) -> ASGIApp:
    """The ASGI application. `hub.deliver` must be the engine's delivery function.

    `max_model_len`, `vocab_size` and `eos_token_ids` come from the loaded model; without them the configuration and
    the tokenizer are asked. `tool_format` names a format of tool calls where detection would be wrong. `embedding`
    is given for an embedding model. With `preparation`, which then counts, the process for large requests is started
    now and not with the first of them (but not in prefill workers, which get none as a rule). `grammars` is a compiler
    that the caller closes; without it the application has its own. `sampling` stands below what requests say. `prompts`
    keeps the names that gateways give to prompts. Raises
    ValueError when no context length is known.
    """
    model = ServedModel(
        tokenizer,
        config,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        tool_format=tool_format,
        embedding=embedding,
        grammars=grammars,
        sampling=sampling,
    )
    if preparation is not None:
        model.preparation.counts = preparation
        if config.role is not Role.PREFILL:
            model.preparation.start()
    state = _State(
        engine=engine, hub=hub, model=model, ready=ready, draining=draining, observer=observer, tracer=tracer,
        prompts=PromptNames() if prompts is None else prompts,
    )  # fmt: skip
    api = _Api(state, Answerer(engine, hub, pod_name), Embedder(engine, hub, pod_name, model))
    return Router(_routes(state, api), default=_not_found, redirect_slashes=False, lifespan=state.lifespan)


def _routes(state: _State, api: _Api) -> list[Route]:
    compares = [("/v1/score", api.score), ("/score", api.score), ("/v1/rerank", api.rerank), ("/rerank", api.rerank)]
    return [
        *(_route(path, state, POST=handler) for path, handler in compares if state.model.embedding is not None),
        _route("/v1/chat/completions", state, POST=api.chat),
        _route("/v1/responses", state, POST=api.responses),
        _route("/v1/messages", state, shape=to_error, POST=api.messages),
        _route("/v1/messages/count_tokens", state, shape=to_error, POST=api.count_tokens),
        _route("/v1/completions", state, POST=api.completions),
        _route("/v1/embeddings", state, POST=api.embeddings),
        _route("/v1/models", state, GET=api.models),
        _route("/v1/models/{model:path}", state, GET=api.model),
        _route("/health", state, GET=api.health),
        _route("/ping", state, GET=api.health),
        _route("/version", state, GET=api.version),
        _route("/load", state, GET=api.load),
        _route("/tokenizer_info", state, GET=api.tokenizer_info),
        _route("/tokenize", state, POST=api.tokenize),
        _route("/detokenize", state, POST=api.detokenize),
    ]


@dataclass(slots=True, kw_only=True)
class _State:
    engine: Engine
    hub: DeltaHub
    model: ServedModel
    ready: Callable[[], bool]
    draining: Callable[[], bool]
    observer: RequestObserver | None
    tracer: Tracer | None
    prompts: PromptNames

    def check_admission(self) -> None:
        """Raises ServiceError while this worker takes no requests."""
        if self.engine.failure is not None:
            raise ServiceError(
                "The engine has failed; this worker is about to restart.", status=503, retry=names.RETRY_WORKER
            )
        if self.draining():
            raise ServiceError(
                "This worker is shutting down and takes no new requests.", status=503, retry=names.RETRY_WORKER
            )
        if not self.ready():
            raise ServiceError("This worker is still loading the model.", status=503, retry=names.RETRY_WORKER)

    @contextlib.asynccontextmanager
    async def lifespan(self, _app: object) -> AsyncIterator[None]:
        watcher = asyncio.create_task(self._watch_engine())
        try:
            yield
        finally:
            watcher.cancel()
            self.model.close()

    async def _watch_engine(self) -> None:
        """A dead step loop delivers nothing more: its requests must not hang."""
        while True:
            await asyncio.sleep(FAILURE_POLL_SECONDS)
            if self.engine.failure is not None:
                self.hub.abort_all("The engine failed while it worked on this request.")


async def _plan_response(
    prepared: PreparedChat, model: ServedModel, endpoints: tuple[str, ...], start: StreamHead | None
) -> Plan:
    encoder = partial(ResponsesEncoder, echo=prepared.echo)
    plan = await plan_chat(prepared, model, endpoints, start, prefix="resp_", new_encoder=encoder)
    plan.include_usage = True
    return plan


async def _plan_message(
    prepared: PreparedChat, model: ServedModel, endpoints: tuple[str, ...], start: StreamHead | None
) -> Plan:
    plan = await plan_chat(prepared, model, endpoints, start, prefix="msg_", new_encoder=MessagesEncoder)
    plan.include_usage = True
    return plan


_BuildPlan = Callable[[Any, ServedModel, tuple[str, ...], StreamHead | None], Awaitable[Plan]]
"""Makes the plan of a prepared request, for the prefill workers that it may ask, and with the beginning of what it
continues."""


class _Api:
    def __init__(self, state: _State, answerer: Answerer, embedder: Embedder) -> None:
        self._state = state
        self._model = state.model
        self._answerer = answerer
        self._embedder = embedder
        self._created = int(time.time())

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generate("chat", plan_chat, scope, receive, send)

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._generate("completion", plan_completion, scope, receive, send)

    async def responses(self, scope: Scope, receive: Receive, send: Send) -> None:
        with renamed_errors(RENAMED_RESPONSES):
            await self._generate("responses", _plan_response, scope, receive, send)

    async def messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        with renamed_errors(RENAMED_MESSAGES):
            await self._generate("messages", _plan_message, scope, receive, send)

    async def count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        with renamed_errors(RENAMED_MESSAGES):
            await send_bytes(send, 200, await self._model.preparation.prepare("count", scope, receive))

    async def _generate(self, kind: str, build_plan: _BuildPlan, scope: Scope, receive: Receive, send: Send) -> None:
        self._state.check_admission()
        self._model.check_generates()
        resume, inner, receive = await take_journal(scope, receive)
        prepared = await self._model.preparation.prepare(kind, inner, receive)
        plan = await build_plan(prepared, self._model, prefill_endpoints(scope), resume and resume.head)
        source, held = read_kv_source(scope)
        if source:
            plan.requests = [
                dataclasses.replace(request, kv_source=source, kv_source_tokens=held) for request in plan.requests
            ]
        if (seconds := read_step_seconds(scope)) is not None:
            plan.requests = [dataclasses.replace(request, step_seconds=seconds) for request in plan.requests]
        if plan.stream and wants_journal(scope):
            plan.journal = open_journal(plan)
        name = header(scope, names.HEADER_PROMPT)
        if name is not None:
            self._state.prompts.add(name)
        if resume is not None:
            await take_up(plan, resume, vocab_size=self._model.vocab_size)
        scope["tandem.usage"] = await self._answerer.run(plan, receive, send, {})

    async def embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._state.check_admission()
        self._model.check_embeds()
        prepared = await self._model.preparation.prepare("embedding", scope, receive)
        scope["tandem.usage"] = await self._embedder.run(prepared, receive, send)

    async def score(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._compare("score", scope, receive, send)

    async def rerank(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._compare("rerank", scope, receive, send)

    async def _compare(self, kind: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._state.check_admission()
        prepared = await self._model.preparation.prepare(kind, scope, receive)
        scope["tandem.usage"] = await self._embedder.compare(prepared, receive, send)

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"object": "list", "data": [self._card(self._model.name)]})

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["model"]
        self._model.rules.check_name(name)
        await send_json(send, self._card(name))

    def _card(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "tandem",
            "root": self._model.root,
            "parent": None,
            "max_model_len": self._model.max_model_len,
        }

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._state.check_admission()
        await send_json(send, {})

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"version": VERSION})

    async def load(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"server_load": self._state.hub.num_open})

    async def tokenizer_info(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, describe_tokenizer(self._model))

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, 200, await self._model.preparation.prepare("tokenize", scope, receive))

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, 200, await self._model.preparation.prepare("detokenize", scope, receive))


def describe_tokenizer(model: ServedModel) -> dict[str, object]:
    """What clients that render or score by themselves ask for, under the names of tokenizer_config.json."""
    tokenizer = model.tokenizer
    return {
        "tokenizer_class": tokenizer.settings.class_name,
        "model_max_length": model.max_model_len,
        "vocab_size": model.vocab_size,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "unk_token": tokenizer.unk_token,
        "eos_token_id": tokenizer.eos_token_id,
        "special_tokens": sorted(tokenizer.all_special_tokens),
        "chat_template": model.chat_template or None,
    }


def prefill_endpoints(scope: Scope) -> tuple[str, ...]:
    """The prefill workers that the gateway names. Raises RequestError."""
    value = header(scope, names.HEADER_PREFILL)
    if value is None:
        return ()
    endpoints = tuple(part.strip() for part in value.split(",") if part.strip())
    if len(endpoints) > MAX_PREFILL_ENDPOINTS or not all(_ENDPOINT.fullmatch(part) for part in endpoints):
        raise RequestError(
            f"The header {names.HEADER_PREFILL} must be a comma-separated list of at most {MAX_PREFILL_ENDPOINTS} "
            "host:port pairs.",
            param=names.HEADER_PREFILL,
        )
    return endpoints


def read_kv_source(scope: Scope) -> tuple[str, int]:
    """The worker that has blocks of this prompt, and how many tokens of it, as the gateway says; empty: it names none.
    Raises RequestError."""
    value = header(scope, names.HEADER_KV_SOURCE)
    if value is None:
        return "", 0
    found = _KV_SOURCE.fullmatch(value.strip())
    if found is None or len(found[1]) > MAX_KV_SOURCE:
        raise RequestError(
            f"The header {names.HEADER_KV_SOURCE} must be one host:port of at most {MAX_KV_SOURCE} characters, and may "
            "say behind ;tokens= how many tokens are there, for example 10.0.0.7:7000;tokens=4096.",
            param=names.HEADER_KV_SOURCE,
        )
    return found[1], int(found[2] or 0)


def read_step_seconds(scope: Scope) -> float | None:
    """How long steps may be with a part of this prompt, as the gateway says; None: as long as others. Raises
    RequestError.
    """
    value = header(scope, names.HEADER_STEP_SECONDS)
    if value is None:
        return None
    if not _DECIMAL.fullmatch(value) or not 0 < float(value) <= MAX_STEP_SECONDS:
        raise RequestError(
            f"The header {names.HEADER_STEP_SECONDS} must be a number of seconds above 0 and at most "
            f"{MAX_STEP_SECONDS:g}, for example 0.05.",
            param=names.HEADER_STEP_SECONDS,
        )
    return float(value)


class _Endpoint:
    """Runs the handler of a method; errors become OpenAI error bodies; every response carries the request id."""

    def __init__(
        self, state: _State, handlers: dict[str, Handler], shape: Callable[[dict[str, Any]], dict[str, Any]] | None
    ) -> None:
        """`shape` makes of OpenAI's error bodies those of another API."""
        self._state = state
        self._shape = shape
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get("GET" if scope["method"] == "HEAD" else scope["method"])
        if handler is None:
            await self._send_method_error(send, scope)
            return
        response = _Response(send, request_id(scope))
        started = time.perf_counter()
        trace = begin_trace(self._state.tracer, header(scope, "traceparent")) if "POST" in self._handlers else None
        if trace is not None:
            current_trace.set(trace)  # of this task alone
        try:
            await handler(scope, receive, response)
        except ClientGoneError:
            response.status = 499
        except Exception as error:
            await self._fail(error, scope, response)
        finally:
            if trace is not None:
                self._end_trace(trace, scope, response, started)
        if "POST" in self._handlers:
            self._report(scope, response, started)

    @staticmethod
    def _end_trace(trace: ServerTrace, scope: Scope, response: _Response, started: float) -> None:
        current_trace.set(None)
        ended = time.monotonic()
        trace.end(
            method=scope["method"],
            path=scope["path"],
            status=response.status,
            began=ended - (time.perf_counter() - started),
            ended=ended,
            request_id=response.request_id,
            usage=scope.get("tandem.usage"),
        )

    async def _fail(self, error: Exception, scope: Scope, response: _Response) -> None:
        status, body, headers = describe_error(error)
        if status == 500 and not isinstance(error, ServiceError):
            _log.exception("request failed", extra={"request_id": response.request_id, "path": scope["path"]})
        if response.status:
            # Half an answer is out; closing without its end tells the client that it is not complete.
            raise error
        await self._send_error(response, status, body, headers)

    async def _send_method_error(self, send: Send, scope: Scope) -> None:
        allowed = ", ".join(self._handlers)
        message = f"{scope['method']} is not allowed on {scope['path']}; use {allowed}."
        body = error_body(message, kind="invalid_request_error")
        await self._send_error(send, 405, body, {"allow": allowed})

    async def _send_error(self, send: Send, status: int, body: dict[str, Any], headers: Mapping[str, str]) -> None:
        await send_json(send, self._shape(body) if self._shape else body, status=status, headers=headers)

    def _report(self, scope: Scope, response: _Response, started: float) -> None:
        seconds = time.perf_counter() - started
        first = response.first_body
        outcome = RequestOutcome(
            path=scope["path"],
            status=response.status,
            seconds=seconds,
            first_token_seconds=None if first is None or response.status != 200 else first - started,
            usage=scope.get("tandem.usage"),
        )
        parent = header(scope, "traceparent")
        _log.info(
            "request",
            extra={
                "request_id": response.request_id,
                "trace_id": None if parent is None else find_trace(parent.encode("latin-1")),
                "path": outcome.path,
                "status": outcome.status,
                "seconds": seconds,
            },
        )
        if self._state.observer is not None:
            self._state.observer(outcome)


class _Response:
    """The `send` of one request: adds the request id, notes the status and the time of the first byte of the body."""

    __slots__ = ("_send", "first_body", "request_id", "status")

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status = 0
        self.first_body: float | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"].append((names.HEADER_REQUEST_ID.encode(), self.request_id.encode("latin-1")))
        elif self.first_body is None:
            self.first_body = time.perf_counter()
        await self._send(message)


def _route(
    path: str,
    state: _State,
    shape: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    **handlers: Handler,
) -> Route:
    return Route(path, endpoint=_Endpoint(state, handlers, shape))


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1000})
        return
    body = error_body(f"There is no {scope['path']} here.", kind="not_found_error", code="unknown_url")
    await send_json(send, body, status=404, headers={names.HEADER_REQUEST_ID: request_id(scope)})
