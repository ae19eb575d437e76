"""A chat completion request: the body, checked and typed. Pure.

Raises RequestError for anything that OpenAI's API does not know, and for what it knows and this server does not have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tandem_worker.server.dialects.fields import Fields, refuse
from tandem_worker.server.dialects.openai.messages import parse_messages, parse_prediction
from tandem_worker.server.dialects.openai.options import API_DEFAULTS, CommonOptions, SamplingDefaults, parse_common
from tandem_worker.server.dialects.openai.other_servers import refuse_other_servers
from tandem_worker.server.dialects.openai.output_format import ResponseFormat, parse_output_format
from tandem_worker.server.dialects.openai.toolspec import parse_tools
from tandem_worker.server.tools.contract import ToolOptions

MAX_TOP_LOGPROBS = 20
MAX_TEMPLATE_KWARGS = 64
MAX_TEMPLATE_LENGTH = 64 * 1024
_RESERVED_KWARGS = frozenset({
    "messages", "conversation", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "chat_template",
    "return_tensors", "return_dict", "padding", "truncation", "max_length", "documents", "tokenizer_kwargs",
    "return_assistant_tokens_mask",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    model: str | None
    """None: whichever is served."""
    messages: list[dict[str, Any]]
    common: CommonOptions
    tools: ToolOptions
    response_format: ResponseFormat
    max_tokens: int | None
    max_tokens_param: str
    """The field that `max_tokens` came from: errors name it."""
    num_logprobs: int | None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    """In place of the model's own."""
    documents: list[Any] | None = None
    """For templates that print them."""
    add_special_tokens: bool = False
    """Those of the tokenizer, beside those that the template writes."""
    prediction: str = ""
    """What the client expects the answer to be."""


def parse_chat(
    body: object, vocab_size: int, *, sampling: SamplingDefaults = API_DEFAULTS, lenient: bool = False
) -> ChatRequest:
    """The body of a chat request, every field checked. Raises RequestError naming the field."""
    fields = Fields(body, lenient=lenient)
    model = fields.string("model")
    messages = parse_messages(fields)
    tools = parse_tools(fields)
    max_tokens, param = _max_tokens(fields)
    add_generation_prompt = fields.boolean("add_generation_prompt", default=True)
    continue_final = fields.boolean("continue_final_message")
    if continue_final:
        # Continuing leaves no room for the header of a new message; that default gives way, an explicit wish does not.
        add_generation_prompt = False
        if messages[-1]["role"] != "assistant":
            refuse(
                "continue_final_message",
                "'continue_final_message' needs an assistant message at the end of 'messages'.",
            )
    _refuse_unsupported(fields)
    request = ChatRequest(
        model=model,
        messages=messages,
        tools=tools,
        max_tokens=max_tokens,
        max_tokens_param=param,
        num_logprobs=_logprobs(fields),
        response_format=parse_output_format(fields),
        reasoning_effort=fields.choice(
            "reasoning_effort", ("none", "minimal", "low", "medium", "high", "xhigh", "max")
        ),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final,
        template_kwargs=_template_kwargs(fields),
        chat_template=fields.string("chat_template", max_length=MAX_TEMPLATE_LENGTH, allow_empty=False),
        documents=fields.array("documents") or None,
        add_special_tokens=fields.boolean("add_special_tokens"),
        prediction=parse_prediction(fields),
        common=parse_common(fields, vocab_size, sampling),
    )
    answer = request.response_format
    if answer.definition and tools.mode != "none":
        refuse(answer.name, "A grammar and 'tools' exclude each other: leave one out.")
    if answer.kind == "structural_tag" and (tools.narrowed or any(tool.strict for tool in tools.tools)):
        refuse(
            answer.name,
            f"'{answer.name}' holds calls to the form of its tags: leave 'strict' out of the tools, and 'tool_choice' "
            "'auto' or 'none'.",
        )
    if answer.kind != "text" and tools.mode == "required":
        refuse(answer.name, f"'{answer.name}' and a required tool call exclude each other: leave one out.")
    fields.finish()
    return request


def _refuse_unsupported(fields: Fields) -> None:
    fields.unsupported("audio", "This model does not produce audio: remove 'audio'.")
    fields.unsupported(
        "modalities", "This model produces text only: leave 'modalities' out or [\"text\"].", harmless=[["text"]]
    )
    fields.unsupported("web_search_options", "Web search is not supported: remove 'web_search_options'.")
    fields.unsupported(
        "verbosity", "'verbosity' is not supported: leave it out or 'medium'.", harmless=["medium"], ignorable=True
    )
    fields.unsupported(
        "prompt_cache_retention",
        "'prompt_cache_retention' cannot be chosen: leave it out or 'in_memory'.",
        harmless=["in_memory", "in-memory"],
        ignorable=True,
    )
    fields.unsupported("prompt_cache_options", "Prompt caching cannot be configured: remove 'prompt_cache_options'.")
    fields.unsupported("moderation", "This server does not moderate: remove 'moderation'.")
    fields.unsupported("suffix", "'suffix' is not an option of chat completions.")
    fields.unsupported(
        "echo", "'echo' is not an option of chats: continue a message with 'continue_final_message'.", harmless=[False]
    )
    fields.unsupported("best_of", "'best_of' is not supported: leave it out or 1.", harmless=[1])
    refuse_other_servers(fields)


def _max_tokens(fields: Fields) -> tuple[int | None, str]:
    old = fields.integer("max_tokens", minimum=1)
    new = fields.integer("max_completion_tokens", minimum=1)
    if old is not None and new is not None and old != new:
        refuse("max_tokens", "'max_tokens' and 'max_completion_tokens' differ: give one of them.")
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


def _logprobs(fields: Fields) -> int | None:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", minimum=0, maximum=MAX_TOP_LOGPROBS)
    if top is not None and not wanted:
        refuse("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    return (top or 0) if wanted else None


def _template_kwargs(fields: Fields) -> dict[str, Any]:
    kwargs = fields.raw_object("chat_template_kwargs") or {}
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        refuse("chat_template_kwargs", f"At most {MAX_TEMPLATE_KWARGS} template arguments are supported.")
    for key in kwargs:
        if key in _RESERVED_KWARGS or not key.isidentifier():
            refuse(
                f"chat_template_kwargs.{key}", f"'{key}' cannot be set through 'chat_template_kwargs'.", "invalid_value"
            )
    return kwargs
