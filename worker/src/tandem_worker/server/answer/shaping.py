"""The shape of a chat answer: which tokens are allowed (grammar), and how its text is taken apart (parser)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.guess.literals import LiteralText
from tandem_worker.engine.schedule.params import GrammarFactory
from tandem_worker.server.dialects.fields import refuse
from tandem_worker.server.dialects.openai.chat_request import ChatRequest
from tandem_worker.server.dialects.openai.completion_request import CompletionRequest
from tandem_worker.server.dialects.openai.options import CommonOptions
from tandem_worker.server.dialects.openai.output_format import ResponseFormat
from tandem_worker.server.prepare.served_model import ServedModel
from tandem_worker.server.structured.compiler import MOST_READ, REQUEST_SECONDS, GrammarCompiler, write_structural_tags
from tandem_worker.server.structured.contract import GrammarError, GrammarUnavailableError
from tandem_worker.server.structured.grammar import AfterReasoningFactory, TokenGrammarFactory
from tandem_worker.server.structured.limits import GrammarLimits, check_types
from tandem_worker.server.structured.token_masks import AllowedTokens, BadWords
from tandem_worker.server.text import reasoning
from tandem_worker.server.text.output import TextParser
from tandem_worker.server.tools.contract import Tool, ToolOptions
from tandem_worker.server.tools.formats import GENERIC_FORMAT, ToolFormat, build_grammar
from tandem_worker.server.wire.http import ServiceError

_MAX_QUOTED = 8
_LITTLE = GrammarLimits(text_bytes=MOST_READ, values=2000, depth=30)
"""Schemas whose texts are read for guesses alone, on the event loop: the checks take a millisecond at the most, and the
reading, which the first of many equal ones pays, as `MOST_READ` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    grammar: GrammarFactory | None
    literals: LiteralText | None
    """The literal texts of the grammar."""
    new_parser: Callable[[], TextParser | None]
    visible: frozenset[int]
    """Special tokens whose text the parser reads."""


async def shape_completion(request: CompletionRequest, model: ServedModel) -> GrammarFactory | None:
    """The grammar of a text that goes on from a prompt. Raises RequestError, ServiceError."""
    answer = request.response_format
    if answer.kind == "text":
        return _named_tokens(request.common, model)
    work = _Compiling(model.grammars, time.monotonic() + REQUEST_SECONDS)
    _check_options(request.common)
    if answer.definition or answer.tags is not None:
        return await _free_grammar(answer, model, None, work)
    return await _answer_grammar(answer, work)


def find_literals(grammar: GrammarFactory | None) -> LiteralText | None:
    """The literal texts of a grammar, where it is one of texts."""
    return grammar.literals if isinstance(grammar, TokenGrammarFactory) else None


def _read_calls(request: ChatRequest, model: ServedModel, tool_format: ToolFormat | None) -> LiteralText | None:
    """The texts of calls that an answer may have and nothing holds it to; None where nothing is known of them."""
    if tool_format is None or request.tools.mode != "auto" or not model.guesses:
        return None
    tools = request.tools
    schemas = [tool.parameters for tool in tools.callable_tools]
    try:
        _LITTLE.check_schema(schemas)
        names = [tool.name for tool in tools.callable_tools]
        source = orjson.dumps([tool_format.name, tools.parallel, names, schemas])
    except (GrammarError, orjson.JSONEncodeError):  # many functions, or numbers of any length: nobody asked for that
        return None
    return model.grammars.read_literals(
        source, lambda: build_grammar(tool_format, tools, model.vocabulary, most_bytes=MOST_READ)
    )


def _named_tokens(options: CommonOptions, model: ServedModel) -> GrammarFactory | None:
    """Holds an answer without a grammar to the tokens that the request allows. Raises RequestError."""
    if options.allowed_token_ids is None:
        return bad_words(options, model)
    if options.bad_words:
        raise RequestError("'bad_words' is not allowed with 'allowed_token_ids'.", param="bad_words")
    return AllowedTokens(options.allowed_token_ids, model.vocab_size)


async def shape_answer(request: ChatRequest, model: ServedModel, prompt: str) -> AnswerShape:
    """`prompt` is the end of the rendered conversation, from the last message's header on. Raises RequestError."""
    tool_format = _tool_format(request, model)
    inside = model.reasons and prompt.rstrip().endswith(reasoning.BEGIN)
    grammar: GrammarFactory | None = await _grammar(request, model, tool_format)
    literals = find_literals(grammar)
    if grammar is not None:
        _check_options(request.common)
        if request.continue_final_message and tool_format is not None and tool_format.always:
            raise RequestError(
                "'continue_final_message' is not allowed with structured output of this model.",
                param="continue_final_message",
            )
        if model.reasons:
            grammar = _after_reasoning(grammar, model, prompt, inside=inside)
    else:
        grammar = _named_tokens(request.common, model)
        literals = _read_calls(request, model, tool_format)
    marks = (tool_format.marks if tool_format is not None else ()) + (
        (reasoning.BEGIN, reasoning.END) if model.reasons else ()
    )

    def new_parser() -> TextParser | None:
        tools = tool_format.new_parser(request.tools) if tool_format is not None else None
        if tools is not None and tool_format is not None:
            tools.feed(tool_format.read_opening(prompt))
        return reasoning.ReasoningParser(tools, inside=inside) if model.reasons else tools

    visible = frozenset(model.vocabulary[mark] for mark in marks if mark in model.vocabulary)
    if request.common.show_special:
        if tool_format is not None and tool_format.always:
            raise RequestError(
                "This model's answers are framed by special tokens, which are read and not shown: leave "
                "'skip_special_tokens' out or true.",
                param="skip_special_tokens",
                code="unsupported_parameter",
            )
        visible |= model.table.special_ids
    return AnswerShape(grammar=grammar, literals=literals, new_parser=new_parser, visible=visible)


