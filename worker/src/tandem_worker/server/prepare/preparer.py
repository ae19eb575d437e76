"""From the body of a request to its tokens: parsed, checked, rendered, tokenized and known to fit.

All of it can take long: a body of 8 MiB may be four million objects, or a text of two million tokens. So nothing here
knows the event loop, and `job` offers the same functions to a process of their own, in which requests are prepared
that would hold up everybody else (`placing` decides).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from tandem_worker.engine.errors import RequestError
from tandem_worker.server.dialects.fields import Fields, wrong_type
from tandem_worker.server.dialects.messages import request as messages
from tandem_worker.server.dialects.openai.chat_request import ChatRequest
from tandem_worker.server.dialects.openai.completion_request import (
    check_token_ids,
    parse_completion,
)
from tandem_worker.server.dialects.openai.pooling_requests import (
    parse_rerank,
    parse_score,
)
from tandem_worker.server.dialects.renaming import rename, renamed_errors
from tandem_worker.server.dialects.responses import request as responses
from tandem_worker.server.prepare.draft import (
    Draft,
    Prepared,
    PreparedChat,
    PreparedCompletion,
    Text,
    Tokens,
    cut_count,
    cut_front,
    fill_in,
)
from tandem_worker.server.prepare.fitting import LengthBound
from tandem_worker.server.prepare.pooling import check_text_input, draft_comparison, draft_embedding
from tandem_worker.server.prepare.prompting import Prompter
from tandem_worker.server.prepare.rules import AnswerLimit, PromptRules
from tandem_worker.server.tools.harmony import START

_END_CHARACTERS = 64
"""Marks that a prompt may end in are shorter."""


class NotHereError(Exception):
    """The request runs what its client wrote: a process of its own prepares it."""


class Preparer:
    """Prepares requests for one model. Stateless; any thread. `apart`: in a process that one request may use up."""

    def __init__(
        self, prompter: Prompter, rules: PromptRules, bound: LengthBound | None, *, apart: bool = False
    ) -> None:
        self._prompter = prompter
        self._rules = rules
        self._bound = bound
        self._apart = apart
        self._drafts: Mapping[str, Callable[[Any, bool], Draft]] = {
            "chat": self._chat,
            "completion": self._completion,
            "responses": self._responses,
            "messages": self._messages,
            "count": self._count,
            "embedding": lambda body, lenient: draft_embedding(rules, body),
            "score": lambda body, lenient: draft_comparison(rules, parse_score(body)),
            "rerank": lambda body, lenient: draft_comparison(rules, parse_rerank(body)),
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
        }

    def prepare(self, kind: str, body: bytes, *, lenient: bool = False) -> Prepared:
        """Raises RequestError, NotHereError."""
        draft = self.draft(kind, body, lenient=lenient)
        return draft.finish(self.encode(draft))

    def draft(self, kind: str, body: bytes, *, lenient: bool = False) -> Draft:
        """Parse, check and render. `lenient`: do without some options that are not supported. Raises RequestError,
        NotHereError.
        """
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            if "Not enough memory" in str(error):
                raise MemoryError from error
            raise RequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from error
        try:
            return self._drafts[kind](value, lenient)
        except RecursionError as error:
            raise RequestError("The request is nested too deeply.", code="invalid_json") from error

    def encode(self, draft: Draft) -> list[Tokens]:
        """Tokenize; most of the time is spent without the interpreter's lock. Raises RequestError."""
        return [self._encode(each) for each in draft.texts]

    def _encode(self, each: Text) -> Tokens:
        # A character is four bytes at most.
        if self._bound is not None and 4 * len(each.text) > self._rules.max_model_len:
            each.check(self._bound.fewest_tokens(each.text), True)
        tokens = self._prompter.encode(each.text, add_special_tokens=each.add_special_tokens)
        each.check(len(tokens), False)
        return tokens

    # -- one for each endpoint -----------------------------------------------------------------------------------------

    def _chat(self, body: Any, lenient: bool) -> Draft:
        rules = self._rules
        request = self._settle_chat(rules.parse_chat(body, lenient=lenient), lenient=lenient)
        text = self._prompter.render(request)
        most = rules.cut(request.common.truncate_prompt, request.max_tokens)
        limit = AnswerLimit(rules, request.max_tokens, lenient=lenient, name=request.max_tokens_param)

        def check(num_tokens: int, least: bool) -> int:
            return limit.room(cut_count(num_tokens, most), param="messages", least=least)

        def finish(encoded: Sequence[Tokens]) -> PreparedChat:
            tokens = cut_front(encoded[0], most)
            room = limit.room(len(tokens), param="messages")
            ignored = [*request.common.ignored, *limit.ignored]
            return PreparedChat(
                request=request,
                tokens=tokens,
                room=room,
                prompt_end=_end_of(text),
                ignored=ignored,
                prediction=encoded[1] if request.prediction else (),
            )

        texts = [Text(text, request.add_special_tokens, check), *self._prediction(request.prediction)]
        return Draft(texts, finish)

    def _prediction(self, text: str) -> list[Text]:
        """To be tokenized after the prompts, where there is any."""
        return [Text(text, False, check_text_input(self._rules, "prediction", None))] if text else []

    def _responses(self, body: Any, lenient: bool) -> Draft:
        chat, echo, places = responses.translate(body, self._rules.sampling)
        with renamed_errors((), places):
            draft = self._chat(chat, lenient)

        def finish(encoded: Sequence[Tokens]) -> Prepared:
            prepared = draft.finish(encoded)
            assert isinstance(prepared, PreparedChat)
            ignored = [rename(name, responses.RENAMED) for name in prepared.ignored]
            return dataclasses.replace(prepared, echo=echo, ignored=ignored)

        return Draft(draft.texts, finish)

    def _messages(self, body: Any, lenient: bool) -> Draft:
        chat, ignored, places = messages.translate(body, lenient=lenient)
        with renamed_errors((), places):
            draft = self._chat(chat, lenient)

        def finish(encoded: Sequence[Tokens]) -> Prepared:
            prepared = draft.finish(encoded)
            assert isinstance(prepared, PreparedChat)
            more = [rename(name, messages.RENAMED, places) for name in prepared.ignored]
            return dataclasses.replace(prepared, ignored=[*ignored, *more])

        return Draft(draft.texts, finish)

    def _count(self, body: Any, lenient: bool) -> Draft:
        """As `_tokenize`, of a Messages request."""
        chat, _, places = messages.translate(body, counting=True, lenient=lenient)
        with renamed_errors((), places):
            draft = self._tokenize(chat, lenient)
        return Draft(draft.texts, lambda encoded: orjson.dumps({"input_tokens": len(encoded[0])}))

    def _settle_chat(self, request: ChatRequest, *, lenient: bool) -> ChatRequest:
        """With what the model itself says about it. Raises RequestError, NotHereError."""
        rules = self._rules
        request = dataclasses.replace(request, model=rules.name if request.model is None else request.model)
        rules.check_name(request.model or "")
        rules.check_template(request)
        rules.check_schemas(request)
        if request.chat_template is not None and not self._apart:
            raise NotHereError
        if lenient and not self._prompter.of(request).takes_effort(request.reasoning_effort):
            ignored = (*request.common.ignored, "reasoning_effort")
            common = dataclasses.replace(request.common, ignored=ignored)
            request = dataclasses.replace(request, reasoning_effort=None, common=common)
        return request

    def _completion(self, body: Any, lenient: bool) -> Draft:
        rules = self._rules
        request = parse_completion(body, rules.vocab_size, sampling=rules.sampling, lenient=lenient)
        request = dataclasses.replace(request, model=rules.name if request.model is None else request.model)
        rules.check_name(request.model or "")
        rules.check_answer_schema(request.response_format)
        most = rules.cut(request.common.truncate_prompt, request.max_tokens)
        limit = AnswerLimit(rules, request.max_tokens, lenient=lenient, name="max_tokens")

        def check(num_tokens: int, least: bool) -> int:
            return limit.room(cut_count(num_tokens, most), param="prompt", least=least)

        def finish(encoded: Sequence[Tokens]) -> PreparedCompletion:
            # OpenAI takes an empty prompt as the beginning of a document.
            prompts = encoded[: len(texts)]
            tokens = [cut_front(each, most) or (rules.start_token,) for each in fill_in(request.prompts, prompts)]
            room = [limit.room(len(each), param="prompt") for each in tokens]
            ignored = [*request.common.ignored, *limit.ignored]
            prediction = encoded[-1] if request.prediction else ()
            return PreparedCompletion(request=request, tokens=tokens, room=room, ignored=ignored, prediction=prediction)

        for prompt in request.prompts:
            if not isinstance(prompt, str):
                check(len(prompt), False)
        texts = [each for each in request.prompts if isinstance(each, str)]
        prompts = [Text(each, request.add_special_tokens, check) for each in texts]
        return Draft([*prompts, *self._prediction(request.prediction)], finish)

    def _tokenize(self, body: Any, lenient: bool) -> Draft:
        """Tokenize a `prompt`, or `messages` with the options of a chat request."""
        rules = self._rules
        if isinstance(body, dict) and "messages" in body:
            spelled = Fields({"return_token_strs": body.get("return_token_strs")}).boolean("return_token_strs")
            # The same parser as for a chat: what is counted here is what a chat would be charged.
            body = {key: value for key, value in body.items() if key != "return_token_strs"}
            chat = self._settle_chat(rules.parse_chat(body, lenient=lenient), lenient=lenient)
            text, special, path = self._prompter.render(chat), chat.add_special_tokens, "messages"
        else:
            fields = Fields(body)
            name = fields.string("model")
            text, path = fields.required_string("prompt"), "prompt"
            special = fields.boolean("add_special_tokens", default=True)
            spelled = fields.boolean("return_token_strs")
            fields.finish()
            if name is not None:
                rules.check_name(name)

        def check(num_tokens: int, least: bool) -> None:
            if least:  # a text that is known not to fit is not counted; one that turns out not to fit is
                rules.check_input(num_tokens, param=path, least=True)

        def finish(encoded: Sequence[Tokens]) -> bytes:
            (tokens,) = encoded
            told = {"count": len(tokens), "max_model_len": rules.max_model_len, "tokens": tokens}
            return orjson.dumps({**told, "token_strs": self._prompter.spell(tokens) if spelled else None})

        return Draft([Text(text, special, check)], finish)

    def _detokenize(self, body: Any, lenient: bool) -> Draft:
        rules = self._rules
        fields = Fields(body)
        name = fields.string("model")
        raw = fields.required("tokens")
        fields.finish()
        if name is not None:
            rules.check_name(name)
        if not isinstance(raw, list):
            wrong_type("tokens", "an array of token ids", raw)
        if len(raw) > rules.max_model_len:
            raise RequestError(f"'tokens' has {len(raw)} ids; at most {rules.max_model_len} are taken.", param="tokens")
        tokens = check_token_ids(raw, "tokens", rules.vocab_size) if raw else ()
        return Draft([], lambda _: orjson.dumps({"prompt": self._prompter.decode(tokens)}))


def _end_of(prompt: str) -> str:
    cut = max(0, len(prompt.rstrip()) - _END_CHARACTERS)
    start = prompt.rfind(START)
    return prompt[cut if start < 0 else min(cut, start) :]
