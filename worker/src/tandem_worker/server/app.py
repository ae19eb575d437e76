"""The worker's HTTP API: routes, and the order of checks of a request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send
from tandem_api import names
from tandem_api.launch import WorkerConfig
from tandem_api.names import Role
from tandem_api.openai import error_body
from tandem_api.tracing import Tracer
from tandem_api.version import VERSION

from tandem_worker.engine.contract import Engine
from tandem_worker.model.pooling import EmbeddingSpec
from tandem_worker.server.answer.answerer import Answerer, Plan
from tandem_worker.server.answer.deltas import DeltaHub
from tandem_worker.server.answer.embeddings import Embedder
from tandem_worker.server.answer.endpoint import Endpoint, Handler
from tandem_worker.server.answer.journal import StreamHead, take_journal, wants_journal
from tandem_worker.server.answer.planning import plan_chat, plan_completion
from tandem_worker.server.answer.request_metrics import RequestObserver
from tandem_worker.server.answer.resuming import open_journal, take_up
from tandem_worker.server.dialects.messages.encoder import MessagesEncoder, to_error
from tandem_worker.server.dialects.messages.request import RENAMED as RENAMED_MESSAGES
from tandem_worker.server.dialects.openai.options import API_DEFAULTS, SamplingDefaults
from tandem_worker.server.dialects.renaming import renamed_errors
from tandem_worker.server.dialects.responses.encoder import ResponsesEncoder
from tandem_worker.server.dialects.responses.request import RENAMED as RENAMED_RESPONSES
from tandem_worker.server.prepare.counts import PreparationCounts
from tandem_worker.server.prepare.draft import PreparedChat
from tandem_worker.server.prepare.served_model import ServedModel
from tandem_worker.server.structured.compiler import GrammarCompiler
from tandem_worker.server.wire.http import (
    ServiceError,
    header,
    prefill_endpoints,
    read_kv_source,
    read_step_seconds,
    request_id,
    send_bytes,
    send_json,
)
from tandem_worker.server.wire.prompt_names import PromptNames

FAILURE_POLL_SECONDS = 0.5


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
        preparation=preparation,
    )
    if preparation is not None and config.role is not Role.PREFILL:
        model.preparation.start()
    state = _State(
        engine=engine, hub=hub, model=model, ready=ready, draining=draining, observer=observer, tracer=tracer,
        prompts=PromptNames() if prompts is None else prompts,
    )  # fmt: skip
    generation = _Generation(state, Answerer(engine, hub, pod_name), Embedder(engine, hub, pod_name, model))
    return Router(
        _routes(state, generation, _Facts(state)), default=_not_found, redirect_slashes=False, lifespan=state.lifespan
    )


def _routes(state: _State, generation: _Generation, facts: _Facts) -> list[Route]:
    compares = [
        ("/v1/score", generation.score),
        ("/score", generation.score),
        ("/v1/rerank", generation.rerank),
        ("/rerank", generation.rerank),
    ]
    return [
        *(_route(path, state, POST=handler) for path, handler in compares if state.model.embedding is not None),
        _route("/v1/chat/completions", state, POST=generation.chat),
        _route("/v1/responses", state, POST=generation.responses),
        _route("/v1/messages", state, shape=to_error, POST=generation.messages),
        _route("/v1/messages/count_tokens", state, shape=to_error, POST=generation.count_tokens),
        _route("/v1/completions", state, POST=generation.completions),
        _route("/v1/embeddings", state, POST=generation.embeddings),
        _route("/v1/models", state, GET=facts.models),
        _route("/v1/models/{model:path}", state, GET=facts.model),
        _route("/health", state, GET=facts.health),
        _route("/ping", state, GET=facts.health),
        _route("/version", state, GET=facts.version),
        _route("/load", state, GET=facts.load),
        _route("/tokenizer_info", state, GET=facts.tokenizer_info),
        _route("/tokenize", state, POST=facts.tokenize),
        _route("/detokenize", state, POST=facts.detokenize),
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


class _Generation:
    """What the engine computes for a request: an answer, or vectors."""

    def __init__(self, state: _State, answerer: Answerer, embedder: Embedder) -> None:
        self._state = state
        self._model = state.model
        self._answerer = answerer
        self._embedder = embedder

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


class _Facts:
    """What is asked about the model and this worker, and the tokenizer at work."""

    def __init__(self, state: _State) -> None:
        self._state = state
        self._model = state.model
        self._created = int(time.time())

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


def _route(
    path: str,
    state: _State,
    shape: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    **handlers: Handler,
) -> Route:
    endpoint = Endpoint(handlers, shape=shape, observer=state.observer, tracer=state.tracer)
    return Route(path, endpoint=endpoint)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1000})
        return
    body = error_body(f"There is no {scope['path']} here.", kind="not_found_error", code="unknown_url")
    await send_json(send, body, status=404, headers={names.HEADER_REQUEST_ID: request_id(scope)})
