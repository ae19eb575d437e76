"""Random walks along the masks: whatever a model prefers, what it writes is valid."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits
from llguidance.hf import from_tokenizer
from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.schedule.params import Grammar
from tandem_worker.server.structured.compiler import MAX_CACHED, GrammarCompiler
from tandem_worker.server.structured.contract import GrammarError
from tandem_worker.server.structured.grammar import AfterReasoningFactory, TokenGrammarFactory, describe_refusal
from tandem_worker.server.text.detokenizer import TokenTable, byte_level_alphabet
from tandem_worker.server.tools import harmony
from tandem_worker.server.tools.contract import Tool, ToolOptions
from tandem_worker.server.tools.formats import FORMATS, build_grammar
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"enum": ["red", "green", 3, None]},
    {"type": "string", "minLength": 2, "maxLength": 6},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "format": "date"},
    {"anyOf": [{"type": "null"}, {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000}]},
    {"$ref": "#/$defs/p", "$defs": {"p": {"type": "object", "properties": {"n": {"const": 1}}, "required": ["n"],
     "additionalProperties": False}}},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
            "inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "additionalProperties": False},
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"x": {"type": "number", "minimum": 0, "maximum": 1}}, "required": ["x"],
     "additionalProperties": False},
]  # fmt: skip
CLOSED = [{**schema, "additionalProperties": False} if "properties" in schema else schema for schema in SCHEMAS]
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|tool_calls_section_begin|>",
         "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>",
         "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
         "<｜tool▁sep｜>", *harmony.MARKS]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {piece: index for index, piece in enumerate([*byte_level_alphabet(), '{"', '":', "true", "se"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    backend.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@pytest.fixture(scope="module")
def compiler(tokenizer: PreTrainedTokenizerFast) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, 300, [tokenizer.eos_token_id])  # more rows than tokens, as models have
    yield compiler
    compiler.close()


def compile_schema(compiler: GrammarCompiler, schema: dict[str, Any]) -> TokenGrammarFactory:
    return compiler.compile_here(compiler.write_json_schema(schema))


def allowed(grammar: Grammar, words: int = 10) -> list[int]:
    mask = np.zeros(words, dtype=np.int32)
    grammar.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return [int(index) for index in np.flatnonzero(bits)]


def walk(grammar: Grammar, eos: int, rng: random.Random, limit: int = 600, favoured: int = -1) -> list[int]:
    """Tokens of a random answer. The end and the `favoured` token are preferred, so that texts have an end."""
    tokens: list[int] = []
    while not grammar.terminated and len(tokens) < limit:
        options = allowed(grammar)
        assert options, "a mask must allow something"
        assert max(options) < 300
        token = next((end for end in (eos, favoured) if end in options and rng.random() < 0.3), rng.choice(options))
        grammar.accept(token)
        if token == eos:
            return tokens
        tokens.append(token)
    return tokens


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    table = TokenTable(tokenizer)
    return b"".join(table.token_bytes(token) for token in tokens).decode()


@pytest.mark.parametrize("index", range(len(CLOSED)))
def test_schemas(compiler: GrammarCompiler, tokenizer: Any, index: int) -> None:
    schema = CLOSED[index]
    factory = compile_schema(compiler, schema)
    validator = jsonschema.Draft202012Validator(schema)
    for seed in range(12):
        text = text_of(tokenizer, walk(factory.new(), tokenizer.eos_token_id, random.Random(seed)))
        validator.validate(json.loads(text))


def test_only_an_end_token_follows_the_end(compiler: GrammarCompiler, tokenizer: Any) -> None:
    grammar = compile_schema(compiler, {"const": 7}).new()
    grammar.accept(tokenizer.convert_tokens_to_ids("7"))
    assert grammar.terminated
    assert allowed(grammar) == [tokenizer.eos_token_id]
    grammar.accept(tokenizer.eos_token_id)
    assert grammar.terminated


def test_choices_do_not_share_state(compiler: GrammarCompiler, tokenizer: Any) -> None:
    factory = compile_schema(compiler, {"enum": [12, 34]})
    first, second = factory.new(), factory.new()
    first.accept(tokenizer.convert_tokens_to_ids("1"))
    assert allowed(first) == [tokenizer.convert_tokens_to_ids("2")]
    assert allowed(second) == sorted(tokenizer.convert_tokens_to_ids(["1", "3"]))


def test_masks_fit_tensors_and_wider_rows(compiler: GrammarCompiler) -> None:
    grammar = compile_schema(compiler, {"type": "object"}).new()
    mask = torch.full((16,), -1, dtype=torch.int32)
    grammar.fill_mask(mask)
    assert mask.tolist()[10:] == [0] * 6
    assert mask.any()


def test_a_forbidden_token_raises(compiler: GrammarCompiler, tokenizer: Any) -> None:
    grammar = compile_schema(compiler, {"type": "object"}).new()
    with pytest.raises(GrammarError, match="not allowed"):
        grammar.accept(tokenizer.convert_tokens_to_ids("x"))


def test_a_grammar_at_its_limits_ends_with_an_error_on_accept(tokenizer: Any) -> None:
    limits = LLParserLimits(step_lexer_fuel=1, step_max_items=1)
    matcher = LLMatcher(
        from_tokenizer(tokenizer, n_vocab=300), LLMatcher.grammar_from_json_schema({}), log_level=0, limits=limits
    )
    grammar = TokenGrammarFactory(matcher, 10, frozenset({0, tokenizer.eos_token_id})).new()
    assert not grammar.failed
    assert allowed(grammar) == [1]
    assert grammar.failed
    with pytest.raises(RequestError, match="too complex") as raised:
        grammar.accept(1)
    assert (raised.value.status, raised.value.code) == (400, "grammar_too_complex")


@pytest.mark.parametrize(
    ("limits", "fault"),
    [({"step_lexer_fuel": 1}, True), ({"max_lexer_states": 3}, True), ({}, False)],
)
def test_whose_fault_a_refused_token_is(tokenizer: Any, limits: dict[str, int], fault: bool) -> None:
    matcher = LLMatcher(
        from_tokenizer(tokenizer, n_vocab=300),
        LLMatcher.grammar_from_json_schema({}),
        log_level=0,
        limits=LLParserLimits(**limits),
    )
    for text in '{"a' if fault else "x":
        matcher.consume_token(tokenizer.convert_tokens_to_ids(text))
    matcher.compute_bitmask()
    error = describe_refusal(7, matcher.get_error().partition("\n")[0])
    assert isinstance(error, RequestError if fault else GrammarError), error


def test_a_grammar_can_be_given_up(compiler: GrammarCompiler) -> None:
    grammar = compile_schema(compiler, {"type": "object"}).new()
    assert len(allowed(grammar)) > 1 or not grammar.failed
    assert grammar.seconds > 0
    grammar.give_up(RequestError("it is the slowest"))
    grammar.give_up(RequestError("it is too late for another reason"))
    assert grammar.failed
    assert len(allowed(grammar)) == 1
    with pytest.raises(RequestError, match="it is the slowest"):
        grammar.accept(allowed(grammar)[0])


def test_who_thinks_has_no_grammar_to_give_up(compiler: GrammarCompiler, tokenizer: Any) -> None:
    begin, end, one = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "1"])
    thinking = AfterReasoningFactory(compile_schema(compiler, {"const": 1}), begin, end, inside=True).new()
    thinking.give_up(RequestError("too slow"))
    thinking.accept(end)
    thinking.accept(one)
    assert thinking.terminated
    assert not thinking.failed


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, "objekt"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"$ref": "http://127.0.0.1/x"}, "127.0.0.1"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "Unsatisfiable"),
        ({"not": {}}, "not"),
    ],
)
def test_invalid_schemas(compiler: GrammarCompiler, schema: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compile_schema(compiler, schema)


def test_compiled_grammars_are_kept_up_to_a_limit(compiler: GrammarCompiler) -> None:
    first = compile_schema(compiler, {"const": "kept"})
    assert compile_schema(compiler, {"const": "kept"}) is first
    for number in range(MAX_CACHED):
        compile_schema(compiler, {"const": number})
    assert compile_schema(compiler, {"const": "kept"}) is not first


def test_thinking_comes_first(compiler: GrammarCompiler, tokenizer: Any) -> None:
    begin, end, x, one = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "x", "1"])
    factory = compile_schema(compiler, {"const": 1})
    grammar = AfterReasoningFactory(factory, begin, end, inside=False).new()
    assert allowed(grammar) == sorted([begin, one])
    for token in (begin, x):
        grammar.accept(token)
        assert not grammar.terminated
    assert len(allowed(grammar)) == 320
    grammar.accept(end)
    assert allowed(grammar) == [one]
    grammar.accept(one)
    assert grammar.terminated
    inside = AfterReasoningFactory(factory, begin, end, inside=True).new()
    assert len(allowed(inside)) == 320


NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = tuple(
    Tool(name=name, parameters=schema, strict=True, definition={})
    for name, schema in (("get_weather", SCHEMAS[8]), ("f", NOTHING))
)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parallel", [False, True])
def test_required_calls_parse_and_validate(
    compiler: GrammarCompiler, tokenizer: Any, name: str, parallel: bool
) -> None:
    tool_format = FORMATS[name]
    options = ToolOptions(mode="required", tools=TOOLS, callable_tools=TOOLS, parallel=parallel)
    grammar = build_grammar(tool_format, options, tokenizer.get_added_vocab())
    factory = compiler.compile_here(grammar)
    for seed in range(4):
        end = tokenizer.convert_tokens_to_ids(harmony.END)
        text = text_of(tokenizer, walk(factory.new(), tokenizer.eos_token_id, random.Random(seed), 4000, end))
        parser = tool_format.new_parser(options)
        parsed = parser.feed(text)
        parsed.add(parser.flush())
        assert parsed.content.strip() == "" or name == "harmony"  # whose remarks may come first
        starts = [delta for delta in parsed.tools if delta.name is not None]
        assert starts
        for start in starts:
            arguments = "".join(delta.arguments for delta in parsed.tools if delta.index == start.index)
            schema = next(tool.parameters for tool in TOOLS if tool.name == start.name)
            jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize("name", FORMATS)
def test_free_answers_may_be_text_or_strict_calls(compiler: GrammarCompiler, tokenizer: Any, name: str) -> None:
    tool_format = FORMATS[name]
    options = ToolOptions(mode="auto", tools=TOOLS, callable_tools=TOOLS)
    factory = compiler.compile_here(build_grammar(tool_format, options, tokenizer.get_added_vocab()))
    grammar = factory.new()
    head = "<|channel|>final<|message|>" if name == "harmony" else ""
    for token in tokenizer.encode(f"{head}Hello, world"):
        assert token in allowed(grammar)
        grammar.accept(token)
    assert tokenizer.eos_token_id in allowed(grammar)
    assert not grammar.terminated
    mark = {"llama": '{"', "pythonic": "[", "harmony": harmony.CHANNEL}.get(name, tool_format.marks[0])
    assert tokenizer.convert_tokens_to_ids(mark) in allowed(factory.new())


def test_an_answer_schema_beside_tools(compiler: GrammarCompiler, tokenizer: Any) -> None:
    options = ToolOptions(mode="auto", tools=TOOLS, callable_tools=TOOLS)
    lark = build_grammar(FORMATS["hermes"], options, tokenizer.get_added_vocab(), answer_schema={"const": "yes"})
    grammar = compiler.compile_here(lark).new()
    assert allowed(grammar) == sorted(tokenizer.convert_tokens_to_ids(['"', "<tool_call>"]))


def test_a_row_of_the_parser_that_is_too_long_is_the_requests_fault() -> None:
    words = "Parser Error: Current row has 2558 items; max is 2000; consider making your grammar left-recursive"
    found = describe_refusal(65, words)
    assert isinstance(found, RequestError)
    assert (found.status, found.code) == (400, "grammar_too_complex")
    assert isinstance(describe_refusal(65, "Parser Error: token not allowed"), GrammarError)