def _tool_format(request: ChatRequest, model: ServedModel) -> ToolFormat | None:
    if model.tool_format is not None and model.tool_format.always:
        return model.tool_format
    if request.tools.mode == "none":
        return None
    if model.tools == "Generic":
        return GENERIC_FORMAT
    own = model.tool_format is not None and model.takes_tools
    if request.tools.mode == "required" and not own and model.tools != "Template":
        return GENERIC_FORMAT
    if model.tool_format is None:
        instead = "" if model.tools == "Template" else "require a call with 'tool_choice', or "
        raise RequestError(
            f"It is not known how this model writes tool calls: {instead}remove 'tools'. Who runs the model can let it "
            "write them in a generic form, with 'spec.engine.tools: Generic' of the InferenceModel.",
            param="tools",
            code="unsupported_parameter",
        )
    return model.tool_format


async def _grammar(
    request: ChatRequest, model: ServedModel, tool_format: ToolFormat | None
) -> TokenGrammarFactory | None:
    """Raises RequestError when a schema cannot be enforced, ServiceError when that cannot be found out now."""
    work = _Compiling(model.grammars, time.monotonic() + REQUEST_SECONDS)
    if request.response_format.definition or request.response_format.tags is not None:
        return await _free_grammar(request.response_format, model, tool_format, work)
    schema = _answer_schema(request.response_format)
    tools = request.tools
    if tool_format is None:
        return None if schema is None else await _answer_grammar(request.response_format, work)
    free = tools.mode != "required" and not tools.narrowed and not any(tool.strict for tool in tools.tools)
    if schema is None and free:
        return None
    if schema is not None:
        await _answer_grammar(request.response_format, work)  # so that an error names the right one of the schemas
    return await _tool_grammar(request, model, tool_format, schema, work)


@dataclass(frozen=True, slots=True)
class _Compiling:
    """All that one request has compiled shares a deadline."""

    grammars: GrammarCompiler
    deadline: float

    async def compile(self, grammar: str) -> TokenGrammarFactory:
        """Raises GrammarError, ServiceError."""
        try:
            return (await self.grammars.compile(grammar, self.deadline)).for_request()
        except GrammarUnavailableError as error:
            raise ServiceError(f"Structured output is not available now: {error}.", status=503) from error


async def _free_grammar(
    answer: ResponseFormat, model: ServedModel, tool_format: ToolFormat | None, work: _Compiling
) -> TokenGrammarFactory:
    """A regex, a grammar or structural tags of the client's own."""
    if answer.kind in ("lark", "gbnf") and not model.free_form_grammars:
        raise RequestError(
            "Grammars of a client's own are off for this model: use a JSON schema, or a grammar with syntax 'regex'. "
            "Who runs the model turns them on with 'freeFormGrammars: true' in 'spec.engine' of the InferenceModel.",
            param=answer.path,
            code="unsupported_parameter",
        )
    if tool_format is not None and tool_format.always:
        raise RequestError(
            "This model's answers have a frame that a grammar of your own does not know: use a JSON schema.",
            param=answer.path,
            code="unsupported_parameter",
        )
    try:
        return await work.compile(_write_free(answer, model, work.grammars))
    except GrammarError as error:
        what, code = "grammar", "invalid_grammar"
        if answer.tags is not None:
            what, code = "structural tag", "invalid_structural_tag"
        raise RequestError(f"Invalid {what}: {error}", param=answer.content_path, code=code) from error


def _write_free(answer: ResponseFormat, model: ServedModel, grammars: GrammarCompiler) -> str:
    """Raises GrammarError."""
    match answer.kind:
        case "structural_tag":
            assert answer.tags is not None
            return write_structural_tags(answer.tags, model.special_texts)
        case "regex":
            return grammars.write_regex(answer.definition)
        case "lark":
            return grammars.write_lark(answer.definition)
        case _:
            return grammars.write_gbnf(answer.definition)


def _answer_schema(answer: ResponseFormat) -> dict[str, Any] | None:
    if answer.kind == "text":
        return None
    return {"type": "object"} if answer.kind == "json_object" else (answer.schema or {})


