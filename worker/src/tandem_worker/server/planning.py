"""From a parsed request to the plan that is run: tokens, limits, choices, encoder."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from tandem_worker.engine.schedule.params import GenerationRequest, SamplingParams, TokenDelta
from tandem_worker.server.answer import Plan
from tandem_worker.server.journal import StreamHead
from tandem_worker.server.openai.chunks import AnswerHead, ChatEncoder, CompletionEncoder, Echo, Encoder
from tandem_worker.server.openai.completion_request import Prompt
from tandem_worker.server.openai.options import CommonOptions, to_sampling
from tandem_worker.server.preparation.preparing import PreparedChat, PreparedCompletion, Tokens
from tandem_worker.server.served_model import ServedModel
from tandem_worker.server.text.choice import Choice
from tandem_worker.server.text.detokenizer import TokenTable
from tandem_worker.server.text.patterns import compile_patterns
from tandem_worker.server.text.shaping import shape_answer, shape_completion
from tandem_worker.server.text.words import resolve_bias


async def plan_chat(
    prepared: PreparedChat,
    model: ServedModel,
    endpoints: tuple[str, ...],
    start: StreamHead | None = None,
    *,
    prefix: str = "chatcmpl-",
    new_encoder: Callable[[AnswerHead, TokenTable], Encoder] = ChatEncoder,
) -> Plan:
    """`start` is the beginning of the stream that this request continues, `prefix` begins its id, and `new_encoder`
    writes its answer. Raises RequestError.
    """
    request = prepared.request
    options = _begin_as(start, request.common)
    shape = await shape_answer(request, model, prepared.prompt_end)
    sampling = to_sampling(
        options,
        logit_bias=resolve_bias(options, model),
        max_tokens=prepared.room,
        num_logprobs=request.num_logprobs,
        eos_token_ids=model.eos_token_ids,
        grammar=shape.grammar,
    )
    head = _head(
        prefix, request.model or model.name, options, model, start, with_logprobs=request.num_logprobs is not None
    )
    choices = [
        Choice(
            index,
            model.table.new(visible=shape.visible),
            **_ends(options),
            parser=shape.new_parser(),
        )
        for index in range(options.n)
    ]
    return Plan(
        requests=[_engine_request(head.id, prepared.tokens, sampling, options, endpoints)],
        choices=choices,
        encoder=new_encoder(head, model.table),
        stream=options.stream,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage,
        ignored=prepared.ignored,
    )


async def plan_completion(
    prepared: PreparedCompletion, model: ServedModel, endpoints: tuple[str, ...], start: StreamHead | None = None
) -> Plan:
    """As `plan_chat`. Raises RequestError."""
    request = prepared.request
    options = _begin_as(start, request.common)
    grammar = await shape_completion(request, model)
    logit_bias = resolve_bias(options, model)
    visible = model.table.special_ids if options.show_special else frozenset[int]()
    score_only = request.max_tokens == 0
    head = _head(
        "cmpl-", request.model or model.name, options, model, start, with_logprobs=request.num_logprobs is not None
    )
    requests: list[GenerationRequest] = []
    choices: list[Choice] = []
    for position, (tokens, room) in enumerate(zip(prepared.tokens, prepared.room, strict=True)):
        sampling = to_sampling(
            options,
            logit_bias=logit_bias,
            max_tokens=room,
            num_logprobs=request.num_logprobs,
            eos_token_ids=model.eos_token_ids,
            grammar=grammar,
        )
        wanted = request.num_logprobs if request.echo else None
        requests.append(
            _engine_request(f"{head.id}-{position}", tokens, sampling, options, endpoints, prompt_logprobs=wanted)
        )
        choices += [
            Choice(
                position * options.n + index,
                model.table.new(visible=visible, continues=True),
                **_ends(options),
            )
            for index in range(options.n)
        ]
    encoder = CompletionEncoder(head, model.table)
    plan = Plan(
        requests=requests,
        choices=choices,
        encoder=encoder,
        stream=options.stream,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage,
        ignored=prepared.ignored,
        score_only=score_only,
    )
    if request.echo:
        plan.first_delta = _Echoes(encoder, request.prompts, prepared.tokens, options.n)
    return plan


class _Echoes:
    """Puts the prompts before the texts once their logprobs are there."""

    def __init__(
        self,
        encoder: CompletionEncoder,
        prompts: Sequence[Prompt],
        tokens: Sequence[Tokens],
        n: int,
    ) -> None:
        self._encoder = encoder
        self._prompts = prompts
        self._tokens = tokens
        self._n = n

    def __call__(self, position: int, delta: TokenDelta) -> None:
        prompt = self._prompts[position]
        text = prompt if isinstance(prompt, str) else None
        echo = Echo(text=text, token_ids=self._tokens[position], logprobs=delta.prompt_logprobs)
        for index in range(self._n):
            self._encoder.echoes[position * self._n + index] = echo


def _ends(options: CommonOptions) -> dict[str, Any]:
    """Arguments of a choice: what ends it."""
    return {
        "stops": options.stop,
        "stop_patterns": compile_patterns(options.stop_regex) if options.stop_regex else None,
        "stop_token_ids": options.stop_token_ids,
        "include_stop": options.include_stop,
        "min_tokens": options.min_tokens,
    }


def _begin_as(start: StreamHead | None, options: CommonOptions) -> CommonOptions:
    return options if start is None else dataclasses.replace(options, seed=start.seed)


def _head(
    prefix: str,
    name: str,
    options: CommonOptions,
    model: ServedModel,
    start: StreamHead | None,
    *,
    with_logprobs: bool,
) -> AnswerHead:
    return AnswerHead(
        id=f"{prefix}{secrets.token_hex(16)}" if start is None else start.id,
        created=int(time.time()) if start is None else start.created,
        model=name,
        fingerprint=model.fingerprint,
        service_tier=options.service_tier,
        include_usage=options.include_usage,
        return_token_ids=options.return_token_ids,
        tokens_as_ids=options.tokens_as_ids,
        with_logprobs=with_logprobs,
    )


def _engine_request(
    request_id: str,
    tokens: Tokens,
    sampling: SamplingParams,
    options: CommonOptions,
    endpoints: tuple[str, ...],
    *,
    prompt_logprobs: int | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(tokens),
        sampling=sampling,
        n=options.n,
        priority=options.priority,
        cache_salt=options.cache_salt,
        prefill_endpoints=endpoints,
        prompt_logprobs=prompt_logprobs,
    )
