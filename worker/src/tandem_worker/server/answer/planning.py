"""From a parsed request to the plan that is run: tokens, limits, choices, encoder."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.guess.literals import LiteralFollower, LiteralText
from tandem_worker.engine.schedule.params import GenerationRequest, SamplingParams, TokenDelta
from tandem_worker.server.answer.answerer import Plan
from tandem_worker.server.answer.journal import StreamHead
from tandem_worker.server.answer.shaping import find_literals, resolve_bias, shape_answer, shape_completion
from tandem_worker.server.dialects.contract import AnswerHead, Encoder
from tandem_worker.server.dialects.openai.chunks import ChatEncoder, CompletionEncoder, Echo
from tandem_worker.server.dialects.openai.completion_request import CompletionRequest
from tandem_worker.server.dialects.openai.logprobs import PromptScores
from tandem_worker.server.dialects.openai.options import CommonOptions, to_sampling
from tandem_worker.server.prepare.draft import PreparedChat, PreparedCompletion, Tokens
from tandem_worker.server.prepare.served_model import ServedModel
from tandem_worker.server.text.choice import Choice
from tandem_worker.server.text.detokenizer import TokenTable
from tandem_worker.server.text.prediction import Prediction

MAX_SCORES = 1 << 18
"""What one answer repeats of its prompts, in tokens and logprobs: 20 MB as JSON."""
MAX_IDS = 1 << 22
"""Ids of prompt tokens in one answer: 32 MB as JSON."""


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
    prediction = Prediction(prepared.prediction) if len(prepared.prediction) else None
    head = _head(
        prefix, request.model or model.name, options, model, start, with_logprobs=request.num_logprobs is not None
    )
    choices = [
        Choice(
            index,
            model.table.new(visible=shape.visible),
            **_ends(options),
            parser=shape.new_parser(),
            answer_id=head.id,
            prediction=None if prediction is None else prediction.begin(),
        )
        for index in range(options.n)
    ]
    _check_repeats(options, [prepared.tokens])
    encoder = new_encoder(head, model.table)
    engine_request = _engine_request(
        head.id, prepared.tokens, sampling, options, endpoints, prepared.prediction,
        prompt_logprobs=options.prompt_logprobs, literals=_follow(shape.literals, model),
    )  # fmt: skip
    return Plan(
        requests=[engine_request],
        choices=choices,
        encoder=encoder,
        stream=options.stream,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage,
        ignored=prepared.ignored,
        first_delta=_keep_scores(encoder, options.prompt_logprobs),
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
    _check_repeats(options, prepared.tokens, echoed=(1 + (request.num_logprobs or 0)) if request.echo else 0)
    _check_ids(options, prepared.tokens)
    predicted = tuple(prepared.prediction)  # the same for all prompts
    prediction = Prediction(predicted) if predicted else None
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
        asked = (request.num_logprobs if request.echo else None, options.prompt_logprobs)
        wanted = max((each for each in asked if each is not None), default=None)
        requests.append(
            _engine_request(
                f"{head.id}-{position}",
                tokens,
                sampling,
                options,
                endpoints,
                predicted,
                prompt_logprobs=wanted,
                literals=_follow(find_literals(grammar), model),
            )
        )
        choices += [
            Choice(
                position * options.n + index,
                model.table.new(visible=visible, continues=True),
                **_ends(options),
                prediction=None if prediction is None else prediction.begin(),
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
    if request.echo or options.prompt_logprobs is not None:
        plan.first_delta = _Prompts(encoder, request, prepared.tokens)
    return plan


def _check_repeats(options: CommonOptions, prompts: Sequence[Tokens], *, echoed: int = 0) -> None:
    """`echoed`: entries for each token that is repeated before the text. Raises RequestError where the answer would
    have too many of them, and of logprobs of the prompts: every choice has its own.
    """
    scores = 0 if options.prompt_logprobs is None else 1 + options.prompt_logprobs
    tokens = sum(map(len, prompts))
    count = tokens * (echoed + scores) * options.n
    if count > MAX_SCORES:
        told = [name for name, asked in (("1 + 'logprobs'", echoed), ("1 + 'prompt_logprobs'", scores)) if asked]
        raise RequestError(
            f"The answer would repeat {count} tokens and logprobs of the prompt ({tokens} tokens, times "
            f"{' and '.join(told)}, times 'n'); at most {MAX_SCORES} are told: send fewer or shorter prompts.",
            param="echo" if echoed > scores else "prompt_logprobs",
            code="invalid_value",
        )


def _check_ids(options: CommonOptions, prompts: Sequence[Tokens]) -> None:
    """Every choice of a completion repeats the ids of its prompt. Raises RequestError where those are too many."""
    count = sum(map(len, prompts)) * options.n
    if options.return_token_ids and count > MAX_IDS:
        raise RequestError(
            f"The answer would repeat {count} ids of prompt tokens ({count // options.n} tokens, times 'n'); at most "
            f"{MAX_IDS} are told: send fewer or shorter prompts, a smaller 'n', or no 'return_token_ids'.",
            param="return_token_ids",
            code="invalid_value",
        )


def _keep_scores(encoder: Encoder, num_top: int | None) -> Callable[[int, TokenDelta], None] | None:
    if num_top is None or not isinstance(encoder, ChatEncoder):
        return None

    def keep(position: int, delta: TokenDelta) -> None:
        encoder.prompt_scores = PromptScores(logprobs=delta.prompt_logprobs or (), num_top=num_top)

    return keep


class _Prompts:
    """Puts the prompts before the texts, and their logprobs beside them, once those are there."""

    def __init__(self, encoder: CompletionEncoder, request: CompletionRequest, tokens: Sequence[Tokens]) -> None:
        self._encoder = encoder
        self._request = request
        self._tokens = tokens

    def __call__(self, position: int, delta: TokenDelta) -> None:
        request, options, scores = self._request, self._request.common, delta.prompt_logprobs
        choices = range(position * options.n, (position + 1) * options.n)
        if options.prompt_logprobs is not None:
            told = PromptScores(logprobs=scores or (), num_top=options.prompt_logprobs)
            self._encoder.prompt_scores.update(dict.fromkeys(choices, told))
        if request.echo:
            prompt = request.prompts[position]
            text = prompt if isinstance(prompt, str) else None
            echo = Echo(text=text, token_ids=self._tokens[position], logprobs=scores, num_top=request.num_logprobs or 0)
            self._encoder.echoes.update(dict.fromkeys(choices, echo))


def _ends(options: CommonOptions) -> dict[str, Any]:
    """Arguments of a choice: what ends it, and what is told of that."""
    return {
        "stops": options.stop,
        "stop_token_ids": options.stop_token_ids,
        "include_stop": options.include_stop,
        "min_tokens": options.min_tokens,
        "every_logprob": options.return_token_ids,
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
    prediction: Tokens,
    *,
    prompt_logprobs: int | None = None,
    literals: Callable[[], LiteralFollower] | None = None,
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
        prediction=tuple(prediction),
        literals=literals,
    )


def _follow(literals: LiteralText | None, model: ServedModel) -> Callable[[], LiteralFollower] | None:
    """Makes what follows a choice through the texts of its grammar; None where there are none."""
    return None if literals is None or not literals.words else partial(LiteralFollower, literals, model.spelling)
