"""A scripted engine behind a real server: the API's behaviour without a model."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from tandem_api.launch import ModelSource, WorkerConfig
from tandem_api.names import Role
from tandem_worker.engine.errors import EngineStoppedError, RequestError
from tandem_worker.engine.schedule.params import FinishReason, GenerationRequest, TokenDelta, TokenLogprob
from tandem_worker.model.tokenization.tokenizer import Tokenizer, TokenizerSettings
from tandem_worker.server.answer.deltas import DeltaHub
from tandem_worker.server.answer.request_metrics import RequestOutcome
from tandem_worker.server.app import build_app
from tandem_worker.server.prepare.served_model import end_tokens
from tandem_worker.server.structured.compiler import GrammarCompiler
from tandem_worker.server.text.detokenizer import byte_level_alphabet
from tandem_worker.server.wire.serving import RunningServer, serve
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

MAX_LEN = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n# Tools\n<tools>' }}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '\n</tools>\nUse <tool_call><|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{{- '<|im_start|>assistant\n' + (message.content or '') }}
{%- for call in message.tool_calls %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if force_thinking %}{{ '<think>\n' }}{% endif %}
{%- endif %}"""
MERGES = ["Ġ t", "h e", "i n", "Ġt he", "P a", "r i", "Pa ri", "Pari s", "o n", "e r"]


def byte_level_tokenizer(template: str = TEMPLATE, marks: Sequence[str] = MARKS) -> Tokenizer:
    """All bytes, a few merges, the marks of Qwen-style models."""
    pieces = [*byte_level_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocab, merges=[tuple(merge.split(" ")) for merge in MERGES]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False) for token in marks])
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return Tokenizer(backend, TokenizerSettings(special_tokens=named, chat_template=template))


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece-style pieces, bytes for what they lack."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,", "▁t", "▁th", "▁the", "he", "in"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("h", "e"), ("i", "n")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(backend, TokenizerSettings(special_tokens=named))


