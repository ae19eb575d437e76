"""From conversations and texts to token ids, by the model's own template and tokenizer.

Templates come with models, or with requests where that is allowed, and run in a sandbox. What a template refuses is the
client's error.

Everything here computes where it is called: `placing` decides in which thread or process that is.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2

from tandem_worker.engine.errors import RequestError
from tandem_worker.model.tokenization.template import choose_template, render_chat
from tandem_worker.server.dialects.openai.chat_request import ChatRequest
from tandem_worker.server.tools.generic import describe_tools, write_calls
from tandem_worker.server.tools.harmony import CHANNEL

if TYPE_CHECKING:
    from tandem_api.launch import ToolForm  # the process that prepares large requests does without what it loads

_PROBE = "tandem_probe_argument"
_REFUSALS = (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError)
"""What a model's template raises for a conversation that it does not take."""


class Prompter:
    """Renders and tokenizes. One per process; any thread. `tools` is how functions get into prompts."""

    def __init__(self, tokenizer: Any, tools: ToolForm = "Auto") -> None:
        self._templates: str | Mapping[str, str] | None = tokenizer.chat_template
        self._special_tokens: Mapping[str, str] = tokenizer.special_tokens_map
        self._own: str | None = None
        """The template where it is not the tokenizer's."""
        self._backend = tokenizer.backend_tokenizer
        # A checkpoint's own settings would cut long texts in silence.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.template = _template_source(self._templates)
        self.takes_tools = "tools" in self.template
        self._object_arguments = self.takes_tools and self._probe_object_arguments()
        self._harmony = CHANNEL in self.template
        self._tools = tools

    def of(self, request: ChatRequest) -> Prompter:
        """The one that renders this request: with the template that it brings, if it does. Raises RequestError."""
        if request.chat_template is None or self._own is not None:
            return self
        if self._harmony:
            raise RequestError(
                "This model's answers have a frame that its own chat template begins: remove 'chat_template'.",
                param="chat_template",
                code="unsupported_parameter",
            )
        found = copy.copy(self)
        found.template = found._own = request.chat_template
        found._object_arguments = True  # of earlier calls, as vLLM hands them over
        return found

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Releases the interpreter's lock but for what grows with the result. Raises RequestError."""
        # The backend is called directly: the wrapper sets padding and truncation on it, which is not thread-safe. And
        # in a batch of one, because its `encode` holds the lock for as long as it takes.
        try:
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:  # so it says of strings that are not text
            raise RequestError("The text contains lone surrogates, which are not valid Unicode.") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, special ones included."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def spell(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it."""
        return [self._backend.id_to_token(token) for token in token_ids]

    def render(self, request: ChatRequest) -> str:
        """The prompt text of a conversation. Raises RequestError."""
        prompter = self.of(request)
        if prompter is not self:
            return prompter.render(request)
        if not self.template:
            raise RequestError(
                "This model has no chat template: use /v1/completions.", param="messages", code="unsupported_endpoint"
            )
        messages, tools = request.messages, request.tools.tools
        if tools and self._tools == "Off":
            raise _refuse_tools("Tools are off for this model: remove 'tools'.")
        if self._own is None and (self._tools == "Generic" or not self.takes_tools):
            messages = self._without_tools(request)
            tools = ()
        if request.documents is not None and "documents" not in self.template:
            raise RequestError(
                "This model's chat template has no place for documents: write them into a message.",
                param="documents",
                code="unsupported_parameter",
            )
        try:
            return self._apply(
                self._prepare(messages),
                tools=[self._define(tool.definition) for tool in tools] or None,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                **self._kwargs(request),
            )
        except Exception as error:
            own = self._own is not None  # a client's program may raise anything
            if isinstance(error, MemoryError | RecursionError) or not (own or isinstance(error, _REFUSALS)):
                raise
            name, param = ("'chat_template'", "chat_template") if own else ("The model's chat template", "messages")
            raise RequestError(
                f"{name} does not accept this conversation: {error}", param=param, code="invalid_conversation"
            ) from error

    def _without_tools(self, request: ChatRequest) -> list[dict[str, Any]]:
        """The messages where the template is not to be asked about tools, or knows none. Raises RequestError."""
        messages = write_calls(request.messages)
        if not request.tools.tools:
            return messages
        required = request.tools.mode == "required"
        if self._tools == "Generic":
            if self._harmony:
                raise _refuse_tools(
                    "This model's answers have a frame of their own, which holds no call in the generic form: remove "
                    "'tools'. Who runs the model sets 'spec.engine.tools' of the InferenceModel to Auto."
                )
        elif self._tools == "Template":
            raise _refuse_tools("This model's chat template has no place for tools: remove 'tools'.")
        elif not required:
            raise _refuse_tools(
                "This model's chat template has no place for tools, so it cannot choose to call one: require a call "
                "with 'tool_choice', or remove 'tools'. Who runs the model can let it choose all the same, with "
                "'spec.engine.tools: Generic' of the InferenceModel."
            )
        return describe_tools(messages, request.tools.tools, required=required)

    def _apply(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        template = choose_template(self._templates, self._own, tools=kwargs.get("tools") is not None)
        return render_chat(template, messages, **{**self._special_tokens, **kwargs})

    def _prepare(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Raises RequestError for what the template would leave out in silence."""
        prepared = self._with_arguments(messages, as_objects=self._object_arguments)
        if self._harmony:
            for index, message in enumerate(prepared):
                _to_harmony(message, f"messages[{index}]")
        return prepared

    def _define(self, definition: dict[str, Any]) -> dict[str, Any]:
        """Harmony templates print a description whether there is one or not."""
        if not self._harmony:
            return definition
        return {**definition, "function": {"description": "", **definition["function"]}}

    def takes_effort(self, effort: str | None) -> bool:
        """Whether a conversation can be rendered for this reasoning effort."""
        if effort is None or "reasoning_effort" in self.template or "enable_thinking" in self.template:
            return True
        return effort == "none" and "<think>" not in self.template

    def _kwargs(self, request: ChatRequest) -> dict[str, Any]:
        """Template arguments; `reasoning_effort` becomes whichever of them the template knows."""
        kwargs = dict(request.template_kwargs)
        if request.documents is not None:
            kwargs["documents"] = request.documents
        effort = request.reasoning_effort
        if effort is None:
            return kwargs
        if "reasoning_effort" in self.template:
            kwargs.setdefault("reasoning_effort", effort)
        elif "enable_thinking" in self.template:
            kwargs.setdefault("enable_thinking", effort != "none")
        elif not self.takes_effort(effort):
            raise RequestError(
                "This model's reasoning effort cannot be chosen: remove 'reasoning_effort'.",
                param="reasoning_effort",
                code="unsupported_parameter",
            )
        return kwargs

    @staticmethod
    def _with_arguments(messages: Sequence[Mapping[str, Any]], *, as_objects: bool) -> list[dict[str, Any]]:
        """Copies in which the arguments of tool calls are objects or JSON text, as the template expects them."""
        return [
            {**message, "tool_calls": [_with_argument_form(call, as_objects) for call in message["tool_calls"]]}
            if "tool_calls" in message
            else dict(message)
            for message in messages
        ]

    def _probe_object_arguments(self) -> bool:
        """Whether the template wants arguments as objects: some print them as JSON, others join them as text."""
        function = {"name": "probe", "arguments": json.dumps({_PROBE: "x"})}
        call = {"id": "call_probe00", "type": "function", "function": function}
        conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            text = self._apply(self._with_arguments(conversation, as_objects=True))
        except Exception:  # a template may fail in any way; then it gets what OpenAI's API has: text
            return False
        # As Python writes a dictionary: the template expected text.
        return _PROBE in text and f"'{_PROBE}'" not in text


def _refuse_tools(message: str) -> RequestError:
    return RequestError(message, param="tools", code="unsupported_parameter")


def _with_argument_form(call: Mapping[str, Any], as_objects: bool) -> dict[str, Any]:
    function = dict(call["function"])
    if as_objects:
        # A model's malformed call, sent back, stays text.
        with contextlib.suppress(ValueError):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def _to_harmony(message: dict[str, Any], path: str) -> None:
    """Reasoning is `thinking` there, and stands in one place with what was said before a call."""
    if message["role"] == "system" and path != "messages[0]":
        raise RequestError(
            "This model has one system (or developer) message, at the beginning: move its text there.",
            param=f"{path}.role",
            code="invalid_conversation",
        )
    thinking = message.pop("reasoning_content", None)
    calls = message.get("tool_calls", ())
    if len(calls) > 1:
        raise RequestError(
            f"This model calls one function per message, but '{path}' has {len(calls)} calls: make a message of each.",
            param=f"{path}.tool_calls",
            code="invalid_conversation",
        )
    if calls and thinking and message["content"]:
        thinking, message["content"] = f"{thinking}\n\n{message['content']}", ""
    if thinking:
        message["thinking"] = thinking


def _template_source(templates: str | Mapping[str, str] | None) -> str:
    """Source of the chat template; the tool-use one where a tokenizer has several."""
    if isinstance(templates, Mapping):
        return templates.get("tool_use") or templates.get("default") or ""
    return templates or ""
