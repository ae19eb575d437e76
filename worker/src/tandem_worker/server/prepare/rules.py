"""What a model says about prompts: who may ask, what may be asked, how long prompts and answers may be. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem_worker.engine.errors import ContextLengthError, RequestError
from tandem_worker.server.dialects.fields import refuse
from tandem_worker.server.dialects.openai.chat_request import ChatRequest, parse_chat
from tandem_worker.server.dialects.openai.options import API_DEFAULTS, SamplingDefaults
from tandem_worker.server.dialects.openai.output_format import ResponseFormat
from tandem_worker.server.structured.contract import GrammarError
from tandem_worker.server.structured.limits import GrammarLimits

if TYPE_CHECKING:
    from tandem_api.launch import ToolForm  # the process that prepares large requests does without what it loads


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRules:
    """What a model says about prompts. Plain data."""

    name: str
    vouched: bool = False
    """Who may ask has checked the name that a request gives: this worker takes whatever it is."""
    tools: ToolForm = "Auto"
    request_templates: bool = False
    """Requests may bring their chat template."""
    max_model_len: int
    vocab_size: int
    start_token: int
    """Stands for an empty prompt."""
    embedding_size: int | None
    """None: the model generates text."""
    grammar_limits: GrammarLimits
    sampling: SamplingDefaults = API_DEFAULTS

    def parse_chat(self, body: object, *, lenient: bool) -> ChatRequest:
        """Raises RequestError."""
        return parse_chat(body, self.vocab_size, sampling=self.sampling, lenient=lenient)

    def check_name(self, name: str) -> None:
        """Raises RequestError (404, `model_not_found`) when another model than this one is asked for.

        With `vouched` every name is right: whoever sent the request here has checked it.
        """
        if not self.vouched and name != self.name:
            raise RequestError(
                f"The model '{name}' does not exist here. This server serves '{self.name}'.",
                param="model",
                code="model_not_found",
                status=404,
            )

    def check_template(self, request: ChatRequest) -> None:
        """Raises RequestError where the request may not bring the chat template that it brings."""
        if request.chat_template is None:
            return
        if not self.request_templates:
            refuse(
                "chat_template",
                "Chat templates of a client's own are off for this model: remove 'chat_template', and the model's own "
                "is used. Who runs the model turns them on with 'requestChatTemplates: true' in 'spec.engine' of the "
                "InferenceModel.",
                "unsupported_parameter",
            )
        if request.tools.tools:
            refuse(
                "chat_template",
                "'chat_template' and 'tools' exclude each other, because calls are read as the model's own template "
                "asks for them: leave one out.",
            )

    def check_schemas(self, request: ChatRequest) -> None:
        """Refuse schemas that are too large or deep for whatever reads them next, the template too.

        Raises RequestError.
        """
        self.check_answer_schema(request.response_format)
        for index, tool in enumerate(request.tools.tools):
            self._check_schema(
                tool.parameters, "Invalid 'parameters' schema of a function", f"tools[{index}].function.parameters"
            )

    def check_answer_schema(self, answer: ResponseFormat) -> None:
        """Raises RequestError."""
        self._check_schema(answer.schema, f"Invalid schema for {answer.name}", answer.content_path)

    def _check_schema(self, schema: object, problem: str, param: str) -> None:
        try:
            self.grammar_limits.check_schema(schema)
        except GrammarError as error:
            raise RequestError(f"{problem}: {error}.", param=param, code="invalid_json_schema") from error

    def cut(self, truncate: int | None, max_tokens: int | None) -> int | None:
        """Tokens that are taken of a prompt, from its end; None: all. `truncate` -1 leaves room for `max_tokens`."""
        if truncate is None or truncate > 0:
            return truncate
        return max(1, self.max_model_len - (1 if max_tokens is None else max_tokens))

    def room(self, num_prompt_tokens: int, max_tokens: int | None, *, param: str, least: bool = False) -> int:
        """The allowed output. Raises ContextLengthError when prompt plus `max_tokens` do not fit.

        `least`: the prompt has this many tokens or more.
        """
        limit = self.max_model_len
        if num_prompt_tokens + (1 if max_tokens is None else max_tokens) > limit:
            wanted = "and leaves no room for an answer" if max_tokens is None else f"and {max_tokens} were requested"
            raise ContextLengthError(
                f"This model's context length is {limit} tokens. "
                f"The prompt has {'at least ' if least else ''}{num_prompt_tokens} tokens {wanted}.",
                param=param,
            )
        return limit - num_prompt_tokens if max_tokens is None else max_tokens

    def check_input(self, num_tokens: int, *, param: str, least: bool = False) -> None:
        """Hold a text that gets no answer to the context length. Raises ContextLengthError."""
        if num_tokens > self.max_model_len:
            raise ContextLengthError(
                f"This model's context length is {self.max_model_len} tokens, but '{param}' has "
                f"{'at least ' if least else ''}{num_tokens}.",
                param=param,
            )


class AnswerLimit:
    """How long an answer may be. A lenient client gets what fits where it asks for more."""

    def __init__(self, rules: PromptRules, max_tokens: int | None, *, lenient: bool, name: str) -> None:
        self._rules = rules
        self._max_tokens = max_tokens
        self._lenient = lenient
        self._name = name
        self.ignored: tuple[str, ...] = ()
        """The field that asked for more than fits."""

    def room(self, num_prompt_tokens: int, *, param: str, least: bool = False) -> int:
        """As `PromptRules.room`."""
        max_tokens, fits = self._max_tokens, self._rules.max_model_len - num_prompt_tokens
        if self._lenient and max_tokens is not None and max_tokens > fits > 0:
            self.ignored = self.ignored if least else (self._name,)
            return fits
        return self._rules.room(num_prompt_tokens, max_tokens, param=param, least=least)