@dataclass
class ScriptedEngine:
    """Answers with what `script` says, one token per choice and step, from its own thread as the real engine does."""

    hub: DeltaHub
    script: Callable[[GenerationRequest, int], Sequence[int]]
    step_seconds: float = 0.0
    tokens_per_delta: int = 1
    fail_after: int | None = None
    """Deliver an ERROR after this many tokens."""
    error: str | RequestError = "The GPU is gone."
    submit_error: Exception | None = None
    prefill_worker: str | None = None
    num_cached_tokens: int = 0
    failure: BaseException | None = None
    idle: bool = True
    requests: list[GenerationRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    aborted_choices: list[tuple[str, int]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    """Cleared: nothing is delivered."""
    threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    def submit(self, request: GenerationRequest) -> None:
        if self.submit_error is not None:
            raise self.submit_error
        self.requests.append(request)
        thread = threading.Thread(target=self._run, args=(request,), daemon=True)
        self.threads.append(thread)
        thread.start()

    def abort(self, request_id: str, choice: int | None = None) -> None:
        if choice is None:
            self.aborted.append(request_id)
        else:
            self.aborted_choices.append((request_id, choice))

    def _run(self, request: GenerationRequest) -> None:
        answers = [list(self.script(request, choice))[: request.sampling.max_tokens] for choice in range(request.n)]
        stop = request.sampling.stop_token_ids
        size = self.tokens_per_delta
        for start in range(0, max(len(answer) for answer in answers) + 1, size):
            while not self.gate.wait(0.01):
                if request.request_id in self.aborted:
                    return
            if request.request_id in self.aborted:
                return
            if self.fail_after is not None and start >= self.fail_after:
                error = TokenDelta(
                    request_id=request.request_id, choice=0, finish_reason=FinishReason.ERROR, error=self.error
                )
                self.hub.deliver([error])
                return
            deltas = [
                delta
                for choice, answer in enumerate(answers)
                if start <= len(answer) and (request.request_id, choice) not in self.aborted_choices
                for delta in [self._delta(request, choice, answer, start, stop)]
            ]
            self.hub.deliver(deltas)
            if self.step_seconds:
                threading.Event().wait(self.step_seconds)
        self.finished.append(request.request_id)

    def _delta(
        self, request: GenerationRequest, choice: int, answer: list[int], start: int, stop: frozenset[int]
    ) -> TokenDelta:
        tokens = tuple(answer[start : start + self.tokens_per_delta])
        last = start + self.tokens_per_delta > len(answer)
        stopped = next((index for index, token in enumerate(tokens) if token in stop), None)
        reason = None
        stop_token = None
        if stopped is not None:
            stop_token, tokens, reason = tokens[stopped], tokens[:stopped], FinishReason.STOP
            del answer[start:]
            answer += tokens
        elif last:
            reason = FinishReason.LENGTH
        wanted = request.sampling.num_logprobs
        return TokenDelta(
            request_id=request.request_id,
            choice=choice,
            token_ids=tokens,
            logprobs=None if wanted is None else tuple(_logprob(token, wanted) for token in tokens),
            prompt_logprobs=_prompt_logprobs(request) if start == 0 and request.prompt_logprobs is not None else None,
            finish_reason=reason,
            stop_token_id=stop_token,
            num_cached_tokens=self.num_cached_tokens,
            prefill_worker=self.prefill_worker,
        )

    def __getattr__(self, name: str) -> Any:
        raise EngineStoppedError(f"the scripted engine has no {name}")


def _logprob(token: int, wanted: int) -> TokenLogprob:
    top = tuple(((token + rank) % 200, -0.5 - rank) for rank in range(wanted))
    return TokenLogprob(token_id=token, logprob=-0.5, top=top, rank=1)


def _prompt_logprobs(request: GenerationRequest) -> tuple[TokenLogprob | None, ...]:
    assert request.prompt_logprobs is not None
    rest = [_logprob(token, request.prompt_logprobs) for token in request.prompt_token_ids[1:]]
    return (None, *rest)


@dataclass
class Worker:
    """A running server with its scripted engine and clients."""

    app: Any
    """What it serves."""
    engine: ScriptedEngine
    hub: DeltaHub
    tokenizer: Any
    server: RunningServer
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient
    outcomes: list[RequestOutcome]
    state: dict[str, bool]

    def says(self, text: str, *, end: bool = True) -> None:
        """Every choice answers with this text."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if end:
            ids = [*ids, self.tokenizer.eos_token_id]
        self.engine.script = lambda _request, _choice: ids

    @property
    def port(self) -> int:
        return self.server.port


_compilers: dict[int, GrammarCompiler] = {}
"""By tokenizer. Their processes take longer to start than a test."""


@pytest.fixture(scope="session", autouse=True)
def _close_compilers() -> Iterator[None]:
    yield
    for compiler in _compilers.values():
        compiler.close()


def share_compiler(tokenizer: Any) -> GrammarCompiler:
    ends = end_tokens(tokenizer)
    return _compilers.setdefault(id(tokenizer), GrammarCompiler(tokenizer, len(tokenizer), ends))


@contextlib.asynccontextmanager
async def running_worker(
    tokenizer: Any,
    *,
    free_form_grammars: bool = False,
    request_chat_templates: bool = False,
    keys_path: str | None = None,
    tools: Any = "Auto",
    **options: Any,
) -> AsyncIterator[Worker]:
    hub = DeltaHub()
    engine = ScriptedEngine(hub, lambda _request, _choice: [tokenizer.eos_token_id])
    config = WorkerConfig(
        model_name="tiny", served_name="tiny", role=Role.UNIFIED, revision="r1", model=ModelSource(uri="file:///m"),
        max_model_len=MAX_LEN, free_form_grammars=free_form_grammars, keys_path=keys_path, tools=tools,
        request_chat_templates=request_chat_templates,
    )  # fmt: skip
    if options.keys().isdisjoint({"grammars", "vocab_size", "eos_token_ids"}):
        options["grammars"] = share_compiler(tokenizer)
    outcomes: list[RequestOutcome] = []
    state = {"ready": True, "draining": False}
    app = build_app(
        engine, tokenizer, config, hub=hub, pod_name="pod-0", ready=lambda: state["ready"],
        draining=lambda: state["draining"],
        observer=outcomes.append, **options,
    )  # fmt: skip
    server = await serve(app, "127.0.0.1", 0)
    base = f"http://127.0.0.1:{server.port}"
    try:
        async with (
            # Without TLS there is nothing to verify, and reading certificates takes longer than a test.
            httpx.AsyncClient(base_url=base, timeout=120, verify=False) as http,
            httpx.AsyncClient(verify=False) as transport,
            openai.AsyncOpenAI(
                base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=120, http_client=transport
            ) as client,
        ):
            try:
                yield Worker(app, engine, hub, tokenizer, server, client, http, outcomes, state)
            finally:
                engine.gate.set()
    finally:
        await server.stop()
        for thread in engine.threads:
            await asyncio.to_thread(thread.join, 5)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def fallback_tokenizer() -> Tokenizer:
    return byte_fallback_tokenizer()


@pytest.fixture
async def worker(tokenizer: Tokenizer) -> AsyncIterator[Worker]:
    async with running_worker(tokenizer) as running:
        yield running


@pytest.fixture
def start_worker() -> Callable[..., contextlib.AbstractAsyncContextManager[Worker]]:
    """For workers with other tokenizers or options."""
    return running_worker


@pytest.fixture
def make_tokenizer() -> Callable[..., Tokenizer]:
    return byte_level_tokenizer