async def _answer_grammar(answer: ResponseFormat, work: _Compiling) -> TokenGrammarFactory:
    try:
        return await work.compile(work.grammars.write_json_schema(_answer_schema(answer) or {}))
    except GrammarError as error:
        raise RequestError(
            f"Invalid schema for {answer.name}: {error}",
            param=answer.content_path,
            code="invalid_json_schema",
        ) from error


async def _tool_grammar(
    request: ChatRequest,
    model: ServedModel,
    tool_format: ToolFormat,
    answer_schema: dict[str, Any] | None,
    work: _Compiling,
) -> TokenGrammarFactory:
    """Strict tools' schemas are promised; the others' are enforced where they can be."""

    def write(tools: ToolOptions, *, enforce_schemas: bool = True) -> str:
        return build_grammar(
            tool_format, tools, model.vocabulary, answer_schema=answer_schema, enforce_schemas=enforce_schemas
        )

    if request.tools.mode == "required":
        for tool in request.tools.callable_tools:
            try:
                check_types(tool.parameters)
            except GrammarError as error:
                raise _invalid_parameters(error, _path(request.tools, tool)) from error
    for enforce_schemas in (True, False):
        try:
            return await work.compile(write(request.tools, enforce_schemas=enforce_schemas))
        except GrammarError as error:
            if not enforce_schemas or all(tool.strict for tool in request.tools.callable_tools):
                raise _invalid_parameters(error, await _find_culprit(request.tools, write, work)) from error
    raise AssertionError("unreachable: the second round returns or raises")


def _invalid_parameters(error: GrammarError, param: str) -> RequestError:
    return RequestError(f"Invalid 'parameters' schema of a function: {error}", param=param, code="invalid_json_schema")


async def _find_culprit(tools: ToolOptions, write: Callable[[ToolOptions], str], work: _Compiling) -> str:
    """Path of the first strict tool whose schema alone is refused; that of all tools where none is, in time."""
    strict = [tool for tool in tools.callable_tools if tool.strict]
    for tool in strict:
        if time.monotonic() > work.deadline:
            break
        alone = dataclasses.replace(tools, mode="required", tools=(tool,), callable_tools=(tool,))
        try:
            await work.compile(write(alone))
        except GrammarError:
            return _path(tools, tool)
    return _path(tools, strict[0]) if len(strict) == 1 else "tools"


def _path(tools: ToolOptions, tool: Tool) -> str:
    return f"tools[{tools.tools.index(tool)}].function.parameters"


def _check_options(options: CommonOptions) -> None:
    """Options that contradict a grammar, which alone says what the answer is and when it is over."""
    if options.allowed_token_ids is not None:
        raise RequestError("'allowed_token_ids' is not allowed with structured output.", param="allowed_token_ids")
    if options.bad_words:
        raise RequestError("'bad_words' is not allowed with structured output.", param="bad_words")
    if options.ignore_eos:
        raise RequestError("'ignore_eos' is not allowed with structured output.", param="ignore_eos")
    if options.min_tokens:
        raise RequestError("'min_tokens' is not allowed with structured output.", param="min_tokens")


def _after_reasoning(grammar: GrammarFactory, model: ServedModel, prompt: str, *, inside: bool) -> GrammarFactory:
    if not inside and prompt.rstrip().endswith(reasoning.END):
        return grammar  # the template closed an empty reasoning
    begin, end = model.vocabulary.get(reasoning.BEGIN), model.vocabulary.get(reasoning.END)
    if begin is None or end is None:
        if not inside:
            return grammar
        raise RequestError("This model cannot combine reasoning and structured output.", param="response_format")
    return AfterReasoningFactory(grammar, begin, end, inside=inside)


def resolve_bias(options: CommonOptions, model: ServedModel) -> dict[int, float]:
    """`logit_bias` by token id. Raises RequestError for a text that is not one token."""
    named = {text: _encode(model, text) for text in options.text_bias}
    wrong = [text for text, tokens in named.items() if len(tokens) != 1 or _decode(model, tokens) != text]
    if wrong:
        keys = ", ".join(f"'{text}'" for text in wrong[:_MAX_QUOTED])
        refuse(
            "logit_bias",
            f"Not the text of one token each: {keys}. Keys of 'logit_bias' are token ids, which /tokenize tells, or "
            "the text of one token.",
            "invalid_value",
        )
    return options.logit_bias | {tokens[0]: options.text_bias[text] for text, tokens in named.items()}


def bad_words(options: CommonOptions, model: ServedModel) -> BadWords | None:
    """What keeps them out of an answer: each as it stands, and after a space."""
    if not options.bad_words:
        return None
    sequences = {
        tuple(_encode(model, spelled)) for word in options.bad_words for spelled in (word, f" {word.lstrip(' ')}")
    }
    return BadWords((sequence for sequence in sequences if sequence), model.vocab_size)


def _decode(model: ServedModel, tokens: list[int]) -> str:
    return model.tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=False)


def _encode(model: ServedModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special_tokens=False)
